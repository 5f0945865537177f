// SPDX-License-Identifier: MIT
// The layout is put together from one for each residue class. With p = i + q_offset, queries of residue a see keys of
// residue b = (a + q_offset) mod m and no others, and in the coordinates of residue b the first query stands at (a +
// q_offset - b) / m.
//
//     m = 2, q_offset 0          keys: residue 0   residue 1
//     queries: residue 0         its own layout    .
//     queries: residue 1         .                 its own layout
#include "layout/orders/residue.h"

#include <algorithm>
#include <deque>
#include <map>
#include <tuple>

#include "core/cancel.h"
#include "core/error.h"
#include "layout/head_kinds.h"
#include "layout/live.h"
#include "layout/tables.h"

namespace spattn {
namespace {

// The layout of one residue class, and under which ids the whole keeps its masks.
struct ResidueLayout {
    Layout layout;
    std::vector<int32_t> mask_of;  // [num_masks of `layout`]
};

// Layouts of single residue classes. Most of these are alike (a window is one in each of them) and share theirs.
class ResidueLayouts {
public:
    ResidueLayouts(Layout& whole) : whole_(whole), masks_(whole) {}

    // Null for an empty extent, which has no layout.
    const ResidueLayout* at(const Pattern& in_residue, const Extent& extent) {
        if (extent.seq_q == 0 || extent.seq_k == 0) return nullptr;
        const auto [place, is_first] =
            known_.try_emplace({in_residue.identity(), extent.seq_q, extent.seq_k, extent.q_offset}, nullptr);
        if (is_first) place->second = build(in_residue, extent);
        return place->second;
    }

private:
    const ResidueLayout* build(const Pattern& in_residue, const Extent& extent) {
        ResidueLayout& made = made_.emplace_back();
        made.layout = build_layout(in_residue, extent, whole_.block_q, whole_.block_k);
        for (int32_t mask = 0; mask < made.layout.num_masks; ++mask)
            made.mask_of.push_back(masks_.intern(&made.layout.masks[size_t(mask) * whole_.mask_words]));
        return &made;
    }

    Layout& whole_;
    MaskTable masks_;
    std::deque<ResidueLayout> made_;
    std::map<std::tuple<std::string, int64_t, int64_t, int64_t>, const ResidueLayout*> known_;
};

// Puts the lists of one residue class where they belong among those of the whole. Residue classes see different keys,
// so no list equals one of another, and rows that share a slice in the part share one in the whole.
struct Placement {
    const ResidueLayout& part;
    int32_t row, other;  // tiles of the whole at which the residue class begins, along the lists and in them

    // kind_of_head[c]: the part's kind of heads for kind c of the whole.
    void copy(const Lists& from, const std::vector<int32_t>& kind_of_head, Lists& to) const {
        const int32_t shift = int32_t(to.runs.size());
        Pace pace;
        for (const Run& run : from.runs) {
            pace.step();
            const int32_t mask = run.mask == full_block ? full_block : part.mask_of[size_t(run.mask)];
            to.runs.push_back({run.first + other, run.count, mask});
        }
        for (size_t c = 0; c < kind_of_head.size(); ++c) {
            const Slice* slices = &from.slices[size_t(kind_of_head[c]) * from.rows];
            Slice* out = &to.slices[c * to.rows + row];
            for (int32_t r = 0; r < from.rows; ++r)
                if (slices[r].begin < slices[r].end) out[r] = {slices[r].begin + shift, slices[r].end + shift};
        }
    }
};

Axis make_axis(int64_t seq, int32_t modulus, int32_t block) {
    Axis axis;
    axis.modulus = modulus;
    axis.residue_tiles = int32_t(ceil_div(ceil_div(seq, modulus), block));
    return axis;
}

Lists make_empty_lists(const Axis& axis, int32_t head_kinds) {
    Lists lists;
    lists.rows = axis.modulus * axis.residue_tiles;
    lists.slices.resize(size_t(head_kinds) * lists.rows);
    return lists;
}

void add_residue(const Patterns& patterns, const std::vector<Plane>& planes, int64_t residue_q, ResidueLayouts& layouts,
               Layout& whole) {
    const Extent& e = whole.extent;
    const int64_t modulus = whole.queries.modulus, first = residue_q + e.q_offset;
    const int64_t residue_k = floor_mod(first, modulus);
    const Extent extent{e.batch, e.heads, members(e.seq_q, modulus, residue_q), members(e.seq_k, modulus, residue_k),
                        floor_div(first, modulus)};
    const ResidueLayout* part = layouts.at(*patterns[size_t(residue_k)], extent);
    if (!part) return;
    std::vector<int32_t> kind_of_head;
    for (const Plane& plane : planes)
        kind_of_head.push_back(part->layout.kind_of_head[size_t(plane.batch * e.heads + plane.head)]);
    const int32_t row = int32_t(residue_q) * whole.queries.residue_tiles;
    const int32_t column = int32_t(residue_k) * whole.keys.residue_tiles;
    Placement{*part, row, column}.copy(part->layout.by_query, kind_of_head, whole.by_query);
    Placement{*part, column, row}.copy(part->layout.by_key, kind_of_head, whole.by_key);
}

}  // namespace

Patterns find_residue_patterns(const Pattern& pattern, int32_t modulus) {
    if (pattern.modulus() % modulus != 0) return {};
    Patterns patterns;
    for (int32_t residue = 0; residue < modulus; ++residue) {
        check_cancelled();
        patterns.push_back(pattern.in_residue(modulus, residue));
        if (!patterns.back()) return {};
    }
    return patterns;
}

std::optional<Layout> build_residue_layout(const Pattern& pattern, const Extent& extent, int32_t modulus,
                                           int32_t block_q, int32_t block_k) {
    require_range(modulus, 1, std::max(extent.seq_q, extent.seq_k), "modulus");
    pattern.check(extent);
    const Patterns patterns = find_residue_patterns(pattern, modulus);
    if (patterns.empty()) return {};
    Layout whole;
    whole.extent = extent;
    whole.block_q = block_q;
    whole.block_k = block_k;
    whole.mask_words = words_for(int64_t(block_q) * block_k);
    whole.queries = make_axis(extent.seq_q, modulus, block_q);
    whole.keys = make_axis(extent.seq_k, modulus, block_k);
    const std::vector<Plane> planes = find_head_kinds(pattern, whole);
    whole.by_query = make_empty_lists(whole.queries, whole.head_kinds);
    whole.by_key = make_empty_lists(whole.keys, whole.head_kinds);
    ResidueLayouts layouts(whole);
    for (int64_t residue = 0; residue < modulus; ++residue) add_residue(patterns, planes, residue, layouts, whole);
    build_live(whole);
    return whole;
}

}  // namespace spattn
