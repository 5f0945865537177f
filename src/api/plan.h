// SPDX-License-Identifier: MIT
// The plan handle: the compiled plan, its image on the device, and what the reference rows need.
#pragma once

#include "api/context.h"
#include "pattern/pattern.h"
#include "plan/image.h"
#include "plan/plan.h"

struct spattn_plan : spattn::RefCounted {
    spattn::Ref<const spattn::Device> device;
    spattn::PatternRef pattern, known;  // known: of a pattern with lists at run time, the part that is known, or null
    spattn::CompiledPlan compiled;
    spattn::PlanImage image;
    spattn_enum axes = SPATTN_BSHD;  // of the tensors that a run brings
};

namespace spattn {

// Bytes: cache lines on the CPU, what cudaMalloc gives on a GPU.
inline size_t workspace_alignment(const spattn_plan& plan) {
    return plan.device->id().type == SPATTN_CPU ? 64 : 256;
}

}  // namespace spattn
