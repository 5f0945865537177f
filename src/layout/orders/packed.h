// SPDX-License-Identifier: MIT
// Packed tokens: where a pattern names few hot tokens (global tokens, landmarks), they fill tiles of their own. What
// was one column in each of many blocks becomes a few dense blocks, and the rest of the pattern is compiled without
// them:
//
//     x.....x...            x x |            hot keys 0 and 6 stand in a listed tile, left of the line; the homes,
//     xx....x...   ->       x x | .x         right of it, keep the pairs of all other keys
//     xxx...x...            x x | .xx
#pragma once

#include <optional>

#include "layout/layout.h"

namespace spattn {

// The pattern's hot tokens, if they are scattered: each would drag a block of this size, mostly empty, into the lists.
std::optional<HotTokens> find_scattered(const Pattern& pattern, const Extent& extent, int32_t block);

// Serves both passes: hot tokens of either axis are listed once and away from home.
Layout build_packed_layout(const HotTokens& hot, const Extent& extent, int32_t block_q, int32_t block_k);

}  // namespace spattn
