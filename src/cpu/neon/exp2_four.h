// SPDX-License-Identifier: MIT
#pragma once

#include <arm_neon.h>

#include "cpu/generic/exp2.h"

namespace spattn::cpu {
namespace {

// 2^x within 2.1 ulp up to x = 127.5, from where on it is inf; below 2^-126 it is 0. FMAX, FMIN and FRINTN hand NaN on.
inline float32x4_t exp2_four(float32x4_t x) {
    const uint32x4_t tiny = vcltq_f32(x, vdupq_n_f32(-126.f));
    x = vminq_f32(vdupq_n_f32(128.f), vmaxq_f32(vdupq_n_f32(-126.f), x));
    const float32x4_t n = vrndnq_f32(x), f = vsubq_f32(x, n);
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127)), 23);
    float32x4_t p = vfmaq_f32(vdupq_n_f32(exp2_c4), f, vdupq_n_f32(exp2_c5));
    p = vfmaq_f32(vdupq_n_f32(exp2_c3), f, p);
    p = vfmaq_f32(vdupq_n_f32(exp2_c2), f, p);
    p = vfmaq_f32(vdupq_n_f32(exp2_c1), f, p);
    const float32x4_t result = vmulq_f32(vfmaq_f32(vdupq_n_f32(1.f), f, p), vreinterpretq_f32_s32(power));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(result), tiny));
}

}  // namespace
}  // namespace spattn::cpu
