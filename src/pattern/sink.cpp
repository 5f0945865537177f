// SPDX-License-Identifier: MIT
// sink(tokens): k < tokens, whatever p. StreamingLLM (https://arxiv.org/abs/2309.17453).
#include "core/error.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

class Sink : public Leaf {
public:
    explicit Sink(int64_t tokens) : Leaf(text("sink(", tokens, ')')), tokens_(tokens) {}

    void keys(const Plane&, int64_t, Interval clip, Intervals& out) const override {
        Cutter(clip, out).add(lowest, tokens_);
    }

    Coverage classify(const Plane&, const Block& block, Key& key, bool&) const override {
        if (block.key >= tokens_) return {Coverage::empty, forever};
        if (tokens_ - block.keys >= block.key) return {Coverage::full, blocks_until(tokens_, block.key, block.keys)};
        key.push_back(tokens_ - block.key);
        return {Coverage::partial, 1};
    }

    bool row_key(const Plane&, int64_t, int64_t, Key&) const override { return true; }
    PatternRef transposed() const override { return make_query_side(PatternRef::share(this)); }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        return make_sink(bound_in_residue(tokens_, modulus, residue));
    }

private:
    int64_t tokens_;
};

}  // namespace

PatternRef make_sink(int64_t tokens) {
    if (tokens < 0) fail(SPATTN_E_RANGE, "tokens", text("is ", tokens, "; accepted: 0 and more"));
    return make_ref<Sink>(tokens);
}

}  // namespace spattn
