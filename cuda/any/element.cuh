// SPDX-License-Identifier: MIT
// Elements of operands as the numbers that kernels add up in, and back.
#pragma once

#include "core/float8.h"
#include "plan/call.h"
#include "tile/dtype.cuh"

namespace spattn::any {

template <Dtype D>
using ElementOf = typename tile::Element<D>::type;

// Keys and values of some caches have it, and no other operand.
struct Float8 {
    uint8_t bits;
};

__device__ __forceinline__ float to_real(float x) { return x; }
__device__ __forceinline__ double to_real(double x) { return x; }
__device__ __forceinline__ float to_real(Float8 x) { return widen_float8(x.bits); }
__device__ __forceinline__ float to_real(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_real(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void from_real(float x, float& to) { to = x; }
__device__ __forceinline__ void from_real(double x, double& to) { to = x; }
__device__ __forceinline__ void from_real(float x, __half& to) { to = __float2half_rn(x); }
__device__ __forceinline__ void from_real(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

// Two elements of 16 bits in a word, `low` in its low half, on every GPU: tile::pack is an instruction of newer ones.
template <Dtype D>
__device__ __forceinline__ uint32_t pack_anywhere(float low, float high) {
    static_assert(D == Dtype::f16 || D == Dtype::bf16, "two elements fill a word");
    if constexpr (D == Dtype::f16) {
        const __half2 word = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(word);
    } else {
        const __nv_bfloat162 word = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(word);
    }
}

// The four codes of a word: a code's sign and seven bits go to where a float has its own, by a shift that fills in signs,
// which a mask takes away. Exponents differ by 120.
__device__ __forceinline__ void widen_float8_word(uint32_t word, float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        x[i] = __uint_as_float(uint32_t(int32_t(word << (24 - 8 * i)) >> 4) & 0x87f00000u) * 0x1p120f;
    const uint32_t nans = ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    if (nans == 0) [[likely]]
        return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (nans >> (8 * i + 7) & 1) x[i] = NAN;
}

// Rows that start at multiples of 16 bytes, and whose columns follow each other.
inline bool is_wide(const TensorView& x, int element_bytes = 2) {
    return x.column == 1 && (x.batch | x.head | x.row) % (16 / element_bytes) == 0 &&
           reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

// One row of one (batch entry, head) of an operand.
template <class T>
__device__ __forceinline__ T* row_of(const TensorView& x, int64_t batch, int64_t head, int64_t token) {
    return static_cast<T*>(x.data) + batch * x.batch + head * x.head + token * x.row;
}

// The rows of one (batch entry, head) of an operand.
template <class T>
struct HeadRows {
    using Element = T;
    const T* first;
    int64_t row, column;  // strides

    __device__ HeadRows(const TensorView& x, int64_t batch, int64_t head)
        : first(row_of<T>(x, batch, head, 0)), row(x.row), column(x.column) {}
    __device__ const T* at(int64_t token) const { return first + token * row; }
    __device__ static float scale(int64_t) { return 1; }
};

// Keys or values of a float8 cache: a row stands for its elements times its scale.
struct Float8Rows : HeadRows<Float8> {
    const float* scales;  // null: 1
    int64_t scale_row;

    __device__ Float8Rows(const TensorView& x, const TensorView& scales, int64_t batch, int64_t head)
        : HeadRows(x, batch, head),
          scales(scales.data ? row_of<float>(scales, batch, head, 0) : nullptr),
          scale_row(scales.row) {}
    __device__ float scale(int64_t token) const { return scales ? scales[token * scale_row] : 1; }
};

// Whether `count` columns of a row may be read at once.
inline bool reads_together(const TensorView& x, int columns, int count) {
    return x.column == 1 && (x.batch | x.head | x.row | columns) % count == 0 &&
           reinterpret_cast<uintptr_t>(x.data) % uintptr_t(count) == 0;
}

// Keys or values of any call.
template <Dtype D, bool IsFloat8>
__device__ __forceinline__ auto key_rows(const TensorView& x, const TensorView& scales, int64_t batch, int64_t head) {
    if constexpr (IsFloat8) return Float8Rows(x, scales, batch, head);
    else return HeadRows<ElementOf<D>>(x, batch, head);
}

}  // namespace spattn::any
