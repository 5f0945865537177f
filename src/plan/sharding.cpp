// SPDX-License-Identifier: MIT
#include "plan/sharding.h"

#include "core/math.h"
#include "layout/build.h"

namespace spattn {
namespace {

constexpr int32_t sent_together = 128;  // tokens: a kernel reads about so many at once

// Whether each block of `sent_together` tokens is seen.
using Blocks = std::vector<bool>;

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

// body(range, token) for the tokens of ranges that lie in blocks which are seen.
template <class Body>
void each_seen(const Intervals& held, const Blocks& seen, Body body) {
    for (size_t range = 0; range < held.size(); ++range)
        for (int64_t token = held[range].begin; token < held[range].end; ++token)
            if (seen[size_t(token / sent_together)]) body(range, token);
}

// Which rows go to some rank, and where.
void list_shared(ExchangeLists& lists) {
    std::vector<int32_t> next(lists.tokens.size());  // of a row: how many places it has, then the next one to fill
    for (const int32_t row : lists.sent) ++next[size_t(row)];
    lists.first_place.push_back(0);
    for (size_t row = 0; row < next.size(); ++row) {
        if (!next[row]) continue;
        lists.shared.push_back(int32_t(row)), lists.shared_tokens.push_back(lists.tokens[row]);
        lists.first_place.push_back(lists.first_place.back() + next[row]);
        next[row] = lists.first_place.end()[-2];
    }
    lists.places.resize(lists.sent.size());
    for (size_t place = 0; place < lists.sent.size(); ++place)
        lists.places[size_t(next[size_t(lists.sent[place])]++)] = int32_t(place);
}

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

RankQueries queries_of(const PatternRef& pattern, const Intervals& held, int64_t seq) {
    std::vector<int64_t> bounds;
    int64_t rows = 0;
    for (const Interval& range : held) {
        bounds.insert(bounds.end(), {range.begin, range.end});
        rows += range.end - range.begin;
    }
    // One range of a pattern that goes by positions needs no cut, and keeps all its closed forms.
    if (held.size() == 1 && !pattern->counts_rows()) return {pattern, rows, held[0].begin};
    return {make_rows_from_zero(pattern, std::move(bounds), seq), rows, 0};
}

ExchangeLists list_exchanges(const PatternRef& pattern, const Holdings& holdings, int32_t rank, const Extent& extent) {
    ExchangeLists lists;
    const Intervals& own = holdings[size_t(rank)];
    std::vector<int64_t> first_row{0};  // of each range
    for (const Interval& range : own) {
        for (int64_t token = range.begin; token < range.end; ++token) lists.tokens.push_back(int32_t(token));
        first_row.push_back(int64_t(lists.tokens.size()));
    }
    const Blocks seen_here = see_blocks(queries_of(pattern, own, extent.seq_k), extent);
    lists.first_sent.push_back(0), lists.first_received.push_back(0);
    for (size_t other = 0; other < holdings.size(); ++other) {
        if (other != size_t(rank)) {
            const Blocks seen_there = see_blocks(queries_of(pattern, holdings[other], extent.seq_k), extent);
            each_seen(own, seen_there, [&](size_t range, int64_t token) {
                lists.sent.push_back(int32_t(first_row[range] + token - own[range].begin));
            });
            each_seen(holdings[other], seen_here,
                      [&](size_t, int64_t token) { lists.received.push_back(int32_t(token)); });
        }
        lists.first_sent.push_back(int64_t(lists.sent.size()));
        lists.first_received.push_back(int64_t(lists.received.size()));
    }
    list_shared(lists);
    return lists;
}

}  // namespace spattn
