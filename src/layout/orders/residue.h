// SPDX-License-Identifier: MIT
// Layouts over residue classes. Where a pattern (a dilated one, say) keeps pairs only between queries of one residue
// class and keys of one, each residue class is a problem of its own, `modulus` times shorter, and keys that were
// scattered stand side by side.
#pragma once

#include <optional>

#include "layout/layout.h"

namespace spattn {

// The layout of `pattern` with both axes in the order of their residue classes (see AxisView). None where queries of
// one residue class see keys of several, or one residue class has no closed form. modulus >= 1.
std::optional<Layout> build_residue_layout(const Pattern& pattern, const Extent& extent, int32_t modulus,
                                           int32_t block_q, int32_t block_k);

}  // namespace spattn
