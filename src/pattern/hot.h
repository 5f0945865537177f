// SPDX-License-Identifier: MIT
// Hot tokens of single patterns and of compositions: see Pattern::hot().
#pragma once

#include "pattern/composite.h"

namespace spattn {

// Of a pattern whose keys are the same for every query: those keys.
std::optional<HotTokens> hot_keys(const Pattern& constant, const Extent& extent);
// Of `marks`, the queries at the positions that such a pattern lists.
std::optional<HotTokens> hot_queries(const Pattern& constant, const Pattern& marks, const Extent& extent);

// Of that one of the first `count` parts that has most of them; the others keep their place in `among` and `apart`.
std::optional<HotTokens> hot_of_parts(const Patterns& parts, size_t count, const Extent& extent,
                                      PatternRef (*rebuild)(Patterns));

// Of a union: of all parts together whose hot tokens see, or are seen by, everything; of another one where it has more.
std::optional<HotTokens> hot_of_union(const Patterns& parts, const Extent& extent);

}  // namespace spattn
