// SPDX-License-Identifier: MIT
// Hot tokens, found in lists: a token is hot where it sees far more than its neighbours do (a global token). At home it
// would make its block list nearly every block of the other axis; in tiles with others of its kind it fills them.
#pragma once

#include <vector>

#include "layout/orders/side.h"

namespace spattn {

// `kept` says how many pairs each token of a block keeps; the result names the places of the hot ones.
std::vector<int32_t> find_hot_places(const std::vector<int64_t>& kept, int32_t other_block);

// Tokens of the owning axis, rising, that are hot for any kind of heads. None where too many of them are.
std::vector<int32_t> find_hot_tokens(const Side& side);

// An axis of `blocks` plain blocks, from which these tokens are away, after listed tiles that they fill, with a place
// left free for each no_token.
Axis make_hot_axis(std::vector<int32_t> tokens, int32_t block, int32_t blocks);

}  // namespace spattn
