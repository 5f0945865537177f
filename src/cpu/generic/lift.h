// SPDX-License-Identifier: MIT
// Where fp16 ends. What is far below 1 loses digits there, which large factors would bring back. So numbers are
// multiplied by a power of two before they become fp16, and sums of their products by its inverse. What is then beyond
// fp16 must not become infinite: each pass says what it does with it. bf16 has the range of float32, and needs nothing.
#pragma once

#include "cpu/generic/not_finite.h"
#include "cpu/generic/panel.h"

namespace spattn::cpu {
namespace {

constexpr bool is_f16 = __is_same(Element, F16);

// p is at most 2^lag forward and at most 1 backward. Gradients of scores are lifted by less, for dp may be large.
constexpr Real forward_lift = is_f16 ? 0x1p7f : 1, p_lift = is_f16 ? 0x1p8f : 1, ds_lift = is_f16 ? 0x1p4f : 1;
constexpr Real forward_unlift = 1 / forward_lift, p_unlift = 1 / p_lift, ds_unlift = 1 / ds_lift;
constexpr Real largest_f16 = 65504;

inline Vec lifted(Vec x, Real lift) { return is_f16 ? x * set1(lift) : x; }

inline Vec size_of(Vec x) { return max(set1(0.f) - x, x); }
inline bool is_beyond_f16(Real x) { return is_finite(x) && (x > largest_f16 || x < -largest_f16); }

// The power of two that brings a finite number beyond fp16 back to [2^14, 2^15).
inline Real reduction(Real size) {
    uint32_t bits;
    __builtin_memcpy(&bits, &size, sizeof bits);
    return float_of((127 + 127 + 14 - (bits >> 23)) << 23);
}

}  // namespace
}  // namespace spattn::cpu
