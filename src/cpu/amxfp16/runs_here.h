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
    return amx::asked_once([=] { return amx::runs_here(device) && has_f16_products(); });
}

}  // namespace
}  // namespace spattn::cpu::amxfp16
