// SPDX-License-Identifier: MIT
// The tile registers of AMX as memory of a thread, in place of cpu/amx/registers.h. Products follow the operation that
// Intel's manual gives: terms with even numbers and those with odd ones are summed apart, each by fused multiply-adds
// in float32, then both sums together are added to c. float32 denormals become zero, going in and coming out, and so do
// denormals of bf16, which is float32 cut short; those of fp16 count. Whoever uses a register before a configuration
// was loaded, or after registers were released, ends the program, as a processor would.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "cpu/generic/elements.h"

namespace spattn::cpu {
namespace {

struct TileConfig {};  // whole tiles: no other configuration is loaded

struct TileRegister {
    alignas(64) char rows[16][64];
};
struct TileRegisters {
    TileRegister all[8];
    bool are_configured;
};
thread_local TileRegisters tile_registers;

inline TileRegister& tile_register(int t) {
    if (!tile_registers.are_configured) __builtin_trap();
    return tile_registers.all[t];
}

inline void load_config(const TileConfig&) {
    tile_registers = {};
    tile_registers.are_configured = true;
}
inline void release_tiles() { tile_registers.are_configured = false; }

template <int t>
inline void load_tile(const void* at, int64_t row_bytes) {
    for (int i = 0; i < 16; ++i) memcpy(tile_register(t).rows[i], (const char*)at + i * row_bytes, 64);
}
template <int t>
inline void store_tile(void* at, int64_t row_bytes) {
    for (int i = 0; i < 16; ++i) memcpy((char*)at + i * row_bytes, tile_register(t).rows[i], 64);
}
template <int t>
inline void zero_tile() {
    tile_register(t) = {};
}

// The terms with even numbers of each pair of a row, or those with odd ones, as float32.
template <bool odd>
inline __m512 terms_of(const char* row, Bf16) {
    const __m512i pairs = _mm512_load_si512(row);
    return (__m512)(odd ? _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))) : _mm512_slli_epi32(pairs, 16));
}
template <bool odd>
inline __m512 terms_of(const char* row, F16) {
    const __m512i pairs = _mm512_load_si512(row);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(odd ? _mm512_srli_epi32(pairs, 16) : pairs));
}

struct TermTile {
    alignas(64) float even[16][16], odd[16][16];
};
template <class T>
inline TermTile terms_of(const TileRegister& t) {
    TermTile terms;
    for (int i = 0; i < 16; ++i) {
        _mm512_store_ps(terms.even[i], terms_of<false>(t.rows[i], T{}));
        _mm512_store_ps(terms.odd[i], terms_of<true>(t.rows[i], T{}));
    }
    return terms;
}

// Not inlined: nothing of it may move out of where denormals are zero.
__attribute__((noinline)) inline void add_products(const TermTile& a, const TermTile& b, TileRegister& c) {
    for (int i = 0; i < 16; ++i) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int pair = 0; pair < 16; ++pair) {
            even = _mm512_fmadd_ps(_mm512_set1_ps(a.even[i][pair]), _mm512_load_ps(b.even[pair]), even);
            odd = _mm512_fmadd_ps(_mm512_set1_ps(a.odd[i][pair]), _mm512_load_ps(b.odd[pair]), odd);
        }
        float* const row = (float*)c.rows[i];
        _mm512_store_ps(row, _mm512_load_ps(row) + (even + odd));
    }
}

template <class T, int c, int a, int b>
inline void multiply_tiles() {
    static_assert(c != a && a != b && b != c, "a product of a register with itself is undefined");
    const TermTile left = terms_of<T>(tile_register(a)), right = terms_of<T>(tile_register(b));
    const unsigned mode = _mm_getcsr();
    constexpr unsigned denormals_are_zero = 0x8040, no_exceptions = 0x1f80;  // to nearest even
    _mm_setcsr(denormals_are_zero | no_exceptions);
    add_products(left, right, tile_register(c));
    _mm_setcsr(mode);
}

}  // namespace
}  // namespace spattn::cpu
