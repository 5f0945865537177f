// SPDX-License-Identifier: MIT
// What layouts that are not made would come to at least, or about that: a row that loses even so need not be lowered.
#pragma once

#include "plan/lower.h"

namespace spattn {

// Of smaller blocks, which divide those of `coarse`: read off the masks, and exact but for what is gathered of listed
// tiles, which is at least this.
LayoutStats make_finer_stats(const Lowered& coarse, const LayoutStats& coarse_stats, const Kernel& kernel);
// Of the layout with listed tiles: about the least that it can come to.
LayoutStats make_least_listed_stats(const Lowered& plain, const LayoutStats& plain_stats, const Kernel& kernel);
// Of plain blocks that divide those of a layout with packed tokens: about the least that they can come to.
LayoutStats make_least_plain_stats(const Lowered& packed, const LayoutStats& packed_stats, const Kernel& kernel);
// Of blocks of this size without waste, or with no more than a query must cause that keeps one key in `modulus`: a
// bound but for `worked`, which is about the least where the modulus is above 1.
LayoutStats make_least_stats(const Problem& problem, const Counts& counts, const Kernel& kernel, int32_t modulus);

}  // namespace spattn
