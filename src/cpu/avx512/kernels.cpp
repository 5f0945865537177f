// SPDX-License-Identifier: MIT
#include "cpu/avx512/runs_here.h"
#include "cpu/avx512/vec.h"
#include "cpu/generic/elements.h"
#include "cpu/generic/rows.h"

namespace spattn::cpu::avx512 {
namespace {

const Kernel rows[] = {
    SPATTN_CPU_BLOCK(avx512, 64, 64),
    SPATTN_CPU_BLOCK(avx512, 16, 16),
    SPATTN_CPU_FEW(avx512),
    SPATTN_CPU_GATHERS(avx512, float, f32),
    SPATTN_CPU_GATHERS(avx512, F16, f16),
    SPATTN_CPU_GATHERS(avx512, Bf16, bf16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::avx512
