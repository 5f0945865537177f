// SPDX-License-Identifier: MIT
// How large the sums of keys' rows may become that a tile's p and ds make (any/key_sums.cuh): what these are, times the
// largest element of dout or q of their rows.
#pragma once

#include <cstdint>

#include "any/key_sums.cuh"
#include "tile/dtype.cuh"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

// The largest size among two elements of 16 bits and those of another word, apart by halves: bits of what is not
// negative are in order as integers, NaN last.
__device__ __forceinline__ void raise(uint32_t& most, uint32_t word) { most = __vmaxu2(most, word & 0x7FFF7FFF); }

// The largest of what the lanes of a quad have.
template <Dtype D>
__device__ __forceinline__ float largest_of_quad(uint32_t most) {
    for (int n = 1; n < 4; n *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, n));
    return tile::unpack<D>(max(most & 0xFFFF, most >> 16), 0);
}

// A lane keeps the sums of one half of 2 * Count values, and the lane 2 * Count further those of the other.
template <int Count>
__device__ __forceinline__ void join_halves(float (&x)[16], int thread) {
    const bool is_upper = thread & 2 * Count;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        const float theirs = __shfl_xor_sync(~0u, is_upper ? x[i] : x[i + Count], 2 * Count);
        x[i] = (is_upper ? x[i + Count] : x[i]) + theirs;
    }
}

// What p or ds of 64 rows, as products read them, can add to a column of their keys' rows. Terms are of 16 query rows.
// largest: of this thread's two rows of dout or q; bounds: of all keys of the plane, to which tile_keys belong.
template <Dtype D>
__device__ __forceinline__ void add_bounds(const float (&x)[32], float factor, const float (&largest)[2],
                                           const int32_t* tile_keys, uint64_t* bounds, int thread) {
    constexpr float slack = 1.03f;  // more than sums and products of 16 floats round
    uint32_t words[4][4];
    tile::pack_tile<D>(x, words);
    float columns[16];  // of which a quad has 8 pairs, from its two rows each
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int at = 4 * (i / 2) + i % 2;
        const auto size = [&](int i) { return fabsf(tile::unpack<D>(words[i / 8][i % 8 / 2], i % 2)); };
        columns[i] = fmaf(size(at), largest[0], size(at + 2) * largest[1]);
    }
    // The quads' sums, of which a lane keeps those of two neighbouring columns.
    join_halves<8>(columns, thread);
    join_halves<4>(columns, thread);
    join_halves<2>(columns, thread);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int key = tile_keys[2 * (thread % 32) + e];
        if (key != no_token) any::add_bound(bounds + int64_t(key) * any::bound_words, columns[e] * factor * slack);
    }
}

}  // namespace spattn::sm90
