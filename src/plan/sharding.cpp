// SPDX-License-Identifier: MIT
#include "plan/sharding.h"

#include <numeric>

#include "core/cancel.h"
#include "core/math.h"
#include "layout/build.h"

namespace spattn {
namespace {

constexpr int32_t sent_together = 128;  // tokens: a kernel reads about so many at once

// Whether each block of `sent_together` tokens is seen.
using Blocks = std::vector<bool>;

int64_t count_tokens(const Intervals& ranges) {
    int64_t tokens = 0;
    for (const Interval& range : ranges) tokens += range.end - range.begin;
    return tokens;
}

std::vector<int64_t> bounds_of(const Intervals& ranges) {
    std::vector<int64_t> bounds;
    for (const Interval& range : ranges) bounds.insert(bounds.end(), {range.begin, range.end});
    return bounds;
}

// The queries of a rank that has the keys of all tokens.
RankQueries queries_of(const PatternRef& pattern, const Intervals& held, int64_t seq) {
    const Intervals all{{0, seq}};
    const int64_t rows = count_tokens(held);
    // One range of a pattern that goes by positions needs no cut, and keeps all its closed forms.
    if (held.size() == 1 && !pattern->counts_rows()) return {pattern, rows, held[0].begin, all};
    return {make_rows_from_zero(pattern, bounds_of(held), seq), rows, 0, all};
}

// What a rank's queries see, or may come to see once a call brings its lists.
Blocks see_blocks(const RankQueries& queries, const Extent& whole) {
    Blocks seen(size_t(ceil_div(whole.seq_k, sent_together)));
    const PatternRef known = queries.pattern->runtime() ? queries.pattern->known_part() : queries.pattern;
    if (!known) {
        seen.flip();
        return seen;
    }
    if (whole.batch == 0) return seen;
    const Extent own{whole.batch, whole.heads, queries.rows, whole.seq_k, queries.q_offset};
    for (const Run& run : build_query_lists(*known, own, sent_together, sent_together).by_query.runs)
        std::fill_n(seen.begin() + run.first, run.count, true);
    return seen;
}

// Units of keys that are left out or taken together: blocks, and as many as residue classes need to keep their places.
// Classes of one token need no place.
int64_t unit_of(const Pattern& pattern, int64_t seq) {
    int64_t unit = sent_together;
    for (const PatternRef& piece : pattern.pieces())
        if (const int64_t modulus = piece->modulus(); modulus > 1 && modulus < seq && unit < seq)
            unit = std::lcm(unit, modulus);
    return unit;
}

// Ranges that have all tokens which a rank holds or sees, or nothing where little would be left out. Few ranges: what
// lies between two that are near comes, too.
Intervals gather_seen(const PatternRef& pattern, const Intervals& held, const Blocks& seen, int64_t seq) {
    constexpr int64_t most_ranges = 64, least_left_out = 8;  // a gap has that share of all tokens, and all gaps that
    const int64_t unit = pattern->runtime() ? seq : unit_of(*pattern, seq);
    if (unit >= seq) return {};
    std::vector<bool> taken(size_t(ceil_div(seq, unit)));
    for (const Interval& range : held)
        std::fill(taken.begin() + range.begin / unit, taken.begin() + ceil_div(range.end, unit), true);
    for (size_t block = 0; block < seen.size(); ++block)
        if (seen[block]) taken[block * sent_together / size_t(unit)] = true;
    Intervals ranges;
    for (size_t n = 0; n < taken.size(); ++n) {
        if (!taken[n]) continue;
        const int64_t begin = int64_t(n) * unit;
        const bool is_near = !ranges.empty() && begin - ranges.back().end <= seq / most_ranges;
        if (!is_near) ranges.push_back({begin, begin});
        ranges.back().end = std::min(begin + unit, seq);
    }
    return seq - count_tokens(ranges) < seq / least_left_out ? Intervals() : ranges;
}

// The same queries with those keys alone.
RankQueries take_keys(const PatternRef& pattern, const Intervals& held, Intervals ranges, int64_t seq) {
    RankQueries queries = queries_of(pattern, held, seq);
    if (ranges.empty()) return queries;
    queries.pattern = make_columns_from_zero(make_rows_from_zero(pattern, bounds_of(held), seq), bounds_of(ranges), seq);
    queries.q_offset = 0, queries.seen = std::move(ranges);
    return queries;
}

// body(range, token) for the tokens of ranges that lie in blocks which are seen.
template <class Body>
void each_seen(const Intervals& held, const Blocks& seen, Body body) {
    Pace pace;
    for (size_t range = 0; range < held.size(); ++range)
        for (int64_t token = held[range].begin; token < held[range].end; ++token) {
            pace.step();
            if (seen[size_t(token / sent_together)]) body(range, token);
        }
}

// Which rows go to some rank, and where.
void list_shared(ExchangeLists& lists) {
    Pace pace;
    std::vector<int32_t> next(lists.own_keys.size());  // of a row: how many places it has, then the next one to fill
    for (const int32_t row : lists.sent) {
        pace.step();
        ++next[size_t(row)];
    }
    lists.first_place.push_back(0);
    for (size_t row = 0; row < next.size(); ++row) {
        pace.step();
        if (!next[row]) continue;
        lists.shared.push_back(int32_t(row)), lists.shared_keys.push_back(lists.own_keys[row]);
        lists.first_place.push_back(lists.first_place.back() + next[row]);
        next[row] = lists.first_place.end()[-2];
    }
    lists.places.resize(lists.sent.size());
    for (size_t place = 0; place < lists.sent.size(); ++place) {
        pace.step();
        lists.places[size_t(next[size_t(lists.sent[place])]++)] = int32_t(place);
    }
}

// Which key of the plan's a token is.
class KeyOfToken {
public:
    explicit KeyOfToken(const Intervals& seen) : seen_(seen) {
        for (const Interval& range : seen) first_.push_back(first_.back() + range.end - range.begin);
    }
    int32_t operator()(int64_t token) const {
        const auto behind = std::upper_bound(seen_.begin(), seen_.end(), token,
                                             [](int64_t t, const Interval& range) { return t < range.begin; });
        const auto range = size_t(behind - seen_.begin()) - 1;
        return int32_t(first_[range] + token - seen_[range].begin);
    }

private:
    const Intervals& seen_;
    std::vector<int64_t> first_{0};
};

}  // namespace

Holdings split_evenly(int64_t seq, int32_t ranks, bool is_zigzag) {
    const int64_t shares = is_zigzag ? 2 * int64_t(ranks) : ranks;
    const auto share = [&](int64_t n) { return Interval{n * seq / shares, (n + 1) * seq / shares}; };
    Holdings holdings;
    for (int64_t rank = 0; rank < ranks; ++rank) {
        holdings.push_back({share(rank)});
        if (is_zigzag) holdings.back().push_back(share(shares - 1 - rank));
    }
    return holdings;
}

int64_t RankQueries::keys() const { return count_tokens(seen); }

RankShare share_of(const PatternRef& pattern, const Holdings& holdings, int32_t rank, const Extent& extent) {
    const Intervals& own = holdings[size_t(rank)];
    const Blocks seen_here = see_blocks(queries_of(pattern, own, extent.seq_k), extent);
    RankShare share{take_keys(pattern, own, gather_seen(pattern, own, seen_here, extent.seq_k), extent.seq_k), {}};
    const KeyOfToken key_of(share.queries.seen);
    ExchangeLists& lists = share.lists;
    std::vector<int64_t> first_row{0};  // of each range
    Pace pace;
    for (const Interval& range : own) {
        for (int64_t token = range.begin; token < range.end; ++token) {
            pace.step();
            lists.own_keys.push_back(key_of(token));
        }
        first_row.push_back(int64_t(lists.own_keys.size()));
    }
    lists.first_sent.push_back(0), lists.first_received.push_back(0);
    for (size_t other = 0; other < holdings.size(); ++other) {
        if (other != size_t(rank)) {
            const Blocks seen_there = see_blocks(queries_of(pattern, holdings[other], extent.seq_k), extent);
            each_seen(own, seen_there, [&](size_t range, int64_t token) {
                lists.sent.push_back(int32_t(first_row[range] + token - own[range].begin));
            });
            each_seen(holdings[other], seen_here,
                      [&](size_t, int64_t token) { lists.received.push_back(key_of(token)); });
        }
        lists.first_sent.push_back(int64_t(lists.sent.size()));
        lists.first_received.push_back(int64_t(lists.received.size()));
    }
    list_shared(lists);
    return share;
}

}  // namespace spattn
