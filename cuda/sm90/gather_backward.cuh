// SPDX-License-Identifier: MIT
//
//     s = q kT,  p = exp2(scale_log2 s - lse),  dp = dout vT,  ds = p (dp - delta)
//     dq += ds k,  dk += dsT q,  dv += pT dout
//
// over lists of keys that the heads of a group share: 64 query rows meet the keys of their list 64 at a time, as in
// gather_forward.cuh. lse and delta of the rows come from any's kernel before.
//
//   grid      one CTA an SM, persistent; tasks in turn, tiles of a list side by side, so that L2 has its keys
//   producer  one warpgroup finds keys in the list and copies their rows into a ring of tiles; q and dout of a task
//             come once
//   weights   the first warpgroup makes p of a block of keys, the second dp and, with the p that it reads, ds. Both go
//             through shared memory, where all products find them
//   products  every warpgroup has some columns of dq, whose sums stay in registers, and some of dk and dv. Of 576
//             columns there are three warpgroups and room for one tile of keys: keys are free when dq has met them, and
//             the next ones come while dk and dv are made
//   dk, dv    are sums of what many tasks make: they go to memory from registers, 64 columns at a time, and are added
//             there in the order of arrival. Memory takes them as floats, which a kernel before clears and one after
//             turns into elements. Where values are columns of keys, a key's two gradients are one sum
//   bits      that are the same in every call, where a plan asks for them, come of integers (any/key_sums.cuh). The
//             kernel then runs twice: at first it makes p and ds alone, and bounds of what each key's sums will be
//             told to add: what p and ds are, times the largest element of dout or q of their rows
//   isolation what a list does not name is not read; absent keys are rows of zeros whose p and ds are 0
//
// That a warpgroup makes ds from p in shared memory, and that there is but one tile of keys, follows from room: q, dout
// and keys of 576 columns take 208 of 227 KiB.
//
// What binds: L2. A block of 64 keys of 576 columns is 5504 cycles of the tensor unit, and takes about 13,000: L2 gives
// 72 KiB of keys and adds 144 KiB of floats, whose limit is 3.8 TB/s. Without the additions a block takes 10,000. Lists
// that name more keys than L2 has room for sums are slower still, less so since sums stay there before all else: 341,
// 329 and 293 became 372, 359 and 313. Two CTAs that have half of the columns of 128 heads each halve both:
// gather_backward_pair.cuh, which plans take for such groups in bf16.
//
// Measured (H200, bf16, L2 cold, TFLOP/s of 5 heads queries list (head_dim + head_dim_v), 2026-11, GEMM 782 in the
// same run): 128 heads, 576/512, lists of 2,048 among 16K keys 387, among 32K 372, among 128K 359; 64 heads 313; lists
// of 512 among 4K 327; 16 heads of 128 64, 64 heads of 128 251, of 256 250. With the same bits in every call, in a run
// of their own (GEMM 784), in that order: 197, 192, 190; 180; 173; 30, 117, 142.
//
// Tried and dropped (128 heads, 16K, in other runs, which waver by 1 %): additions of rows of 32 bytes, as accumulators
// lie (301); panels of keys that come and go in threes, so that scores begin with the first (381); most of dk and dv by
// the warpgroup that makes neither p nor ds (371 to 381); keys of the next block brought into L2 ahead (365);
// q, dout and the list of the next task brought there by the warpgroup that makes neither p nor ds (384 where 386 were
// reached).
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "any/block_backward.h"
#include "any/key_gradients.h"
#include "any/key_sums.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "runtime/launch.h"
#include "sm90/float_rows.cuh"
#include "sm90/gather_backward.h"
#include "sm90/gather_bounds.cuh"
#include "sm90/gather_gradient.cuh"
#include "sm90/gather_rows.cuh"
#include "sm90/pipeline.cuh"
#include "tile/fragment.h"
#include "tile/lift.cuh"
#include "tile/quad.cuh"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

using any::Adding, any::IntegerRows;

// ---- configuration ----
template <Dtype D, int HeadDim, int HeadDimV>
struct GatherGradientConfig : TileConfig<D, HeadDim, HeadDimV> {
    using Base = TileConfig<D, HeadDim, HeadDimV>;
    using Base::panels, Base::v_panels;
    static constexpr bool value_in_key = HeadDim > 256;
    static constexpr int warpgroups = value_in_key ? 3 : 2;  // that make products
    static constexpr int warps = 4 * warpgroups, threads = 128 * (warpgroups + 1);
    static constexpr int panel_bytes = gather_panel_bytes, panel_step = panel_bytes / 16;  // of descriptors
    static constexpr int key_panels = panels + (value_in_key ? 0 : v_panels);             // of a tile of the ring
    static constexpr int dq_panels = (panels + warpgroups - 1) / warpgroups;              // of a warpgroup, at most
    static constexpr int most_bytes = 227 * 1024, barrier_bytes = 3072;
    static constexpr int fitting = ((most_bytes - barrier_bytes) / panel_bytes - panels - v_panels - 2) / key_panels;
    static constexpr int stages = std::min(fitting, 4);
    static constexpr int producer_registers = value_in_key ? 32 : 40, consumer_registers = value_in_key ? 160 : 232;
    static_assert(!value_in_key || panels == v_panels + 1, "the last panel of keys has no values");
    static_assert(stages >= 1, "a tile has room");
    static_assert(producer_registers + warpgroups * consumer_registers <= launch_registers(threads, 1),
                  "roles share what the launch gives");
};

// ---- shared memory ----
template <class C>
struct GatherGradientShared {
    uint8_t q[C::panels][C::panel_bytes];
    uint8_t dout[C::v_panels][C::panel_bytes];
    uint8_t keys[C::stages][C::key_panels][C::panel_bytes];  // and their values
    uint8_t p[C::panel_bytes], ds[C::panel_bytes];           // ds: with a softcap it first holds p times its slope
    int32_t key[C::stages][gather_tile];                     // which key a row is, or no_token
    uint64_t there[C::stages];                               // a bit for each row that is one
    tile::SharedLift lift;                                   // of ds in fp16
    GatherTask task;
    uint64_t rows_full, rows_empty;  // of q, dout and the task: every producer and a warp's; a warp of products
    uint64_t keys_full[C::stages], keys_empty[C::stages];  // likewise
    uint64_t p_full, ds_full;                              // a warp that makes them
    uint64_t weights_empty;                                // of p and ds: a warp of products
};

// ---- producers ----
template <class C>
struct GatherGradientProducer {
    using Element = typename C::Element;

    const GatherBackwardParams& params;
    GatherGradientShared<C>& shared;
    Cursor<C::stages> slot;
    uint32_t rows_phase = 0;

    __device__ __forceinline__ void run() {
        for (int at = int(blockIdx.x); at < params.rows.tasks; at += int(gridDim.x)) {
            GatherTask task = GatherTask::at(params.rows, params.lists, at);
            ListWalk walk(params.lists);
            task.blocks = walk.begin(task);
            // The first keys go ahead: there is room for them before q and dout of the task before are done with.
            if (task.blocks > 0) load(walk);
            announce(task);
#pragma unroll 1
            for (int left = task.blocks - 1; left > 0; --left) load(walk);
        }
        announce({0, 0, 0, 0, end_of_work});
    }

    __device__ __forceinline__ void announce(const GatherTask& task) {
        ptx::mbarrier_wait(&shared.rows_empty, rows_phase ^ 1);
        if (threadIdx.x % 128 == 0) shared.task = task;
        if (task.blocks > 0) {
            copy<C::panels>(task, params.q, params.head_dim, shared.q);
            copy<C::v_panels>(task, params.dout, params.head_dim_v, shared.dout);
        }
        __syncwarp();  // the task is there before lane 0 tells of it
        if (CopyWarp::lane() == 0) ptx::mbarrier_arrive(&shared.rows_full);
        ptx::cp_async_arrive(&shared.rows_full);
        rows_phase ^= 1;
    }

    // Rows beyond the last become zeros, and so does what they would add to dk and dv.
    template <int Panels>
    __device__ __forceinline__ void copy(const GatherTask& task, const TensorView& x, int columns, const void* tile) {
        const auto row = [&](int i) {
            const TileRow at(params.rows, params.lists, task, CopyWarp::first_row() + 4 * i + CopyWarp::lane() / 8);
            return SourceRow<Element>{any::row_of<Element>(x, task.batch, at.head, at.query), at.is_there};
        };
        copy_tile<Panels>(row, columns, 0, tile);
    }

    __device__ __forceinline__ void load(ListWalk<>& walk) {
        const uint32_t there = walk.take();
        ptx::mbarrier_wait(&shared.keys_empty[slot.index], slot.phase ^ 1);
        const int lane = CopyWarp::lane(), first = CopyWarp::first_row();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (lane % 8 == 0) shared.key[slot.index][first + 4 * i + lane / 8] = walk.keys[i];
        if (lane == 0) reinterpret_cast<uint16_t*>(&shared.there[slot.index])[first / 16] = uint16_t(there);
        __syncwarp();  // keys are there before lane 0 tells of them
        if (lane == 0) ptx::mbarrier_arrive(&shared.keys_full[slot.index]);
        auto& tile = shared.keys[slot.index];
        copy_rows<C::panels>(walk.keys, any::row_of<Element>(params.k, walk.batch, walk.head_kv, 0), params.k.row,
                             params.head_dim, 0, tile);
        if constexpr (!C::value_in_key)
            copy_rows<C::v_panels>(walk.keys, any::row_of<Element>(params.v, walk.batch, walk.head_kv, 0), params.v.row,
                                   params.head_dim_v, 0, tile[C::panels]);
        ptx::cp_async_arrive(&shared.keys_full[slot.index]);
        slot.advance();
    }
};

// ---- products: what warpgroup Part does ----
// HasCap: with a softcap.
template <class C, Adding A, bool HasCap, int Part>
struct GatherGradients {
    using Element = typename C::Element;
    static constexpr bool finds_bounds = A == Adding::bounds;
    using Rows = std::conditional_t<A == Adding::integers, IntegerRows, FloatRows>;
    static constexpr bool makes_p = Part == 0, makes_ds = Part == 1;
    static constexpr int first_panel = Part * C::dq_panels;  // of dq
    static constexpr int own_panels = finds_bounds ? 0 : std::max(std::min(C::panels - first_panel, C::dq_panels), 0);
    // Where values stand apart the first warpgroup makes dv, while the second makes ds, and that one dk.
    static constexpr bool makes_dk = C::value_in_key || makes_ds, makes_dv = C::value_in_key || makes_p;
    // p and ds are lifted above their own size, by factors that the sums lose at their end.
    static constexpr float p_unlift = tile::unlift<C::dtype>, ds_unlift = tile::ds_unlift<C::dtype>;
    static constexpr bool is_f16 = C::dtype == Dtype::f16;
    static constexpr float dp_factor = p_unlift * tile::ds_lift<C::dtype>;

    const GatherBackwardParams& params;
    GatherGradientShared<C>& shared;
    const int thread;  // of the warpgroup
    Cursor<C::stages> slot;
    uint32_t phase = 0;  // of p and ds
    GatherTask task;
    float of_row[2];          // of this thread's rows, what p is relative to, or delta
    float lift = 1, dq_lift;  // of fp16: what is left of the lift of ds, and that of dq's sums
    float largest[2];         // of bounds: the largest column of dout or q of these rows
    float dq[own_panels > 0 ? own_panels * 32 : 1];

    __device__ __forceinline__ bool is_first_lane() const { return thread % 32 == 0; }
    __device__ __forceinline__ static auto tag() { return tile::MatrixTag<C::dtype>{}; }

    __device__ __forceinline__ void run() {
        for (uint32_t rows_phase = 0;; rows_phase ^= 1) {
            ptx::mbarrier_wait(&shared.rows_full, rows_phase);
            ptx::fence_async_shared();
            task = shared.task;
            if (task.blocks == end_of_work) return;
            if constexpr (makes_p || makes_ds) read_rows();
            if constexpr (finds_bounds && makes_p) find_largest<C::v_panels>(shared.dout);
            if constexpr (finds_bounds && makes_ds) find_largest<C::panels>(shared.q);
            lift = dq_lift = 1;
            if (task.blocks == 0) {
#pragma unroll
                for (float& x : dq) x = 0;
                release(&shared.rows_empty);
            }
#pragma unroll 1
            for (int n = 0; n < task.blocks; ++n) block(n > 0, n == task.blocks - 1);
            if constexpr (own_panels > 0) store();
        }
    }

    // This warp's arrival, when all its lanes are done.
    __device__ __forceinline__ void release(uint64_t* bar) {
        __syncwarp();
        if (is_first_lane()) ptx::mbarrier_arrive(bar);
    }

    __device__ __forceinline__ void read_rows() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const TileRow row(params.rows, params.lists, task, tile::fragment_row(thread, 2 * h));
            const int64_t at = (int64_t(task.batch) * params.lists.heads_q + row.head) * params.lists.seq_q + row.query;
            if constexpr (makes_p) {
                // A row without a key has lse = -infinity, and an infinite offset would make NaN of its masked scores.
                const float lse = params.lse[at];
                const float offset = lse == -INFINITY ? FLT_MAX : tile::lift<C::dtype> - lse * float(M_LOG2E);
                of_row[h] = row.is_there ? offset : -INFINITY;
            } else {
                of_row[h] = row.is_there ? params.delta[at] * dp_factor : 0;
            }
        }
    }

    __device__ __forceinline__ void block(bool accumulates, bool is_last) {
        ptx::mbarrier_wait(&shared.keys_full[slot.index], slot.phase);
        ptx::fence_async_shared();
        const uint32_t tile = ptx::wgmma_descriptor(shared.keys[slot.index], C::panel_bytes);
        if constexpr (makes_p) make_p(tile);
        if constexpr (makes_ds) make_ds(tile + (C::value_in_key ? 0 : C::panels * C::panel_step));
        if constexpr (finds_bounds) {
            release(&shared.keys_empty[slot.index]);
            end_block(is_last);
        } else {
            add_products(tile, accumulates, is_last);
        }
        slot.advance();
        phase ^= 1;
    }

    __device__ __forceinline__ void add_products(uint32_t tile, bool accumulates, bool is_last) {
        const Rows rows = rows_of_tile(makes_dk ? params.dk : params.dv);
        if constexpr (!makes_ds) ptx::mbarrier_wait(&shared.p_full, phase);
        if constexpr (makes_dv && !C::value_in_key) add_dv(rows);
        ptx::mbarrier_wait(&shared.ds_full, phase);
        if constexpr (is_f16) follow_lift();
        const uint32_t ds = ptx::wgmma_descriptor(shared.ds, 0);
        ptx::wgmma_fence();
        if constexpr (own_panels > 0) {
#pragma unroll
            for (int i = 0; i < gather_tile / 16; ++i)
                ptx::wgmma_transposed_b(dq, ds + i * 2, tile + first_panel * C::panel_step + i * 128,
                                        i > 0 || accumulates, tag());
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
        }
        release(&shared.keys_empty[slot.index]);
        if constexpr (makes_dk)
            add_dk(rows, is_last);
        else
            end_block(is_last);
    }

    __device__ __forceinline__ int64_t plane() const {
        return int64_t(task.batch) * params.lists.heads_kv + task.head_kv;
    }
    // The rows of a tile of dk or dv for which this warp stands.
    __device__ __forceinline__ Rows rows_of_tile(const KeySums& to) const {
        if constexpr (A == Adding::integers)
            return {shared.key[slot.index], to.quanta + plane() * params.lists.seq_k, thread};
        else
            return {shared.key[slot.index], thread};
    }

    // All that this block's products read but keys is free.
    __device__ __forceinline__ void end_block(bool is_last) {
        release(&shared.weights_empty);
        if (is_last) release(&shared.rows_empty);
    }

    // Scores or dp: products of two tiles whose columns both run along k.
    template <int Panels>
    __device__ __forceinline__ void multiply(float (&s)[32], const void* rows, uint32_t keys) {
        const uint32_t a = ptx::wgmma_descriptor(rows, 0);
        ptx::wgmma_fence();
#pragma unroll
        for (int panel = 0; panel < Panels; ++panel)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                ptx::wgmma(s, a + panel * C::panel_step + i * 2, keys + panel * C::panel_step + i * 2,
                           panel > 0 || i > 0, tag());
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
    }

    // Which keys of the block there are, and whether some is absent.
    __device__ __forceinline__ bool take_keys(uint32_t (&keys)[2]) const {
        const uint64_t all = shared.there[slot.index];
        keys[0] = uint32_t(all), keys[1] = uint32_t(all >> 32);
        return (keys[0] & keys[1]) != ~0u;
    }

    __device__ __forceinline__ void make_p(uint32_t tile) {
        float s[32], weight[HasCap ? 32 : 1];
        multiply<C::panels>(s, shared.q, tile);
        if constexpr (HasCap) {
            tile::cap(s, params.into_cap);
#pragma unroll
            for (int i = 0; i < 32; ++i) weight[i] = 1 - s[i] * s[i];
        }
#pragma unroll
        for (int i = 0; i < 32; ++i)
            s[i] = ptx::exp2_approx(fmaf(s[i], params.scale_log2, of_row[tile::row_of(i)]));
        uint32_t keys[2];
        if (take_keys(keys)) [[unlikely]] {
#pragma unroll
            for (int i = 0; i < 32; ++i) ptx::zero_unless(s[i], has_key(keys, thread, i));
        }
        ptx::mbarrier_wait(&shared.weights_empty, phase ^ 1);
        if constexpr (finds_bounds) add_bounds(s, p_unlift, params.dv);
        put(s, shared.p);
        if constexpr (HasCap) {
#pragma unroll
            for (int i = 0; i < 32; ++i) weight[i] *= s[i];
            put(weight, shared.ds);
        }
        ptx::fence_async_shared();
        release(&shared.p_full);
    }

    __device__ __forceinline__ void put(const float (&x)[32], const void* to) {
        uint32_t words[4][4];
        tile::pack_tile<C::dtype>(x, words);
        tile::store_swizzled(words, ptx::shared_address(to), C::panel_bytes, thread);
    }

    __device__ __forceinline__ void make_ds(uint32_t tile) {
        float ds[32];
        multiply<C::v_panels>(ds, shared.dout, tile);
        ptx::mbarrier_wait(&shared.p_full, phase);
        const int row = 16 * (thread / 32) + thread % 16;
        const uint32_t from = ptx::shared_address(HasCap ? shared.ds : shared.p) + row * 128;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            uint32_t words[4];
            ptx::load_matrix_x4(words, from + ((32 * c + 16 * (thread / 16 % 2)) ^ (row % 8 << 4)));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& x = ds[8 * c + i];
                x = tile::unpack<C::dtype>(words[i / 2], i % 2) * fmaf(x, dp_factor, -of_row[tile::row_of(i)]);
            }
        }
        uint32_t keys[2];
        if (take_keys(keys)) [[unlikely]] {
#pragma unroll
            for (int i = 0; i < 32; ++i) ptx::zero_unless(ds[i], has_key(keys, thread, i));
        }
        if constexpr (is_f16) tile::fit(ds, lift, shared.lift, thread);
        if constexpr (finds_bounds) {
            add_bounds(ds, dk_factor(), params.dk);
        } else {
            put(ds, shared.ds);
            ptx::fence_async_shared();
            release(&shared.ds_full);
        }
    }

    // ---- bounds ----
    // Chunks of 16 bytes stand in another order in each row: the largest knows none.
    template <int Panels>
    __device__ __forceinline__ void find_largest(const void* tile) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile::fragment_row(thread, 2 * h);
            uint32_t most = 0;
#pragma unroll
            for (int i = 0; i < 2 * Panels; ++i) {
                const int chunk = thread % 4 + (i + thread / 4) % 2 * 4;
                uint32_t words[4];
                ptx::load_shared(words, ptx::shared_address(tile) + i / 2 * C::panel_bytes + row * 128 + chunk * 16);
                for (uint32_t word : words) raise(most, word);
            }
            largest[h] = largest_of_quad<C::dtype>(most);
        }
    }

    __device__ __forceinline__ void add_bounds(const float (&x)[32], float factor, const KeySums& to) const {
        uint64_t* const bounds = to.bounds + plane() * params.lists.seq_k * any::bound_words;
        sm90::add_bounds<C::dtype>(x, factor, largest, shared.key[slot.index], bounds, thread);
    }

    // What ds is multiplied by on its way to dk.
    __device__ __forceinline__ float dk_factor() const { return params.scale * (ds_unlift / lift); }

    __device__ __forceinline__ void follow_lift() {
        lift = shared.lift.lift;
        if (lift == dq_lift) return;
#pragma unroll
        for (float& x : dq) x *= lift / dq_lift;
        dq_lift = lift;
    }

    // One panel of pT dout or dsT q, begun.
    __device__ __forceinline__ void multiply_transposed(float (&sums)[32], const void* weights, const void* rows,
                                                        int panel, bool accumulates) {
        const uint32_t a = ptx::wgmma_descriptor(weights, 0);
        const uint32_t b = ptx::wgmma_descriptor(rows, C::panel_bytes) + panel * C::panel_step;
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < gather_tile / 16; ++i)
            ptx::wgmma_transposed(sums, a + i * 128, b + i * 128, i > 0 || accumulates, tag());
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void add_dv(const Rows& rows) {
#pragma unroll
        for (int panel = 0; panel < C::v_panels; ++panel) {
            float sums[32];
            multiply_transposed(sums, shared.p, shared.dout, panel, false);
            ptx::wgmma_wait<0>();
            add(rows, sums, p_unlift, params.dv, panel, params.head_dim_v);
        }
    }

    // Also ends the block.
    __device__ __forceinline__ void add_dk(const Rows& rows, bool is_last) {
        constexpr int first = C::value_in_key ? first_panel : 0, end = C::value_in_key ? first + own_panels : C::panels;
#pragma unroll
        for (int panel = first; panel < end; ++panel) {
            float sums[32];
            multiply_transposed(sums, shared.ds, shared.q, panel, false);
            ptx::wgmma_wait<0>();
            float factor = dk_factor();
            if (C::value_in_key && panel < C::v_panels) {
#pragma unroll
                for (float& x : sums) x *= factor / p_unlift;
                factor = p_unlift;
                multiply_transposed(sums, shared.p, shared.dout, panel, true);
                ptx::wgmma_wait<0>();
            }
            if (panel == end - 1) end_block(is_last);
            add(rows, sums, factor, params.dk, panel, params.head_dim);
        }
    }

    __device__ __forceinline__ void add(const Rows& rows, const float (&x)[32], float factor, const KeySums& to,
                                        int panel, int columns) {
        float* const sums = to.sums + plane() * params.lists.seq_k * to.columns;
        rows.add(x, factor, sums, to.columns, 64 * panel, columns, thread);
    }

    __device__ __forceinline__ void store() {
        const float factor = params.scale * (ds_unlift / dq_lift);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const TileRow row(params.rows, params.lists, task, tile::fragment_row(thread, 2 * h));
            Element* const to = any::row_of<Element>(params.dq, task.batch, row.head, row.query);
            // Where integers are added, registers that the quad's exchange needs would be spilled (2 % slower).
            if constexpr (A == Adding::integers)
                store_pairs(row.is_there ? to : nullptr, h, factor);
            else
                store_chunks(row.is_there ? to : nullptr, h, factor);
        }
    }

    // Row `half` of dq, or nothing: two columns at a time as they lie in registers, or the eight of which a quad gives
    // each lane its own. Numbers of columns are multiples of 8.
    __device__ __forceinline__ void store_pairs(Element* to, int half, float factor) const {
#pragma unroll
        for (int i = 2 * half; i < own_panels * 32; i += 4) {
            const int column = 64 * first_panel + tile::fragment_column(thread, i);
            if (to && column < params.head_dim)
                *reinterpret_cast<uint32_t*>(to + column) = tile::pack<C::dtype>(dq[i] * factor, dq[i + 1] * factor);
        }
    }
    __device__ __forceinline__ void store_chunks(Element* to, int half, float factor) const {
#pragma unroll
        for (int i = 0; i < own_panels * 32; i += 16) {
            uint32_t words[4];
            tile::pack_row<C::dtype>(dq, i, half, factor, thread, words);
            const int column = 64 * first_panel + 2 * i + 8 * (thread % 4);
            if (to && column < params.head_dim)
                *reinterpret_cast<uint4*>(to + column) = {words[0], words[1], words[2], words[3]};
        }
    }
};

// ---- kernel ----
template <class C, Adding A, bool HasCap>
__global__ void __launch_bounds__(C::threads, 1)
    gather_backward_kernel(const __grid_constant__ GatherBackwardParams params) {
    GatherGradientShared<C>& shared = *ptx::swizzled_shared<GatherGradientShared<C>>();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&shared.rows_full, gather_producers + gather_producers / 32);
        ptx::mbarrier_init(&shared.rows_empty, C::warps);
        for (int i = 0; i < C::stages; ++i) {
            ptx::mbarrier_init(&shared.keys_full[i], gather_producers + gather_producers / 32);
            ptx::mbarrier_init(&shared.keys_empty[i], C::warps);
        }
        ptx::mbarrier_init(&shared.p_full, 4);
        ptx::mbarrier_init(&shared.ds_full, 4);
        ptx::mbarrier_init(&shared.weights_empty, C::warps);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const int warpgroup =
        __shfl_sync(~0u, threadIdx.x / 128, 0);  // a shuffle, so that the compiler sees one value a warp
    const int thread = int(threadIdx.x % 128);
    if (warpgroup == C::warpgroups) {
        ptx::give_registers<C::producer_registers>();
        GatherGradientProducer<C>{params, shared}.run();
        return;
    }
    ptx::take_registers<C::consumer_registers>();
    if (warpgroup == 0)
        GatherGradients<C, A, HasCap, 0>{params, shared, thread}.run();
    else if (C::warpgroups == 2 || warpgroup == 1)
        GatherGradients<C, A, HasCap, 1>{params, shared, thread}.run();
    else
        GatherGradients<C, A, HasCap, 2>{params, shared, thread}.run();
}

// ---- launch ----
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherBackward<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs& args) {
    static_assert(BlockQ == gather_tile && BlockK == gather_tile, "tiles of 64 rows and 64 keys");
    using C = GatherGradientConfig<D, HeadDim, HeadDimV>;
    const GatherBackwardParams params = make_gather_backward_params(args, gather_tile);
    const int64_t ctas = std::min(params.rows.tasks, int64_t(runtime::count_processors(args.device)));
    make_gradients<D>(args, [&](auto adding) {
        constexpr Adding A = decltype(adding)::value;
        const bool has_cap = args.problem->softcap != 0;
        const auto kernel = has_cap ? gather_backward_kernel<C, A, true> : gather_backward_kernel<C, A, false>;
        runtime::launch(kernel, {unsigned(ctas), unsigned(C::threads), sizeof(GatherGradientShared<C>)}, args.stream,
                        params);
    });
}

template <class C, Adding A>
void prepare_products() {
    runtime::prepare(gather_backward_kernel<C, A, false>, sizeof(GatherGradientShared<C>));
    runtime::prepare(gather_backward_kernel<C, A, true>, sizeof(GatherGradientShared<C>));
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherBackward<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    using C = GatherGradientConfig<D, HeadDim, HeadDimV>;
    any::BlockBackward<D>::prepare(device);
    any::KeyGradients<D>::prepare(device);
    const runtime::CurrentDevice current(device);
    static_assert(sizeof(GatherGradientShared<C>) <= C::most_bytes, "a CTA has no more");
    prepare_products<C, Adding::floats>();
    prepare_products<C, Adding::bounds>();
    prepare_products<C, Adding::integers>();
}

}  // namespace spattn::sm90
