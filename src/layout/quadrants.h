// SPDX-License-Identifier: MIT
// Counts of a pattern whose lists nobody needs, in time and memory that hardly depend on its length.
#pragma once

#include <optional>

#include "layout/layout.h"

namespace spattn {

// As count() of the pattern's layout says. Nothing where some mask has no closed form, or where so little of the
// pattern repeats that a layout costs no more.
std::optional<Counts> count_quadrants(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k);

}  // namespace spattn
