// SPDX-License-Identifier: MIT
// Tokens that see far more than their neighbours (global tokens): left at home, they would make their blocks
// everybody's; in tiles of their own they fill them.
#pragma once

#include <vector>

#include "layout/side.h"

namespace spattn {

// Places of a block whose tokens see far more than the others do, of what each of them keeps.
std::vector<int32_t> find_exceptions(const std::vector<int64_t>& kept, int32_t other_block);

// Tokens of the owning axis, rising, that are such exceptions in any class.
std::vector<int32_t> find_moved(const Side& side);

// An axis of so many plain blocks with these tokens in listed tiles and away from home.
Axis move_tokens(std::vector<int32_t> moved, int32_t block, int32_t blocks);

}  // namespace spattn
