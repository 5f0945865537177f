// SPDX-License-Identifier: MIT
#include "layout/pairs.h"

namespace spattn {

Said read_lists(const Layout& layout, int32_t head_kind, bool by_key) {
    const LayoutView v = view(layout);
    const ListsView& lists = by_key ? v.by_key : v.by_query;
    Said said{Dense(size_t(v.seq_q), std::vector<bool>(size_t(v.seq_k)))};
    for (int32_t list = 0; list < lists.rows; ++list) {
        const Slice slice = lists.slices[head_kind * lists.rows + list];
        for (int32_t r = slice.begin; r < slice.end; ++r)
            for (int32_t other = lists.runs[r].first; other < lists.runs[r].first + lists.runs[r].count; ++other) {
                const TileView q = tile_at(v.queries, v.block_q, v.seq_q, by_key ? other : list);
                const TileView k = tile_at(v.keys, v.block_k, v.seq_k, by_key ? list : other);
                const int32_t mask = lists.runs[r].mask;
                for (int64_t i = 0; i < int64_t(v.block_q) * v.block_k; ++i) {
                    if (mask != full_block && !(v.masks[int64_t(mask) * v.mask_words + i / 64] >> (i % 64) & 1))
                        continue;
                    const int64_t query = token_at(q, i / v.block_k), key = token_at(k, i % v.block_k);
                    said.is_inside &= query >= 0 && key >= 0;
                    if (query < 0 || key < 0) continue;
                    said.is_once &= !said.pairs[size_t(query)][size_t(key)];
                    said.pairs[size_t(query)][size_t(key)] = true;
                }
            }
    }
    return said;
}

std::vector<int> count_writers(const AxisView& axis, int32_t block, int64_t seq, int32_t tiles) {
    std::vector<int> writers(static_cast<size_t>(seq));
    const int32_t words = (block + 63) / 64;
    for (int32_t t = 0; t < tiles; ++t) {
        const TileView tile = tile_at(axis, block, seq, t);
        for (int64_t i = 0; i < block; ++i) {
            const int64_t token = token_at(tile, i);
            const bool is_away =
                t >= axis.listed && axis.away && axis.away[(t - axis.listed) * words + i / 64] >> (i % 64) & 1;
            if (token >= 0 && !is_away) ++writers[size_t(token)];
        }
    }
    return writers;
}

}  // namespace spattn
