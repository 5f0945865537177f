// SPDX-License-Identifier: MIT
// Estimates of layouts that are not made yet. Each is about the least that such a layout can come to, so that a row
// which loses even with the estimate need not be lowered.
#pragma once

#include "plan/lower.h"

namespace spattn {

// Estimates plain or residue blocks of the row's size from larger ones that they divide. The masks of these tell all
// but `gathered`, which is a lower bound.
LayoutStats make_finer_stats(const Lowered& coarse, const LayoutStats& coarse_stats, const Kernel& kernel);
// Estimates the layout with listed tiles from the plain one, or from one of larger blocks that the row's divide, whose
// masks tell as much.
LayoutStats make_least_listed_stats(const Lowered& plain, const LayoutStats& plain_stats, const Kernel& kernel);
// Estimates plain blocks of the row's size from a layout with packed tokens, whose blocks they divide.
LayoutStats make_least_plain_stats(const Lowered& packed, const LayoutStats& packed_stats, const Kernel& kernel);
// Estimates blocks of the row's size from the pairs alone. With modulus 1, no block wastes anything; with a larger one,
// a query keeps at most one key in so many, so blocks of consecutive keys cannot be dense. Only `worked` may exceed the
// truth, and only with a modulus above 1.
LayoutStats make_least_stats(const Problem& problem, const Counts& counts, const Kernel& kernel, int32_t modulus);

}  // namespace spattn
