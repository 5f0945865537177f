// SPDX-License-Identifier: MIT
// What a call must have written, in double precision from the definitions, over the keys that each row sees; and how
// far it may be off. Bounds follow the errors of scores and sums, so that they hold for loud and tiny values, too.
#pragma once

#include <string>

#include "problem.h"

namespace random_test {

struct Findings {
    std::string failure;   // the first one, or empty
    double worst = 0;      // largest error, in bounds
    int64_t rows = 0;      // compared with the truth
    int64_t isolated = 0;  // of these, rows with a neighbour that sees poison
    int64_t empty_rows = 0;
    bool has_empty_stretch = false;  // 128 rows without a key behind rows with some
};
Findings compare(const Problem& problem, const Tensors& tensors);

}  // namespace random_test
