// SPDX-License-Identifier: MIT
#include "layout/layout.h"

#include "layout/arrays.h"

namespace spattn {

namespace {
AxisView shape_of(const Axis& axis, int32_t block) {
    AxisView v{};
    v.listed = int32_t(axis.tokens.size() / size_t(block));
    v.modulus = axis.modulus;
    v.residue_tiles = axis.residue_tiles;
    return v;
}
bool is_ordered(const Axis& axis) { return axis.modulus != 1 || !axis.tokens.empty(); }
}  // namespace

bool Layout::is_ordered() const { return spattn::is_ordered(queries) || spattn::is_ordered(keys); }

size_t Layout::bytes() const {
    LayoutView v{};
    CountBytes counted;
    each_array(*this, masks, v, counted);
    return counted.bytes + by_query.stems.size() * sizeof(Slice);
}

std::vector<int64_t> count_heads(const Layout& layout) {
    std::vector<int64_t> heads(size_t(layout.head_kinds));
    for (int32_t c : layout.kind_of_head) ++heads[size_t(c)];
    return heads;
}

LayoutView shape_of(const Layout& layout) {
    LayoutView v{};
    v.block_q = layout.block_q;
    v.block_k = layout.block_k;
    v.seq_q = layout.extent.seq_q;
    v.seq_k = layout.extent.seq_k;
    v.queries = shape_of(layout.queries, layout.block_q);
    v.keys = shape_of(layout.keys, layout.block_k);
    v.by_query.rows = layout.by_query.rows;
    v.by_key.rows = layout.by_key.rows;
    v.by_query.num_runs = int32_t(layout.by_query.runs.size());
    v.by_key.num_runs = int32_t(layout.by_key.runs.size());
    v.head_kinds = layout.head_kinds;
    v.mask_words = layout.mask_words;
    v.num_masks = layout.num_masks;
    v.live_queries.words = layout.live_queries.words;
    v.live_keys.words = layout.live_keys.words;
    return v;
}

LayoutView view(const Layout& layout) {
    LayoutView v = shape_of(layout);
    each_array(layout, layout.masks, v, PointAtHost());
    return v;
}

}  // namespace spattn
