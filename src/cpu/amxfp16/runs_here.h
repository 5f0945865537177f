// SPDX-License-Identifier: MIT
#pragma once

#include "cpu/amx/runs_here.h"

namespace spattn::cpu::amxfp16 {
namespace {

inline bool has_f16_products() {
    unsigned a, b, c, d;
    constexpr unsigned amx_fp16 = 1u << 21;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & amx_fp16);
}

inline bool runs_here(int device) {
    static int known = 0;  // as in amx::runs_here
    int answer = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (answer == 0) {
        answer = amx::runs_here(device) && has_f16_products() ? 2 : 1;
        __atomic_store_n(&known, answer, __ATOMIC_RELAXED);
    }
    return answer == 2;
}

}  // namespace
}  // namespace spattn::cpu::amxfp16
