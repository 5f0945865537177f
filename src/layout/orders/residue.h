// SPDX-License-Identifier: MIT
// Layouts over residue classes. Where a pattern (a dilated one, say) keeps pairs only between queries of one residue
// class and keys of one, each residue class is a problem of its own, `modulus` times shorter, and keys that were
// scattered stand side by side.
#pragma once

#include <optional>

#include "layout/layout.h"

namespace spattn {

// How many tokens of [0, seq) are `residue` mod `modulus`.
constexpr int64_t members(int64_t seq, int64_t modulus, int64_t residue) {
    return residue < seq ? (seq - residue + modulus - 1) / modulus : 0;
}
// One pattern for each residue class of keys. None at all where one of them has no closed form, or where queries of one
// see keys of several.
Patterns find_residue_patterns(const Pattern& pattern, int32_t modulus);

// The layout of `pattern` with both axes in the order of their residue classes (see AxisView). None where queries of
// one residue class see keys of several, or one residue class has no closed form. modulus >= 1.
std::optional<Layout> build_residue_layout(const Pattern& pattern, const Extent& extent, int32_t modulus,
                                           int32_t block_q, int32_t block_k);

}  // namespace spattn
