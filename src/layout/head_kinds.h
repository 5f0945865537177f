// SPDX-License-Identifier: MIT
#pragma once

#include <vector>

#include "layout/layout.h"

namespace spattn {

// Fills layout.head_kinds and kind_of_head: planes that choose the same parts of a pattern are of one kind. Returns one
// plane of each kind.
std::vector<Plane> find_head_kinds(const Pattern& pattern, Layout& layout);

}  // namespace spattn
