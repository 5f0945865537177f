// SPDX-License-Identifier: MIT
// Elements of operands, as C++ and as the matrix instructions name them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "ptx/convert.cuh"
#include "ptx/matrix_element.cuh"

namespace spattn::tile {

template <Dtype D>
struct Element;
template <>
struct Element<Dtype::f32> {
    using type = float;
};
template <>
struct Element<Dtype::f16> {
    using type = __half;
};
template <>
struct Element<Dtype::bf16> {
    using type = __nv_bfloat16;
};
template <>
struct Element<Dtype::f64> {
    using type = double;
};

// The element as the matrix instructions name it, and two of them in a word, `low` in its low half.
template <Dtype D>
using MatrixTag = ptx::ElementTag<D == Dtype::f32   ? ptx::MatrixElement::tf32
                                  : D == Dtype::f16 ? ptx::MatrixElement::f16
                                                    : ptx::MatrixElement::bf16>;
template <Dtype D>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    static_assert(D == Dtype::f16 || D == Dtype::bf16, "two elements fill a word");
    return D == Dtype::f16 ? ptx::pack_f16(low, high) : ptx::pack_bf16(low, high);
}
// One of them.
template <Dtype D>
__device__ __forceinline__ float unpack(uint32_t word, int half) {
    static_assert(D == Dtype::f16 || D == Dtype::bf16, "two elements fill a word");
    const uint32_t bits = half ? word >> 16 : word & 0xFFFF;
    if constexpr (D == Dtype::bf16) return __uint_as_float(bits << 16);
    else return __half2float(__ushort_as_half(uint16_t(bits)));
}

// The nearest number in TF32, ten bits of mantissa: half of the last of them is added, and matrix instructions cut off
// what lies below. That they do is how CUTLASS rounds, too, https://github.com/NVIDIA/cutlass. Ties go away from 0, and
// NaN stays NaN. A bit operation and an FMA into any register: cvt.rna is a compare, a predicated addition and a bit
// operation, and a move where operands must be neighbours.
__device__ __forceinline__ uint32_t to_tf32(uint32_t word) {
    const float power = __uint_as_float(word & 0xFF800000);  // of two, with the sign; infinity for NaN
    return __float_as_uint(fmaf(power, 0x1p-11f, __uint_as_float(word)));
}
template <int Count>
__device__ __forceinline__ void round_to_tf32(uint32_t (&words)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) words[i] = to_tf32(words[i]);
}
// What matrix instructions cut off a number, as one of its own: of its 13 bits they cut off another two. NaN for infinity.
__device__ __forceinline__ uint32_t below_tf32(uint32_t word) {
    return __float_as_uint(__uint_as_float(word) - __uint_as_float(word & 0xFFFFE000));
}

}  // namespace spattn::tile
