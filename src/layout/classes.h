// SPDX-License-Identifier: MIT
#pragma once

#include <vector>

#include "layout/layout.h"

namespace spattn {

// Fills layout.classes and class_of: planes that choose the same parts of a pattern are one class. Returns one plane of
// each class.
std::vector<Plane> find_classes(const Pattern& pattern, Layout& layout);

}  // namespace spattn
