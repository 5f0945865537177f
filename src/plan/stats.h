// SPDX-License-Identifier: MIT
// The counts that cost models work on, of a layout or of what no layout can beat.
#pragma once

#include "plan/lower.h"

namespace spattn {

// What a row's cost model is told of a layout.
LayoutStats make_layout_stats(const Lowered& lowered, bool by_key);
// The same of smaller blocks, which divide those of `coarse`, without lowering them: read off the masks, and exact but
// for `rows`, which are at least these.
LayoutStats make_finer_stats(const Lowered& coarse, const Kernel& kernel);
// The same of the layout with listed tiles, without making it: about the least that it can come to.
LayoutStats make_least_listed_stats(const Lowered& plain, bool by_key);
// What a gather row's is told, whose lists the plan makes or a run brings.
LayoutStats make_gather_stats(const Problem& problem, const Lowered& lowered);
LayoutStats make_run_stats(const Problem& problem);
// Whether the heads of each group see the same keys.
bool groups_share(const Problem& problem, const Layout& layout);
// Of a pattern with lists at run time, as if all were full.
Counts count_run_lists(const Problem& problem);
// As make_layout_stats if blocks of this size could be had without waste, or with no more than a query must cause that
// keeps one key in `modulus`: no layout costs less.
LayoutStats make_least_stats(const Problem& problem, const Counts& counts, const Kernel& kernel, int32_t modulus);

}  // namespace spattn
