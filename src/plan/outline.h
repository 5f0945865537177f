// SPDX-License-Identifier: MIT
// An outline says what a layout of 64 x 64 blocks would come to, without making it. It is counted from the pattern's
// lists of tokens. Where no closed form names masks (csr, trees), nearly every block has a mask of its own: making them
// takes far more time and memory than the token lists, and is in vain where a row that gathers tokens costs less.
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
        LayoutStats least_listed{};  // as make_least_listed_stats() says, or closer: hot tokens are known here
    };
    Stats by_query, by_key;
    Counts counts;
    int64_t longest_column = 0;  // queries of the key that most see
    size_t bytes = 0;  // of the layout: its masks, if all are different, and runs
    std::shared_ptr<const TokenLists> tokens;

    const Stats& stats(bool is_by_key) const { return is_by_key ? by_key : by_query; }
};

// Null where the pattern has closed forms, where its pairs are so dense that blocks are likely to cost less than lists,
// and where they are more than a plan may list. `layout` has its extent only, and gets its kinds of heads.
std::shared_ptr<const Outline> build_outline(const Pattern& pattern, Layout& layout);

}  // namespace spattn
