// SPDX-License-Identifier: MIT
#include "layout/token_lists.h"

#include "layout/arrays.h"
#include "pattern/key_walk.h"

namespace spattn {

size_t TokenLists::bytes() const {
    TokenListsView v{};
    CountBytes counted;
    each_array(*this, v, counted);
    return counted.bytes;
}

std::optional<TokenLists> build_token_lists(const Pattern& pattern, const Layout& layout, double pairs, size_t most) {
    const Extent& extent = layout.extent;
    TokenLists lists;
    lists.rows = extent.seq_q;
    lists.head_kinds = layout.head_kinds;
    lists.kind_of_head = layout.kind_of_head;
    lists.begin.reserve(size_t(layout.head_kinds) * size_t(extent.seq_q) + 1);
    lists.begin.push_back(0);
    lists.keys.reserve(size_t(pairs / double(layout.kind_of_head.size()) * layout.head_kinds));
    Intervals kept;
    int32_t head_kinds = 0;  // kinds are numbered as they are met
    for (size_t head = 0; head < layout.kind_of_head.size(); ++head) {
        if (layout.kind_of_head[head] < head_kinds) continue;
        ++head_kinds;
        const Plane plane{extent, int64_t(head) / extent.heads, int64_t(head) % extent.heads};
        for (int64_t row = 0; row < extent.seq_q; ++row) {
            for (KeyWalk walk(pattern, plane, row, {0, extent.seq_k}, kept); walk.next();) {
                for (const Interval& i : kept)
                    for (int64_t key = i.begin; key < i.end; ++key) lists.keys.push_back(int32_t(key));
                if (lists.keys.size() > most) return {};
            }
            lists.begin.push_back(int64_t(lists.keys.size()));
        }
    }
    return lists;
}

TokenListsView view(const TokenLists& lists) {
    TokenListsView v = shape_of(lists);
    each_array(lists, v, PointAtHost());
    return v;
}

}  // namespace spattn
