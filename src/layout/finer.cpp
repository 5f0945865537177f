// SPDX-License-Identifier: MIT
// Each mask is cut once, however many blocks have it, and rows that share a list share what becomes of it:
//
//     . m         . .  x .          m  ->  x .     x full or a mask of its own
//     . f    ->   . .  x x                 x x
//                 . .  f f
//                 . .  f f
#include "layout/finer.h"

#include <algorithm>

#include "core/cancel.h"
#include "layout/live.h"
#include "layout/tables.h"

namespace spattn {
namespace {

class Cutting {
public:
    Cutting(const Layout& coarse, int32_t block_q, int32_t block_k)
        : coarse_(coarse), parts_q_(coarse.block_q / block_q), parts_k_(coarse.block_k / block_k), masks_(fine_),
          slices_(fine_.by_query), mask_of_(size_t(coarse.num_masks) * parts_q_ * parts_k_, unknown),
          slice_of_(size_t(parts_q_)) {
        fine_.extent = coarse.extent;
        fine_.block_q = block_q, fine_.block_k = block_k;
        fine_.mask_words = words_for(int64_t(block_q) * block_k);
        fine_.head_kinds = coarse.head_kinds, fine_.kind_of_head = coarse.kind_of_head;
        fine_.by_query.rows = fine_.queries.residue_tiles = int32_t(ceil_div(coarse.extent.seq_q, block_q));
        fine_.by_key.rows = fine_.keys.residue_tiles = int32_t(ceil_div(coarse.extent.seq_k, block_k));
    }

    Layout build() {
        const Lists& lists = coarse_.by_query;
        fine_.by_query.slices.reserve(size_t(fine_.head_kinds) * fine_.by_query.rows);
        Pace pace;
        for (int32_t c = 0; c < fine_.head_kinds; ++c)
            for (int32_t row = 0; row < fine_.by_query.rows; ++row) {
                pace.step();
                fine_.by_query.slices.push_back(
                    cut(lists.slices[size_t(c) * lists.rows + size_t(row / parts_q_)], row % parts_q_));
            }
        return std::move(fine_);
    }

private:
    static constexpr int32_t unknown = -3;

    // Rows that follow each other often have the same list (documents, blocks).
    Slice cut(Slice slice, int32_t part) {
        if (slice.begin != last_.begin || slice.end != last_.end) {
            last_ = slice;
            slice_of_.assign(slice_of_.size(), {unknown, unknown});
        }
        Slice& known = slice_of_[size_t(part)];
        if (known.begin == unknown) known = list(slice, part);
        return known;
    }

    Slice list(Slice slice, int32_t part) {
        for (int32_t r = slice.begin; r < slice.end; ++r) {
            const Run& run = coarse_.by_query.runs[r];
            const int32_t first = run.first * parts_k_, end = first + run.count * parts_k_;
            if (run.mask == full_block) {
                slices_.add({first, end - first, full_block});
            } else if (is_same(run.mask, part)) {
                const int32_t mask = mask_of(run.mask, part, 0);
                if (mask != absent_block) slices_.add({first, end - first, mask});
            } else {
                for (int32_t fine = first; fine < end; ++fine) {
                    const int32_t mask = mask_of(run.mask, part, fine % parts_k_);
                    if (mask != absent_block) slices_.add({fine, 1, mask});
                }
            }
        }
        return slices_.finish();
    }

    // Whether all parts of a mask beside each other are the same: a long run of it (strides) then stays one.
    bool is_same(int32_t mask, int32_t part_q) {
        for (int32_t part_k = 1; part_k < parts_k_; ++part_k)
            if (mask_of(mask, part_q, part_k) != mask_of(mask, part_q, 0)) return false;
        return true;
    }

    int32_t mask_of(int32_t mask, int32_t part_q, int32_t part_k) {
        int32_t& known = mask_of_[(size_t(mask) * parts_q_ + size_t(part_q)) * parts_k_ + size_t(part_k)];
        if (known != unknown) return known;
        const uint64_t* bits = &coarse_.masks[size_t(mask) * coarse_.mask_words];
        const int32_t block_q = fine_.block_q, block_k = fine_.block_k;
        bits_.assign(size_t(fine_.mask_words), 0);
        for (int32_t i = 0; i < block_q; ++i) {
            const int64_t at = (int64_t(part_q) * block_q + i) * coarse_.block_k + int64_t(part_k) * block_k;
            put_bits(bits_.data(), int64_t(i) * block_k, block_k, get_bits(bits, at, block_k));
        }
        return known = masks_.intern(bits_.data());
    }

    const Layout& coarse_;
    int32_t parts_q_, parts_k_;  // of a coarse block
    Layout fine_;
    MaskTable masks_;
    SliceTable slices_;
    std::vector<int32_t> mask_of_;  // [masks][parts_q][parts_k]
    Slice last_{unknown, unknown};  // of the coarse lists,
    std::vector<Slice> slice_of_;   // and what becomes of each part of it
    std::vector<uint64_t> bits_;
};

}  // namespace

Layout cut_query_lists(const Layout& coarse, int32_t block_q, int32_t block_k) {
    return Cutting(coarse, block_q, block_k).build();
}

Layout cut_layout(const Layout& coarse, int32_t block_q, int32_t block_k) {
    Layout layout = cut_query_lists(coarse, block_q, block_k);
    layout.by_key = transpose_lists(layout.by_query, layout.head_kinds, layout.keys.residue_tiles);
    build_live(layout);
    return layout;
}

}  // namespace spattn
