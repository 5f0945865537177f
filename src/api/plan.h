// SPDX-License-Identifier: MIT
// The plan handle: the compiled plan, where its arrays lie on the device, and what the reference rows need.
#pragma once

#include <string>

#include "api/device.h"
#include "pattern/pattern.h"
#include "plan/placed.h"
#include "plan/plan.h"

struct spattn_plan : spattn::RefCounted {
    const spattn::PassPlan& pass(spattn_enum op) const {
        return op == SPATTN_OP_FORWARD ? compiled.forward : compiled.backward;
    }

    // What its arrays and its pattern's take, on the host and, where it has a copy, on the device. The rest is some ten
    // KiB, whatever the plan.
    size_t bytes() const;

    spattn::Ref<const spattn::Device> device;
    spattn::PatternRef pattern, known;  // known: of a pattern with lists at run time, the part that is known, or null
    spattn::Problem given{};  // what calls bring; differs from compiled.problem where it is empty: api/empty.h
    spattn::CompiledPlan compiled;
    spattn::PlacedPlan placed;
    std::string kernels[2];             // the names that spattn_plan_kernel returns, by spattn_op
    spattn_enum axes = SPATTN_BSHD;     // which axes the tensors of a call have
};

namespace spattn {

// The plan of a problem, from the context's cache where it is there.
Ref<const spattn_plan> find_or_make_plan(const spattn_context& context, const Pattern& pattern,
                                         const spattn_problem& given, void* stream);

// Bytes: cache lines on the CPU, what cudaMalloc gives on a GPU.
inline size_t workspace_alignment(const spattn_plan& plan) {
    return plan.device->id().type == SPATTN_CPU ? 64 : 256;
}

}  // namespace spattn
