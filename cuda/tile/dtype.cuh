// SPDX-License-Identifier: MIT
// Elements of operands, as C++ and as the matrix instructions name them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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
using MatrixTag = ptx::ElementTag<D == Dtype::f16 ? ptx::MatrixElement::f16 : ptx::MatrixElement::bf16>;
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

}  // namespace spattn::tile
