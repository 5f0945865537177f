// SPDX-License-Identifier: MIT
// keys(), classify() and layouts of drawn patterns, with lists of rows too, against what they mean.
#pragma once

#include <map>

#include "check.h"
#include "layout/layout.h"
#include "pattern/trees.h"

namespace trees {

// Kinds are certain, equal keys say equal masks (the memo of a layout hangs on it), repeats hold.
inline void check_closed_form(const Tree& tree, const Plane& plane, int64_t rows, int64_t keys) {
    std::map<Key, std::string> seen;
    const auto mask_at = [&](const Block& b) {
        std::string mask;
        for (int64_t row = b.row; row < b.row + b.rows; ++row) {
            for (int64_t k = b.key; k < b.key + b.keys; ++k)
                mask += tree.sees(plane, plane.position(row), k) ? '1' : '0';
        }
        return mask;
    };
    const std::string ones(size_t(rows * keys), '1'), zeros(size_t(rows * keys), '0');
    for (int64_t row = 0; row < plane.extent.seq_q; row += rows) {
        for (Block block{row, rows, 0, keys}; block.key < plane.extent.seq_k; block.key += keys) {
            Key key;
            bool known = true;
            const Coverage c = tree.pattern->classify(plane, block, key, known);
            const std::string mask = mask_at(block);
            if (c.kind != Coverage::partial) CHECK(mask == (c.kind == Coverage::full ? ones : zeros));
            if (c.kind == Coverage::partial && known) CHECK(seen.emplace(key, mask).first->second == mask);
            Block next = block;
            for (int64_t n = 1; n < std::min<int64_t>(c.repeat, 5); ++n) {
                next.key += keys;
                if (next.key + keys <= plane.extent.seq_k) CHECK(mask_at(next) == mask);
            }
        }
    }
}

inline bool layout_keeps(const Layout& layout, int32_t head_kind, int64_t row, int64_t key) {
    const Slice slice = layout.by_query.slices[size_t(head_kind) * layout.by_query.rows + size_t(row / layout.block_q)];
    const int64_t column = key / layout.block_k;
    for (int32_t i = slice.begin; i < slice.end; ++i) {
        const Run& run = layout.by_query.runs[size_t(i)];
        if (column < run.first || column >= run.first + run.count) continue;
        if (run.mask == full_block) return true;
        const int64_t bit = row % layout.block_q * layout.block_k + key % layout.block_k;
        return layout.masks[size_t(run.mask) * layout.mask_words + size_t(bit / 64)] >> (bit % 64) & 1;
    }
    return false;
}

// keys(), classify() and the layout against the definition.
inline void check_meaning(const Tree& tree, const Plane& plane, uint32_t seed) {
    check::context = describe(tree, plane, seed);
    const Extent& e = plane.extent;
    tree.pattern->check(e);
    Source sizes(seed);
    const Layout layout = build_layout(*tree.pattern, e, int32_t(sizes.number(1, 20)), int32_t(sizes.number(1, 20)));
    const int32_t head_kind = layout.kind_of_head[size_t(plane.batch * e.heads + plane.head)];
    bool is_right = true, is_layout_right = true;
    for (int64_t row = 0; row < e.seq_q; ++row) {
        Intervals kept;
        tree.pattern->keys(plane, row, {0, e.seq_k}, kept);
        std::string seen(size_t(e.seq_k), '0');
        for (const Interval& i : kept) std::fill(seen.begin() + i.begin, seen.begin() + i.end, '1');
        for (int64_t k = 0; k < e.seq_k; ++k) {
            const bool wanted = tree.sees(plane, plane.position(row), k);
            is_right &= wanted == (seen[size_t(k)] == '1');
            is_layout_right &= wanted == layout_keeps(layout, head_kind, row, k);
        }
    }
    CHECK(is_right);
    CHECK(is_layout_right);
    check_closed_form(tree, plane, sizes.number(1, 14), sizes.number(1, 14));
    check::context.clear();
}

}  // namespace trees
