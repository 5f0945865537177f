// SPDX-License-Identifier: MIT
// 64 x 64 bits, transposed. static, so that every arch of the CPU backend compiles its own: an inline function would be
// emitted weak, and the linker would pick one arch's instructions for everyone.
#pragma once

#include <stdint.h>

namespace spattn {

// Bit c of row r becomes bit r of row c. Changes the two off-diagonal quarters of ever smaller squares (Hacker's
// Delight 7-3, https://hackersdelight.org).
static inline void transpose_bits(uint64_t (&rows)[64]) {
    uint64_t low = 0x00000000FFFFFFFF;  // the columns of the left half of each square
    for (int half = 32; half; half >>= 1, low ^= low << half)
        for (int row = 0; row < 64; row = (row + half + 1) & ~half) {
            const uint64_t change = ((rows[row] >> half) ^ rows[row + half]) & low;
            rows[row] ^= change << half;
            rows[row + half] ^= change;
        }
}

}  // namespace spattn
