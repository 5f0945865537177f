// SPDX-License-Identifier: MIT
#include "cpu/avx2/vec.h"
#include "cpu/generic/rows.h"

namespace spattn::cpu::avx2 {
namespace {

// Each flag of archs.inc: the compiler may use any of them.
bool runs_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const Kernel rows[] = {
    SPATTN_CPU_BLOCK(avx2, 64, 64),
    SPATTN_CPU_BLOCK(avx2, 16, 16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::avx2
