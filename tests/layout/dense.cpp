// SPDX-License-Identifier: MIT
#include "layout/dense.h"

#include <map>
#include <set>

#include "check.h"
#include "layout/tables.h"

namespace spattn {

std::string describe(const Case& c) {
    return c.pattern->print() + " on " + std::to_string(c.extent.seq_q) + " x " + std::to_string(c.extent.seq_k) +
           " offset " + std::to_string(c.extent.q_offset) + " blocks " + std::to_string(c.layout.block_q) + " x " +
           std::to_string(c.layout.block_k) + " modulus " + std::to_string(c.layout.queries.modulus);
}

Dense dense_of_pattern(const Case& c, int64_t batch, int64_t head) {
    Dense dense(size_t(c.extent.seq_q), std::vector<bool>(size_t(c.extent.seq_k)));
    Intervals intervals;
    for (int64_t row = 0; row < c.extent.seq_q; ++row) {
        intervals.clear();
        c.pattern->keys({c.extent, batch, head}, row, {0, c.extent.seq_k}, intervals);
        for (Interval i : intervals)
            for (int64_t key = i.begin; key < i.end; ++key) dense[size_t(row)][size_t(key)] = true;
    }
    return dense;
}

std::vector<Run> runs_of(const Lists& lists, int32_t head_kind, int32_t row) {
    const Slice slice = lists.slices[size_t(head_kind) * lists.rows + row];
    return {lists.runs.begin() + slice.begin, lists.runs.begin() + slice.end};
}

std::vector<int64_t> tokens_of(const AxisView& axis, int32_t block, int64_t seq, int32_t tiles) {
    std::vector<int64_t> tokens(size_t(tiles) * block, no_token);
    for (int32_t tile = 0; tile < tiles; ++tile) {
        const TileView at = tile_at(axis, block, seq, tile);
        for (int32_t i = 0; i < at.count; ++i)
            tokens[size_t(tile) * block + i] = at.tokens ? at.tokens[i] : at.first + i * at.stride;
    }
    return tokens;
}

std::vector<int64_t> query_tokens(const Layout& layout) {
    return tokens_of(view(layout).queries, layout.block_q, layout.extent.seq_q, layout.by_query.rows);
}

std::vector<int64_t> key_tokens(const Layout& layout) {
    return tokens_of(view(layout).keys, layout.block_k, layout.extent.seq_k, layout.by_key.rows);
}

Dense dense_of_lists(const Layout& layout, int32_t head_kind, bool by_key) {
    Said said = read_lists(layout, head_kind, by_key);
    CHECK(said.is_inside);
    CHECK(said.is_once);
    return std::move(said.pairs);
}

void check_meaning(const Case& c) {
    for (int64_t plane = 0; plane < c.extent.batch * c.extent.heads; ++plane) {
        const Dense wanted = dense_of_pattern(c, plane / c.extent.heads, plane % c.extent.heads);
        const int32_t head_kind = c.layout.kind_of_head[size_t(plane)];
        CHECK(dense_of_lists(c.layout, head_kind, false) == wanted);
        CHECK(dense_of_lists(c.layout, head_kind, true) == wanted);
    }
}

void check_masks(const Layout& layout) {
    std::set<std::vector<uint64_t>> distinct;
    bool is_exact = true;
    for (int32_t mask = 0; mask < layout.num_masks; ++mask) {
        const auto begin = layout.masks.begin() + int64_t(mask) * layout.mask_words;
        distinct.emplace(begin, begin + layout.mask_words);
        int64_t kept = 0;
        for (int32_t row = 0; row < layout.block_q; ++row)
            for (int32_t key = 0; key < layout.block_k; ++key) kept += mask_bit(layout, mask, row, key);
        is_exact &= kept > 0 && kept < int64_t(layout.block_q) * layout.block_k;
    }
    CHECK(is_exact);
    CHECK_EQ(distinct.size(), size_t(layout.num_masks));
    CHECK_EQ(layout.masks.size(), size_t(layout.num_masks) * layout.mask_words);
}

void check_runs(const Lists& lists, int32_t head_kinds, int32_t others) {
    std::map<std::vector<int32_t>, std::pair<int32_t, int32_t>> slices;
    bool is_sorted = true, is_maximal = true, is_shared = true;
    for (int32_t i = 0; i < head_kinds * lists.rows; ++i) {
        const std::vector<Run> runs = runs_of(lists, 0, i);
        std::vector<int32_t> content;
        for (size_t r = 0; r < runs.size(); ++r) {
            const int32_t end = r ? runs[r - 1].first + runs[r - 1].count : 0;
            is_sorted &= runs[r].count > 0 && runs[r].first >= end && runs[r].first + runs[r].count <= others;
            if (r && runs[r].first == end) is_maximal &= runs[r].mask != runs[r - 1].mask;
            content.insert(content.end(), {runs[r].first, runs[r].count, runs[r].mask});
        }
        const std::pair<int32_t, int32_t> place{lists.slices[i].begin, lists.slices[i].end};
        is_shared &= slices.emplace(content, place).first->second == place;
    }
    CHECK(is_sorted);
    CHECK(is_maximal);
    CHECK(is_shared);
}

void check_runs(const Layout& layout) {
    check_runs(layout.by_query, layout.head_kinds, layout.by_key.rows);
    check_runs(layout.by_key, layout.head_kinds, layout.by_query.rows);
}

void check_live(const Case& c) {
    const Layout& layout = c.layout;
    const Dense dense = dense_of_pattern(c, 0, 0);
    std::vector<bool> sees(dense.size()), is_seen(size_t(c.extent.seq_k));
    for (size_t row = 0; row < dense.size(); ++row)
        for (size_t key = 0; key < is_seen.size(); ++key)
            if (dense[row][key]) sees[row] = is_seen[key] = true;
    const auto is_away = [](const Axis& axis, int32_t block, size_t place) {
        if (axis.away.empty() || place < axis.tokens.size()) return false;
        const size_t home = (place - axis.tokens.size()) / size_t(block), at = place % size_t(block);
        return (axis.away[home * size_t(words_for(block)) + at / 64] >> (at % 64) & 1) != 0;
    };
    const auto check_axis = [&](const Live& live, const Axis& axis, const std::vector<int64_t>& tokens, int32_t block,
                                const std::vector<bool>& alive) {
        bool is_right = true;
        const int64_t first = int64_t(layout.kind_of_head[0]) * int64_t(tokens.size() / size_t(block));
        for (size_t place = 0; place < tokens.size(); ++place)
            is_right &= is_alive(live, first + int64_t(place) / block, int64_t(place) % block) ==
                        (tokens[place] != no_token && alive[size_t(tokens[place])] && !is_away(axis, block, place));
        CHECK(is_right);
    };
    check_axis(layout.live_queries, layout.queries, query_tokens(layout), layout.block_q, sees);
    check_axis(layout.live_keys, layout.keys, key_tokens(layout), layout.block_k, is_seen);
}

void check_live_keys(const Layout& layout) {
    bool is_right = true;
    for (int32_t at = 0; at < layout.head_kinds * layout.by_key.rows; ++at)
        for (int64_t key = 0; key < layout.block_k; ++key) {
            bool is_seen = false;
            for (const Run& run : runs_of(layout.by_key, 0, at))
                for (int64_t row = 0; row < layout.block_q; ++row)
                    is_seen |= run.mask == full_block || mask_bit(layout, run.mask, row, key);
            is_right &= is_alive(layout.live_keys, at, key) == is_seen;
        }
    CHECK(is_right);
}

void check_counts(const Counts& got, const Counts& want) {
    CHECK_EQ(got.pairs, want.pairs);
    CHECK_EQ(got.visited, want.visited);
    CHECK_EQ(got.blocks_full, want.blocks_full);
    CHECK_EQ(got.blocks_partial, want.blocks_partial);
    CHECK_EQ(got.blocks_empty, want.blocks_empty);
    CHECK_EQ(got.row_min, want.row_min);
    CHECK_EQ(got.row_max, want.row_max);
    CHECK_EQ(got.rows_empty, want.rows_empty);
}

}  // namespace spattn
