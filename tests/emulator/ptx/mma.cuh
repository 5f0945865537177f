// SPDX-License-Identifier: MIT
// cuda/ptx/mma.cuh for the emulator.
#pragma once

#include <cstdint>

#include "emulator/matrix.h"
#include "ptx/matrix_element.cuh"

namespace spattn::ptx {

struct Mma {
    float* d;
    uint32_t a[4], b[2];
};
template <emulator::Half Kind>
void run_mma(void* const (&all)[emulator::warp_threads]) {
    uint32_t words[32][4];
    uint16_t a[16][16], b[16 * 8];
    float* d[32];
    for (int lane = 0; lane < 32; ++lane) {
        const Mma& mine = *static_cast<const Mma*>(all[lane]);
        std::memcpy(words[lane], mine.a, sizeof mine.a);
        d[lane] = mine.d;
        for (int i = 0; i < 4; ++i)
            b[(2 * (lane % 4) + i % 2 + 8 * (i / 2)) * 8 + lane / 4] = uint16_t(mine.b[i / 2] >> 16 * (i % 2));
    }
    emulator::read_fragments(words, a);
    emulator::multiply(Kind, a, b, 8, d, true);
}
template <MatrixElement Kind>
inline void mma(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, ElementTag<Kind>) {
    Mma mine{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::here->cta->meet(&mine,
                              run_mma < Kind == MatrixElement::f16 ? emulator::Half::f16 : emulator::Half::bf16 >);
}

inline void run_tf32_mma(void* const (&all)[emulator::warp_threads]) {
    uint32_t a[16][8], b[8][8];
    float* d[32];
    for (int lane = 0; lane < 32; ++lane) {
        const Mma& mine = *static_cast<const Mma*>(all[lane]);
        d[lane] = mine.d;
        for (int i = 0; i < 4; ++i) a[lane / 4 + 8 * (i % 2)][lane % 4 + 4 * (i / 2)] = mine.a[i];
        for (int i = 0; i < 2; ++i) b[lane % 4 + 4 * i][lane / 4] = mine.b[i];
    }
    emulator::multiply_tf32(a, b, d);
}
inline void mma(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, ElementTag<MatrixElement::tf32>) {
    Mma mine{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::here->cta->meet(&mine, run_tf32_mma);
}

// Lane l has the address of row l % 8 of matrix l / 8.
struct MatrixLoad {
    const uint8_t* row;
    uint32_t words[4];
};
inline void load_matrix_x4(uint32_t (&x)[4], uint32_t shared) {
    MatrixLoad mine{emulator::here->cta->shared(shared, 16), {}};
    emulator::here->cta->meet(&mine, [](void* const(&all)[emulator::warp_threads]) {
        for (int lane = 0; lane < 32; ++lane)
            for (int m = 0; m < 4; ++m)
                std::memcpy(&static_cast<MatrixLoad*>(all[lane])->words[m],
                            static_cast<MatrixLoad*>(all[8 * m + lane / 4])->row + 4 * (lane % 4), 4);
    });
    std::memcpy(x, mine.words, sizeof x);
}
inline void load_matrix_x4_transposed(uint32_t (&x)[4], uint32_t shared) {
    MatrixLoad mine{emulator::here->cta->shared(shared, 16), {}};
    emulator::here->cta->meet(&mine, [](void* const(&all)[emulator::warp_threads]) {
        for (int lane = 0; lane < 32; ++lane)
            for (int m = 0; m < 4; ++m) {
                uint16_t pair[2];
                for (int i = 0; i < 2; ++i)
                    std::memcpy(&pair[i],
                                static_cast<MatrixLoad*>(all[8 * m + 2 * (lane % 4) + i])->row + 2 * (lane / 4), 2);
                std::memcpy(&static_cast<MatrixLoad*>(all[lane])->words[m], pair, 4);
            }
    });
    std::memcpy(x, mine.words, sizeof x);
}

}  // namespace spattn::ptx
