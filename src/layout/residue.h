// SPDX-License-Identifier: MIT
// Layouts over residue classes: where a pattern maps each class of a modulus to itself, the classes are problems of
// their own, as many times shorter, and what was scattered over the keys stands side by side.
#pragma once

#include <optional>

#include "layout/layout.h"

namespace spattn {

// The layout of `pattern` with both axes in the order of their residue classes (see AxisView). None where these classes
// do not keep to themselves, or one of them has no closed form. modulus >= 1.
std::optional<Layout> build_residue_layout(const Pattern& pattern, const Extent& extent, int32_t modulus,
                                           int32_t block_q, int32_t block_k);

}  // namespace spattn
