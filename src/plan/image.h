// SPDX-License-Identifier: MIT
// The part of a plan that kernels read, in one block of the device's memory: written once, never changed.
#pragma once

#include <vector>

#include "core/memory.h"
#include "plan/plan.h"

namespace spattn {

// Where the lists, masks and tasks of one piece of a pass lie.
struct PieceImage {
    LayoutView layout{};
    TasksView tasks{};
    TokenListsView tokens{};
};
using PassImage = std::vector<PieceImage>;

// Of a piece as it lies in host memory.
PieceImage view(const PiecePlan& piece);

struct PlanImage {
    Memory::Block block;
    PassImage forward, backward;
};

// Lays out both passes of the plan, copies them with one transfer on `stream` where the host cannot write there.
// Arrays that the passes share are stored once.
PlanImage make_image(const CompiledPlan& plan, const Ref<const Memory>& memory, void* stream);

}  // namespace spattn
