// SPDX-License-Identifier: MIT
#include "plan/stats.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "layout/tables.h"

namespace spattn {

namespace {

constexpr int32_t strip = 16;  // rows that work on a masked block together

// Keys from the first to the last that queries [first, first + rows) of a mask keep.
int32_t count_keys(const uint64_t* bits, const Layout& layout, int32_t first, int32_t rows) {
    int32_t low = layout.block_k, high = 0;
    for (int32_t key = 0; key < layout.block_k; key += 64) {
        const int32_t width = std::min(64, layout.block_k - key);
        uint64_t any = 0;
        for (int32_t row = first; row < first + rows; ++row)
            any |= get_bits(bits, int64_t(row) * layout.block_k + key, width);
        if (!any) continue;
        low = std::min(low, key + std::countr_zero(any));
        high = key + 64 - std::countl_zero(any);
    }
    return std::max(high - low, 0);
}

// Queries from the first to the last that keep one of the keys [first, first + keys).
int32_t count_queries(const uint64_t* bits, const Layout& layout, int32_t first, int32_t keys) {
    int32_t low = layout.block_q, high = 0;
    for (int32_t row = 0; row < layout.block_q; ++row) {
        if (!get_bits(bits, int64_t(row) * layout.block_k + first, keys)) continue;
        low = std::min(low, row);
        high = row + 1;
    }
    return std::max(high - low, 0);
}

// What is worked on of each mask, see LayoutStats.
std::vector<double> measure_masks(const Layout& layout, bool by_key) {
    std::vector<double> worked(size_t(layout.num_masks));
    const int32_t own = by_key ? layout.block_k : layout.block_q;
    for (int32_t mask = 0; mask < layout.num_masks; ++mask) {
        const uint64_t* bits = &layout.masks[size_t(mask) * layout.mask_words];
        for (int32_t at = 0; at < own; at += strip) {
            const int32_t rows = std::min(strip, own - at);
            const int32_t tokens = by_key ? count_queries(bits, layout, at, rows) : count_keys(bits, layout, at, rows);
            worked[size_t(mask)] += double(rows) * tokens;
        }
    }
    return worked;
}

// Tokens of each listed tile.
std::vector<int32_t> count_tokens(const Axis& axis, int32_t block) {
    std::vector<int32_t> tokens(axis.tokens.size() / size_t(block));
    for (size_t i = 0; i < axis.tokens.size(); ++i) tokens[i / size_t(block)] += axis.tokens[i] != no_token;
    return tokens;
}

// Sums over the blocks of lists. Equal rows share a slice, and mostly follow each other.
class ListMeter {
public:
    ListMeter(const Layout& layout, bool by_key)
        : lists_(by_key ? layout.by_key : layout.by_query), block_(by_key ? layout.block_q : layout.block_k),
          full_(double(layout.block_q) * layout.block_k), masks_(measure_masks(layout, by_key)),
          tokens_(count_tokens(by_key ? layout.queries : layout.keys, block_)),
          apart_((by_key ? layout.queries : layout.keys).modulus > 1) {}

    void add(Slice slice, double heads, LayoutStats& stats) {
        if (slice.begin == slice.end) return;
        if (slice.begin != last_.begin || slice.end != last_.end) measure(slice);
        stats.worked += worked_ * heads;
        stats.gathered += gathered_ * heads;
    }

private:
    void measure(Slice slice) {
        last_ = slice;
        worked_ = gathered_ = 0;
        for (int32_t r = slice.begin; r < slice.end; ++r) {
            const Run& run = lists_.runs[r];
            const int32_t end = run.first + run.count, listed = std::min(end, int32_t(tokens_.size()));
            worked_ += run.count * (run.mask == full_block ? full_ : masks_[size_t(run.mask)]);
            for (int32_t tile = run.first; tile < listed; ++tile) gathered_ += tokens_[tile];
            if (apart_) gathered_ += double(block_) * (end - std::max(run.first, listed));
        }
    }

    const Lists& lists_;
    int32_t block_;
    double full_;
    std::vector<double> masks_;
    std::vector<int32_t> tokens_;
    bool apart_;  // tokens of tiles that are not listed are no neighbours either
    Slice last_{0, 0};
    double worked_ = 0, gathered_ = 0;
};

}  // namespace

LayoutStats make_layout_stats(const Lowered& lowered, bool by_key) {
    const Layout& layout = *lowered.layout;
    const Lists& lists = by_key ? layout.by_key : layout.by_query;
    std::vector<int64_t> heads(layout.classes);
    for (int32_t c : layout.class_of) ++heads[c];
    LayoutStats stats{};
    stats.pairs = lowered.counts.pairs;
    stats.visited = lowered.counts.visited;
    stats.blocks = double(lowered.counts.blocks_full + lowered.counts.blocks_partial);
    stats.masked = double(lowered.counts.blocks_partial);
    ListMeter meter(layout, by_key);
    for (int32_t c = 0; c < layout.classes; ++c)
        for (int32_t row = 0; row < lists.rows; ++row) {
            const Slice slice = lists.slices[size_t(c) * lists.rows + row];
            stats.rows += slice.begin != slice.end ? heads[c] : 0;
            meter.add(slice, double(heads[c]), stats);
        }
    return stats;
}

namespace {

// How often each mask is visited, over all heads; the first is full_block.
std::vector<double> weigh_masks(const Layout& layout, const Lists& lists) {
    std::vector<double> weights(size_t(layout.num_masks) + 1);
    std::vector<int64_t> heads(layout.classes);
    for (int32_t c : layout.class_of) ++heads[c];
    for (size_t i = 0; i < lists.slices.size(); ++i)
        for (int32_t r = lists.slices[i].begin; r < lists.slices[i].end; ++r)
            weights[size_t(lists.runs[r].mask - full_block)] +=
                double(lists.runs[r].count) * double(heads[i / size_t(lists.rows)]);
    return weights;
}

// A part of a mask: its kept pairs, and what is worked on of it.
struct Part {
    double kept = 0, worked = 0;
};
Part measure_part(const Layout& layout, int32_t mask, int32_t query, int32_t key, const Kernel& kernel) {
    const uint64_t* bits = &layout.masks[size_t(mask) * layout.mask_words];
    Part part;
    uint64_t keys = 0;
    int32_t first = kernel.block_q, last = -1;
    for (int32_t row = 0; row < kernel.block_q; ++row) {
        const uint64_t kept = get_bits(bits, int64_t(query + row) * layout.block_k + key, kernel.block_k);
        if (!kept) continue;
        part.kept += std::popcount(kept);
        keys |= kept;
        first = std::min(first, row), last = row;
    }
    if (last < 0) return part;
    const int32_t span = kernel.by_key ? last - first + 1 : 64 - std::countl_zero(keys) - std::countr_zero(keys);
    part.worked = double(span) * (kernel.by_key ? kernel.block_k : kernel.block_q);
    return part;
}

}  // namespace

LayoutStats make_finer_stats(const Lowered& coarse, const Kernel& kernel) {
    const Layout& layout = *coarse.layout;
    LayoutStats stats = make_layout_stats(coarse, kernel.by_key);
    const std::vector<double> weights = weigh_masks(layout, kernel.by_key ? layout.by_key : layout.by_query);
    const double area = double(kernel.block_q) * kernel.block_k;
    stats.blocks = weights[0] * layout.block_q * layout.block_k / area;
    stats.worked = stats.blocks * area;
    stats.masked = 0;
    for (int32_t mask = 0; mask < layout.num_masks; ++mask)
        for (int32_t query = 0; query < layout.block_q; query += kernel.block_q)
            for (int32_t key = 0; key < layout.block_k; key += kernel.block_k) {
                const Part part = measure_part(layout, mask, query, key, kernel);
                const double weight = part.kept > 0 ? weights[size_t(mask) + 1] : 0;
                stats.blocks += weight;
                stats.masked += part.kept < area ? weight : 0;
                stats.worked += weight * part.worked;
            }
    stats.visited = stats.blocks * area;
    if (stats.gathered > 0) stats.gathered = stats.blocks * (kernel.by_key ? kernel.block_q : kernel.block_k);
    return stats;
}

namespace {

// Queries and keys of a mask that keep anything.
struct Sides {
    int32_t queries = 0, keys = 0;
};
Sides count_sides(const Layout& layout, int32_t mask) {
    const uint64_t* bits = &layout.masks[size_t(mask) * layout.mask_words];
    Sides sides;
    std::vector<bool> is_alive(size_t(layout.block_q));
    for (int32_t key = 0; key < layout.block_k; key += 64) {
        uint64_t keys = 0;
        for (int32_t row = 0; row < layout.block_q; ++row) {
            const uint64_t kept =
                get_bits(bits, int64_t(row) * layout.block_k + key, std::min(64, layout.block_k - key));
            keys |= kept;
            if (kept) is_alive[size_t(row)] = true;
        }
        sides.keys += std::popcount(keys);
    }
    sides.queries = int32_t(std::count(is_alive.begin(), is_alive.end(), true));
    return sides;
}

}  // namespace

// Of a block with few tokens of the other axis these are listed, of one with few of its own these may move: what both
// leave of the block is the product of what is alive.
LayoutStats make_least_listed_stats(const Lowered& plain, bool by_key) {
    const Layout& layout = *plain.layout;
    LayoutStats stats = make_layout_stats(plain, by_key);
    const std::vector<double> weights = weigh_masks(layout, by_key ? layout.by_key : layout.by_query);
    const double own_block = by_key ? layout.block_k : layout.block_q;
    const double other_block = by_key ? layout.block_q : layout.block_k;
    for (int32_t mask = 0; mask < layout.num_masks; ++mask) {
        const Sides sides = count_sides(layout, mask);
        const double own = by_key ? sides.keys : sides.queries, other = by_key ? sides.queries : sides.keys;
        if (2 * own > own_block && 2 * other > other_block) continue;
        const double weight = weights[size_t(mask) + 1], share = own * other / (own_block * other_block);
        stats.visited -= weight * (1 - share) * own_block * other_block;
        stats.blocks -= weight * (1 - share);
        stats.masked -= weight * (1 - share);
        stats.gathered += 2 * other <= other_block ? weight * other * own / own_block : 0;
    }
    stats.worked = std::min(stats.worked, stats.visited);
    return stats;
}

bool groups_share(const Problem& p, const Layout& layout) {
    for (size_t head = 0; head < layout.class_of.size(); ++head)
        if (layout.class_of[head] != layout.class_of[head - head % size_t(p.group())]) return false;
    return true;
}

LayoutStats make_gather_stats(const Problem& p, const Lowered& lowered) {
    LayoutStats stats{};
    stats.pairs = stats.visited = stats.worked = lowered.counts.pairs;
    stats.rows = p.batch * p.heads_q * p.seq_q;
    stats.gathered = stats.pairs / (groups_share(p, *lowered.layout) ? double(p.group()) : 1);
    return stats;
}

Counts count_run_lists(const Problem& p) {
    const double rows = double(p.batch) * double(p.heads_q) * double(p.seq_q);
    Counts counts;
    counts.pairs = counts.visited = rows * double(p.run_lists.tokens());
    counts.row_max = p.run_lists.tokens();
    return counts;
}

LayoutStats make_run_stats(const Problem& p) {
    LayoutStats stats{};
    stats.pairs = stats.visited = stats.worked = count_run_lists(p).pairs;
    stats.rows = p.batch * p.heads_q * p.seq_q;
    stats.gathered = stats.pairs / double(p.group());
    return stats;
}

// A query keeps one key in `modulus` at most, so a block at most ceil(block_k / modulus) a query. 16 queries in a row
// belong to as many classes, up to the modulus, and meet what all of them see: about half of that is the least waste.
LayoutStats make_least_stats(const Problem& p, const Counts& counts, const Kernel& kernel, int32_t modulus) {
    LayoutStats stats{};
    stats.pairs = counts.pairs;
    stats.visited = counts.pairs * kernel.block_k / std::ceil(double(kernel.block_k) / modulus);
    stats.worked = std::min(stats.visited, counts.pairs * std::max(1, std::min(strip, modulus) / 2));
    stats.blocks = std::ceil(stats.visited / (double(kernel.block_q) * kernel.block_k));
    const int64_t rows = p.batch * p.heads_q * p.seq_q - counts.rows_empty;
    stats.rows = kernel.by_key ? std::min<int64_t>(rows, 1) : (rows + kernel.block_q - 1) / kernel.block_q;
    return stats;
}

}  // namespace spattn
