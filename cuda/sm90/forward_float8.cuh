// SPDX-License-Identifier: MIT
//
//     block_forward.cuh for a float8 cache: few queries, mostly one a sequence, of which heads of a group share tiles
//
// Bytes must become elements as fast as memory brings them. Warps make them in registers, as operands of mma.sync, as
// FlashInfer does (https://github.com/flashinfer-ai/flashinfer): elements never lie in shared memory.
//
//   rows      a tile has 64, and of one query mostly 8 or 16 are any. Four warps share them: each has 16 rows that
//             queries have, and 16, 32 or 64 keys of a block. Where several have the same rows their sums come together
//             through shared memory at a task's end
//   k         two bytes are two fp16 by one instruction, and so q is fp16, too: each row times a power of two that
//             brings its largest number near fp16's. A lane's 16 neighbouring bytes are its part of the b operands of
//             four products, which take columns in the order in which lanes have them, of q as well
//   v         ldmatrix transposes pairs of bytes: a lane then has two keys' bytes of two columns, which become parts of
//             two b operands, of even columns and of odd ones
//   scales    a row's scale of k is a factor of its scores, that of v of its probabilities, which are fp16. What these
//             are multiplied by is relative to the largest scale that a warp has met, as exponentials are to a maximum.
//             Where a scale is so much smaller that digits would be lost, probabilities are a sum of two bf16, which has
//             float32's range, and v is bf16, which takes more conversions and twice the products
//   isolation values and scales of keys that no row of a warp sees count as 0. Rows that are not finite all the same
//             are made again from kept pairs
//
// The walker, lists and parts are those of block_forward.cuh.
//
// Measured (H200, one query of 64 heads on 8, 128 columns, pages of 128, us; from bf16): 32 sequences of 8K keys 178 (257),
// which is 3.1 TB/s, eight of 32K 191 (267), one of 128K 114 (156), sink and window of 1K over 32K 44 (59). By widened tiles
// (forward_widener.cuh) it is 276, 288, 159 and 55. A warp takes some 1,800 cycles for 16 rows and 16 keys, whatever
// memory does: where queries have all 64 rows, 32 sequences of 8K keys took 511 us.
#pragma once

#include "any/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/float8_stages.cuh"
#include "sm90/forward_consumer.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/row_end.cuh"
#include "tile/dtype.cuh"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

template <bool AnyOrder>
struct BlockForwardParams;
template <class C>
struct Float8Shared;

// ---- configuration ----
template <Dtype D, int HeadDim, int HeadDimV>
struct Float8Config : TileConfig<D, HeadDim, HeadDimV> {
    using Base = TileConfig<D, HeadDim, HeadDimV>;
    using Base::head_dim, Base::head_dim_v, Base::panels, Base::row_bytes;
    using Params = BlockForwardParams<false>;
    using Shared = Float8Shared<Float8Config>;
    static constexpr bool any_order = false, in_pieces = false, is_float8 = true, reads_bytes = true;
    static constexpr int block_q = 64, block_k = 64, panel_bytes = block_q * row_bytes;
    static constexpr int ctas = 2, consumers = 4, threads = 32 * (consumers + 1);  // consumers: warps; another one walks
    static constexpr int group_rows = 16;  // of a warp's products
    static constexpr int chunk = 16, chunks = block_k / chunk;  // keys of a product of probabilities; of a block
    static constexpr int q_tiles = 1, q_releases = consumers;
    static constexpr int most_bytes = (228 / ctas - 1) * 1024, other_bytes = 5 * 1024;  // of shared memory
    static constexpr int sums_bytes = consumers * group_rows * head_dim_v * int(sizeof(float));
    static constexpr int fitting =
        (most_bytes - other_bytes - panels * panel_bytes - sums_bytes) / (block_k * stage_row_bytes);
    static constexpr int stages = fitting < 8 ? fitting : 8, scale_blocks = stages / 2 + 1;
    static constexpr int slots = 1, requests = 1;  // of other kernels
    static_assert(stages >= 4, "k and v of a block, and those of the next on their way");
};

template <class C>
struct Float8Shared {
    uint8_t q[C::q_tiles][C::panels][C::panel_bytes];
    Float8Stages<C> helper;
    float sums[C::consumers][C::group_rows][C::head_dim_v];  // of a warp at a task's end, in units of 16 bytes, swizzled
    float m[C::consumers][C::group_rows], l[C::consumers][C::group_rows];  // of its rows
    unsigned long long odd;  // a bit for each row of the tile that is to be made again
    ForwardMessage task[C::q_tiles];
    uint64_t q_full[C::q_tiles];   // the walker with the bytes of q
    uint64_t q_empty[C::q_tiles];  // one arrival a consumer warp
};

// Which rows of a tile a warp has, and which keys of a block.
struct TileShare {
    int group;              // of 16 rows
    int first_warp, warps;  // that have the same rows, and the chunks of a block in turn
    bool is_there;

    // Rows that queries have lie in one to four groups of 16.
    template <class C>
    __device__ static TileShare of(const QuerySpan& queries, const any::TileRows& tile, int warp) {
        const int begin = (queries.begin - queries.first) << tile.bits, end = (queries.end - queries.first) << tile.bits;
        const int first = begin / C::group_rows, groups = (end + C::group_rows - 1) / C::group_rows - first;
        const int warps = groups > 2 ? 1 : C::consumers / max(groups, 1);
        const int own = warp / warps;
        return {first + own, own * warps, warps, own < groups};
    }
};

// ---- consumers ----
template <class C>
struct Float8Consumer {
    using Element = typename C::Element;
    static constexpr int steps = C::head_dim / 16;
    static constexpr int units = C::head_dim_v / 16;  // of 16 columns, of a row
    using Fp16 = tile::MatrixTag<Dtype::f16>;

    const typename C::Params& params;
    typename C::Shared& shared;
    const int warp, lane;
    Cursor<C::q_tiles> q_at{};
    Cursor<C::stages> stage{};
    Cursor<C::scale_blocks> scales_at{};
    uint32_t q[steps][4];
    float unscale[2];  // what brings scores of such rows of q back
    float out[C::head_dim_v / 2];  // sums of p v, in units of v_scale
    float v_scale, per_v_scale;    // a power of two, above all scales of v so far; 1 / v_scale
    tile::RowState rows;
    bool fresh;

    __device__ __forceinline__ void run() {
        for (;; q_at.advance()) {
            ptx::mbarrier_wait(&shared.q_full[q_at.index], q_at.phase);
            const ForwardMessage task = shared.task[q_at.index];
            const TileShare share = TileShare::of<C>(task.queries, params.tile, warp);
            if (task.count != end_of_work && share.is_there) load_q(share.group);
            __syncwarp();  // all lanes have read q and the message
            if (task.count == end_of_work) return;
            if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[q_at.index]);
            begin();
#pragma unroll 1
            for (int left = task.count; left > 0; --left) block(share);
            finish(task, share);
        }
    }

    // ---- q ----
    // Columns 16 t to 16 t + 15 of each 64, of rows r and r + 8, for lane 4 r + t.
    __device__ __forceinline__ void load_q(int group) {
#pragma unroll
        for (int panel = 0; panel < C::panels; ++panel)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int row = C::group_rows * group + lane / 4 + 8 * h;
                    uint32_t words[4];
                    ptx::load_shared(words, ptx::shared_address(shared.q[q_at.index][panel]) + row * C::row_bytes +
                                                (((2 * (lane % 4) + j) ^ row % 8) << 4));
#pragma unroll
                    for (int n = 0; n < 4; ++n) q[4 * panel + 2 * j + n / 2][2 * (n % 2) + h] = words[n];
                }
        if constexpr (C::dtype == Dtype::bf16) narrow_q();
    }

    // bf16 becomes fp16: the largest number of a row lies in [2^14, 2^15) then, and what is smaller by 2^28 loses digits.
    __device__ __forceinline__ void narrow_q() {
        float top[2] = {0, 0};
#pragma unroll
        for (auto& step : q)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    top[i % 2] = fmaxf(top[i % 2], fabsf(tile::unpack<Dtype::bf16>(step[i], half)));
        float scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t exponent = max(__float_as_uint(tile::quad_max(top[h])) >> 23, 16u);
            scale[h] = __uint_as_float((268 - exponent) << 23), unscale[h] = __uint_as_float((exponent - 14) << 23);
        }
#pragma unroll
        for (auto& step : q)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                step[i] = ptx::pack_f16(tile::unpack<Dtype::bf16>(step[i], 0) * scale[i % 2],
                                        tile::unpack<Dtype::bf16>(step[i], 1) * scale[i % 2]);
    }

    __device__ __forceinline__ void begin() {
        rows = tile::RowState{};
        fresh = true, v_scale = 0, per_v_scale = 1;
#pragma unroll
        for (float& x : out) x = 0;
    }

    // ---- a block of keys ----
    __device__ __forceinline__ void block(const TileShare& share) {
        auto& helper = shared.helper;
        const Cursor<C::stages> k = stage;
        stage.advance();
        ptx::mbarrier_wait(&helper.full[k.index], k.phase);
        const int mask = helper.mask[k.index];
        uint32_t word = ~0u;  // a lane's 32 bits of its rows and the block
        if (mask != full_block && share.is_there) word = __ldg(mask_words(params.layout, mask) + 32 * share.group + lane);
        ptx::mbarrier_wait(&helper.full[stage.index], stage.phase);
        if (share.is_there) {
            const uint32_t k_bytes = ptx::shared_address(helper.bytes[k.index]);
            const uint32_t v_bytes = ptx::shared_address(helper.bytes[stage.index]);
#pragma unroll 1
            for (int n = warp - share.first_warp; n < C::chunks; n += share.warps)
                add(n, k_bytes + n * (C::chunk * stage_row_bytes), v_bytes + n * (C::chunk * stage_row_bytes),
                    mask != full_block, uint8_t(word >> 8 * n));
        }
        __syncwarp();  // all lanes have read both
        if (lane == 0) ptx::mbarrier_arrive(&helper.empty[k.index]), ptx::mbarrier_arrive(&helper.empty[stage.index]);
        stage.advance(), scales_at.advance();
    }

    // 16 keys of it. bits: of this lane's values that are kept.
    __device__ __forceinline__ void add(int chunk, uint32_t k, uint32_t v, bool is_masked, uint8_t bits) {
        float s[C::chunk / 2];
        make_scores(k, s);
        const auto& scales = shared.helper.scales[scales_at.index];
        float k_scales[4], v_scales[4];
        load_scales(scales[0] + C::chunk * chunk, k_scales);
        load_scales(scales[1] + C::chunk * chunk, v_scales);
#pragma unroll
        for (int i = 0; i < C::chunk / 2; ++i) {
            if constexpr (C::dtype == Dtype::bf16) s[i] *= unscale[tile::row_of(i)];
            s[i] *= k_scales[key_of(i)];
        }
        if (params.has_cap) tile::cap(s, params.into_cap);
        uint32_t seen[2] = {~0u, ~0u};  // bytes of v, of a lane's keys in either eight, that count
        if (is_masked) {
            tile::mask(s, bits);
            find_seen(bits, seen, v_scales);
        }
        const bool is_mild = take_scales(v_scales);
        uint32_t p[1][4];
        make_probabilities(s, v_scales, is_mild, p[0]);
        fresh = false;
        is_mild ? add_values<Dtype::f16>(v, seen, p[0]) : add_wide_values(v, seen, v_scales, p[0]);
    }

    // Lane 4 n + t brings bytes 16 t to 16 t + 15 of each 64 of keys n and n + 8.
    __device__ __forceinline__ void make_scores(uint32_t k, float (&s)[8]) const {
        float sums[C::panels][8] = {};  // apart, since each product waits for the one before
#pragma unroll
        for (int panel = 0; panel < C::panels; ++panel) {
            const uint32_t at = k + lane / 4 * stage_row_bytes + (((4 * panel + lane % 4) ^ lane / 4) << 4);
            uint32_t low[4], high[4];
            ptx::load_shared(low, at);
            ptx::load_shared(high, at + 8 * stage_row_bytes);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                ptx::mma(sums[panel], q[4 * panel + i], widen(low[i], 0), widen(low[i], 1), Fp16{});
                ptx::mma(sums[panel] + 4, q[4 * panel + i], widen(high[i], 0), widen(high[i], 1), Fp16{});
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            s[i] = sums[0][i];
            if constexpr (C::panels == 2) s[i] += sums[1][i];
        }
    }

    // Two of a word's bytes.
    __device__ __forceinline__ static uint32_t widen(uint32_t word, int half) {
        return ptx::widen_float8_pair(uint16_t(word >> 16 * half));
    }

    // A lane's keys of 16 are 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: which of them its value i of scores belongs to.
    __device__ __forceinline__ static constexpr int key_of(int i) { return i / 4 * 2 + i % 2; }
    __device__ __forceinline__ void load_scales(const float* from, float (&scales)[4]) const {
        float two[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            ptx::load_shared(two, ptx::shared_address(from + 2 * (lane % 4) + 8 * n));
            scales[2 * n] = two[0], scales[2 * n + 1] = two[1];
        }
    }

    // What no row of the warp sees may be anything: such a key's scale becomes 0, and its bytes will count as 0.
    __device__ __forceinline__ void find_seen(uint8_t bits, uint32_t (&seen)[2], float (&v_scales)[4]) const {
        uint32_t any = bits | bits >> 2;  // of both rows
#pragma unroll
        for (int n = 4; n < 32; n *= 2) any |= __shfl_xor_sync(~0u, any, n);
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (!(any >> (n / 2 * 4 + n % 2) & 1)) {
                seen[n / 2] &= n % 2 ? 0x00FF00FFu : 0xFF00FF00u;
                v_scales[n] = 0;
            }
    }

    // Scales in units of v_scale, which grows with them. Whether fp16 has room for probabilities times all of them: those
    // of 2^-13 keep their digits.
    __device__ __forceinline__ bool take_scales(float (&scales)[4]) {
        float top = 0, low = INFINITY;
#pragma unroll
        for (const float x : scales) {
            top = fmaxf(top, fabsf(x));
            low = fminf(low, x == 0 ? INFINITY : fabsf(x));
        }
        top = tile::quad_max(top), low = -tile::quad_max(-low);
        if (top > v_scale) {  // the same answer for all lanes
            const uint32_t exponent = min((__float_as_uint(top) >> 23) + 1, 253u);
            per_v_scale = __uint_as_float((254 - exponent) << 23);
            tile::scale_rows(out, v_scale * per_v_scale, v_scale * per_v_scale);
            v_scale = __uint_as_float(exponent << 23);
        }
        bool is_finite = true;
#pragma unroll
        for (float& x : scales) x *= per_v_scale, is_finite &= fabsf(x) <= 1;
        return __all_sync(~0u, is_finite && low >= v_scale * 0x1p-9f);
    }

    __device__ __forceinline__ void make_probabilities(const float (&s)[8], const float (&v_scales)[4], bool is_mild,
                                                       uint32_t (&p)[4]) {
        const auto weigh = [&](int i, float& x, float& y) {
            if (is_mild) x *= v_scales[key_of(i)], y *= v_scales[key_of(i + 1)];
        };
        uint32_t words[1][4];
        float factor[2];
        // Who asks for the largest score gets it by following the maximum in each block.
        const bool follows = fresh || params.to.max_logits.data;
        if (tile::softmax<Dtype::f16>(s, rows, params.scale_log2, follows, words, factor, weigh) && !fresh)
            tile::scale_rows(out, factor[0], factor[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) p[i] = words[0][i];
    }

    // out += p v, of elements D.
    template <Dtype D>
    __device__ __forceinline__ void add_values(uint32_t v, const uint32_t (&seen)[2], const uint32_t (&p)[4]) {
        const uint32_t at = v + lane % 16 * stage_row_bytes;
#pragma unroll
        for (int n = 0; n < C::head_dim_v / 32; ++n) {
            uint32_t x[4];  // of keys 0 to 7 and 8 to 15 and 16 columns, and of 16 more
            ptx::load_matrix_x4_transposed(x, at + (((2 * n + lane / 16) ^ lane % 8) << 4));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // Bytes of two keys and two columns, of which those of a column come together.
                const uint32_t low = __byte_perm(x[2 * i], 0, 0x3120) & seen[0];
                const uint32_t high = __byte_perm(x[2 * i + 1], 0, 0x3120) & seen[1];
#pragma unroll
                for (int odd = 0; odd < 2; ++odd)
                    ptx::mma(out + 16 * n + 8 * i + 4 * odd, p, as<D>(widen(low, odd)), as<D>(widen(high, odd)),
                             tile::MatrixTag<D>{});
            }
        }
    }
    template <Dtype D>
    __device__ __forceinline__ static uint32_t as(uint32_t wide) {
        if constexpr (D == Dtype::f16) return wide;
        else return tile::pack<D>(tile::unpack<Dtype::f16>(wide, 0), tile::unpack<Dtype::f16>(wide, 1));
    }

    // The same where p, which is not multiplied yet, times scales would leave fp16's range.
    __device__ __forceinline__ void add_wide_values(uint32_t v, const uint32_t (&seen)[2], const float (&v_scales)[4],
                                                 const uint32_t (&p)[4]) {
        uint32_t first[4], rest[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = tile::unpack<Dtype::f16>(p[i], 0) * v_scales[i / 2 * 2];
            const float y = tile::unpack<Dtype::f16>(p[i], 1) * v_scales[i / 2 * 2 + 1];
            first[i] = ptx::pack_bf16(x, y);
            rest[i] = ptx::pack_bf16(x - tile::unpack<Dtype::bf16>(first[i], 0), y - tile::unpack<Dtype::bf16>(first[i], 1));
        }
        add_values<Dtype::bf16>(v, seen, first);
        add_values<Dtype::bf16>(v, seen, rest);
    }

    // ---- the end of a task ----
    // What warps with the same rows have comes together in shared memory, and leaves from there, 16 columns a lane.
    __device__ __forceinline__ void finish(const ForwardMessage& task, const TileShare& share) {
        if (share.is_there) leave_sums();
        ptx::named_barrier_sync(1, 32 * C::consumers);  // all sums are there
        if (share.is_there)
#pragma unroll 1
            for (int unit = 32 * (warp - share.first_warp) + lane; unit < C::group_rows * units;
                 unit += 32 * share.warps)
                store(task, share, unit / units, unit % units);
        ptx::named_barrier_sync(1, 32 * C::consumers);  // all have read them; odd rows are known, and were written
        const unsigned long long odd = shared.odd;
        if (odd) [[unlikely]]
            repair(task, odd);
    }

    __device__ __forceinline__ static int place_of(int row, int column) {
        return ((column / 4) ^ (row % units * 4)) * 4 + column % 4;  // units: 4 or 8
    }
    __device__ __forceinline__ void leave_sums() {
        const float l[2] = {tile::quad_sum(rows.l[0]), tile::quad_sum(rows.l[1])};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = lane / 4 + 8 * h;
            if (lane % 4 == 0) shared.m[warp][row] = rows.m[h], shared.l[warp][row] = l[h];
            // A lane has four neighbours of each 16 columns: even ones lie in one product, odd ones in another.
#pragma unroll
            for (int n = 0; n < units; ++n) {
                const float* x = out + 8 * n + 2 * h;
                *reinterpret_cast<float4*>(&shared.sums[warp][row][place_of(row, 16 * n + 4 * (lane % 4))]) =
                    make_float4(x[0] * v_scale, x[4] * v_scale, x[1] * v_scale, x[5] * v_scale);
            }
        }
    }

    __device__ __forceinline__ void store(const ForwardMessage& task, const TileShare& share, int row, int unit) {
        const int in_tile = C::group_rows * share.group + row;
        const int token = any::query_at(task.queries, params.tile.place(in_tile));
        if (token == no_token) return;
        const int head = task.head + params.tile.head(in_tile);
        float m = -INFINITY, l = 0, x[16] = {};
        for (int n = 0; n < share.warps; ++n) m = fmaxf(m, shared.m[share.first_warp + n][row]);
        for (int n = 0; n < share.warps; ++n) {
            const int from = share.first_warp + n;
            const float own = shared.m[from][row], factor = own == m ? 1 : ptx::exp2_approx((own - m) * params.scale_log2);
            l = fmaf(shared.l[from][row], factor, l);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float four[4];
                ptx::load_shared(four, ptx::shared_address(&shared.sums[from][row][place_of(row, 16 * unit + 4 * i)]));
#pragma unroll
                for (int j = 0; j < 4; ++j) x[4 * i + j] = fmaf(four[j], factor, x[4 * i + j]);
            }
        }
        const RowEnd end = end_row(params, head, task.part, m, l, tile::lift<Dtype::f16>);
        float is_nan = l * 0;
#pragma unroll
        for (float& value : x) value *= end.factor, is_nan = fmaf(value, 0.f, is_nan);
        if (!(is_nan == 0)) [[unlikely]]
            atomicOr(&shared.odd, 1ull << in_tile);
        const float top = m * params.scale;
        if (task.part == whole_row) {
            write(any::row_of<Element>(params.to.out, task.batch, head, token), 16 * unit, x);
            if (unit != 0) return;
            if (params.to.lse.data) *any::row_of<float>(params.to.lse, task.batch, head, token) = end.lse;
            if (params.to.max_logits.data) *any::row_of<float>(params.to.max_logits, task.batch, head, token) = top;
        } else {
            const int64_t to = int64_t(task.part) * C::block_q + in_tile;
            write(params.parts.out + to * params.head_dim_v, 16 * unit, x);
            if (unit == 0) params.parts.lse[to] = end.lse, params.parts.top[to] = top;
        }
    }

    // 16 columns of a row, of which there are a multiple of 16.
    __device__ __forceinline__ void write(Element* row, int column, const float (&x)[16]) const {
        if (column >= params.head_dim_v) return;
#pragma unroll
        for (int i = 0; i < 16; i += 8)
            *reinterpret_cast<uint4*>(row + column + i) =
                uint4{tile::pack<C::dtype>(x[i], x[i + 1]), tile::pack<C::dtype>(x[i + 2], x[i + 3]),
                      tile::pack<C::dtype>(x[i + 4], x[i + 5]), tile::pack<C::dtype>(x[i + 6], x[i + 7])};
    }
    __device__ __forceinline__ void write(float* row, int column, const float (&x)[16]) const {
        if (column >= params.head_dim_v) return;
#pragma unroll
        for (int i = 0; i < 16; i += 4)
            *reinterpret_cast<float4*>(row + column + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }

    __device__ __forceinline__ void repair(const ForwardMessage& message, unsigned long long odd) {
        const Task task = params.tasks.tasks[message.index];
        for (int row = warp; row < C::block_q; row += C::consumers)
            if (odd >> row & 1) Repair<C>{params, task, lane}.row(row);
        ptx::named_barrier_sync(1, 32 * C::consumers);  // all have seen which rows are odd
        if (warp == 0 && lane == 0) shared.odd = 0;
    }
};

}  // namespace spattn::sm90
