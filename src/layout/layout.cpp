// SPDX-License-Identifier: MIT
#include "layout/layout.h"

namespace spattn {

namespace {
template <class T>
size_t bytes_of(const std::vector<T>& values) {
    return values.size() * sizeof(T);
}
size_t bytes_of(const Axis& axis) { return bytes_of(axis.tokens) + bytes_of(axis.away); }
size_t bytes_of(const Lists& lists) { return bytes_of(lists.slices) + bytes_of(lists.runs); }
size_t bytes_of(const Live& live) { return bytes_of(live.set_of) + bytes_of(live.sets); }
AxisView view(const Axis& axis, int32_t block) {
    return {int32_t(axis.tokens.size() / size_t(block)), axis.tokens.data(), axis.modulus, axis.class_tiles,
            axis.away.empty() ? nullptr : axis.away.data()};
}
bool is_ordered(const Axis& axis) { return axis.modulus != 1 || !axis.tokens.empty(); }
ListsView view(const Lists& lists) { return {lists.slices.data(), lists.runs.data(), lists.rows}; }
LiveView view(const Live& live) { return {live.set_of.data(), live.sets.data(), live.words}; }
}  // namespace

bool Layout::is_ordered() const { return spattn::is_ordered(queries) || spattn::is_ordered(keys); }

size_t Layout::bytes() const {
    return bytes_of(queries) + bytes_of(keys) + bytes_of(class_of) + bytes_of(by_query) + bytes_of(by_key) +
           bytes_of(masks) + bytes_of(live_queries) + bytes_of(live_keys);
}

std::vector<int64_t> count_heads(const Layout& layout) {
    std::vector<int64_t> heads(size_t(layout.classes));
    for (int32_t c : layout.class_of) ++heads[size_t(c)];
    return heads;
}

LayoutView view(const Layout& layout) {
    LayoutView v{};
    v.block_q = layout.block_q;
    v.block_k = layout.block_k;
    v.seq_q = layout.extent.seq_q;
    v.seq_k = layout.extent.seq_k;
    v.queries = view(layout.queries, layout.block_q);
    v.keys = view(layout.keys, layout.block_k);
    v.by_query = view(layout.by_query);
    v.by_key = view(layout.by_key);
    v.class_of = layout.class_of.data();
    v.classes = layout.classes;
    v.masks = layout.masks.data();
    v.mask_words = layout.mask_words;
    v.num_masks = layout.num_masks;
    v.live_queries = view(layout.live_queries);
    v.live_keys = view(layout.live_keys);
    return v;
}

}  // namespace spattn
