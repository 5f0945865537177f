// SPDX-License-Identifier: MIT
// Sums of rows of keys that many CTAs make together in global memory: as floats, which take terms in the order of
// arrival, or as integers, whose bits no order changes.
//
// For integers a pass before learns how large the terms of each row become, in integers, too: terms are counted by
// their power of two. A row's terms are then multiples of a quantum, the least power of two for which their sum has 31
// bits whatever their signs. A sum of n terms is off by about the square root of n quanta, far below what elements of
// 16 bits keep. Two neighbouring columns are one 64-bit word, so that an addition serves both: the even one is the low
// half, and what it borrows from the high half comes back at the end. A row with a term that is not finite is NaN.
//
// What it costs: the pass of bounds is 0.4 of that of floats (6.3 of 15.0 ms, 128 heads of 576/512, lists of 2,048
// among 16K keys, H200), and additions of integers take 24.9 ms. Not the additions themselves: alone, words of 64 bits
// reach the 3.9 TB/s that four floats do. What is left, and was not measured apart, is converting, 16 a cycle of an SM,
// and moving words between lanes.
//
// Sums that do not depend on order by a quantum known ahead: Demmel and Nguyen, Fast reproducible floating-point
// summation, 2013 (https://doi.org/10.1109/ARITH.2013.9); by windows of exponents: Kulisch's accumulators.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "any/element.cuh"
#include "any/key_sums.h"
#include "ptx/reduce.cuh"

namespace spattn::any {

// ---- how large a row's terms become ----
// Word w of 64 bits counts powers of two from 2^(32 w - 127) on, in units of that one. Terms that are not finite count
// as 2^128, so that the sum says of itself that it is not.
constexpr int bound_window = 32;
static_assert(bound_words * bound_window == 256, "all powers of two of floats");

// A term of at most x.
__device__ __forceinline__ void add_bound(uint64_t* row, float x) {
    constexpr unsigned largest_exponent = 255, mantissa = 0x7FFFFF;
    const unsigned exponent = min(((__float_as_uint(x) & 0x7FFFFFFF) + mantissa) >> 23, largest_exponent);
    if (exponent > 0) ptx::add_global(row + exponent / bound_window, uint64_t(1) << exponent % bound_window);
}

// A power of two; NaN where a term is not finite.
__device__ __forceinline__ float quanta_of(const uint64_t* row) {
    double sum = 0;
    for (int i = bound_words; i-- > 0;) sum += ldexp(double(row[i]), bound_window * i - 127);
    if (!(sum < double(FLT_MAX))) return NAN;
    constexpr int bits = 30, most = 126;  // the inverse of 2^126 is still a normal float
    return sum == 0 ? 1 : ldexpf(1, min(bits - 1 - ilogb(sum), most));
}

// ---- a warp's 16 rows of a tile of 64 keys and 64 or 32 columns, as accumulators have them ----
// L2 adds whole lines of 128 bytes at 3.8 TB/s, but the 32 bytes that a quad has of a row at 2.3: lanes exchange what
// they have of 32 columns until a row's line is one instruction's.

// One step of transposing words of quads that have a row each: in the end word i of quad j is what word j of quad i
// was. Words whose number has another bit `Step` than the quad's go.
template <int Step, int Count, class Word>
__device__ __forceinline__ void exchange(Word (&words)[Count], int quad) {
    const bool is_upper = quad & Step;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        if (i & Step) continue;
        const Word theirs = __shfl_xor_sync(~0u, is_upper ? words[i] : words[i + Step], 4 * Step);
        words[i] = is_upper ? theirs : words[i], words[i + Step] = is_upper ? words[i + Step] : theirs;
    }
}

// Sums of integers; sixteen lanes have a row.
struct IntegerRows {
    int key;  // of row lane % 16 of the warp's
    float quanta;

    // `quanta` of all keys of the plane.
    __device__ IntegerRows(const int32_t* tile_keys, const float* quanta, int thread)
        : key(tile_keys[16 * (thread / 32) + thread % 16]), quanta(key == no_token ? 0 : quanta[key]) {}

    template <int Values>
    __device__ __forceinline__ void add(const float (&x)[Values], float factor, float* sums, int columns, int first,
                                        int end, int thread) const {
        const int lane = thread % 32, quad = lane / 4 % 4;
        const int column = first + 8 * quad + 2 * (lane % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float scale = factor * __shfl_sync(~0u, quanta, lane / 4 + 8 * h);
            int rows[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) rows[i] = __shfl_sync(~0u, key, lane / 16 * 4 + i + 8 * h);
#pragma unroll
            for (int half = 0; half < Values / 16; ++half) {
                uint64_t words[4];  // two columns of this lane's row, of every eighth column
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = 16 * half + 4 * i + 2 * h;
                    words[i] = (uint64_t(uint32_t(__float2int_rn(scale * x[at + 1]))) << 32) +
                               uint64_t(int64_t(__float2int_rn(scale * x[at])));
                }
                // From there: of this lane's eight columns, of four rows.
                exchange<2>(words, quad);
                exchange<1>(words, quad);
                const int at = column + 32 * half;
                if (at >= end) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (rows[i] != no_token)
                        ptx::add_global(reinterpret_cast<uint64_t*>(sums + int64_t(rows[i]) * columns + at), words[i]);
            }
        }
    }
};

// ---- how sums are read ----
// Two neighbouring columns; `quantum` of integers.
template <Adding A>
__device__ __forceinline__ void read_sums(const float* from, float quantum, float* x) {
    const float2 word = *reinterpret_cast<const float2*>(from);
    x[0] = word.x, x[1] = word.y;
    if constexpr (A == Adding::integers) {
        const int low = __float_as_int(word.x), high = __float_as_int(word.y) + (low < 0);
        x[0] = float(low) * quantum, x[1] = float(high) * quantum;
    }
}

}  // namespace spattn::any
