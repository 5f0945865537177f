// SPDX-License-Identifier: MIT
// Hot tokens of single patterns and of compositions: see Pattern::hot().
#pragma once

#include "pattern/composite.h"

namespace spattn {

// The hot tokens of a pattern whose keys are the same for every query are those keys.
std::optional<HotTokens> hot_keys(const Pattern& constant, const Extent& extent);
// The hot tokens of `marks` are the queries at the positions that such a pattern lists.
std::optional<HotTokens> hot_queries(const Pattern& constant, const Pattern& marks, const Extent& extent);

// One of the first `count` parts gives its hot tokens: the one that has most. The others keep their place in `among`
// and `apart`.
std::optional<HotTokens> hot_of_parts(const Patterns& parts, size_t count, const Extent& extent,
                                      PatternRef (*rebuild)(Patterns));

// A union has the hot tokens of all its parts where these see, or are seen by, everything; where another part has more
// of its own, it has those of that part.
std::optional<HotTokens> hot_of_union(const Patterns& parts, const Extent& extent);

}  // namespace spattn
