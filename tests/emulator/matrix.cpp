// SPDX-License-Identifier: MIT
#include "emulator/matrix.h"

#include <cuda_fp16.h>

#include <bit>
#include <cstring>
#include <vector>

#include "core/float8.h"
#include "emulator/cta.h"

namespace emulator {

namespace {

constexpr int depth = 16, most_columns = 256;
constexpr int in_chunk = 8;  // elements that stay together

const std::vector<float>& halves() {
    static const std::vector<float> all = [] {
        std::vector<float> values(65536);
        for (unsigned bits = 0; bits < 65536; ++bits) values[bits] = __half2float(__ushort_as_half(uint16_t(bits)));
        return values;
    }();
    return all;
}

__attribute__((target_clones("arch=haswell", "default"))) void add_products(const float (&a)[16][16],
                                                                            const float (&b)[16][most_columns], int n,
                                                                            float (&d)[16][most_columns]) {
    constexpr int width = 8;  // columns of sums that stay in registers; n is a multiple
    for (int row = 0; row < 16; ++row)
        for (int first = 0; first < n; first += width) {
            float sums[width];
            for (int i = 0; i < width; ++i) sums[i] = d[row][first + i];
            for (int k = 0; k < depth; ++k)
                for (int i = 0; i < width; ++i) sums[i] += a[row][k] * b[k][first + i];
            for (int i = 0; i < width; ++i) d[row][first + i] = sums[i];
        }
}

struct Factors {
    alignas(32) float a[16][depth];
    alignas(32) float b[depth][most_columns];
};

void multiply(const Factors& factors, int n, float* const (&d)[32], bool accumulate) {
    alignas(32) float sums[16][most_columns];
    const auto each = [&](auto visit) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; d[lane] && i < n / 2; ++i)
                visit(d[lane][i], sums[lane / 4 + 8 * (i >> 1 & 1)][8 * (i >> 2) + 2 * (lane & 3) + (i & 1)]);
    };
    each([&](float value, float& sum) { sum = accumulate ? value : 0; });
    add_products(factors.a, factors.b, n, sums);
    each([](float& value, float sum) { value = sum; });
}

float cut_to_tf32(uint32_t word) { return std::bit_cast<float>(word & ~uint32_t(0x1FFF)); }

}  // namespace

float from_half(Half kind, uint16_t bits) {
    return kind == Half::bf16 ? std::bit_cast<float>(uint32_t(bits) << 16) : halves()[bits];
}

uint16_t from_float8(int code) {
    return __half_as_ushort(__float2half_rn(spattn::widen_float8(uint8_t(code))));
}

void multiply(Half kind, const uint16_t (&a)[16][16], const uint16_t* b, int n, float* const (&d)[32],
              bool accumulate) {
    Factors factors;
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k) factors.a[row][k] = from_half(kind, a[row][k]);
    for (int k = 0; k < 16; ++k)
        for (int column = 0; column < n; ++column) factors.b[k][column] = from_half(kind, b[k * n + column]);
    multiply(factors, n, d, accumulate);
}

// The same with zeros for the other half of k.
void multiply_tf32(const uint32_t (&a)[16][8], const uint32_t (&b)[8][8], float* const (&d)[32]) {
    Factors factors;
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k) factors.a[row][k] = k < 8 ? cut_to_tf32(a[row][k]) : 0;
    for (int k = 0; k < 16; ++k)
        for (int column = 0; column < 8; ++column) factors.b[k][column] = k < 8 ? cut_to_tf32(b[k][column]) : 0;
    multiply(factors, 8, d, true);
}

void read_fragments(const uint32_t (&words)[32][4], uint16_t (&a)[16][16]) {
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            uint16_t* const at = &a[lane / 4 + 8 * (i & 1)][2 * (lane % 4) + 8 * (i >> 1)];
            at[0] = uint16_t(words[lane][i]), at[1] = uint16_t(words[lane][i] >> 16);
        }
}

namespace {

// visit(chunk of eight elements, its first row, its first k) of an operand: as rows, or as columns where transposed.
template <class Visit>
void each_chunk(uint32_t descriptor, bool transposed, int first_row, int rows, Visit visit) {
    constexpr uint32_t line_bytes = 128, panel_rows = 64;
    const uint32_t address = (descriptor & 0x3FFF) << 4, panel_bytes = (descriptor >> 16) << 4;
    const int last_row = transposed ? rows / in_chunk : rows, last_k = transposed ? depth : depth / in_chunk;
    for (int i = 0; i < last_row; ++i)
        for (int j = 0; j < last_k; ++j) {
            const int row = transposed ? i * in_chunk : i, k = transposed ? j : j * in_chunk;
            const uint32_t at = uint32_t(first_row + row);
            const uint32_t byte = transposed
                                      ? at / panel_rows * panel_bytes + uint32_t(k) * line_bytes + at % panel_rows * 2
                                      : at * line_bytes + uint32_t(k) * 2;
            visit(here->cta->shared(here->cta->own_address(swizzled(address + byte)), 16), row, k);
        }
}

}  // namespace

void read_operand(uint32_t descriptor, bool transposed, int first_row, int rows, uint16_t* elements) {
    each_chunk(descriptor, transposed, first_row, rows, [&](const uint8_t* chunk, int row, int k) {
        uint16_t values[in_chunk];
        std::memcpy(values, chunk, sizeof values);
        for (int i = 0; i < in_chunk; ++i) elements[transposed ? k * rows + row + i : (k + i) * rows + row] = values[i];
    });
}

void watch_operand(uint32_t descriptor, bool transposed, int first_row, int rows) {
    Cta& cta = *here->cta;
    each_chunk(descriptor, transposed, first_row, rows, [&](const uint8_t* chunk, int, int) {
        cta.races().begin_product(here->warp, cta.offset_of(chunk), 16);
    });
}

}  // namespace emulator
