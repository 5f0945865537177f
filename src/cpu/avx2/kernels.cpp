// SPDX-License-Identifier: MIT
#include "cpu/avx2/runs_here.h"
#include "cpu/avx2/vec.h"
#include "cpu/generic/elements.h"
#include "cpu/generic/rows.h"

namespace spattn::cpu::avx2 {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_BLOCK(avx2, 64, 64),
    SPATTN_CPU_BLOCK(avx2, 16, 16),
    SPATTN_CPU_FEW(avx2),
    SPATTN_CPU_GATHERS(avx2, float, f32),
    SPATTN_CPU_GATHERS(avx2, F16, f16),
    SPATTN_CPU_GATHERS(avx2, Bf16, bf16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::avx2
