// SPDX-License-Identifier: MIT
#include <cpuid.h>

#include "cpu/avx2/vec.h"
#include "cpu/generic/rows.h"

namespace spattn::cpu::avx2 {
namespace {

// Not every compiler's __builtin_cpu_supports knows this one. That the system saves AVX registers follows from avx2.
// Asked once: every row asks for every plan, and a hypervisor takes its time to answer.
bool has_f16c() {
    static const bool has = [] {
        unsigned eax, ebx, ecx, edx;
        return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    }();
    return has;
}

// Each flag of archs.inc: the compiler may use any of them.
bool runs_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

const Kernel rows[] = {
    SPATTN_CPU_BLOCK(avx2, 64, 64),
    SPATTN_CPU_BLOCK(avx2, 16, 16),
    SPATTN_CPU_GATHERS(avx2, float, f32),
    SPATTN_CPU_GATHERS(avx2, F16, f16),
    SPATTN_CPU_GATHERS(avx2, Bf16, bf16),
};

}  // namespace

KernelTable kernels() { return {rows, int(sizeof rows / sizeof *rows)}; }

}  // namespace spattn::cpu::avx2
