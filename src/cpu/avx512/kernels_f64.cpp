// SPDX-License-Identifier: MIT
#include "cpu/avx512/runs_here.h"
#include "cpu/generic/vec_f64.h"
#include "cpu/generic/rows.h"
#include "cpu/generic/block_backward_f64.h"

namespace spattn::cpu::avx512 {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_BLOCK_F64(avx512, 64, 64),
    SPATTN_CPU_BLOCK_F64(avx512, 16, 16),
    SPATTN_CPU_GATHERS(avx512, double, f64),
};

}  // namespace

KernelTable kernels_f64() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::avx512
