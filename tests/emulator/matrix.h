// SPDX-License-Identifier: MIT
// Products of 16-bit elements by a warp: d[16, n] += a[16, 16] b[16, n]; and of TF32.
#pragma once

#include <cstdint>

namespace emulator {

enum class Half { bf16, f16 };

float from_half(Half kind, uint16_t bits);
uint16_t from_float8(int code);  // a code of e4m3 in its low 8 bits, as fp16

// a and b in rows; d: where each lane keeps its values, as accumulators lie in fragments (cuda/tile/fragment.h), null
// for lanes that have ended.
void multiply(Half kind, const uint16_t (&a)[16][16], const uint16_t* b, int n, float* const (&d)[32], bool accumulate);

// d[16, 8] += a[16, 8] b[8, 8] of float32, from which TF32 is cut.
void multiply_tf32(const uint32_t (&a)[16][8], const uint32_t (&b)[8][8], float* const (&d)[32]);

// Four words a lane as the 16 x 16 matrix that they are.
void read_fragments(const uint32_t (&words)[32][4], uint16_t (&a)[16][16]);

// [16][rows] of an operand of wgmma in shared memory, from that row on, by the low word of its descriptor: it lies
// there as [row][16], or transposed as [16][row] in panels of 64 rows.
void read_operand(uint32_t descriptor, bool transposed, int first_row, int rows, uint16_t* elements);

// Tells that a product which begins here reads that operand.
void watch_operand(uint32_t descriptor, bool transposed, int first_row, int rows);

// The byte of tiles whose rows are 128 bytes, swizzled as the copy engine writes them: chunks of 16 change their
// places.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

}  // namespace emulator
