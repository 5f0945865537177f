// SPDX-License-Identifier: MIT
#include "layout/orders/packed.h"

#include <algorithm>

#include "layout/build.h"
#include "layout/orders/hot_lines.h"
#include "layout/live.h"
#include "layout/orders/hot_axis.h"

namespace spattn {
namespace {

// Packing puts the pattern into products and differences with others. Patterns that are near the bounds of compositions
// already are not packed.
constexpr int32_t most_packed_levels = 64, most_packed_nodes = 256;

int64_t count_blocks(const std::vector<int64_t>& tokens, int32_t block) {
    int64_t blocks = 0, last = -1;
    for (int64_t token : tokens) {
        blocks += token / block != last;
        last = token / block;
    }
    return blocks;
}

bool is_scattered(const std::vector<int64_t>& tokens, int32_t block) {
    return count_blocks(tokens, block) >= 2 * ceil_div(int64_t(tokens.size()), block);
}

class Packer {
public:
    Packer(const HotTokens& hot, const Extent& extent, int32_t block_q, int32_t block_k)
        : hot_(hot), homes_(build_query_lists(*make_difference(hot.apart, hot.marks), extent, block_q, block_k)),
          masks_(whole_) {
        whole_.extent = extent;
        whole_.block_q = block_q, whole_.block_k = block_k;
        whole_.mask_words = homes_.mask_words;
        whole_.head_kinds = homes_.head_kinds, whole_.kind_of_head = homes_.kind_of_head;
        whole_.queries = pack(hot.queries, block_q, homes_.by_query.rows);
        whole_.keys = pack(hot.keys, block_k, homes_.by_key.rows);
        tiles_q_ = int32_t(whole_.queries.tokens.size()) / block_q;
        tiles_k_ = int32_t(whole_.keys.tokens.size()) / block_k;
        for (int32_t mask = 0; mask < homes_.num_masks; ++mask)
            mask_of_.push_back(masks_.intern(&homes_.masks[size_t(mask) * homes_.mask_words]));
    }

    Layout build() {
        const Lists rows = list_lines(Owner::queries, hot_.keys, whole_.queries);
        Lists columns = list_lines(Owner::keys, hot_.queries, whole_.keys);
        if (!columns.slices.empty()) columns = transpose_lists(columns, homes_.head_kinds, tiles_q_);
        SliceTable table(whole_.by_query);
        whole_.by_query.rows = tiles_q_ + homes_.by_query.rows;
        for (int32_t c = 0; c < homes_.head_kinds; ++c) {
            for (int32_t tile = 0; tile < tiles_q_; ++tile) {
                add_corner(plane_of(c), tile, table);
                add(columns, c, tile, tiles_k_, table);
                whole_.by_query.slices.push_back(table.finish());
            }
            for (int32_t row = 0; row < homes_.by_query.rows; ++row) {
                add(rows, c, row, 0, table);
                add_home(c, row, table);
                whole_.by_query.slices.push_back(table.finish());
            }
        }
        whole_.by_key = transpose_lists(whole_.by_query, homes_.head_kinds, tiles_k_ + homes_.by_key.rows);
        build_live(whole_);
        return std::move(whole_);
    }

private:
    static Axis pack(const std::vector<int64_t>& tokens, int32_t block, int32_t blocks) {
        return make_hot_axis({tokens.begin(), tokens.end()}, block, blocks);
    }

    Plane plane_of(int32_t head_kind) const {
        const auto head =
            std::find(homes_.kind_of_head.begin(), homes_.kind_of_head.end(), head_kind) - homes_.kind_of_head.begin();
        return {homes_.extent, head / homes_.extent.heads, head % homes_.extent.heads};
    }

    Lists list_lines(Owner owner, const std::vector<int64_t>& hot, const Axis& own) {
        HotLines lines(*hot_.among, owner, hot, own, whole_, masks_);
        for (int32_t c = 0; c < homes_.head_kinds && !hot.empty(); ++c) lines.add(plane_of(c));
        return lines.finish();
    }

    static void add(const Lists& lists, int32_t head_kind, int32_t row, int32_t shift, SliceTable& table) {
        if (lists.slices.empty()) return;
        const Slice slice = lists.slices[size_t(head_kind) * lists.rows + size_t(row)];
        for (int32_t r = slice.begin; r < slice.end; ++r)
            table.add({lists.runs[r].first + shift, lists.runs[r].count, lists.runs[r].mask});
    }

    void add_home(int32_t head_kind, int32_t row, SliceTable& table) const {
        const Slice slice = homes_.by_query.slices[size_t(head_kind) * homes_.by_query.rows + size_t(row)];
        for (int32_t r = slice.begin; r < slice.end; ++r) {
            const Run& run = homes_.by_query.runs[r];
            const int32_t mask = run.mask == full_block ? full_block : mask_of_[size_t(run.mask)];
            table.add({run.first + tiles_k_, run.count, mask});
        }
    }

    // Lists the pairs of hot queries with hot keys, which neither kind of lines has.
    void add_corner(const Plane& plane, int32_t tile, SliceTable& table) {
        if (hot_.keys.empty()) return;
        corner_.assign(size_t(tiles_k_) * whole_.mask_words, 0);
        const int32_t block_q = whole_.block_q, block_k = whole_.block_k;
        for (int32_t i = 0; i < block_q && size_t(tile) * block_q + size_t(i) < hot_.queries.size(); ++i) {
            intervals_.clear();
            hot_.among->keys(plane, hot_.queries[size_t(tile) * block_q + size_t(i)],
                             {hot_.keys.front(), hot_.keys.back() + 1}, intervals_);
            for (const Interval& interval : intervals_) {
                auto key = std::lower_bound(hot_.keys.begin(), hot_.keys.end(), interval.begin);
                for (; key != hot_.keys.end() && *key < interval.end; ++key) {
                    const int64_t place = key - hot_.keys.begin(), bit = int64_t(i) * block_k + place % block_k;
                    set_bits(&corner_[size_t(place / block_k) * whole_.mask_words], bit, bit + 1);
                }
            }
        }
        for (int32_t other = 0; other < tiles_k_; ++other) {
            const int32_t mask = masks_.intern(&corner_[size_t(other) * whole_.mask_words]);
            if (mask != absent_block) table.add({other, 1, mask});
        }
    }

    const HotTokens& hot_;
    Layout homes_, whole_;
    MaskTable masks_;
    std::vector<int32_t> mask_of_;  // [masks of homes_] their ids in whole_
    int32_t tiles_q_ = 0, tiles_k_ = 0;
    std::vector<uint64_t> corner_;
    Intervals intervals_;
};

}  // namespace

std::optional<HotTokens> find_scattered(const Pattern& pattern, const Extent& extent, int32_t block) {
    if (pattern.levels > most_packed_levels || pattern.nodes > most_packed_nodes) return {};
    std::optional<HotTokens> hot = pattern.hot(extent);
    if (!hot || !is_scattered(hot->keys, block) || !is_scattered(hot->queries, block)) return {};
    return hot;
}

Layout build_packed_layout(const HotTokens& hot, const Extent& extent, int32_t block_q, int32_t block_k) {
    return Packer(hot, extent, block_q, block_k).build();
}

}  // namespace spattn
