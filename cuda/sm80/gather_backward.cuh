// SPDX-License-Identifier: MIT
//
//     s = q kT,  p = exp2(scale_log2 s - lse),  dp = dout vT,  ds = p (dp - delta)
//     dq += ds k,  dk += dsT q,  dv += pT dout
//
// over lists of keys that the heads of a group share: 64 query rows, as in gather_forward.cuh, meet the keys of their
// list 16 or 64 at a time. lse and delta of the rows come from any's kernel before.
//
//   grid      a CTA a tile of 64 rows, of 576 columns and less shared memory 32; tiles of a list follow each other, so
//             that L2 has its keys. q and dout come once
//   warps     eight; of 576 columns twelve, whose registers have room for dq
//   weights   a warp for 16 rows makes p. As many make dp and, with the p that they read, ds. Both go through shared
//             memory, where all products find them
//   products  a warp has 16 rows of some columns of dq, whose sums stay in registers. Then it makes 64 columns of dk or
//             dv of 16 keys at a time. Keys are free when dq has met them, and the next ones come while dk and dv are
//             made:
//
//               copy     |    keys 1          |    keys 2          |
//               products | dk0 dv0 | p1 ds1 dq1 | dk1 dv1 | p2 ds2 dq2
//
//   dk, dv    are sums of what many tasks make: they go to memory from registers, lines of 128 bytes at a time, and are
//             added there in the order of arrival, as floats. Where values are columns of keys, a key's two gradients
//             are one sum
//   bits      that are the same in every call, where a plan asks for them, come of integers (any/key_sums.cuh). The
//             kernel then runs twice: at first it makes p and ds alone, and bounds of what each key's sums will be
//             told to add: what p and ds are, times the largest element of dout or q of their rows
//   isolation what a list does not name is not read; absent keys are rows of zeros whose p and ds are 0
//
// That 576 columns meet 16 keys at a time, with one tile of them, follows from room: q and dout take 136 of the 163 KiB
// that an A100 has for a CTA. Half as many rows would leave room for more keys, and add twice as much to memory: so
// they are where a CTA has 99 KiB.
//
// Measured (H200, bf16, L2 cold, TFLOP/s, 2026-11): DeepSeek's sparse attention with 128 heads and lists of 2,048 keys
// 123, 64 heads of 128 columns 123, with the same bits in every call 80. No older GPU has run it. By count, 64 rows and
// 16 keys of 576 columns are 2,750 cycles of an A100's tensor cores and 3,900 of reading shared memory, and add 36 KiB
// to L2.
#pragma once

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "any/block_backward.h"
#include "any/key_gradients.h"
#include "any/key_sums.cuh"
#include "ptx/mma.cuh"
#include "ptx/reduce.cuh"
#include "ptx/shared.cuh"
#include "runtime/launch.h"
#include "sm80/gather_backward.h"
#include "sm80/gather_rows.cuh"
#include "sm80/tile.cuh"
#include "sm80/turing.h"
#include "tile/lift.cuh"
#include "tile/softmax.cuh"

namespace spattn::sm80 {

using any::Adding, any::KeySums;

// ---- configuration ----
// p or ds: rows of so many keys. Chunks of 16 bytes are swizzled by row, so that eight rows of one column are read
// without a conflict.
template <int Rows, int Keys>
struct WeightTile {
    static constexpr int row_bytes = 2 * Keys, chunks = Keys / 8, rows_of_line = 8 / chunks;
    static_assert(Keys == 16 || Keys == 32 || Keys == 64, "whole rows fill a line of 128 bytes");
    static constexpr int bytes = Rows * row_bytes;
    __device__ static uint32_t at(uint32_t base, int row, int chunk) {
        return base + row * row_bytes + ((chunk ^ row / rows_of_line % chunks) << 4);
    }
};

template <Dtype D, int HeadDim, int HeadDimV, int Rows>
struct GatherGradientConfig {
    using Kernel = GatherBackward<D, HeadDim, HeadDimV, any::gather_tile>;
    static constexpr Dtype dtype = D;
    using Element = any::ElementOf<D>;
    static constexpr bool value_in_key = Kernel::value_in_key;
    static constexpr int head_dim = HeadDim, panels = HeadDim / 64, v_panels = HeadDimV / 64;  // of 64 columns
    static constexpr int rows = Rows;            // of queries
    static constexpr int row_warps = rows / 16;  // that make p, and as many that make ds
    static constexpr int warps = value_in_key ? 12 : 8, threads = 32 * warps, step = Kernel::step_keys;
    static constexpr int finders = step > 32 ? step : 32;  // that find keys: the last ones, who do not make p
    static constexpr int ctas = HeadDim <= 128 ? 2 : 1;    // an SM
    using KeyTile = SharedTile<HeadDim>;                   // of q, too
    using ValueTile = SharedTile<HeadDimV>;                // of dout, too
    using ValueRows = SharedTile<HeadDimV, value_in_key ? HeadDim : HeadDimV>;
    using Weights = WeightTile<rows, step>;
    static constexpr int k_bytes = KeyTile::bytes(step), v_bytes = value_in_key ? 0 : ValueTile::bytes(step);
    // dq: as many warps have the rows of a part of its columns, whole panels. The last part ends where the columns end;
    // those that it has in common with the one before come out alike in both.
    static constexpr int most_parts = warps / row_warps, part_columns = (panels + most_parts - 1) / most_parts * 64;
    static constexpr int column_parts = (HeadDim + part_columns - 1) / part_columns;
    using PartTile = SharedTile<part_columns, HeadDim>;  // of keys
    // dk and dv: a unit is a panel of 16 keys.
    static constexpr int key_groups = step / 16, dk_units = key_groups * panels;
    static constexpr int units = dk_units + (value_in_key ? 0 : key_groups * v_panels);
};

struct GatherBackwardParams {
    TensorView q, k, v, dout, dq;
    KeySums dk, dv;
    const float *lse, *delta;  // [batch, heads_q, seq_q]
    any::GatherLists lists;
    any::ListRows rows;
    int head_dim, head_dim_v;
    bool q_is_wide, k_is_wide, v_is_wide, dout_is_wide;
    bool has_pairs;           // two columns of dq are one aligned word
    float scale, scale_log2;  // of gradients; from what stands for scores to powers of two
    bool has_cap;             // scores become tanh(into_cap s) first
    float into_cap;
};

template <class C>
struct GatherGradientShared {
    uint8_t q[C::KeyTile::bytes(C::rows)];
    uint8_t dout[C::ValueTile::bytes(C::rows)];
    uint8_t keys[C::k_bytes + C::v_bytes];                // and their values
    uint8_t p[C::Weights::bytes], ds[C::Weights::bytes];  // ds: with a softcap it first holds p times its slope
    StepKeys<C::step, 2> listed;
    tile::SharedLiftOf<C::row_warps> lift;  // of ds in fp16
};

// ---- sums of keys' rows ----
// A warp's 16 rows of 64 columns, as accumulators have them: all 32 lanes add to a row's line.
struct FloatLines {
    int key;  // of row lane % 16

    __device__ FloatLines(const int32_t* keys, int lane) : key(keys[lane % 16]) {}

    // To columns from `first` on, below `end`, of rows of so many columns.
    __device__ __forceinline__ void add(const float (&x)[32], float factor, float* sums, int columns, int first,
                                        int end, int lane) const {
        const int quad = lane / 4, column = first + quad / 2 * 8 + lane % 4 * 2 + quad % 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int rows[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) rows[i] = __shfl_sync(~0u, key, 8 * h + i);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float words[8];  // of this quad's row, two of every eighth column
#pragma unroll
                for (int i = 0; i < 8; ++i) words[i] = factor * x[16 * half + i / 2 * 4 + 2 * h + i % 2];
                // From there: of this lane's column, of eight rows.
                any::exchange<4>(words, quad);
                any::exchange<2>(words, quad);
                any::exchange<1>(words, quad);
                const int at = column + 32 * half;
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (rows[i] != no_token && at < end)
                        ptx::add_global(sums + int64_t(rows[i]) * columns + at, words[i]);
            }
        }
    }
};

// ---- the CTA ----
template <class C, Adding A>
struct GatherGradients {
    using Element = typename C::Element;
    using Weights = typename C::Weights;
    static constexpr bool finds_bounds = A == Adding::bounds, is_f16 = C::dtype == Dtype::f16;
    static constexpr int values = C::step / 2;  // of a thread, of p or ds
    // p and ds are lifted above their own size, by factors that the sums lose at their end.
    static constexpr float p_unlift = tile::unlift<C::dtype>, ds_unlift = tile::ds_unlift<C::dtype>;
    static constexpr float dp_factor = p_unlift * tile::ds_lift<C::dtype>;

    const GatherBackwardParams& params;
    GatherGradientShared<C>& shared;
    const any::GatherTask task;
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // a shuffle, so that the compiler sees one value a warp
    const int warp_row = warp % C::row_warps * 16;  // of p, ds and dq
    float of_row[2];                                // of this thread's rows, what p is relative to, or delta
    float lift = 1, dq_lift = 1;                    // of fp16: what is left of the lift of ds, and that of dq's sums
    float largest[2];                               // of bounds: the largest column of dout or q of these rows
    float dq[1][finds_bounds ? 1 : C::part_columns / 2];

    __device__ GatherGradients(const GatherBackwardParams& params, uint8_t* memory)
        : params(params),
          shared(*reinterpret_cast<GatherGradientShared<C>*>(memory)),
          task(any::GatherTask::at<C::rows>(params.rows, params.lists, int(blockIdx.x))) {}

    __device__ bool makes_p() const { return warp < C::row_warps; }
    __device__ bool makes_ds() const { return warp / C::row_warps == 1; }
    __device__ bool has_dq() const { return warp < C::row_warps * C::column_parts; }
    __device__ int dq_column() const {
        const int column = warp / C::row_warps * C::part_columns;
        return C::head_dim % C::part_columns ? min(column, C::head_dim - C::part_columns) : column;
    }
    __device__ static uint32_t at(const void* tile) { return ptx::shared_address(tile); }
    __device__ uint32_t value_rows() const { return at(shared.keys) + (C::value_in_key ? 0 : C::k_bytes); }

    __device__ __forceinline__ void run() {
        const TileList list(params.lists, task);
        const int steps = list.steps(C::step), finder = int(threadIdx.x) - (C::threads - C::finders);
        const auto find = [&](int step) {
            if (finder >= 0) list.find(shared.listed, step, finder);
        };
        begin();
        find(0);
        __syncthreads();  // the first keys are known
        if (steps > 0) load(0);
        ptx::cp_async_commit();
        if constexpr (finds_bounds) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // q and dout are there
            makes_p() ? find_largest<typename C::ValueTile>(shared.dout) : find_largest<typename C::KeyTile>(shared.q);
        }
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // the step is there, and everyone is done with p, ds and the keys of the one before
            find(step + 1);
            make_weights(step);
            if constexpr (!finds_bounds) {
                __syncthreads();  // ds is there
                if constexpr (is_f16) follow_lift();
                if (has_dq()) add_dq();
            }
            __syncthreads();  // everyone is done with keys and values, and the next step's keys are known
            if (step + 1 < steps) load(step + 1);
            ptx::cp_async_commit();
            if constexpr (!finds_bounds) add_keys(step);
        }
        ptx::cp_async_wait<0>();
        if constexpr (!finds_bounds)
            if (has_dq()) store();
    }

    // ---- what comes ----
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (float& x : dq[0]) x = 0;
        load_queries<C::rows, typename C::KeyTile, C::threads>(at(shared.q), params.q, params.head_dim,
                                                               params.q_is_wide, params.rows, params.lists, task);
        load_queries<C::rows, typename C::ValueTile, C::threads>(at(shared.dout), params.dout, params.head_dim_v,
                                                                 params.dout_is_wide, params.rows, params.lists, task);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const any::TileRow row(params.rows, params.lists, task, warp_row + lane / 4 + 8 * h);
            const int64_t at = (int64_t(task.batch) * params.lists.heads_q + row.head) * params.lists.seq_q + row.query;
            if (makes_p()) {
                // A row without a key has lse = -infinity, and an infinite offset would make NaN of its masked scores.
                const float lse = params.lse[at];
                const float offset = lse == -INFINITY ? FLT_MAX : tile::lift<C::dtype> - lse * float(M_LOG2E);
                of_row[h] = row.is_there ? offset : -INFINITY;
            } else {
                of_row[h] = row.is_there ? params.delta[at] * dp_factor : 0;
            }
        }
    }

    __device__ __forceinline__ void load(int step) {
        const int32_t* const keys = shared.listed.keys(step);
        load_listed<C::step, typename C::KeyTile, C::threads>(at(shared.keys), params.k, params.head_dim,
                                                              params.k_is_wide, task, keys);
        if constexpr (!C::value_in_key)
            load_listed<C::step, typename C::ValueTile, C::threads>(value_rows(), params.v, params.head_dim_v,
                                                                    params.v_is_wide, task, keys);
    }

    // ---- p and ds ----
    // With softcap ds needs p times its slope: where ds will be, it waits for dp.
    __device__ __forceinline__ void make_weights(int step) {
        float x[1][values];  // scores, or dp
        if (makes_p()) {
            multiply_rows<C::dtype, typename C::KeyTile>(at(shared.q), warp_row, at(shared.keys), x);
            make_p(x[0], step);
        } else if (makes_ds()) {
            multiply_rows<C::dtype, typename C::ValueTile, typename C::ValueRows>(at(shared.dout), warp_row,
                                                                                  value_rows(), x);
        }
        __syncthreads();  // p is there
        if (makes_ds()) make_ds(x[0], step);
    }

    __device__ __forceinline__ void make_p(float (&s)[values], int step) const {
        params.has_cap ? exponentials<true>(s) : exponentials<false>(s);
        zero_absent(s, step);
        if constexpr (finds_bounds) add_bounds(s, p_unlift, params.dv, step);
        put(shared.p, s);
    }

    template <bool HasCap>
    __device__ __forceinline__ void exponentials(float (&s)[values]) const {
        if constexpr (HasCap) tile::cap(s, params.into_cap);
#pragma unroll
        for (int i = 0; i < values; i += 2) {
            const float slope[2] = {1 - s[i] * s[i], 1 - s[i + 1] * s[i + 1]};
            for (int n = i; n < i + 2; ++n)
                s[n] = ptx::exp2_approx(fmaf(s[n], params.scale_log2, of_row[tile::row_of(n)]));
            if constexpr (HasCap) put(shared.ds, i, s[i] * slope[0], s[i + 1] * slope[1]);
        }
    }

    __device__ __forceinline__ void make_ds(float (&ds)[values], int step) {
        const uint32_t from = params.has_cap ? at(shared.ds) : at(shared.p);
#pragma unroll
        for (int c = 0; c < values / 8; ++c) {
            uint32_t words[4];
            ptx::load_matrix_x4(words, Weights::at(from, warp_row + lane % 16, 2 * c + lane / 16));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& x = ds[8 * c + i];
                x = tile::unpack<C::dtype>(words[i / 2], i % 2) * fmaf(x, dp_factor, -of_row[tile::row_of(i)]);
            }
        }
        zero_absent(ds, step);
        if constexpr (is_f16) tile::fit(ds, lift, shared.lift, int(threadIdx.x) - 32 * C::row_warps);
        if constexpr (finds_bounds) {
            add_bounds(ds, dk_factor(), params.dk, step);
        } else {
            __syncwarp();  // all lanes have read what they overwrite
            put(shared.ds, ds);
        }
    }

    __device__ __forceinline__ void zero_absent(float (&x)[values], int step) const {
        const ThereBits there = shared.listed.there(step);
        if (there.all()) [[likely]] return;
#pragma unroll
        for (int i = 0; i < values; ++i) ptx::zero_unless(x[i], there.has(i));
    }

    // Values i and i + 1 of a thread, or all.
    __device__ __forceinline__ void put(const void* to, int i, float x, float y) const {
        const int row = warp_row + lane / 4 + 8 * tile::row_of(i);
        ptx::store_shared(Weights::at(at(to), row, i / 4) + lane % 4 * 4, tile::pack<C::dtype>(x, y));
    }
    __device__ __forceinline__ void put(const void* to, const float (&x)[values]) const {
#pragma unroll
        for (int i = 0; i < values; i += 2) put(to, i, x[i], x[i + 1]);
    }

    // ---- bounds ----
    // Bits of what is not negative are in order as integers, NaN last.
    template <class Tile>
    __device__ __forceinline__ void find_largest(const void* tile) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t most = 0;
#pragma unroll 4
            for (int chunk = lane % 4; chunk < Tile::chunks; chunk += 4) {
                uint32_t words[4];
                ptx::load_shared(words, Tile::at(at(tile), warp_row + lane / 4 + 8 * h, chunk));
                for (uint32_t word : words) most = __vmaxu2(most, word & 0x7FFF7FFF);
            }
            for (int n = 1; n < 4; n *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, n));
            largest[h] = tile::unpack<C::dtype>(max(most & 0xFFFF, most >> 16), 0);
        }
    }

    // What p or ds, as products read them, can add to a column of their keys' rows. Terms are of 16 query rows.
    __device__ __forceinline__ void add_bounds(const float (&x)[values], float factor, const KeySums& to,
                                               int step) const {
        constexpr float slack = 1.03f;  // more than sums and products of 16 floats round
        uint32_t words[values / 8][4];
        tile::pack_tile<C::dtype>(x, words);
        const auto size = [&](int i) { return fabsf(tile::unpack<C::dtype>(words[i / 8][i % 8 / 2], i % 2)); };
        uint64_t* const bounds = to.bounds + plane() * params.lists.seq_k * any::bound_words;
#pragma unroll
        for (int n = 0; n < values / 2; ++n) {  // columns of this thread
            const int i = n / 2 * 4 + n % 2;
            float sum = fmaf(size(i), largest[0], size(i + 2) * largest[1]);
            for (int quads = 4; quads < 32; quads *= 2) sum += __shfl_xor_sync(~0u, sum, quads);
            const int key = shared.listed.keys(step)[tile::fragment_column(lane, i)];
            if (lane / 4 == n % 8 && key != no_token)
                any::add_bound(bounds + int64_t(key) * any::bound_words, sum * factor * slack);
        }
    }

    // ---- products ----
    __device__ int64_t plane() const { return int64_t(task.batch) * params.lists.heads_kv + task.head_kv; }
    // What ds is multiplied by on its way to dk.
    __device__ float dk_factor() const { return params.scale * (ds_unlift / lift); }

    __device__ __forceinline__ void follow_lift() {
        lift = shared.lift.lift;
        if (lift == dq_lift) return;
#pragma unroll
        for (float& x : dq[0]) x *= lift / dq_lift;
        dq_lift = lift;
    }

    __device__ __forceinline__ void add_dq() {
        uint32_t ds[1][C::step / 16][4];
#pragma unroll
        for (int c = 0; c < C::step / 16; ++c)
            ptx::load_matrix_x4(ds[0][c], Weights::at(at(shared.ds), warp_row + lane % 16, 2 * c + lane / 16));
        add_product<C::dtype, typename C::PartTile>(ds, at(shared.keys) + dq_column() * 2, dq);
    }

    // sums += weightsT rows: 16 keys, from 16 * group on, of 64 columns.
    template <class Tile>
    __device__ __forceinline__ void add_transposed(float (&sums)[32], const void* weights, int group, const void* rows,
                                                   int panel) const {
        const int a_row = lane % 8 + lane / 16 * 8, a_chunk = 2 * group + lane / 8 % 2;
        const uint32_t b_at = Tile::at(at(rows), lane % 16, lane / 16) + panel * 128;
#pragma unroll
        for (int k = 0; k < C::rows / 16; ++k) {
            uint32_t a[4];
            ptx::load_matrix_x4_transposed(a, Weights::at(at(weights), 16 * k + a_row, a_chunk));
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                uint32_t b[4];
                ptx::load_matrix_x4_transposed(b, Tile::further(b_at, c) + k * Tile::bytes16);
                ptx::mma(&sums[8 * c], a, b[0], b[1], tile::MatrixTag<C::dtype>{});
                ptx::mma(&sums[8 * c + 4], a, b[2], b[3], tile::MatrixTag<C::dtype>{});
            }
        }
    }

    __device__ __forceinline__ void add_keys(int step) const {
#pragma unroll 1
        for (int unit = warp; unit < C::units; unit += C::warps) {
            const bool is_dk = unit < C::dk_units;
            const int of = is_dk ? unit : unit - C::dk_units, group = of % C::key_groups, panel = of / C::key_groups;
            float x[32] = {}, factor = p_unlift;
            if (is_dk) {
                factor = dk_factor();
                add_transposed<typename C::KeyTile>(x, shared.ds, group, shared.q, panel);
                if (C::value_in_key && panel < C::v_panels) {
#pragma unroll
                    for (float& y : x) y *= factor / p_unlift;
                    factor = p_unlift;
                }
            }
            if (C::value_in_key ? panel < C::v_panels : !is_dk)
                add_transposed<typename C::ValueTile>(x, shared.p, group, shared.dout, panel);
            const KeySums& to = is_dk ? params.dk : params.dv;
            add(x, factor, to, shared.listed.keys(step) + 16 * group, 64 * panel,
                is_dk ? params.head_dim : params.head_dim_v);
        }
    }

    __device__ __forceinline__ void add(const float (&x)[32], float factor, const KeySums& to, const int32_t* keys,
                                        int first, int end) const {
        const int64_t row = plane() * params.lists.seq_k;
        float* const sums = to.sums + row * to.columns;
        if constexpr (A == Adding::integers)
            any::IntegerRows(keys, to.quanta + row, lane).add(x, factor, sums, to.columns, first, end, lane);
        else
            FloatLines(keys, lane).add(x, factor, sums, to.columns, first, end, lane);
    }

    // ---- the end ----
    __device__ __forceinline__ void store() const {
        const float factor = params.scale * (ds_unlift / dq_lift);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const any::TileRow row(params.rows, params.lists, task, warp_row + lane / 4 + 8 * h);
            if (!row.is_there) continue;
            Element* const to = any::row_of<Element>(params.dq, task.batch, row.head, row.query);
#pragma unroll
            for (int i = 2 * h; i < C::part_columns / 2; i += 4) {
                const int column = dq_column() + tile::fragment_column(lane, i);
                const float x = dq[0][i] * factor, y = dq[0][i + 1] * factor;
                if (params.has_pairs) {
                    if (column < params.head_dim)
                        *reinterpret_cast<uint32_t*>(to + column) = tile::pack<C::dtype>(x, y);
                } else {
                    if (column < params.head_dim) any::from_real(x, to[column * params.dq.column]);
                    if (column + 1 < params.head_dim) any::from_real(y, to[(column + 1) * params.dq.column]);
                }
            }
        }
    }
};

// ---- kernel ----
template <class C, Adding A>
__global__ void __launch_bounds__(C::threads, C::ctas)
    gather_backward_kernel(const __grid_constant__ GatherBackwardParams params) {
    if constexpr (!is_turing) GatherGradients<C, A>(params, ptx::swizzled_shared<uint8_t>()).run();
}

// ---- launch ----
template <class C>
struct GatherBackwardLaunch {
    static constexpr size_t shared_bytes = C::Kernel::shared_bytes(C::rows);
    static_assert(sizeof(GatherGradientShared<C>) <= shared_bytes, "what the host was told");
    const BackwardArgs& args;
    GatherBackwardParams params;

    explicit GatherBackwardLaunch(const BackwardArgs& args) : args(args) {
        const Problem& p = *args.problem;
        const any::KeySumsSpace space(p);
        const auto rows = any::BackwardSpace<float>::at(args.workspace, p, {}, {});
        const any::GatherLists lists = any::GatherLists::of(args);
        const double scale = p.softcap != 0 ? p.softcap : p.scale;
        const bool has_pairs = p.head_dim % 2 == 0 && args.dq.column == 1 &&
                               (args.dq.batch | args.dq.head | args.dq.row) % 2 == 0 &&
                               reinterpret_cast<uintptr_t>(args.dq.data) % 4 == 0;
        params = {args.q,
                  args.k,
                  args.v,
                  args.dout,
                  args.dq,
                  space.dk_at(args.workspace, p),
                  space.dv_at(args.workspace, p),
                  rows.lse,
                  rows.delta,
                  lists,
                  any::ListRows::of(p, lists.sizes, lists.known, C::rows),
                  int(p.head_dim),
                  int(p.head_dim_v),
                  is_wide(args.q),
                  is_wide(args.k),
                  is_wide(args.v),
                  is_wide(args.dout),
                  has_pairs,
                  float(p.scale),
                  float(scale * M_LOG2E),
                  p.softcap != 0,
                  p.softcap != 0 ? float(p.scale / p.softcap) : 0};
    }

    template <Adding A>
    void products() const {
        runtime::launch(gather_backward_kernel<C, A>, {unsigned(params.rows.tasks), unsigned(C::threads), shared_bytes},
                        args.stream, params);
    }
    void run_all() const {
        any::KeyGradients<C::dtype>::clear(args);
        any::BlockBackward<C::dtype>::rows(args);
        if (args.problem->deterministic) {
            products<Adding::bounds>();
            any::KeyGradients<C::dtype>::find_quanta(args);
            products<Adding::integers>();
        } else {
            products<Adding::floats>();
        }
        any::KeyGradients<C::dtype>::write(args);
        any::BlockBackward<C::dtype>::sinks(args);
    }
    static void prepare_all() {
        runtime::prepare(gather_backward_kernel<C, Adding::floats>, shared_bytes);
        runtime::prepare(gather_backward_kernel<C, Adding::bounds>, shared_bytes);
        runtime::prepare(gather_backward_kernel<C, Adding::integers>, shared_bytes);
    }
};

// act(config) with the rows that the device has shared memory for.
template <Dtype D, int HeadDim, int HeadDimV, int Block, class Act>
void choose_rows(int32_t device, Act act) {
    using Kernel = GatherBackward<D, HeadDim, HeadDimV, Block>;
    if (Kernel::least_rows == Block || runtime::shared_bytes(device) >= Kernel::shared_bytes(Block))
        act(GatherGradientConfig<D, HeadDim, HeadDimV, Block>{});
    else
        act(GatherGradientConfig<D, HeadDim, HeadDimV, Kernel::least_rows>{});
}

template <Dtype D, int HeadDim, int HeadDimV, int Block>
void GatherBackward<D, HeadDim, HeadDimV, Block>::run(const BackwardArgs& args) {
    static_assert(Block == any::gather_tile, "tiles of 64 rows");
    choose_rows<D, HeadDim, HeadDimV, Block>(args.device,
                                             [&]<class C>(C) { GatherBackwardLaunch<C>(args).run_all(); });
}

template <Dtype D, int HeadDim, int HeadDimV, int Block>
void GatherBackward<D, HeadDim, HeadDimV, Block>::prepare(int32_t device) {
    any::BlockBackward<D>::prepare(device);
    any::KeyGradients<D>::prepare(device);
    const runtime::CurrentDevice current(device);
    choose_rows<D, HeadDim, HeadDimV, Block>(device, []<class C>(C) { GatherBackwardLaunch<C>::prepare_all(); });
}

}  // namespace spattn::sm80
