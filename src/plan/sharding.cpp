// SPDX-License-Identifier: MIT
#include "plan/sharding.h"

#include "core/math.h"
#include "layout/head_kinds.h"
#include "layout/image.h"

namespace spattn {
namespace {

constexpr int64_t sent_together = 128;  // tokens: a kernel reads about so many at once

// A bool for each of the pieces that tokens are sent in, some `sent_together` each: the columns of a picture.
class Pieces {
public:
    explicit Pieces(int64_t seq) : seq_(seq), seen_(size_t(ceil_div(seq, sent_together))) {}

    void see(int64_t first, int64_t count) { std::fill_n(seen_.begin() + first, count, true); }
    void see_all() { see(0, count()); }
    int64_t count() const { return int64_t(seen_.size()); }

    // The tokens of [begin, end) in pieces that are seen.
    void list(const Interval& range, std::vector<int64_t>& out) const {
        // A picture's column c begins with token c * seq / count.
        int64_t piece = ((range.begin + 1) * count() - 1) / seq_;
        for (int64_t token = range.begin; token < range.end; ++piece) {
            const int64_t end = std::min(range.end, (piece + 1) * seq_ / count());
            for (; token < end; ++token)
                if (seen_[size_t(piece)]) out.push_back(token);
        }
    }

private:
    int64_t seq_;
    std::vector<bool> seen_;
};

// What a rank's queries see, or may come to see once a call brings its lists.
Pieces see_pieces(const RankQueries& queries, const Extent& whole) {
    Pieces pieces(whole.seq_k);
    const PatternRef known = queries.pattern->runtime() ? queries.pattern->known_part() : queries.pattern;
    if (!known) {
        pieces.see_all();
        return pieces;
    }
    Layout kinds;
    kinds.extent = {whole.batch, whole.heads, queries.rows, whole.seq_k, queries.q_offset};
    for (const Plane& plane : find_head_kinds(*known, kinds))
        draw_image(*known, plane, 1, pieces.count(), [&](int64_t, int64_t first, int64_t count, float share) {
            if (share > 0) pieces.see(first, count);
        });
    return pieces;
}

// The rank's tokens that are in pieces which are seen.
std::vector<int64_t> list_tokens(const Intervals& held, const Pieces& seen) {
    std::vector<int64_t> tokens;
    for (const Interval& range : held) seen.list(range, tokens);
    return tokens;
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
    // One range of a pattern that goes by positions needs no cut, and keeps its closed forms.
    if (held.size() == 1 && !pattern->counts_rows()) return {pattern, rows, held[0].begin};
    return {make_rows(pattern, std::move(bounds), seq), rows, 0};
}

ExchangeLists list_exchanges(const PatternRef& pattern, const Holdings& holdings, int32_t rank, const Extent& extent) {
    ExchangeLists lists;
    const Intervals& own = holdings[size_t(rank)];
    std::vector<int64_t> first_row{0};  // of each range
    for (const Interval& range : own) {
        for (int64_t token = range.begin; token < range.end; ++token) lists.tokens.push_back(int32_t(token));
        first_row.push_back(int64_t(lists.tokens.size()));
    }
    const Pieces seen_here = see_pieces(queries_of(pattern, own, extent.seq_k), extent);
    lists.first_sent.push_back(0), lists.first_received.push_back(0);
    for (size_t other = 0; other < holdings.size(); ++other) {
        if (other != size_t(rank)) {
            const Pieces seen_there = see_pieces(queries_of(pattern, holdings[other], extent.seq_k), extent);
            std::vector<int64_t> tokens;
            for (size_t n = 0; n < own.size(); ++n) {
                tokens.clear();
                seen_there.list(own[n], tokens);
                for (const int64_t token : tokens) lists.sent.push_back(int32_t(first_row[n] + token - own[n].begin));
            }
            for (const int64_t token : list_tokens(holdings[other], seen_here))
                lists.received.push_back(int32_t(token));
        }
        lists.first_sent.push_back(int64_t(lists.sent.size()));
        lists.first_received.push_back(int64_t(lists.received.size()));
    }
    lists.first_place.assign(lists.tokens.size() + 1, 0);
    for (const int32_t row : lists.sent) ++lists.first_place[size_t(row) + 1];
    for (size_t row = 0; row < lists.tokens.size(); ++row) lists.first_place[row + 1] += lists.first_place[row];
    std::vector<int32_t> next(lists.first_place.begin(), lists.first_place.end() - 1);
    lists.places.resize(lists.sent.size());
    for (size_t place = 0; place < lists.sent.size(); ++place)
        lists.places[size_t(next[size_t(lists.sent[place])]++)] = int32_t(place);
    return lists;
}

}  // namespace spattn
