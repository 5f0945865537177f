// SPDX-License-Identifier: MIT
#include "cpu/scalar/runs_here.h"
#include "cpu/generic/vec_f64.h"
#include "cpu/generic/rows.h"
#include "cpu/generic/block_backward_f64.h"

namespace spattn::cpu::scalar {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_BLOCK_F64(scalar, 64, 64),
    SPATTN_CPU_BLOCK_F64(scalar, 16, 16),
    SPATTN_CPU_GATHERS(scalar, double, f64),
};

}  // namespace

KernelTable kernels_f64() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::scalar
