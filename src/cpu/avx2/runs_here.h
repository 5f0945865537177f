// SPDX-License-Identifier: MIT
#pragma once

#include <cpuid.h>

namespace spattn::cpu::avx2 {
namespace {

// Not every compiler's __builtin_cpu_supports knows this one. That the system saves AVX registers follows from avx2.
// Asked once: every row asks for every plan, and a hypervisor takes its time to answer.
inline bool has_f16c() {
    static const bool has = [] {
        unsigned eax, ebx, ecx, edx;
        return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    }();
    return has;
}

// Each flag of archs.inc: the compiler may use any of them.
inline bool runs_here(int) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

}  // namespace
}  // namespace spattn::cpu::avx2
