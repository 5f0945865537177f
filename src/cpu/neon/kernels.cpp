// SPDX-License-Identifier: MIT
#include "cpu/neon/vec.h"
#include "cpu/generic/rows.h"

namespace spattn::cpu::neon {
namespace {

// Every AArch64 has these instructions: no flag in archs.inc, nothing to ask.
bool runs_here() { return true; }

const Kernel rows[] = {
    SPATTN_CPU_BLOCK(neon, 64, 64),
    SPATTN_CPU_BLOCK(neon, 16, 16),
    SPATTN_CPU_GATHERS(neon, float, f32),
    SPATTN_CPU_GATHERS(neon, F16, f16),
    SPATTN_CPU_GATHERS(neon, Bf16, bf16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::neon
