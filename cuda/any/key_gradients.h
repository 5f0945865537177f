// SPDX-License-Identifier: MIT
#pragma once

#include "any/key_sums.h"
#include "plan/call.h"

namespace spattn::any {

// The steps around kernels that add dk and dv in memory, where KeySumsSpace lays out the workspace. D: f16 or bf16.
template <Dtype D>
struct KeyGradients {
    static void clear(const BackwardArgs& args);        // sums, and the bounds of a deterministic plan
    static void find_quanta(const BackwardArgs& args);  // once all bounds are there
    static void write(const BackwardArgs& args);        // sums into dk and dv
    static void prepare(int32_t device);
};

}  // namespace spattn::any
