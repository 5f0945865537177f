// SPDX-License-Identifier: MIT
#pragma once

#include "layout/layout.h"

namespace spattn {

// The lists of build_layout() by query alone, and their masks: for layouts that are put together from several.
Layout build_query_lists(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k);
// The same lists, with stems where rows share some.
Layout build_stem_lists(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k);

}  // namespace spattn
