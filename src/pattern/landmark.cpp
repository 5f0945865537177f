// SPDX-License-Identifier: MIT
// landmark(block,landmarks): k mod block >= block - landmarks: the last keys of each block.
// Landmark Attention (https://arxiv.org/abs/2305.16300).
#include "core/cancel.h"
#include "core/error.h"
#include "pattern/hot.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

class Landmark : public Leaf {
public:
    Landmark(int64_t block, int64_t landmarks)
        : Leaf(text("landmark(", block, ',', landmarks, ')')), block_(block), plain_(block - landmarks) {}

    void keys(const Plane&, int64_t, Interval clip, Intervals& out) const override {
        if (plain_ == block_) return;
        Cutter cutter(clip, out);
        int64_t begin = clip.begin - floor_mod(clip.begin, block_);
        for (Pace pace; begin < clip.end; begin = add_saturated(begin, block_)) {
            pace.step();
            cutter.add(add_saturated(begin, plain_), add_saturated(begin, block_));
        }
    }

    Coverage classify(const Plane&, const Block& block, Key& key, bool&) const override {
        if (plain_ == block_) return {Coverage::empty, forever};
        if (plain_ == 0) return {Coverage::full, forever};
        const int64_t phase = floor_mod(block.key, block_);
        if (phase <= plain_ - block.keys) return {Coverage::empty, blocks_until(plain_, phase, block.keys)};
        if (phase >= plain_ && phase <= block_ - block.keys) {
            return {Coverage::full, blocks_until(block_, phase, block.keys)};
        }
        key.push_back(phase);
        return {Coverage::partial, block.keys % block_ == 0 ? forever : 1};
    }

    bool row_key(const Plane&, int64_t, int64_t, Key&) const override { return true; }
    PatternRef transposed() const override { return make_query_side(PatternRef::share(this)); }
    std::optional<HotTokens> hot(const Extent& extent) const override { return hot_keys(*this, extent); }
    int64_t modulus() const override { return plain_ == block_ ? 0 : 1; }
    int64_t period() const override { return block_; }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        if (modulus % block_ == 0) return residue % block_ >= plain_ ? make_full() : make_nothing();
        if (block_ % modulus) return {};
        return make_landmark(block_ / modulus, block_ / modulus - bound_in_residue(plain_, modulus, residue));
    }

private:
    int64_t block_, plain_;  // keys of a block, and those of them before its landmarks
};

}  // namespace

PatternRef make_landmark(int64_t block, int64_t landmarks) {
    if (block < 1) fail(SPATTN_E_RANGE, "block", text("is ", block, "; accepted: 1 and more"));
    if (landmarks < 0 || landmarks > block) {
        fail(SPATTN_E_RANGE, "landmarks", text("is ", landmarks, "; accepted: 0 to ", block, ", the block"));
    }
    return make_ref<Landmark>(block, landmarks);
}

}  // namespace spattn
