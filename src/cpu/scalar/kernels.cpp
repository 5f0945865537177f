// SPDX-License-Identifier: MIT
#include "cpu/scalar/runs_here.h"
#include "cpu/scalar/vec.h"
#include "cpu/generic/elements.h"
#include "cpu/generic/rows.h"

namespace spattn::cpu::scalar {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_BLOCK(scalar, 64, 64),
    SPATTN_CPU_BLOCK(scalar, 16, 16),
    SPATTN_CPU_GATHERS(scalar, float, f32),
    SPATTN_CPU_GATHERS(scalar, F16, f16),
    SPATTN_CPU_GATHERS(scalar, Bf16, bf16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::scalar
