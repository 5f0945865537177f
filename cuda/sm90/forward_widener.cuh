// SPDX-License-Identifier: MIT
// How block_forward.cuh reads a float8 cache, where queries are too many for forward_float8.cuh: who makes elements of its
// bytes, and where scales of rows go.
//
// The walker brings a block's bytes to a stage by TMA. The other warps of the producer, the wideners, write what they
// stand for into the next slot of the ring, where consumers find a tile like any other. All of them work on the same
// tile: slots are few, and while each warp filled one of its own, consumers waited for it three times as long.
//
// A row's scale is a factor of all its scores, or of its probabilities: consumers multiply these, of which a tile of few
// queries has fewer than elements. So tiles hold just what the bytes say, which bf16 and fp16 can. Where probabilities
// are fp16, whose range a scale may leave, values are multiplied where they are widened.
//
// Three wideners use three of an SM's four schedulers. Seven, a third warpgroup in each of two CTAs, were tried: a launch
// has 80 registers a thread then, with which the assembler refuses products of 128 columns. Tried and dropped: keys as
// fp16, which one instruction makes of two bytes, and queries made fp16 once a task. 32 sequences of 8K keys took 273.7 us
// instead of 278.5, but a sink and a window over 32K keys 56.8 instead of 54.0: conversions alone do not bind.
#pragma once

#include "layout/view.h"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "sm90/float8_stages.cuh"
#include "sm90/pipeline.cuh"
#include "tile/dtype.cuh"

namespace spattn::sm90 {

constexpr int widener_warps = 3;

// What the walker says of a stage.
struct WidenRequest {
    enum What : int32_t { k_rows, v_rows, no_more };
    What what;
    int32_t mask;    // of a block whose k it is
    int32_t scales;  // where the block's are
};

template <class C>
struct WidenStages {
    alignas(1024) uint8_t bytes[C::stages][C::block_k * stage_row_bytes];
    float scales[C::scale_blocks][2][C::block_k];  // of k and of v
    WidenRequest request[C::stages];
    uint64_t asked[C::stages];  // the walker with the bytes, and each of its lanes with scales; wideners wait
    uint64_t taken[C::stages];  // one arrival a widener; the walker waits

    __device__ __forceinline__ void init() {
        for (int i = 0; i < C::stages; ++i)
            ptx::mbarrier_init(&asked[i], 1 + 32), ptx::mbarrier_init(&taken[i], widener_warps);
    }
};

// The walker's side. A block's scales, of k and of v, come with its k. Their place is free: it was used so many blocks
// ago that consumers have released the v of that block, or there would be no stage for this k.
template <class C>
struct StageLoader : Float8Source<C> {
    static_assert(!C::is_float8 || 2 * C::scale_blocks >= 3 + C::stages + C::slots,
                  "v of block j is the tile 2 j + 2, k the tile 2 j - 1");

    using Source = Float8Source<C>;
    using Source::params, Source::lane;

    typename C::Shared& shared;
    Cursor<C::stages> stage{};
    Cursor<C::scale_blocks> scales{};

    __device__ __forceinline__ StageLoader(const typename C::Params& params, typename C::Shared& shared, int lane)
        : Source(params, lane), shared(shared) {}

    __device__ __forceinline__ void load_k(int block, int mask, int entry, int head) {
        this->find_tokens(block);
        load({WidenRequest::k_rows, mask, scales.index}, params.maps.k, entry, head);
        this->copy_scales(params.k_scales, entry, head, shared.helper.scales[scales.index][0]);
        this->copy_scales(params.v_scales, entry, head, shared.helper.scales[scales.index][1]);
        end_load();
        scales.advance();
    }
    // The block is one before the last whose scales came.
    __device__ __forceinline__ void load_v(int block, int entry, int head, int scales_at) {
        this->find_tokens(block);
        load({WidenRequest::v_rows, full_block, scales_at}, params.maps.v, entry, head);
        end_load();
    }
    __device__ __forceinline__ void end() {
        begin({WidenRequest::no_more, 0, 0}, 0);
        end_load();
    }

    __device__ __forceinline__ void load(const WidenRequest& what, const CUtensorMap& map, int entry, int head) {
        begin(what, C::block_k * stage_row_bytes);
        this->load_bytes(map, entry, head, shared.helper.bytes[stage.index], &shared.helper.asked[stage.index]);
    }
    __device__ __forceinline__ void begin(const WidenRequest& what, uint32_t bytes) {
        ptx::mbarrier_wait(&shared.helper.taken[stage.index], stage.phase ^ 1);
        if (ptx::elect()) {
            shared.helper.request[stage.index] = what;
            ptx::mbarrier_arrive_expect(&shared.helper.asked[stage.index], bytes);
        }
        __syncwarp();  // what is expected is known before it comes
    }
    __device__ __forceinline__ void end_load() {
        ptx::cp_async_arrive(&shared.helper.asked[stage.index]);
        stage.advance();
    }
};

// ---- wideners: each of these warps widens some rows of a tile ----
// In a step a warp widens as many rows as it has lanes for: each lane 16 columns.
template <class C>
struct Widener {
    static constexpr int rows = 32 / (C::head_dim / 16), all_steps = C::block_k / rows;
    static constexpr int own_steps = (all_steps + widener_warps - 1) / widener_warps;  // of a warp, or fewer
    static constexpr int ahead = 2;  // steps whose reads are together: no read passes a write

    const typename C::Params& params;
    typename C::Shared& shared;
    const int warp, lane;
    Cursor<C::stages> stage{};
    Cursor<C::slots> slot{};

    __device__ __forceinline__ void run() {
        auto& helper = shared.helper;
        for (;;) {
            ptx::mbarrier_wait(&helper.asked[stage.index], stage.phase);
            const WidenRequest what = helper.request[stage.index];
            if (what.what == WidenRequest::no_more) break;
            ptx::mbarrier_wait(&shared.empty[slot.index], slot.phase ^ 1);
            if (C::weighs_values && what.what == WidenRequest::v_rows)
                widen<true>(helper.scales[what.scales][1]);
            else
                widen<false>(nullptr);
            if (what.what == WidenRequest::k_rows && warp == 0 && lane == 0) shared.mask[slot.index] = what.mask;
            ptx::fence_async_shared();
            __syncwarp();  // all lanes have read and written theirs
            if (lane == 0) {
                ptx::mbarrier_arrive(&helper.taken[stage.index]);
                ptx::mbarrier_arrive(&shared.full[slot.index]);
            }
            stage.advance(), slot.advance();
        }
    }

    // Eight lanes have four units of 16 columns of two rows. Numbers of these differ by 5 in their last three bits: the
    // units lie in other banks then, those that are read as well as those that are written.
    __device__ __forceinline__ int first_row() const {
        return (C::head_dim == 64 ? lane / 8 : lane / 16) ^ lane / 4 % 2 * 5;
    }
    __device__ __forceinline__ int panel() const { return C::head_dim == 64 ? 0 : lane / 8 % 2; }
    // A step has all four such pairs of eight rows, or two of them.
    __device__ __forceinline__ static int eight_of(int step) { return C::head_dim == 64 ? 8 * step : step / 2 * 8; }
    __device__ __forceinline__ static int pair_of(int step) { return C::head_dim == 64 ? 0 : step % 2 * 2; }
    // The byte of a step's row where a chunk of 16 bytes stands in a tile of swizzled rows of 128.
    __device__ __forceinline__ uint32_t place_of(int step, int chunk) const {
        const int row = first_row() ^ pair_of(step);
        return (eight_of(step) + row) * stage_row_bytes + ((chunk ^ row) << 4);
    }

    template <bool Weighs>
    __device__ __forceinline__ void widen(const float* scales) const {
        static_assert(C::row_bytes == stage_row_bytes, "rows of bytes and of elements are swizzled alike");
        const uint32_t bytes = ptx::shared_address(shared.helper.bytes[stage.index]);
        const uint32_t tile = ptx::shared_address(shared.ring[slot.index][0]) + panel() * C::box_bytes;
        const int begin = warp * own_steps, end = min(begin + own_steps, all_steps), unit = lane % 4;
#pragma unroll 1
        for (int first = begin; first < end; first += ahead) {
            uint32_t codes[ahead][4];
            float scale[ahead];
#pragma unroll
            for (int n = 0; n < ahead; ++n) {
                const int step = first + n;
                if (step >= end) break;
                ptx::load_shared(codes[n], bytes + place_of(step, 4 * panel() + unit));
                if constexpr (Weighs) scale[n] = scales[eight_of(step) + (first_row() ^ pair_of(step))];
            }
#pragma unroll
            for (int n = 0; n < ahead; ++n) {
                const int step = first + n;
                if (step >= end) break;
                const uint32_t to = tile + place_of(step, 2 * unit);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t words[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const uint16_t pair = uint16_t(codes[n][2 * half + i / 2] >> 16 * (i % 2));
                        const uint32_t wide = ptx::widen_float8_pair(pair);
                        float x = tile::unpack<Dtype::f16>(wide, 0), y = tile::unpack<Dtype::f16>(wide, 1);
                        if constexpr (Weighs) x *= scale[n], y *= scale[n];
                        words[i] = tile::pack<C::dtype>(x, y);
                    }
                    ptx::store_shared(to ^ half << 4, words);
                }
            }
        }
    }
};

// ---- consumers: what a thread multiplies by ----
// Its two neighbouring columns of each eight.
__device__ __forceinline__ uint32_t own_scales(const float* scales, int thread) {
    return ptx::shared_address(scales + 2 * (thread % 4));
}
template <int Values>
__device__ __forceinline__ void scale_columns(float (&s)[Values], const float* scales, int thread) {
#pragma unroll
    for (int i = 0; i < Values; i += 4) {
        float scale[2];
        ptx::load_shared(scale, own_scales(scales, thread) + 8 * i);
        s[i] *= scale[0], s[i + 1] *= scale[1], s[i + 2] *= scale[0], s[i + 3] *= scale[1];
    }
}
// The same of probabilities when they are packed (tile/softmax.cuh).
struct ValueScales {
    uint32_t own;
    float scale[2];

    __device__ __forceinline__ ValueScales(const float* scales, int thread) : own(own_scales(scales, thread)) {}
    __device__ __forceinline__ void operator()(int i, float& x, float& y) {
        if (i % 4 == 0) ptx::load_shared(scale, own + 8 * i);
        x *= scale[0], y *= scale[1];
    }
};

}  // namespace spattn::sm90
