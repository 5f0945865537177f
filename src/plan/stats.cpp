// SPDX-License-Identifier: MIT
#include "plan/stats.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/math.h"
#include "plan/cache.h"
#include "plan/call_lists.h"
#include "plan/mask_part.h"

namespace spattn {

namespace {

// How many pairs of each mask are worked on, kept or not: see LayoutStats::worked.
std::vector<double> measure_masks(const Layout& layout, bool by_key) {
    std::vector<double> worked(size_t(layout.num_masks));
    const int32_t own = by_key ? layout.block_k : layout.block_q;
    for (int32_t mask = 0; mask < layout.num_masks; ++mask)
        for (int32_t at = 0; at < own; at += strip) {
            const int32_t rows = std::min(strip, own - at);
            const int32_t span = by_key
                                     ? query_span(layout, mask, {0, layout.block_q, at, rows})
                                     : key_span(find_seen(layout, mask, at, rows).by_some, 0, layout.block_k);
            worked[size_t(mask)] += double(rows) * span;
        }
    return worked;
}

// How many tokens each listed tile has.
std::vector<int32_t> count_tokens(const Axis& axis, int32_t block) {
    std::vector<int32_t> tokens(axis.tokens.size() / size_t(block));
    for (size_t i = 0; i < axis.tokens.size(); ++i) tokens[i / size_t(block)] += axis.tokens[i] != no_token;
    return tokens;
}

double count_away(const Axis& axis) {
    double away = 0;
    for (uint64_t word : axis.away) away += std::popcount(word);
    return away;
}

// Sums what is worked on and gathered over the blocks of a list. Rows that share a slice mostly follow each other, so
// the last slice's sums are kept.
class ListMeter {
public:
    ListMeter(const Layout& layout, bool by_key)
        : lists_(by_key ? layout.by_key : layout.by_query), block_(by_key ? layout.block_q : layout.block_k),
          full_(double(layout.block_q) * layout.block_k), masks_(measure_masks(layout, by_key)),
          tokens_(count_tokens(by_key ? layout.queries : layout.keys, block_)),
          apart_((by_key ? layout.queries : layout.keys).modulus > 1),
          repeats_((by_key ? layout.queries : layout.keys).away.empty()) {}

    void add(Slice slice, double heads, LayoutStats& stats) {
        if (slice.begin == slice.end) return;
        if (slice.begin != last_.begin || slice.end != last_.end) measure(slice);
        stats.worked += worked_ * heads;
        stats.gathered += (listed_ + homes_) * heads;
        stats.gaps += gaps_ * heads;
        if (repeats_) stats.repeated += listed_ * heads;
    }

    // Adds a row that has a stem, which is not the only one to have those runs: sums up to each tell any length of it.
    void add(Slice stem, Slice own, double heads, LayoutStats& stats) {
        if (stem.begin == stem.end) return add(own, heads, stats);
        if (worked_before_.empty()) sum_runs();
        stats.worked += (worked_before_[size_t(stem.end)] - worked_before_[size_t(stem.begin)]) * heads;
        stats.gaps += (gaps_before_[size_t(stem.end)] - gaps_before_[size_t(stem.begin) + 1]) * heads;
        if (own.begin < own.end) stats.gaps += is_gap(lists_.runs[stem.end - 1], lists_.runs[own.begin]) * heads;
        add(own, heads, stats);
    }

private:
    static bool is_gap(const Run& before, const Run& run) { return run.first > before.first + before.count; }

    double worked_of(const Run& run) const {
        return run.count * (run.mask == full_block ? full_ : masks_[size_t(run.mask)]);
    }

    // Lists with stems have plain tokens, none of which are gathered.
    void sum_runs() {
        const std::vector<Run>& runs = lists_.runs;
        worked_before_.resize(runs.size() + 1), gaps_before_.resize(runs.size() + 1);
        for (size_t r = 0; r < runs.size(); ++r) {
            worked_before_[r + 1] = worked_before_[r] + worked_of(runs[r]);
            gaps_before_[r + 1] = gaps_before_[r] + (r > 0 && is_gap(runs[r - 1], runs[r]));
        }
    }

    void measure(Slice slice) {
        last_ = slice;
        worked_ = listed_ = homes_ = gaps_ = 0;
        for (int32_t r = slice.begin; r < slice.end; ++r) {
            const Run& run = lists_.runs[r];
            const int32_t end = run.first + run.count, listed = std::min(end, int32_t(tokens_.size()));
            worked_ += worked_of(run);
            for (int32_t tile = run.first; tile < listed; ++tile) listed_ += tokens_[tile];
            if (r > slice.begin) gaps_ += is_gap(lists_.runs[r - 1], run);
            if (apart_) homes_ += double(block_) * (end - std::max(run.first, listed));
        }
    }

    const Lists& lists_;
    int32_t block_;
    double full_;
    std::vector<double> masks_;
    std::vector<int32_t> tokens_;
    bool apart_;    // homes are in residue classes: their tokens are no neighbours either
    bool repeats_;  // listed tokens stand at home as well
    Slice last_{0, 0};
    double worked_ = 0, listed_ = 0, homes_ = 0;  // the latter two: tokens gathered
    double gaps_ = 0;
    std::vector<double> worked_before_, gaps_before_;  // [runs + 1] of all runs before
};

// How many queries of each mask see each of its keys: [num_masks][block_k]. Neighbours that see the same are counted at
// once: where nearly every mask is another one, as of documents, these are most.
std::vector<int32_t> count_queries(const Layout& layout) {
    std::vector<int32_t> counts(size_t(layout.num_masks) * size_t(layout.block_k));
    for (int32_t mask = 0; mask < layout.num_masks; ++mask) {
        const uint64_t* const bits = &layout.masks[size_t(mask) * size_t(layout.mask_words)];
        for (int32_t key = 0; key < layout.block_k; key += 64) {
            const auto seen_by = [&](int32_t query) {
                return get_bits(bits, int64_t(query) * layout.block_k + key, std::min(64, layout.block_k - key));
            };
            int32_t* const of_keys = &counts[size_t(mask) * size_t(layout.block_k) + size_t(key)];
            for (int32_t query = 0, next; query < layout.block_q; query = next) {
                const uint64_t seen = seen_by(query);
                for (next = query + 1; next < layout.block_q && seen_by(next) == seen;) ++next;
                for (uint64_t left = seen; left; left &= left - 1) of_keys[std::countr_zero(left)] += next - query;
            }
        }
    }
    return counts;
}

// Rows of blocks: those with work, each once a head, and how many blocks the longest has.
struct RowLengths {
    int64_t rows = 0, longest = 0;

    RowLengths(const Lists& lists, const std::vector<int64_t>& heads) {
        std::vector<int64_t> before(lists.runs.size() + 1);  // blocks of all runs before
        for (size_t r = 0; r < lists.runs.size(); ++r) before[r + 1] = before[r] + lists.runs[r].count;
        const auto blocks_of = [&](Slice slice) { return before[size_t(slice.end)] - before[size_t(slice.begin)]; };
        for (size_t at = 0; at < lists.slices.size(); ++at) {
            const int64_t stem = lists.stems.empty() ? 0 : blocks_of(lists.stems[at]);
            const int64_t blocks = blocks_of(lists.slices[at]) + stem;
            rows += blocks > 0 ? heads[at / size_t(lists.rows)] : 0;
            longest = std::max(longest, blocks);
        }
    }
};

}  // namespace

LayoutStats make_layout_stats(const Lowered& lowered, bool by_key) {
    if (lowered.outline) return lowered.outline->stats(by_key).plain;
    const Layout& layout = *lowered.layout;
    const Lists& lists = by_key ? layout.by_key : layout.by_query;
    const std::vector<int64_t> heads = count_heads(layout);
    LayoutStats stats{};
    stats.pairs = lowered.counts.pairs;
    stats.visited = lowered.counts.visited;
    stats.blocks = double(lowered.counts.blocks_full + lowered.counts.blocks_partial);
    stats.masked = double(lowered.counts.blocks_partial);
    stats.away = (count_away(layout.queries) + count_away(layout.keys)) * double(layout.kind_of_head.size());
    const RowLengths own(lists, heads), across(by_key ? layout.by_query : layout.by_key, heads);
    stats.rows = own.rows;
    stats.longest = {double(own.longest), double(across.longest), across.rows};
    ListMeter meter(layout, by_key);
    for (int32_t c = 0; c < layout.head_kinds; ++c)
        for (int32_t row = 0; row < lists.rows; ++row) {
            const size_t at = size_t(c) * lists.rows + row;
            const Slice slice = lists.slices[at], stem = lists.stems.empty() ? Slice{0, 0} : lists.stems[at];
            meter.add(stem, slice, double(heads[c]), stats);
        }
    return stats;
}

bool groups_share(const Problem& p, const Layout& layout) {
    if (layout.head_kinds <= 1) return true;
    for (size_t head = 0; head < layout.kind_of_head.size(); ++head)
        if (layout.kind_of_head[head] != layout.kind_of_head[head - head % size_t(p.group())]) return false;
    return true;
}

// Queries that see a key are counted once for each mask, and added up along those columns of blocks that are so long that
// a key of theirs may be the most visited one.
int64_t count_longest_column(const Lowered& lowered) {
    if (lowered.outline) return lowered.outline->longest_column;
    const Layout& layout = *lowered.layout;
    const Lists& lists = layout.by_key;
    const std::vector<int32_t> of_masks = count_queries(layout);
    std::vector<int32_t> column(size_t(layout.block_k));
    int32_t longest = 0;
    for (const Slice& slice : lists.slices) {
        int32_t full = 0, masked = 0;  // blocks
        for (int32_t r = slice.begin; r < slice.end; ++r)
            (lists.runs[size_t(r)].mask == full_block ? full : masked) += lists.runs[size_t(r)].count;
        if (int64_t(full + masked) * layout.block_q <= longest) continue;
        std::fill(column.begin(), column.end(), full * layout.block_q);
        for (int32_t r = slice.begin; r < slice.end; ++r) {
            const Run& run = lists.runs[size_t(r)];
            if (run.mask == full_block) continue;
            const int32_t* const of_mask = &of_masks[size_t(run.mask) * column.size()];
            for (size_t key = 0; key < column.size(); ++key) column[key] += run.count * of_mask[key];
        }
        longest = std::max(longest, *std::max_element(column.begin(), column.end()));
    }
    return longest;
}

LayoutStats make_gather_stats(const Problem& p, double pairs, bool groups_share) {
    LayoutStats stats{};
    stats.pairs = stats.visited = stats.worked = pairs;
    stats.rows = p.batch * p.heads_q * p.seq_q;
    stats.gathered = pairs / (groups_share ? double(p.group()) : 1);
    return stats;
}

Counts count_call_lists(const Problem& p) {
    const double rows = double(p.batch) * double(p.heads_q) * double(p.seq_q);
    Counts counts;
    counts.pairs = counts.visited = rows * double(p.call_lists.tokens());
    counts.row_max = p.call_lists.tokens();
    return counts;
}

LayoutStats make_call_stats(const Problem& p) { return make_gather_stats(p, count_call_lists(p).pairs, true); }

LayoutStats make_call_layout_stats(const Problem& p, const Kernel& kernel, const LayoutStats& known) {
    const double rows = double(p.batch * p.heads_q * ceil_div(p.seq_q, kernel.block_q));
    const double tiles = double(ceil_div(std::min(p.call_lists.block_k, p.seq_k), kernel.block_k));
    const int joined = join_blocks(kernel, p);
    const double all = known.blocks * joined, listed = std::min(all, rows * double(p.call_lists.most) * tiles);
    const double share = all > 0 ? listed / all : 0;
    // As if a tile's blocks were named by chance: whether some of those that it joins are, or all.
    const double some_named = 1 - std::pow(1 - share, joined), all_named = std::pow(share, joined);
    LayoutStats stats = known;
    stats.blocks = known.blocks * some_named;
    stats.masked = std::min(known.masked + known.blocks * (some_named - all_named), stats.blocks);
    stats.pairs *= share, stats.visited *= some_named, stats.worked *= some_named;
    double& of_query = kernel.owner() == Owner::keys ? stats.longest.across : stats.longest.row;
    double& of_key = kernel.owner() == Owner::keys ? stats.longest.row : stats.longest.across;
    of_query = std::min(of_query, double(p.call_lists.most) * tiles), of_key *= some_named;
    return stats;
}

double call_share(const Problem& p) {
    return double(p.batch) * double(p.seq_q) / (double(p.sequences()) * double(p.seq_k));
}

Problem seen_of_cache(const Problem& p, const LayoutStats& of_call) {
    const double queries = double(p.batch * p.heads_q * p.seq_q);
    Problem seen = p;
    if (p.ragged) seen.ragged = std::min(p.ragged, p.seq_q);
    const int64_t of_sequence = p.ragged ? ceil_div(p.seq_q, seen.ragged) : p.seq_q;
    seen.seq_k = std::min(p.seq_k, int64_t(of_call.pairs / queries) + of_sequence);
    return seen;
}

LayoutStats make_cache_stats(const Problem& p, const Kernel& kernel, const LayoutStats& whole) {
    const int64_t tile = std::max(kernel.block_q, 1);  // rows that read no layout count queries
    // Sequences that share the queries of a batch entry have a tile each at least that others do not fill.
    const double tiles = double(p.ragged ? std::min(p.seq_q, p.seq_q / tile + p.ragged) : ceil_div(p.seq_q, tile));
    const double share = double(p.batch) * tiles / (double(p.sequences()) * double(ceil_div(p.seq_k, tile)));
    LayoutStats stats = whole;
    stats.longest = {};
    stats.pairs *= call_share(p);
    stats.visited *= share, stats.worked *= share, stats.blocks *= share, stats.masked *= share, stats.gaps *= share;
    stats.rows = int64_t(double(p.batch * p.heads_q) * tiles);
    if (kernel.device != SPATTN_CPU && cache_keys(kernel, p) == CacheKeys::listed && !takes_stretches(kernel, p))
        stats.gathered = stats.blocks * kernel.block_k;
    return stats;
}

}  // namespace spattn
