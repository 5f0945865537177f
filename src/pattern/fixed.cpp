// SPDX-License-Identifier: MIT
// fixed(block,landmarks): block_diagonal(block) | landmark(block,landmarks). Child et al. 2019
// (https://arxiv.org/abs/1904.10509).
#include "core/text.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

class Fixed : public Leaf {
public:
    Fixed(int64_t block, int64_t landmarks, PatternRef meaning)
        : Leaf(text("fixed(", block, ',', landmarks, ')')), block_(block), plain_(block - landmarks),
          meaning_(std::move(meaning)) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        meaning_->keys(plane, row, clip, out);
    }
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override {
        return meaning_->classify(plane, block, key, known);
    }
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        return meaning_->row_key(plane, row, rows, key);
    }
    int64_t stem_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        return meaning_->stem_key(plane, row, rows, key);
    }
    PatternRef transposed() const override { return meaning_->transposed(); }
    std::optional<HotTokens> hot(const Extent& extent) const override { return meaning_->hot(extent); }
    int64_t modulus() const override { return meaning_->modulus(); }
    int64_t period() const override { return meaning_->period(); }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        if (modulus % block_ == 0) return residue % block_ >= plain_ ? make_full() : make_block_diagonal(1);
        if (block_ % modulus) return {};
        return make_fixed(block_ / modulus, block_ / modulus - bound_in_residue(plain_, modulus, residue));
    }

private:
    int64_t block_, plain_;  // keys of a block, and those of them before its landmarks
    PatternRef meaning_;
};

}  // namespace

PatternRef make_fixed(int64_t block, int64_t landmarks) {
    PatternRef meaning = make_union({make_block_diagonal(block), make_landmark(block, landmarks)});
    return make_ref<Fixed>(block, landmarks, std::move(meaning));
}

}  // namespace spattn
