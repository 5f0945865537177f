// SPDX-License-Identifier: MIT
// Drawn extents of up to 200 tokens, and patterns on them whose numbers reach as far.
#pragma once

#include "drawn.h"
#include "pattern/pattern.h"

namespace spattn {

using drawn::Random;

drawn::Builder builder(Random& random, const Extent& e);
PatternRef take(drawn::Model model);

PatternRef random_pattern(Random& random, const Extent& e);
PatternRef random_leaf(Random& random, const Extent& e);
PatternRef random_lists(Random& random, const Extent& e);

Extent random_extent(Random& random);

}  // namespace spattn
