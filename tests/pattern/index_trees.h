// SPDX-License-Identifier: MIT
// Random index patterns together with what they mean, mixed with the analytic ones of trees.h.
#pragma once

#include <map>

#include "check.h"
#include "layout/layout.h"
#include "pattern/trees.h"

namespace trees {

class IndexSource : public Source {
public:
    using Source::Source;

    // Meanings take positions, index patterns rows: row = p - q_offset.
    Tree index_leaf(const Extent& e) {
        switch (number(0, 3)) {
            case 0:
                return csr(e);
            case 1:
                return bsr(e);
            case 2:
                return per_document(e, tree(2));
            default:
                return mask(e);
        }
    }

    Tree mixed(const Extent& e, int depth) {
        if (depth == 0) return number(0, 1) ? index_leaf(e) : leaf();
        const Tree a = mixed(e, depth - 1), b = mixed(e, depth - 1);
        switch (number(0, 5)) {
            case 4: return {make_transpose(a.pattern), transpose(a.sees)};
            case 5: return a;
            default: return composition(a, b);
        }
    }

    // `inner` must fit any extent.
    Tree per_document(const Extent& e, const Tree& inner) {
        const std::vector<int64_t> cuts_q = cuts(e.seq_q), cuts_k = cuts(e.seq_k);
        std::vector<int64_t> cu_q(cuts_q), cu_k(cuts_k);
        cu_q.resize(std::min(cu_q.size(), cu_k.size()));
        cu_k.resize(cu_q.size());
        return {make_per_document(inner.pattern, cu_q, cu_k), meaning::per_document(inner.sees, cu_q, cu_k)};
    }

private:
    std::vector<int64_t> cuts(int64_t limit) {
        std::vector<int64_t> cu{number(0, 2) ? 0 : number(0, limit)};
        const int64_t longest = number(1, 20);
        while (cu.back() < limit && cu.size() < 12) cu.push_back(std::min(limit, cu.back() + number(0, longest)));
        return cu;
    }

    // Sorted columns below `limit`, in runs and alone.
    std::vector<int64_t> columns(int64_t limit) {
        std::set<int64_t> set;
        for (int64_t n = number(0, 3); n > 0; --n) {
            const int64_t first = number(0, limit - 1);
            for (int64_t c = first; c < std::min(limit, first + number(1, 6)); ++c) set.insert(c);
        }
        return {set.begin(), set.end()};
    }

    struct Lists {
        std::vector<int64_t> row_ptr{0}, col_idx;
        std::set<std::pair<int64_t, int64_t>> pairs;
    };
    Lists lists(int64_t rows, int64_t limit) {
        Lists l;
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t c : columns(limit)) {
                l.col_idx.push_back(c);
                l.pairs.insert({row, c});
            }
            l.row_ptr.push_back(int64_t(l.col_idx.size()));
        }
        return l;
    }

    Tree csr(const Extent& e) {
        const Lists l = lists(e.seq_q, e.seq_k);
        return {make_csr(l.row_ptr, l.col_idx, e.seq_k, number(0, 1)), blocks(l.pairs, 1, 1, {e.seq_q, e.seq_k})};
    }

    Tree bsr(const Extent& e) {
        const int64_t bq = number(1, 12), bk = number(1, 12);
        const Lists l = lists((e.seq_q + bq - 1) / bq, (e.seq_k + bk - 1) / bk);
        return {make_bsr(l.row_ptr, l.col_idx, bq, bk, e.seq_q, e.seq_k, number(0, 1)),
                blocks(l.pairs, bq, bk, {e.seq_q, e.seq_k})};
    }

    Tree mask(const Extent& e) {
        const int64_t batch = number(0, 1) ? e.batch : 1, heads = number(0, 1) ? e.heads : 1;
        std::vector<int64_t> values(size_t(batch * heads * e.seq_q * e.seq_k));
        for (int64_t& value : values) value = number(0, 3) == 0;
        return {make_mask(values, {batch, heads, e.seq_q, e.seq_k}),
                meaning::mask(values, batch, heads, {e.seq_q, e.seq_k})};
    }
};

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
