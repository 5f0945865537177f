// SPDX-License-Identifier: MIT
// cuda/ptx/wgmma.cuh for the emulator. A warp makes its own 16 rows of a warpgroup's 64, which need nothing of the
// other warps: at once, or when it waits for them.
#pragma once

#include <cstdint>

#include "emulator/matrix.h"
#include "ptx/matrix_element.cuh"
#include "ptx/mbarrier.cuh"

namespace spattn::ptx {

using Lanes = void* const (&)[emulator::warp_threads];

inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_commit() {
    emulator::here->cta->meet(nullptr, [](Lanes) {
        emulator::here->cta->products().commit();
        emulator::here->cta->races().commit_products(emulator::here->warp);
    });
}
template <int Pending>
inline void wgmma_wait() {
    emulator::here->cta->meet(nullptr, [](Lanes) {
        emulator::here->cta->products().wait(Pending);
        emulator::here->cta->races().end_products(emulator::here->warp, Pending);
    });
}
inline void wgmma_wait_all() { wgmma_wait<0>(); }

inline uint32_t wgmma_descriptor(const void* shared, uint32_t panel) {
    return __shfl_sync(~0u, (shared_address(shared) & 0x3FFFF) >> 4 | (panel >> 4) << 16, 0);
}

struct Wgmma {
    float* d;
    uint32_t a[4], b;  // a: registers, or a descriptor in the first
    bool accumulate;
};
template <emulator::Half Kind, int N, bool SharedA, bool TransposedA, bool TransposedB>
void begin_wgmma(Lanes all) {
    struct Product {
        uint32_t a[32][4], b;
        float* d[32];
        bool accumulate;
        int warp;
    } product;
    for (int lane = 0; lane < 32; ++lane) {
        const Wgmma& mine = *static_cast<const Wgmma*>(all[lane]);
        std::memcpy(product.a[lane], mine.a, sizeof mine.a);
        product.d[lane] = mine.d, product.b = mine.b, product.accumulate = mine.accumulate;
        if (product.b != static_cast<const Wgmma*>(all[0])->b)
            emulator::here->cta->fail("a descriptor differs by lane");
    }
    product.warp = emulator::here->warp % 4;
    emulator::Cta& cta = *emulator::here->cta;
    if constexpr (SharedA) emulator::watch_operand(product.a[0][0], TransposedA, 16 * product.warp, 16);
    emulator::watch_operand(product.b, TransposedB, 0, N);
    const auto run = [product] {
        uint16_t a[16][16], b[16 * N];
        if constexpr (SharedA) {
            uint16_t columns[16 * 16];
            emulator::read_operand(product.a[0][0], TransposedA, 16 * product.warp, 16, columns);
            for (int row = 0; row < 16; ++row)
                for (int k = 0; k < 16; ++k) a[row][k] = columns[k * 16 + row];
        } else {
            emulator::read_fragments(product.a, a);
        }
        emulator::read_operand(product.b, TransposedB, 0, N, b);
        emulator::multiply(Kind, a, b, N, product.d, product.accumulate);
    };
    cta.products().add(run);
    if (cta.chance(2)) cta.products().finish();
}

// Two codes of float8 lie where an element of 16 bits would: a product is one of their even places and one of the odd
// ones, each as fp16, which has all numbers of float8.
template <int N>
void begin_float8_wgmma(Lanes all) {
    struct Product {
        uint32_t a, b;
        float* d[32];
        bool accumulate;
        int warp;
    } product;
    for (int lane = 0; lane < 32; ++lane) {
        const Wgmma& mine = *static_cast<const Wgmma*>(all[lane]);
        product.d[lane] = mine.d, product.a = mine.a[0], product.b = mine.b, product.accumulate = mine.accumulate;
    }
    product.warp = emulator::here->warp % 4;
    emulator::Cta& cta = *emulator::here->cta;
    emulator::watch_operand(product.a, false, 16 * product.warp, 16);
    emulator::watch_operand(product.b, false, 0, N);
    const auto run = [product] {
        uint16_t codes_a[16 * 16], codes_b[16 * N], a[16][16], b[16 * N];
        emulator::read_operand(product.a, false, 16 * product.warp, 16, codes_a);
        emulator::read_operand(product.b, false, 0, N, codes_b);
        for (int half = 0; half < 2; ++half) {
            for (int row = 0; row < 16; ++row)
                for (int k = 0; k < 16; ++k) a[row][k] = emulator::from_float8(codes_a[k * 16 + row] >> 8 * half);
            for (int i = 0; i < 16 * N; ++i) b[i] = emulator::from_float8(codes_b[i] >> 8 * half);
            emulator::multiply(emulator::Half::f16, a, b, N, product.d, product.accumulate || half);
        }
    };
    cta.products().add(run);
    if (cta.chance(2)) cta.products().finish();
}

template <int N, bool SharedA, bool TransposedA, bool TransposedB, MatrixElement Kind>
inline void make_product(float* d, const uint32_t (&a)[4], uint32_t b, int accumulate) {
    Wgmma mine{d, {a[0], a[1], a[2], a[3]}, b, accumulate != 0};
    if constexpr (Kind == MatrixElement::e4m3) {
        static_assert(SharedA && !TransposedA && !TransposedB, "float8 has no other products");
        return emulator::here->cta->meet(&mine, begin_float8_wgmma<N>);
    }
    emulator::here->cta->meet(&mine,
                              begin_wgmma < Kind == MatrixElement::f16 ? emulator::Half::f16 : emulator::Half::bf16, N,
                              SharedA, TransposedA, TransposedB >);
}

template <int Count, MatrixElement Kind>
inline void wgmma(float (&d)[Count], uint32_t a, uint32_t b, int accumulate, ElementTag<Kind>) {
    make_product<2 * Count, true, false, false, Kind>(d, {a}, b, accumulate);
}
template <int Count, MatrixElement Kind>
inline void wgmma_transposed(float (&d)[Count], uint32_t a, uint32_t b, int accumulate, ElementTag<Kind>) {
    make_product<2 * Count, true, true, true, Kind>(d, {a}, b, accumulate);
}
template <int Count, MatrixElement Kind>
inline void wgmma_transposed_b(float (&d)[Count], uint32_t a, uint32_t b, int accumulate, ElementTag<Kind>) {
    make_product<2 * Count, true, false, true, Kind>(d, {a}, b, accumulate);
}
template <int Count, MatrixElement Kind>
inline void wgmma(float (&d)[Count], const uint32_t (&a)[4], uint32_t b, int accumulate, ElementTag<Kind>) {
    make_product<2 * Count, false, false, false, Kind>(d, a, b, accumulate);
}
template <int Count, MatrixElement Kind>
inline void wgmma_transposed(float (&d)[Count], const uint32_t (&a)[4], uint32_t b, int accumulate, ElementTag<Kind>) {
    make_product<2 * Count, false, false, true, Kind>(d, a, b, accumulate);
}

}  // namespace spattn::ptx
