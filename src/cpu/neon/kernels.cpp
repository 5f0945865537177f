// SPDX-License-Identifier: MIT
#include "cpu/neon/runs_here.h"
#include "cpu/neon/vec.h"
#include "cpu/generic/elements.h"
#include "cpu/generic/rows.h"

namespace spattn::cpu::neon {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_BLOCK(neon, 64, 64),
    SPATTN_CPU_BLOCK(neon, 16, 16),
    SPATTN_CPU_FEW(neon),
    SPATTN_CPU_GATHERS(neon, float, f32),
    SPATTN_CPU_GATHERS(neon, F16, f16),
    SPATTN_CPU_GATHERS(neon, Bf16, bf16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::neon
