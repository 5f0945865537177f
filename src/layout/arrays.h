// SPDX-License-Identifier: MIT
// The arrays that layouts and token lists own, listed once. Whoever points a view at them, copies them to a device or
// counts their bytes does so through each_array(), which calls visit(values, pointer) for every array: `values` is the
// vector and `pointer` the view's field for it. The fields of a view that are no pointers come from shape_of(), so a
// view has no pointer that a visitor did not set. Stems are apart: kernels read lists that have none, which calls on a
// cache make of those with stems (plan/placed.h).
#pragma once

#include <vector>

#include "layout/layout.h"
#include "layout/token_lists.h"

namespace spattn {

template <class Visit>
void each_array(const Axis& axis, AxisView& view, Visit&& visit) {
    visit(axis.tokens, view.tokens);
    visit(axis.away, view.away);
}

template <class Visit>
void each_array(const Lists& lists, ListsView& view, Visit&& visit) {
    visit(lists.slices, view.slices);
    visit(lists.runs, view.runs);
}

template <class Visit>
void each_array(const Live& live, LiveView& view, Visit&& visit) {
    if (!live.sets.empty()) visit(live.set_of, view.set_of);
    visit(live.sets, view.sets);
}

// `masks` are the layout's own, or the same in the order of a kernel row.
template <class Visit>
void each_array(const Layout& layout, const std::vector<uint64_t>& masks, LayoutView& view, Visit&& visit) {
    each_array(layout.queries, view.queries, visit);
    each_array(layout.keys, view.keys, visit);
    each_array(layout.by_query, view.by_query, visit);
    each_array(layout.by_key, view.by_key, visit);
    visit(layout.kind_of_head, view.kind_of_head);
    visit(masks, view.masks);
    each_array(layout.live_queries, view.live_queries, visit);
    each_array(layout.live_keys, view.live_keys, visit);
}

template <class Visit>
void each_array(const TokenLists& lists, TokenListsView& view, Visit&& visit) {
    visit(lists.begin, view.begin);
    visit(lists.keys, view.keys);
    visit(lists.kind_of_head, view.kind_of_head);
}

// A view without pointers yet.
LayoutView shape_of(const Layout& layout);
inline TokenListsView shape_of(const TokenLists& lists) {
    return {nullptr, nullptr, nullptr, lists.rows, lists.head_kinds, int64_t(lists.keys.size())};
}

// The two simplest visitors.
struct PointAtHost {
    template <class T>
    void operator()(const std::vector<T>& values, const T*& pointer) const {
        pointer = values.empty() ? nullptr : values.data();
    }
};

struct CountBytes {
    size_t bytes = 0;
    template <class T>
    void operator()(const std::vector<T>& values, const T*&) {
        bytes += values.size() * sizeof(T);
    }
};

}  // namespace spattn
