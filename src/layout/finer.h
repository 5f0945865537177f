// SPDX-License-Identifier: MIT
#pragma once

#include "layout/layout.h"

namespace spattn {

// The layout of smaller blocks, which divide those of one in plain order, block_k up to 64. As build_layout() would
// make it, but for the order of its masks; the pattern is not asked again.
Layout cut_layout(const Layout& coarse, int32_t block_q, int32_t block_k);

}  // namespace spattn
