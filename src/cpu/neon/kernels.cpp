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
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::neon
