// SPDX-License-Identifier: MIT
#pragma once

#include "layout/layout.h"

namespace spattn {

// Cuts the blocks of a layout in plain order into smaller ones that divide them, block_k up to 64. The result is what
// build_layout() would make, with its masks numbered otherwise; the pattern is not asked again.
Layout cut_layout(const Layout& coarse, int32_t block_q, int32_t block_k);
// Its lists by query alone, and their masks.
Layout cut_query_lists(const Layout& coarse, int32_t block_q, int32_t block_k);

}  // namespace spattn
