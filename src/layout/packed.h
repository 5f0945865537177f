// SPDX-License-Identifier: MIT
// Packed tokens: where a few tokens stand out (global tokens, landmarks), they fill tiles of their own, and what was a
// column in each of many blocks becomes a few dense blocks. The rest of the pattern is compiled without them:
//
//     x.....x...            x x |            hot keys 0 and 6 are listed first; their homes keep the others' pairs
//     xx....x...   ->       x x | .x
//     xxx...x...            x x | .xx
#pragma once

#include <optional>

#include "layout/layout.h"

namespace spattn {

// The pattern's hot tokens, where blocks of this many tokens would be mostly waste for their sake.
std::optional<HotTokens> find_scattered(const Pattern& pattern, const Extent& extent, int32_t block);

// One layout for both passes: hot tokens of either axis are listed once and away from home.
Layout build_packed_layout(const HotTokens& hot, const Extent& extent, int32_t block_q, int32_t block_k);

}  // namespace spattn
