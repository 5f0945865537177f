// SPDX-License-Identifier: MIT
// Tiles of 16-bit elements, or of float32, in shared memory, how rows by token get there, and the two products of
// attention on them by warps of 16 or 32 rows.
#pragma once

#include <type_traits>

#include "any/element.cuh"
#include "any/tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "tile/dtype.cuh"
#include "tile/fragment.h"
#include "tile/softmax.cuh"

namespace spattn::sm80 {

constexpr int warps = 4, threads = 32 * warps;  // of a CTA
constexpr int step_tokens = 64;                 // of the other axis that a CTA meets at once

// `Columns` of rows of as many or more elements. Their chunks of 16 bytes are swizzled by row, so that eight rows of
// one column are read without a conflict.
template <int Columns, int RowColumns = Columns, int ElementBytes = 2>
struct SharedTile {
    static constexpr int columns = Columns, row_bytes = ElementBytes * RowColumns, chunks = ElementBytes * Columns / 16;
    static constexpr int bytes16 = 16 * row_bytes;  // of as many rows
    static_assert(chunks % 8 == 0 && row_bytes % 128 == 0, "the swizzle permutes eight chunks");
    static constexpr int bytes(int rows) { return rows * row_bytes; }
    __device__ static uint32_t at(uint32_t base, int row, int chunk) {
        return base + row * row_bytes + ((chunk ^ (row & 7)) << 4);
    }
    // From at(base, row, 0 or 1) to 2 * n chunks further on, in one operation: bases are multiples of 128.
    __device__ static uint32_t further(uint32_t address, int n) { return (address ^ n % 4 * 32) + n / 4 * 128; }
};

// An operand of one batch entry and head, whose elements are such words.
template <class Word>
struct RowsOf {
    static constexpr int element_bytes = sizeof(Word), in_chunk = 16 / element_bytes;  // elements
    const char* data;
    int64_t row, column;  // strides in elements
    int columns;
    bool is_wide;  // rows start at multiples of 16 bytes, their columns follow each other, and are copied so

    __device__ RowsOf(const TensorView& x, int64_t batch, int64_t head, int columns, bool is_wide)
        : data(reinterpret_cast<const char*>(any::row_of<Word>(x, batch, head, 0))),
          row(x.row),
          column(x.column),
          columns(columns),
          is_wide(is_wide) {
        if constexpr (!ptx::copies_parts_of_16) this->is_wide &= columns % in_chunk == 0;
    }
    // From a multiple of a chunk's columns on.
    __device__ void skip_columns(int count) { data += element_bytes * count * column, columns -= count; }
};
template <Dtype D>
using ElementRows = RowsOf<std::conditional_t<D == Dtype::f32, uint32_t, uint16_t>>;

using any::is_wide;

// A chunk's elements of a row, one by one.
template <class Word>
__device__ __forceinline__ void copy_chunk(uint32_t to, const RowsOf<Word>& rows, int64_t token, int first_column) {
    constexpr int in_chunk = RowsOf<Word>::in_chunk, in_word = in_chunk / 4;
    uint32_t words[4] = {};
#pragma unroll
    for (int n = 0; n < in_chunk; ++n) {
        if (token == no_token || first_column + n >= rows.columns) continue;
        const int64_t element = token * rows.row + (first_column + n) * rows.column;
        words[n / in_word] |= uint32_t(reinterpret_cast<const Word*>(rows.data)[element]) << 16 * (n % in_word);
    }
    ptx::store_shared(to, words);
}

// What a tile's places [begin, begin + RowCount) hold.
struct TokenRange {
    any::TileTokens tokens;
    int begin;
    uint64_t live = ~uint64_t(0);  // of the first 64: others are left out

    __device__ int at(int row) const { return live >> (row % 64) & 1 ? tokens.at(begin + row) : no_token; }
    __device__ bool is_even(int rows) const {
        return !tokens.listed && live == ~uint64_t(0) && begin + rows <= tokens.count;
    }
};

// The rows of a range into a tile, 0 where there is no token and beyond the last column. Complete with the group that
// the caller commits, for wide rows; others at once.
template <int RowCount, class Tile, class Word>
__device__ __forceinline__ void load_rows(uint32_t to, const RowsOf<Word>& rows, const TokenRange& range) {
    constexpr int element_bytes = RowsOf<Word>::element_bytes, in_chunk = RowsOf<Word>::in_chunk;
    constexpr int passes = RowCount * Tile::chunks / threads, pass_rows = threads / Tile::chunks;
    static_assert(threads % Tile::chunks == 0, "a thread copies one column of chunks");
    const int first = int(threadIdx.x) / Tile::chunks, chunk = int(threadIdx.x) % Tile::chunks;
    const int bytes = min(max(element_bytes * (rows.columns - in_chunk * chunk), 0), 16);
    if (rows.is_wide && range.is_even(RowCount)) {
        const int64_t token = range.tokens.first + int64_t(range.begin + first) * range.tokens.stride;
        const char* const from = rows.data + element_bytes * (token * rows.row + in_chunk * chunk);
        const int64_t step = element_bytes * pass_rows * range.tokens.stride * rows.row;
#pragma unroll
        for (int i = 0; i < passes; ++i)
            ptx::cp_async_16(Tile::at(to, first + i * pass_rows, chunk), from + i * step, bytes);
    } else if (rows.is_wide) {
#pragma unroll 4
        for (int i = 0; i < passes; ++i) {
            const int row = first + i * pass_rows, token = range.at(row);
            const char* from = rows.data + element_bytes * (max(token, 0) * rows.row + (bytes ? in_chunk * chunk : 0));
            ptx::cp_async_16(Tile::at(to, row, chunk), from, token == no_token ? 0 : bytes);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < passes; ++i) {
            const int row = first + i * pass_rows;
            copy_chunk(Tile::at(to, row, chunk), rows, range.at(row), in_chunk * chunk);
        }
    }
}

// Columns of a float8 row, four a word, of which `left` are there: at once, or one by one.
template <int Columns>
__device__ __forceinline__ void read_float8(const any::Float8* row, int64_t column, int left, bool together,
                                            uint32_t (&words)[Columns / 4]) {
#pragma unroll
    for (int i = 0; i < Columns / 4; ++i) words[i] = 0;
    if (left <= 0) return;
    if (together) {
#pragma unroll
        for (int i = 0; i < Columns / 4; ++i) words[i] = reinterpret_cast<const uint32_t*>(row)[i];
        return;
    }
#pragma unroll
    for (int n = 0; n < Columns; ++n)
        if (n < left) words[n / 4] |= uint32_t(row[n * column].bits) << 8 * (n % 4);
}

// A chunk of D: what these elements stand for.
template <Dtype D, int Words>
__device__ __forceinline__ void widen_chunk(const uint32_t (&from)[Words], float scale, uint32_t (&chunk)[4]) {
    float x[4 * Words];
#pragma unroll
    for (int n = 0; n < 4 * Words; ++n) x[n] = widen_float8(uint8_t(from[n / 4] >> 8 * (n % 4))) * scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (D == Dtype::f32) chunk[i] = __float_as_uint(x[i]);
        else chunk[i] = tile::pack<D>(x[2 * i], x[2 * i + 1]);
    }
}

// As load_rows, of keys or values of a float8 cache, through registers: they are there when this returns.
template <Dtype D, int RowCount, class Tile>
__device__ __forceinline__ void load_float8_rows(uint32_t to, const any::Float8Rows& rows, int columns, bool together,
                                                 const TokenRange& range) {
    constexpr int in_chunk = 16 / int(sizeof(any::ElementOf<D>)), ahead = 4;
    constexpr int passes = RowCount * Tile::chunks / threads, pass_rows = threads / Tile::chunks;
    static_assert(passes % ahead == 0, "rows are read so many at once");
    const int first = int(threadIdx.x) / Tile::chunks, chunk = int(threadIdx.x) % Tile::chunks;
    const int left = columns - in_chunk * chunk;
#pragma unroll 1
    for (int i = 0; i < passes; i += ahead) {
        uint32_t read[ahead][in_chunk / 4];
        float scale[ahead];
#pragma unroll
        for (int n = 0; n < ahead; ++n) {
            const int token = range.at(first + (i + n) * pass_rows);
            const auto* const row = rows.at(max(token, 0)) + (left > 0 ? in_chunk * chunk * rows.column : 0);
            read_float8<in_chunk>(row, rows.column, token == no_token ? 0 : left, together, read[n]);
            scale[n] = token == no_token ? 1 : rows.scale(token);
        }
#pragma unroll
        for (int n = 0; n < ahead; ++n) {
            uint32_t words[4];
            widen_chunk<D>(read[n], scale[n], words);
            ptx::store_shared(Tile::at(to, first + (i + n) * pass_rows, chunk), words);
        }
    }
}

// What this thread copied of a tile of float32 is rounded to TF32 where it lies; the group that brought it is complete.
template <int RowCount, class Tile>
__device__ __forceinline__ void round_own_chunks(uint32_t at) {
#pragma unroll 4
    for (int i = int(threadIdx.x); i < RowCount * Tile::chunks; i += threads) {
        const uint32_t chunk = Tile::at(at, i / Tile::chunks, i % Tile::chunks);
        uint32_t words[4];
        ptx::load_shared(words, chunk);
        tile::round_to_tf32(words);
        ptx::store_shared(chunk, words);
    }
}

// Words of an operand as products take them: 16-bit elements as they are, float32 rounded to TF32; or, if it is split,
// as two numbers in TF32, whose sum is off by three units in the last place at most. Products of two such are three of
// TF32, without that of the two smaller ones, which is below 2^-20 of the whole (CUTLASS multiplies float32 so,
// https://github.com/NVIDIA/cutlass). Where a word is infinite its rest is NaN: rows that are not finite are made again
// anyway.
template <Dtype D, bool Splits, int Count>
struct Operand {
    static_assert(!Splits || D == Dtype::f32, "16-bit elements need no second number");
    uint32_t words[Count], rest[Splits ? Count : 1];

    // is_rounded: to TF32 already, where it lies.
    __device__ __forceinline__ explicit Operand(const uint32_t (&from)[Count], bool is_rounded = false) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            words[i] = D == Dtype::f32 && !Splits && !is_rounded ? tile::to_tf32(from[i]) : from[i];
            if constexpr (Splits) rest[i] = tile::below_tf32(from[i]);
        }
    }
};

// d += a times the b of these two words; products with what is left of a number go to `rest`, which may be d. Each
// instruction rounds what it adds to towards 0.
template <Dtype D, bool Splits, int Count>
__device__ __forceinline__ void add_product(float* d, float* rest, const Operand<D, Splits, 4>& a,
                                            const Operand<D, Splits, Count>& b, int first, int second) {
    constexpr tile::MatrixTag<D> tag{};
    if constexpr (Splits) {
        ptx::mma(rest, a.rest, b.words[first], b.words[second], tag);
        ptx::mma(rest, a.words, b.rest[first], b.rest[second], tag);
    }
    ptx::mma(d, a.words, b.words[first], b.words[second], tag);
}

template <int Groups, int Values>
__device__ __forceinline__ void clear(float (&s)[Groups][Values]) {
#pragma unroll
    for (int g = 0; g < Groups; ++g)
#pragma unroll
        for (int i = 0; i < Values; ++i) s[g][i] = 0;
}

// s[g][...] += of this warp's rows, 16 a group, with twice as many tokens as it has values: own tile's rows from `row` on,
// times the step's; rows of either may lie further apart. A chunk of four float32 is loaded as one of eight 16-bit elements
// is, and each thread then has what that product wants of it. Own rows that stay for all steps are rounded to TF32 already,
// where they lie; others (RoundsOwn) are so here. Scores decide most of the error of split float32, and have sums of what
// is left of numbers beside them: they are then rounded towards 0 once for eight columns, instead of three times.
template <Dtype D, class Tile, class StepTile = Tile, bool Splits = false, bool RoundsOwn = false, int Groups,
          int Values>
__device__ __forceinline__ void add_row_products(uint32_t own, int row, uint32_t step, float (&s)[Groups][Values]) {
    const int lane = threadIdx.x % 32;
    const uint32_t a_at = Tile::at(own, row + lane % 16, lane / 16);
    const uint32_t b_at = StepTile::at(step, lane % 8 + lane / 16 * 8, lane / 8 % 2);
    float rest[Groups][Splits ? Values : 8] = {};
#pragma unroll
    for (int k = 0; k < Tile::chunks / 2; ++k) {
        uint32_t own_words[Groups][4];
#pragma unroll
        for (int g = 0; g < Groups; ++g) ptx::load_matrix_x4(own_words[g], Tile::further(a_at, k) + g * Tile::bytes16);
#pragma unroll
        for (int n = 0; n < Values / 8; ++n) {
            uint32_t step_words[4];
            ptx::load_matrix_x4(step_words, StepTile::further(b_at, k) + n * StepTile::bytes16);
            const Operand<D, Splits, 4> b(step_words);
#pragma unroll
            for (int g = 0; g < Groups; ++g) {
                const Operand<D, Splits, 4> a(own_words[g], !RoundsOwn);
                float* const rest_of = &rest[g][Splits ? 8 * n : 0];
                add_product(&s[g][8 * n], rest_of, a, b, 0, 1);
                add_product(&s[g][8 * n + 4], rest_of + 4, a, b, 2, 3);
            }
        }
    }
    if constexpr (Splits)
#pragma unroll
        for (int g = 0; g < Groups; ++g)
#pragma unroll
            for (int i = 0; i < Values; ++i) s[g][i] += rest[g][i];
}

// The products themselves.
template <Dtype D, class Tile, class StepTile = Tile, bool Splits = false, int Groups, int Values>
__device__ __forceinline__ void multiply_rows(uint32_t own, int row, uint32_t step, float (&s)[Groups][Values]) {
    clear(s);
    add_row_products<D, Tile, StepTile, Splits>(own, row, step, s);
}

// sums += p . step, whose rows are tokens: p as multiply_rows leaves it, packed. The step's columns are the sums' from
// `first` on.
template <Dtype D, class Tile, int Groups, int Words, int Values>
__device__ __forceinline__ void add_product(const uint32_t (&p)[Groups][Words][4], uint32_t step,
                                            float (&sums)[Groups][Values], int first = 0) {
    const int lane = threadIdx.x % 32;
    const uint32_t b_at = Tile::at(step, lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < Words; ++k)
#pragma unroll
        for (int c = 0; c < Tile::columns / 16; ++c) {
            uint32_t b[4];
            ptx::load_matrix_x4_transposed(b, Tile::further(b_at, c) + k * Tile::bytes16);
#pragma unroll
            for (int g = 0; g < Groups; ++g) {
                float* const to = &sums[g][first / 2 + 8 * c];
                ptx::mma(to, p[g][k], b[0], b[1], tile::MatrixTag<D>{});
                ptx::mma(to + 4, p[g][k], b[2], b[3], tile::MatrixTag<D>{});
            }
        }
}

// The same of float32. A load that transposes moves 16 bits at a time, so a thread reads four columns of two rows, those
// that a word of p and its neighbour stand for, without a conflict. Its sums are of other columns than 16-bit elements
// give it: value 16 c + 4 e + 2 h + n is of its row r + 8 h and column 32 c + 8 (lane % 4) + 4 n + e.
template <class Tile, bool Splits>
struct FloatProduct {
    const uint32_t even, odd;  // where this thread's first rows of the step are

    __device__ __forceinline__ explicit FloatProduct(uint32_t step)
        : even(Tile::at(step, 2 * (int(threadIdx.x) % 4), int(threadIdx.x) % 32 / 4)),
          odd(Tile::at(step, 2 * (int(threadIdx.x) % 4) + 1, int(threadIdx.x) % 32 / 4)) {}

    // Matrix instructions round sums towards 0. Of rounded operands that is lost in their own error; where they are split
    // a step's sums are made apart, and added as floats are: errors of one sign would else grow with the keys.
    template <int Groups, int Words, int Values>
    __device__ __forceinline__ void add(const uint32_t (&p)[Groups][Words][4], float (&sums)[Groups][Values],
                                        int first = 0) const {
        if constexpr (Splits) {
#pragma unroll
            for (int c = 0; c < Tile::columns / 32; ++c) {
                float of_step[Groups][16] = {};
#pragma unroll
                for (int k = 0; k < Words; ++k) add(p, k, c, of_step);
#pragma unroll
                for (int g = 0; g < Groups; ++g)
#pragma unroll
                    for (int i = 0; i < 16; ++i) sums[g][first / 2 + 16 * c + i] += of_step[g][i];
            }
        } else {
#pragma unroll
            for (int k = 0; k < Words; ++k)
#pragma unroll
                for (int c = 0; c < Tile::columns / 32; ++c) add(p, k, c, sums, first / 2 + 16 * c);
        }
    }

private:
    // Eight tokens, k of the step, and 32 columns, c of the tile: into 16 values of each group, from `first` on.
    template <int Groups, int Words, int Values>
    __device__ __forceinline__ void add(const uint32_t (&p)[Groups][Words][4], int k, int c,
                                        float (&to)[Groups][Values], int first = 0) const {
        const uint32_t further = k * 8 * Tile::row_bytes + c * 128;
        uint32_t b0[4], b1[4];
        ptx::load_shared(b0, even + further);
        ptx::load_shared(b1, odd + further);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const Operand<Dtype::f32, Splits, 2> b({b0[e], b1[e]});
#pragma unroll
            for (int g = 0; g < Groups; ++g)
                add_product(&to[g][first + 4 * e], &to[g][first + 4 * e], Operand<Dtype::f32, Splits, 4>(p[g][k]), b, 0,
                            1);
        }
    }
};

// Results on their way to memory. They pass through shared memory so that what follows of a row, which may go to parts,
// to the next piece or to the tensor, is a loop over rows: a kernel that has it unrolled for each of a thread's values
// does not fit the instruction cache, and short tasks wait for their own code.
//
// Rows of floats, units of eight columns swizzled by row, so that neither the quads that stage them nor the lanes that
// read four columns each meet conflicts.
template <int Columns>
struct SumTile {
    static constexpr int columns = Columns, row_bytes = 4 * Columns;
    __device__ static uint32_t at(uint32_t base, int row, int column) {
        return base + row * row_bytes + (((column / 8) ^ (row & 7)) * 8 + column % 8) * 4;
    }

    // A warp's sums, times a factor, into its rows from `row` on.
    template <int Groups>
    __device__ static void stage(uint32_t base, int row, const float (&sums)[Groups][Columns / 2], float factor) {
        const int lane = threadIdx.x % 32;
        const uint32_t first = at(base, row + lane / 4, 2 * (lane % 4));
#pragma unroll
        for (int g = 0; g < Groups; ++g)
#pragma unroll
            for (int i = 0; i < Columns / 2; i += 2) {
                const int unit = i / 4, below = 16 * g + 8 * tile::row_of(i);
                const uint32_t to = (first ^ unit % 8 * 32) + unit / 8 * 256 + below * row_bytes;
                ptx::store_shared(to, sums[g][i] * factor, sums[g][i + 1] * factor);
            }
    }

    // The same of sums as FloatProduct leaves them.
    template <int Groups>
    __device__ static void stage_float(uint32_t base, int row, const float (&sums)[Groups][Columns / 2]) {
        const int lane = threadIdx.x % 32;
        const uint32_t first = at(base, row + lane / 4, 8 * (lane % 4));
#pragma unroll
        for (int g = 0; g < Groups; ++g)
#pragma unroll
            for (int i = 0; i < Columns / 2; i += 16)
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int unit = i / 4, below = 16 * g + 8 * tile::row_of(n);
                    const float* const from = &sums[g][i + n];
                    const uint32_t words[4] = {__float_as_uint(from[0]), __float_as_uint(from[4]),
                                               __float_as_uint(from[8]), __float_as_uint(from[12])};
                    ptx::store_shared((first ^ unit % 8 * 32) + unit / 8 * 256 + n % 2 * 16 + below * row_bytes, words);
                }
    }
};

// Four columns at once, or one by one where memory is not aligned for that; of `left` columns the first four.
__device__ __forceinline__ void add_from(float (&x)[4], const float* from, float factor, bool quads, int left) {
    if (quads) {
        const float4 y = *reinterpret_cast<const float4*>(from);
        x[0] += y.x * factor, x[1] += y.y * factor, x[2] += y.z * factor, x[3] += y.w * factor;
    } else {
        for (int e = 0; e < 4; ++e)
            if (e < left) x[e] += from[e] * factor;
    }
}
__device__ __forceinline__ void write_floats(const float (&x)[4], float* to, bool quads, int left) {
    if (quads) {
        *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
        for (int e = 0; e < 4; ++e)
            if (e < left) to[e] = x[e];
    }
}
template <Dtype D>
__device__ __forceinline__ void write_elements(const float (&x)[4], any::ElementOf<D>* to, int64_t column, bool quads,
                                               int left) {
    if (quads) {
        if constexpr (D == Dtype::f32)
            *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
        else
            *reinterpret_cast<uint2*>(to) = make_uint2(tile::pack<D>(x[0], x[1]), tile::pack<D>(x[2], x[3]));
    } else {
        for (int e = 0; e < 4; ++e)
            if (e < left) any::from_real(x[e], to[e * column]);
    }
}

// Rows that quads may be written to.
inline bool has_quads(const TensorView& x, int element_bytes = 2) {
    return x.column == 1 && (x.batch | x.head | x.row) % 4 == 0 &&
           reinterpret_cast<uintptr_t>(x.data) % (4 * element_bytes) == 0;
}

// Blocks [skip, skip + take) of a list, counted from its end.
struct ReverseWalk {
    const Run *begin, *end;
    int32_t skip, take, block = 0, mask = full_block;

    __device__ ReverseWalk(const ListsView& lists, int kind, const Task& task)
        : begin(lists.runs + lists.slices[int64_t(kind) * lists.rows + task.row].begin),
          end(lists.runs + lists.slices[int64_t(kind) * lists.rows + task.row].end),
          skip(task.skip),
          take(task.take) {}

    __device__ bool next() {
        while (end != begin && skip >= end[-1].count) skip -= (--end)->count;
        if (end == begin || take == 0) return false;
        block = end[-1].first + end[-1].count - 1 - skip++;
        mask = end[-1].mask;
        --take;
        return true;
    }
};

}  // namespace spattn::sm80
