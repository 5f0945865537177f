// SPDX-License-Identifier: MIT
// Tokens of one sequence on several ranks: who holds which, and which of those that others hold the queries of each see.
#pragma once

#include <vector>

#include "pattern/pattern.h"

namespace spattn {

// The tokens that each rank holds: ranges, in the order of its rows.
using Holdings = std::vector<Intervals>;

// Equal shares, one for each rank, or twice as many: rank r holds number r and, from the end, number r again. There are
// as many tokens as shares or more.
Holdings split_evenly(int64_t seq, int32_t ranks, bool is_zigzag);

// The queries of a rank, and the keys that its plan takes: those that it holds or sees, and few others.
struct RankQueries {
    PatternRef pattern;
    int64_t rows, q_offset;  // q_offset: where the first one stands, as far as the pattern asks
    Intervals seen;          // tokens of the keys, rising
    int64_t keys() const;
};

// What one rank sends and receives: lists have the part of one rank after the other.
struct ExchangeLists {
    std::vector<int32_t> own_keys;        // which key of the plan's each row is that the rank holds
    std::vector<int32_t> sent, received;  // rows, and keys
    std::vector<int64_t> first_sent, first_received;  // [ranks + 1]: where parts begin
    std::vector<int32_t> shared, shared_keys;   // rows that go to some rank, and their keys
    std::vector<int32_t> first_place, places;  // [shared rows + 1] and the places in `sent` of each of these, rising
};

struct RankShare {
    RankQueries queries;
    ExchangeLists lists;
};
// extent: of all tokens.
RankShare share_of(const PatternRef& pattern, const Holdings& holdings, int32_t rank, const Extent& extent);

}  // namespace spattn
