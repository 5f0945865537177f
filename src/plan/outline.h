// SPDX-License-Identifier: MIT
// What blocks of 64 x 64 come to, counted from a pattern's lists of tokens without keeping a mask. Where no closed form
// names masks (csr, trees), nearly every block may have one of its own: masks then take far more time and memory than
// the lists do, for nothing where rows that gather tokens cost less.
#pragma once

#include <memory>

#include "layout/token_lists.h"
#include "plan/kernel.h"

namespace spattn {

constexpr int32_t outlined_block = 64, outlined_part = 16;
constexpr double most_list_bytes = 512.0 * 1024 * 1024;  // of token lists that a plan makes

struct Outline {
    struct Stats {
        LayoutStats plain{};         // as make_layout_stats() says,
        LayoutStats finer{};         // and make_finer_stats() of blocks of 16 x 16
        LayoutStats least_listed{};  // no less than make_least_listed_stats() says: whether tokens move is known
    };
    Stats by_query, by_key;
    Counts counts;
    size_t bytes = 0;  // of the layout: its masks, if all are different, and runs
    std::shared_ptr<const TokenLists> tokens;

    const Stats& stats(bool is_by_key) const { return is_by_key ? by_key : by_query; }
};

// Null where the pattern has closed forms, or keeps pairs so dense that blocks are likely to cost less than lists, or
// more than a plan may list. The layout is one without lists, with its classes of heads.
std::shared_ptr<const Outline> build_outline(const Pattern& pattern, const Layout& layout);

}  // namespace spattn
