// SPDX-License-Identifier: MIT
// Operands of products of 16-bit elements as units for them want them: cut into tiles of 16 rows of 64 bytes, tile
// after tile. An arch says before which dtype `Element` is: bf16, or fp16.
//
//     C[m][n] += A[m][k] B[k][n]      k: the terms of a sum, m: rows, n: lanes
//
//     left tile    A: [16 rows][32 terms]
//     right tile   B: [16 pairs of terms][16 lanes][2 terms]      neighbours in a sum stand side by side
//
// A unit multiplies both pairs of a 32-bit word at once and adds them to a float32: TDPBF16PS and TDPFP16PS on x86 with
// AMX, sixteen rows at a time, and VDPBF16PS without, one row.
#pragma once

#include "cpu/generic/elements.h"
#include "cpu/generic/gemm.h"

namespace spattn::cpu {
namespace {

struct alignas(64) Tile {
    Element rows[16][32];
};
constexpr int64_t tile_row_bytes = sizeof(Tile::rows[0]);

// Terms of a sum that lie together: of each row of tiles of A those from `a` on, and as many of B.
struct Terms {
    const Tile *a, *b;
    int steps;  // tiles, so 32 terms each
};

// C (+)= sums over some Terms, one after the other. Sums go on where those in C end, so where a sum is interrupted does
// not change its bits.
struct TileProduct {
    const Terms* terms;
    int count;
    int64_t a_row, b_step;  // tiles, from one row of tiles of A to the next, and from one step of B
    float* c;
    int64_t ldc;
    bool is_first = false;  // sums that are added to C begin at zero, whatever lies there
    // Bytes from row to row of a tile of A, and from step to step. Where an arch takes_rows, A may be rows of a tensor,
    // side by side: sixteen of them lie where their tiles would.
    int64_t row_bytes = tile_row_bytes, step_bytes = sizeof(Tile);
};

}  // namespace
}  // namespace spattn::cpu
