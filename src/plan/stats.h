// SPDX-License-Identifier: MIT
// The counts that cost models work on: see LayoutStats.
#pragma once

#include "plan/lower.h"

namespace spattn {

// For block rows.
LayoutStats make_layout_stats(const Lowered& lowered, bool by_key);
// For gather rows whose lists the plan makes. Where the heads of a group share a list, its keys are gathered once.
LayoutStats make_gather_stats(const Problem& problem, double pairs, bool groups_share);
// Queries of a head that see the same key, at most.
int64_t count_longest_column(const Lowered& lowered);
// For gather rows whose lists come at run time: as if every list were full.
LayoutStats make_call_stats(const Problem& problem);
// The same for block rows: what full lists leave of the known part's layout, whose stats are given.
LayoutStats make_call_layout_stats(const Problem& problem, const Kernel& kernel, const LayoutStats& known);
// For block rows on a cache: the share of the whole sequence, whose stats are given, that a call's rows have.
LayoutStats make_cache_stats(const Problem& problem, const Kernel& kernel, const LayoutStats& whole);
// The share of the rows of all sequences that one call has.
double call_share(const Problem& problem);
// The same problem with as many keys as a call's queries see, for operands are priced by these.
Problem seen_of_cache(const Problem& problem, const LayoutStats& of_call);
// Whether the heads of each group see the same keys.
bool groups_share(const Problem& problem, const Layout& layout);
// Counts a pattern whose lists come at run time, as if every list were full.
Counts count_call_lists(const Problem& problem);

}  // namespace spattn
