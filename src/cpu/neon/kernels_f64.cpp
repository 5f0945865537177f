// SPDX-License-Identifier: MIT
#include "cpu/neon/runs_here.h"
#include "cpu/generic/vec_f64.h"
#include "cpu/generic/rows.h"
#include "cpu/generic/block_backward_f64.h"

namespace spattn::cpu::neon {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_BLOCK_F64(neon, 64, 64),
    SPATTN_CPU_BLOCK_F64(neon, 16, 16),
    SPATTN_CPU_GATHERS(neon, double, f64),
};

}  // namespace

KernelTable kernels_f64() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::neon
