// SPDX-License-Identifier: MIT
#include "plan/bounds.h"

#include <cmath>

#include "core/cancel.h"
#include "plan/mask_part.h"
#include "plan/stats.h"

namespace spattn {

namespace {

// How many blocks have each mask, over all heads: [1 + num_masks], full_block first.
std::vector<double> weigh_masks(const Layout& layout, const Lists& lists) {
    const std::vector<int64_t> heads = count_heads(layout);
    std::vector<double> listed(lists.runs.size() + 1);  // how often each run is, first as changes of that
    Pace pace;
    const auto add = [&](const std::vector<Slice>& slices) {
        for (size_t i = 0; i < slices.size(); ++i) {
            pace.step();
            const double weight = double(heads[i / size_t(lists.rows)]);
            listed[size_t(slices[i].begin)] += weight, listed[size_t(slices[i].end)] -= weight;
        }
    };
    add(lists.slices), add(lists.stems);
    std::vector<double> weights(size_t(layout.num_masks) + 1);
    double times = 0;
    for (size_t r = 0; r < lists.runs.size(); ++r) {
        pace.step();
        times += listed[r];
        weights[size_t(lists.runs[r].mask - full_block)] += double(lists.runs[r].count) * times;
    }
    return weights;
}

// How many rows of smaller blocks, `finer_block` tokens high and cut from rows of `own_block`, have a live token; over
// all heads.
int64_t count_rows(const Layout& layout, const Live& live, int32_t own_block, int32_t finer_block) {
    const std::vector<int64_t> heads = count_heads(layout);
    const size_t rows = live.set_of.size() / size_t(layout.head_kinds);
    int64_t count = 0;
    Pace pace;
    for (size_t i = 0; i < live.set_of.size(); ++i) {
        pace.step();
        const bool is_all = live.set_of[i] == all_live;
        const uint64_t* set = is_all ? nullptr : &live.sets[size_t(live.set_of[i]) * size_t(live.words)];
        for (int32_t at = 0; at < own_block; at += finer_block)
            count += is_all || has_any(set, at, finer_block) ? heads[i / rows] : 0;
    }
    return count;
}

}  // namespace

LayoutStats make_finer_stats(const Lowered& coarse, const LayoutStats& coarse_stats, const Kernel& kernel) {
    const bool by_key = kernel.owner() == Owner::keys;
    if (coarse.outline) return coarse.outline->stats(by_key).finer;
    const Layout& layout = *coarse.layout;
    LayoutStats stats = coarse_stats;
    const std::vector<double> weights = weigh_masks(layout, by_key ? layout.by_key : layout.by_query);
    const double area = double(kernel.block_q) * kernel.block_k;
    stats.blocks = weights[0] * layout.block_q * layout.block_k / area;
    stats.worked = stats.blocks * area;
    stats.masked = 0;
    Pace pace;
    for (int32_t mask = 0; mask < layout.num_masks; ++mask)
        for (int32_t query = 0; query < layout.block_q; query += kernel.block_q) {
            pace.step();
            const SeenKeys seen = find_seen(layout, mask, query, kernel.block_q);
            for (int32_t key = 0; key < layout.block_k; key += kernel.block_k) {
                const int32_t keys = key_span(seen.by_some, key, kernel.block_k);
                if (keys == 0) continue;
                const double weight = weights[size_t(mask) + 1];
                stats.blocks += weight;
                stats.masked += has_all(seen.by_all, key, kernel.block_k) ? 0 : weight;
                const MaskArea area{query, kernel.block_q, key, kernel.block_k};
                stats.worked += weight * (by_key ? double(query_span(layout, mask, area)) * kernel.block_k
                                                        : double(keys) * kernel.block_q);
            }
        }
    stats.visited = stats.blocks * area;
    stats.rows = by_key ? count_rows(layout, layout.live_keys, layout.block_k, kernel.block_k)
                               : count_rows(layout, layout.live_queries, layout.block_q, kernel.block_q);
    if (coarse.form.order == Order::residue)
        stats.gathered = stats.blocks * (by_key ? kernel.block_q : kernel.block_k);
    stats.longest = {};
    return stats;
}

// Listing may shrink a block in two ways: where at most half of its other tokens are alive, these go to a listed tile,
// and where at most half of its own tokens are alive, these may be hot and go to a tile of their own. If both happened,
// work on the block would shrink to the share (live own tokens) x (live other tokens) of its area, which is taken as
// its least.
LayoutStats make_least_listed_stats(const Lowered& plain, const LayoutStats& plain_stats, const Kernel& kernel) {
    const bool by_key = kernel.owner() == Owner::keys;
    if (plain.outline) return plain.outline->stats(by_key).least_listed;
    const Layout& layout = *plain.layout;
    const bool is_finer = kernel.block_q < layout.block_q || kernel.block_k < layout.block_k;
    LayoutStats stats = is_finer ? make_finer_stats(plain, plain_stats, kernel) : plain_stats;
    const std::vector<double> weights = weigh_masks(layout, by_key ? layout.by_key : layout.by_query);
    const double own_block = by_key ? kernel.block_k : kernel.block_q;
    const double other_block = by_key ? kernel.block_q : kernel.block_k;
    const auto shrink = [&](int32_t mask, int32_t query, int32_t key) {
        const MaskTokens tokens = count_tokens(layout, mask, {query, kernel.block_q, key, kernel.block_k});
        const double own = by_key ? tokens.keys : tokens.queries, other = by_key ? tokens.queries : tokens.keys;
        if (own == 0 || (2 * own > own_block && 2 * other > other_block)) return;
        const double weight = weights[size_t(mask) + 1], share = own * other / (own_block * other_block);
        stats.visited -= weight * (1 - share) * own_block * other_block;
        stats.blocks -= weight * (1 - share);
        stats.masked -= weight * (1 - share);
        stats.gathered += 2 * other <= other_block ? weight * other * own / own_block : 0;
    };
    for (int32_t mask = 0; mask < layout.num_masks; ++mask) {
        check_cancelled();
        for (int32_t query = 0; query < layout.block_q; query += kernel.block_q)
            for (int32_t key = 0; key < layout.block_k; key += kernel.block_k) shrink(mask, query, key);
    }
    stats.worked = std::min(stats.worked, stats.visited);
    stats.longest = {};
    return stats;
}

namespace {

// How many plain blocks the tokens of each tile are spread over: [tiles].
std::vector<double> count_homes(const Axis& axis, int32_t block, int32_t tiles, int32_t plain_block) {
    std::vector<double> homes(size_t(tiles), double(block) / plain_block);
    for (size_t tile = 0; tile < axis.tokens.size() / size_t(block); ++tile) {
        homes[tile] = 0;
        int32_t last = -1;
        for (size_t i = tile * size_t(block); i < (tile + 1) * size_t(block) && axis.tokens[i] != no_token; ++i) {
            homes[tile] += axis.tokens[i] / plain_block != last;
            last = axis.tokens[i] / plain_block;
        }
    }
    return homes;
}

// The share of a block that its live queries times its live keys make up, for each mask: [1 + num_masks], full_block
// first.
std::vector<double> measure_shares(const Layout& layout) {
    std::vector<double> shares{1};
    for (int32_t mask = 0; mask < layout.num_masks; ++mask) {
        check_cancelled();
        const MaskTokens tokens = count_tokens(layout, mask, {0, layout.block_q, 0, layout.block_k});
        shares.push_back(double(tokens.queries) * tokens.keys / (double(layout.block_q) * layout.block_k));
    }
    return shares;
}

}  // namespace

// Without packing, a tile of hot tokens becomes as many plain blocks as its tokens are spread over; all of them are
// masked unless the rest of the pattern fills them, which keeps at least `rest` blocks anyway. Blocks of hot queries
// with hot keys are left out: they would be counted from both sides.
LayoutStats make_least_plain_stats(const Lowered& packed, const LayoutStats& packed_stats, const Kernel& kernel) {
    const Layout& layout = *packed.layout;
    const int32_t listed_q = int32_t(layout.queries.tokens.size()) / layout.block_q;
    const int32_t listed_k = int32_t(layout.keys.tokens.size()) / layout.block_k;
    const auto homes_q = count_homes(layout.queries, layout.block_q, layout.by_query.rows, kernel.block_q);
    const auto homes_k = count_homes(layout.keys, layout.block_k, layout.by_key.rows, kernel.block_k);
    const double rest_homes_k = double(layout.block_k) / kernel.block_k;
    const std::vector<double> shares = measure_shares(layout);
    const std::vector<int64_t> heads = count_heads(layout);
    double hot = 0, rest = 0;  // blocks
    for (size_t i = 0; i < layout.by_query.slices.size(); ++i) {
        check_cancelled();
        const int32_t row = int32_t(i % size_t(layout.by_query.rows));
        const double weight = homes_q[size_t(row)] * double(heads[i / size_t(layout.by_query.rows)]);
        const bool is_hot_q = row < listed_q;
        for (int32_t r = layout.by_query.slices[i].begin; r < layout.by_query.slices[i].end; ++r) {
            const Run& run = layout.by_query.runs[r];
            const double share = weight * shares[size_t(run.mask - full_block)];
            const int32_t end = run.first + run.count, hot_end = std::clamp(listed_k, run.first, end);
            double of_hot = 0;
            for (int32_t tile = run.first; tile < hot_end; ++tile) of_hot += homes_k[size_t(tile)];
            const double of_rest = (end - hot_end) * rest_homes_k;
            hot += share * (is_hot_q ? of_rest : of_hot);
            rest += share * (is_hot_q ? 0 : of_rest);
        }
    }
    LayoutStats stats{};
    stats.pairs = stats.worked = packed_stats.pairs;
    stats.blocks = std::max(hot, rest);
    stats.masked = std::max(hot - rest, 0.0);
    stats.visited = std::max(stats.pairs, stats.blocks * kernel.block_q * kernel.block_k);
    stats.rows = 1;
    return stats;
}

// A query keeps one key in `modulus` at most, so at most ceil(block_k / modulus) keys of a block. A strip of queries
// works on all keys from the first that one of them sees to the last; its queries lie in several residue classes, up to
// the modulus, which see different keys, so about that many pairs are worked on for each that is kept. Half of it is
// taken.
LayoutStats make_least_stats(const Problem& p, const Counts& counts, const Kernel& kernel, int32_t modulus) {
    LayoutStats stats{};
    stats.pairs = counts.pairs;
    stats.visited = counts.pairs * kernel.block_k / std::ceil(double(kernel.block_k) / modulus);
    stats.worked = std::min(stats.visited, counts.pairs * std::max(1, std::min(strip, modulus) / 2));
    stats.blocks = std::ceil(stats.visited / (double(kernel.block_q) * kernel.block_k));
    const int64_t rows = p.batch * p.heads_q * p.seq_q - counts.rows_empty;
    const bool by_key = kernel.owner() == Owner::keys;
    stats.rows = by_key ? std::min<int64_t>(rows, 1) : (rows + kernel.block_q - 1) / kernel.block_q;
    return stats;
}

}  // namespace spattn
