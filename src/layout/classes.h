// SPDX-License-Identifier: MIT
#pragma once

#include <vector>

#include "layout/layout.h"

namespace spattn {

// Planes that choose the same parts of a pattern are one class: fills layout.classes and class_of. Returns a plane of
// each class.
std::vector<Plane> find_classes(const Pattern& pattern, Layout& layout);

}  // namespace spattn
