// SPDX-License-Identifier: MIT
// Cutting compositions into pieces: see Pattern::pieces().
#pragma once

#include "pattern/pattern.h"

namespace spattn {

// Of the parts of A | B, A & B and A - B - C. None where the composition stays whole.
Patterns pieces_of_union(const Patterns& parts);
Patterns pieces_of_intersection(const Patterns& parts);
Patterns pieces_of_difference(const Patterns& parts);

}  // namespace spattn
