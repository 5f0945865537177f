// SPDX-License-Identifier: MIT
#pragma once

namespace spattn::cpu::avx512 {
namespace {

// Each flag of archs.inc: the compiler may use any of them.
inline bool runs_here(int) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}

}  // namespace
}  // namespace spattn::cpu::avx512
