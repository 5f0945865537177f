// SPDX-License-Identifier: MIT
// Plans for queries that are dispatched (plan/dispatch.h).
#pragma once

#include "plan/dispatch.h"
#include "plan/plan.h"

namespace spattn {

// What a round has, as if every list were full.
LayoutStats make_dispatch_stats(const DispatchShape& shape, const Kernel& kernel);
// What all rounds take; stats: of one.
Cost dispatch_cost(const DispatchShape& shape, const Kernel& kernel, const LayoutStats& stats, const Machine& machine);

// Tasks of a round, a tile each or a block of keys: how long they are is known in the call.
Schedule schedule_dispatch(const DispatchShape& shape, const Walk& walk, int lanes);
size_t dispatch_workspace(const DispatchShape& shape, const Kernel& kernel, const Schedule& first,
                          const Schedule& second, int lanes);

}  // namespace spattn
