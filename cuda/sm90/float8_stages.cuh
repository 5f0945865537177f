// SPDX-License-Identifier: MIT
// How blocks of a float8 cache come to shared memory: bytes by TMA, with a block's k the scales of its rows. The walker of
// forward_producer.cuh brings them, for warps that read bytes (forward_float8.cuh) or widen tiles (forward_widener.cuh).
#pragma once

#include "layout/view.h"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "sm90/pipeline.cuh"

namespace spattn::sm90 {

constexpr int stage_row_bytes = 128;  // swizzled as the copy engine writes them; of heads of 64, half of them are zeros

// What rows are scaled by where a call has no scales.
static __device__ const float no_scale = 1;

// What both loaders of the walker have in common.
template <class C>
struct Float8Source {
    const typename C::Params& params;
    const int lane;
    int tokens[C::block_k / 32];  // of a block's keys, of which a lane has every 32nd; no_token where there is none

    __device__ __forceinline__ Float8Source(const typename C::Params& params, int lane) : params(params), lane(lane) {}

    __device__ __forceinline__ void find_tokens(int block) {
        const AxisView& keys = params.layout.keys;
#pragma unroll
        for (int i = 0; i < C::block_k / 32; ++i) {
            const int place = block * C::block_k + 32 * i + lane;
            tokens[i] = keys.listed ? keys.tokens[place] : place < params.layout.seq_k ? place : no_token;
        }
    }

    // Boxes are of tokens that follow each other: the whole block, or the stretches of listed ones. What is no token
    // comes from beyond all rows, where there are zeros.
    __device__ __forceinline__ void load_bytes(const CUtensorMap& map, int entry, int head, uint8_t* to, uint64_t* bar) {
        const AxisView& keys = params.layout.keys;
        const int stretch = keys.listed ? keys.stretch : C::block_k;
#pragma unroll
        for (int i = 0; i < C::block_k / 32; ++i) {
            const int place = 32 * i + lane, row = tokens[i] == no_token ? int(params.layout.seq_k) : tokens[i];
            if (place % stretch == 0)
                ptx::tma_load_4d(to + place * stage_row_bytes, &map, 0, head, row, entry, bar);
        }
    }
    __device__ __forceinline__ void copy_scales(const TensorView& view, int entry, int head, float* to) const {
        const float* row = &no_scale;
        if (view.data) row = static_cast<const float*>(view.data) + entry * view.batch + head * view.head;
        const int64_t stride = view.data ? view.row : 0;
#pragma unroll
        for (int i = 0; i < C::block_k / 32; ++i) {
            const bool is_there = tokens[i] != no_token;
            ptx::cp_async_4(ptx::shared_address(to + 32 * i + lane), row + (is_there ? tokens[i] * stride : 0),
                            is_there ? 4 : 0);
        }
    }
};

// ---- bytes as they are read ----
// A ring of k and v of blocks, in turn.
template <class C>
struct Float8Stages {
    alignas(1024) uint8_t bytes[C::stages][C::block_k * stage_row_bytes];
    float scales[C::scale_blocks][2][C::block_k];  // of k and of v
    int32_t mask[C::stages];                       // of the block whose k lies there
    uint64_t full[C::stages];   // the walker with the bytes, and each of its lanes with scales; consumers wait
    uint64_t empty[C::stages];  // one arrival a consumer warp; the walker waits

    __device__ __forceinline__ void init() {
        for (int i = 0; i < C::stages; ++i)
            ptx::mbarrier_init(&full[i], 1 + 32), ptx::mbarrier_init(&empty[i], C::consumers);
    }
};

// The walker's side. The place of a block's scales is free: it was used so many blocks ago that consumers have released
// the v of that block, or there would be no stage for this k.
template <class C>
struct ByteLoader : Float8Source<C> {
    using Source = Float8Source<C>;
    using Source::params, Source::lane;
    static_assert(2 * C::scale_blocks > C::stages, "k of block j is the tile 2 j, v the one behind it");

    typename C::Shared& shared;
    Cursor<C::stages> stage{};
    Cursor<C::scale_blocks> scales{};

    __device__ __forceinline__ ByteLoader(const typename C::Params& params, typename C::Shared& shared, int lane)
        : Source(params, lane), shared(shared) {}

    __device__ __forceinline__ void load_block(int block, int mask, int entry, int head) {
        this->find_tokens(block);
        load(params.maps.k, mask, entry, head);
        this->copy_scales(params.k_scales, entry, head, shared.helper.scales[scales.index][0]);
        this->copy_scales(params.v_scales, entry, head, shared.helper.scales[scales.index][1]);
        end_load();
        load(params.maps.v, full_block, entry, head);
        end_load();
        scales.advance();
    }

private:
    __device__ __forceinline__ void load(const CUtensorMap& map, int mask, int entry, int head) {
        uint64_t* const full = &shared.helper.full[stage.index];
        ptx::mbarrier_wait(&shared.helper.empty[stage.index], stage.phase ^ 1);
        if (ptx::elect()) {
            shared.helper.mask[stage.index] = mask;
            ptx::mbarrier_arrive_expect(full, C::block_k * stage_row_bytes);
        }
        __syncwarp();  // what is expected is known before it comes
        this->load_bytes(map, entry, head, shared.helper.bytes[stage.index], full);
    }
    __device__ __forceinline__ void end_load() {
        ptx::cp_async_arrive(&shared.helper.full[stage.index]);
        stage.advance();
    }
};

}  // namespace spattn::sm90
