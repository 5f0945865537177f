// SPDX-License-Identifier: MIT
// Places along an axis whose results are compared with the truth, where there is no time for all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "numbers.h"

namespace random_test {

// Rising places among those of `pairs`, which says how many pairs each takes part in: all where the share is 1, else
// the ends, edges of tiles, borders of the pattern and any others, with about that share of the pairs.
std::vector<int64_t> draw_sample(Random& random, const std::vector<int64_t>& pairs, double share);

}  // namespace random_test
