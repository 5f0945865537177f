// SPDX-License-Identifier: MIT
// A pattern as lists of keys, one a query row: what is left where blocks would be mostly empty.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/layout.h"
#include "layout/token_view.h"

namespace spattn {

struct TokenLists {
    int64_t rows = 0;               // seq_q
    int32_t head_kinds = 0;
    std::vector<int64_t> begin;     // [head_kinds * rows + 1]
    std::vector<int32_t> keys;
    std::vector<int32_t> kind_of_head;  // [batch * heads]

    size_t bytes() const;
};

// Lists of the pattern that `layout` was made of, for its kinds of heads. `pairs`, the number expected over all
// heads, sizes the memory. Nothing where the lists would have more than `most` keys.
std::optional<TokenLists> build_token_lists(const Pattern& pattern, const Layout& layout, double pairs, size_t most);

TokenListsView view(const TokenLists& lists);

}  // namespace spattn
