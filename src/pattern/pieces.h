// SPDX-License-Identifier: MIT
// Cutting compositions into pieces: see Pattern::pieces().
#pragma once

#include "pattern/pattern.h"

namespace spattn {

// The pieces of A | B, of A & B and of A - B - C, whose parts are given. None where the composition stays whole.
Patterns pieces_of_union(const Patterns& parts);
Patterns pieces_of_intersection(const Patterns& parts);
Patterns pieces_of_difference(const Patterns& parts);
// What each part of a choice contributes to a piece, for each of its pieces: nothing where a part has no such piece.
std::vector<Patterns> pieces_of_choice(const Patterns& parts);

}  // namespace spattn
