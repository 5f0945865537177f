// SPDX-License-Identifier: MIT
// The counts that cost models work on.
#pragma once

#include "plan/lower.h"

namespace spattn {

// What a row's cost model is told of a layout.
LayoutStats make_layout_stats(const Lowered& lowered, bool by_key);
// What a gather row's is told, whose lists the plan makes, for each group once or for each head, or a run brings.
LayoutStats make_gather_stats(const Problem& problem, double pairs, bool groups_share);
LayoutStats make_run_stats(const Problem& problem);
// Whether the heads of each group see the same keys.
bool groups_share(const Problem& problem, const Layout& layout);
// Of a pattern with lists at run time, as if all were full.
Counts count_run_lists(const Problem& problem);

}  // namespace spattn
