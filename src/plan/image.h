// SPDX-License-Identifier: MIT
// The part of a plan that kernels read, never changed: the plan's own arrays, or a copy of them in one block of the
// device's memory.
#pragma once

#include <vector>

#include "core/memory.h"
#include "plan/plan.h"

namespace spattn {

// Where the lists, masks and tasks of one piece of a pass lie.
struct PieceImage {
    LayoutView layout{};
    TasksView tasks{}, second_tasks{};
    TokenListsView tokens{};
};
using PassImage = std::vector<PieceImage>;

// Of a piece as it lies in host memory.
PieceImage view(const PiecePlan& piece);

struct PlanImage {
    Memory::Block block;
    PassImage forward, backward;
};

// Of a plan that outlives it. Both passes are copied with one transfer on `stream`, arrays that they share once; where
// the memory is the heap, nothing is.
PlanImage make_image(const CompiledPlan& plan, const Ref<const Memory>& memory, void* stream);

}  // namespace spattn
