// SPDX-License-Identifier: MIT
// A row of float8 as elements of a dtype, each times the row's scale, and rounded.
#pragma once

#include <cstring>

#include "core/dtype.h"
#include "core/float8.h"
#include "cpu/generic/f16.h"

namespace spattn::cpu {

inline uint16_t narrow_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const bool is_nan = (bits & 0x7fffffff) > float_infinity;
    return uint16_t((is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// stride: from one code to the next.
inline void widen_row(const uint8_t* codes, int64_t stride, float scale, int64_t columns, Dtype dtype, void* to) {
    const auto widen = [&]<class T>(T, auto element_of) {
        T* const elements = static_cast<T*>(to);
        for (int64_t column = 0; column < columns; ++column)
            elements[column] = element_of(widen_float8(codes[column * stride]) * scale);
    };
    switch (dtype) {
        case Dtype::f32: return widen(float(), [](float x) { return x; });
        case Dtype::f64: return widen(double(), [](float x) { return double(x); });
        case Dtype::f16: return widen(uint16_t(), narrow_f16);
        case Dtype::bf16: return widen(uint16_t(), narrow_bf16);
    }
}

}  // namespace spattn::cpu
