// SPDX-License-Identifier: MIT
//
//     s = q kT,  p = exp2(scale_log2 s - lse),  dp = dout vT,  ds = scale p (dp - delta)
//     dq += ds k,  dk += dsT q,  dv += pT dout
//
// over lists of keys that the heads of a group share, as in gather_backward.cuh, with 128 query rows a tile, which two
// CTAs of a cluster share: each has half of the columns of q, dout and keys. A key's row then comes from L2 once for
// 128 rows, and once for them its gradient goes there. L2 is what binds tiles of 64 rows.
//
//   columns   values are the first columns of keys. Of 576 a CTA has 256 that are values, too, and 32 that are not
//   scores    of its columns a CTA makes parts of scores and of dp, for all 128 rows. It finishes half of the rows:
//             the other CTA's parts of them come to its shared memory, and p and ds of them go to both
//   producer  one warpgroup copies q and dout of a task and rows of listed keys, of the CTA's own columns
//   products  the first warpgroup makes p of the CTA's rows, the second the other CTA's parts of dp, the third those of
//             scores, and then ds. Of dq, dk and dv each has 96 of the CTA's columns: a panel, and half of one
//   scale     is in ds, so that sums of dv go on as sums of dk: a key's two gradients are one
//   bits      that are the same in every call, as in gather_backward.cuh
//
// What binds: one thing after the other. A block of 64 keys takes 12,000 cycles (H100, traced): scores 1,750, until all
// have p and ds 3,900 more, dq 1,000, and dk and dv, whose products wait while sums go to memory, 5,300. All products
// are 5,504 of them. CTAs exchange 48 KiB a block each way at some 16 bytes a cycle, which nothing hides: shared memory
// has no room for the keys of a second block, nor have registers beside dq for sums that go to memory later.
//
// Measured beside tiles of 64 rows (H200, bf16, L2 cold, TFLOP/s, 2026-11): 128 heads, 576/512, lists of 2,048 among
// 16K keys 417 (388), among 128K 411 (360); lists of 512 among 4K 334 (328). On an H100, whose L2 is smaller, 416
// (348), 368 (260) and 323 (301); with the same bits in every call 235 (186) among 16K and 220 (178) among 128K; 64
// heads, for which half of a tile is empty, 208 (227).
//
// Tried and dropped (16K keys; H100, where 416 were reached): the third warpgroup making parts of scores and of dp one
// after the other (388); parts of dp sent after those of scores (405); rows of a tile found without divisions (403:
// more is spilled). Whatever lets additions run beside other work makes all of it slower: warpgroups that take dq, dk
// and dv in different orders (371 and 407), a half panel added under the next block's scores (371), products of the
// half panel begun between additions of the whole one (H200, where 417 were reached: 401), dq and dk begun before
// either is added (394). Parts of scores sent by the copy engine, from where p will be (H200: 409).
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "any/block_backward.h"
#include "any/key_gradients.h"
#include "any/key_sums.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "runtime/launch.h"
#include "sm90/float_rows.cuh"
#include "sm90/gather_backward_pair.h"
#include "sm90/gather_bounds.cuh"
#include "sm90/gather_gradient.cuh"
#include "sm90/gather_rows.cuh"
#include "sm90/pipeline.cuh"
#include "tile/fragment.h"
#include "tile/quad.cuh"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

using any::Adding, any::IntegerRows;

// ---- configuration ----
template <Dtype D, int HeadDim, int HeadDimV>
struct GatherPairConfig : TileConfig<D, HeadDim, HeadDimV> {
    using Base = TileConfig<D, HeadDim, HeadDimV>;
    static constexpr int ctas = 2, rows = 2 * gather_tile;      // of a cluster; of a tile, of which a CTA finishes half
    static constexpr int panels = Base::v_panels / ctas;        // of a CTA, whose columns are values, too
    static constexpr int last_columns = (HeadDim - HeadDimV) / ctas;  // of a CTA, that are not
    static constexpr int warpgroups = 3, warps = 4 * warpgroups, threads = 128 * (warpgroups + 1);
    static constexpr int panel_bytes = gather_panel_bytes, panel_step = panel_bytes / 16;  // of descriptors
    static constexpr int half_step = 64 / 16;  // from a panel's first 32 columns to the others
    static constexpr int most_bytes = 227 * 1024;
    static constexpr int producer_registers = 32, consumer_registers = 160;
    static_assert(panels == 4 && last_columns == 32, "three warpgroups have a panel and a half each");
    static_assert(D == Dtype::bf16, "p and ds need no lift");
    static_assert(producer_registers + warpgroups * consumer_registers <= launch_registers(threads, 1),
                  "roles share what the launch gives");
};

// ---- shared memory ----
template <class C>
struct GatherPairShared {
    uint8_t q[C::panels][2][C::panel_bytes];  // of either half of the rows
    uint8_t q_last[C::panel_bytes];           // its last columns, those of either half of the rows side by side
    uint8_t dout[C::panels][2][C::panel_bytes];
    uint8_t keys[C::panels + 1][C::panel_bytes];  // the last panel has but 32 columns
    uint8_t p[2][C::panel_bytes], ds[2][C::panel_bytes];
    float parts[gather_tile * gather_tile];  // of scores, from the other CTA, as its accumulators lie; of dp: in ds
    int32_t key[gather_tile];                // which key a row is, or no_token
    uint64_t there;                          // a bit for each row that is one
    GatherTask task;
    uint64_t rows_full, rows_empty;  // of q, dout and the task: every producer and a warp's; a warp of products
    uint64_t keys_full, keys_empty;  // likewise
    uint64_t scores_full, dp_full;   // the bytes of parts
    uint64_t scores_read, dp_read;   // of the parts that the other CTA has got: its warps that read them
    uint64_t own_p_full;             // a warp that makes them
    uint64_t p_full, ds_full;        // likewise, and the bytes of the other CTA's
    uint64_t weights_empty;          // of p and ds of both CTAs: a warp of products of either
};

// ---- producers ----
template <class C>
struct GatherPairProducer {
    using Element = typename C::Element;

    const GatherBackwardParams& params;
    GatherPairShared<C>& shared;
    const int rank;
    uint32_t keys_phase = 0, rows_phase = 0;

    __device__ __forceinline__ void run() {
        for (int at = int(blockIdx.x) / C::ctas; at < params.rows.tasks; at += int(gridDim.x) / C::ctas) {
            GatherTask task = GatherTask::at<C::rows>(params.rows, params.lists, at);
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
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                copy(rows_of(task, params.q, half), params.head_dim, shared.q[0][half]);
                copy_last(rows_of(task, params.q, half), shared.q_last, half);
                copy(rows_of(task, params.dout, half), params.head_dim_v, shared.dout[0][half]);
            }
        }
        __syncwarp();  // the task is there before lane 0 tells of it
        if (CopyWarp::lane() == 0) ptx::mbarrier_arrive(&shared.rows_full);
        ptx::cp_async_arrive(&shared.rows_full);
        rows_phase ^= 1;
    }

    // Rows beyond the last become zeros, and so does what they would add to dk and dv.
    __device__ __forceinline__ auto rows_of(const GatherTask& task, const TensorView& x, int half) const {
        return [&task, &x, half, this](int i) {
            const int in_tile = gather_tile * half + CopyWarp::first_row() + 4 * i + CopyWarp::lane() / 8;
            const TileRow at(params.rows, params.lists, task, in_tile);
            return SourceRow<Element>{any::row_of<Element>(x, task.batch, at.head, at.query), at.is_there};
        };
    }

    template <class Row>
    __device__ __forceinline__ void copy(Row row, int columns, const void* tile) const {
        copy_tile<C::panels, 2 * C::panel_bytes>(row, columns, C::panels * rank, tile);
    }

    // The columns that are no values: four lanes have a row, and the eight that have four rows elsewhere two at a time.
    template <class Row>
    __device__ __forceinline__ void copy_last(Row row, const void* tile, int half) const {
        const int lane = CopyWarp::lane(), chunk = lane % 4;
        const int column = C::head_dim_v + C::last_columns * rank + 8 * chunk;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const bool is_odd = lane & 4;
            const auto even = row(i), odd = row(i + 1);
            const Element* const from = (is_odd ? odd.columns : even.columns) + column;
            const int in_tile = CopyWarp::first_row() + 4 * (i + is_odd) + lane / 8;
            ptx::cp_async_16(ptx::shared_address(tile) + in_tile * 128 + ((4 * half + chunk) ^ in_tile % 8) * 16, from,
                             (is_odd ? odd.is_there : even.is_there) && column < params.head_dim ? 16 : 0);
        }
    }

    __device__ __forceinline__ void load(ListWalk<>& walk) {
        const uint32_t there = walk.take();
        ptx::mbarrier_wait(&shared.keys_empty, keys_phase ^ 1);
        const int lane = CopyWarp::lane(), first = CopyWarp::first_row();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (lane % 8 == 0) shared.key[first + 4 * i + lane / 8] = walk.keys[i];
        if (lane == 0) reinterpret_cast<uint16_t*>(&shared.there)[first / 16] = uint16_t(there);
        __syncwarp();  // keys are there before lane 0 tells of them
        if (lane == 0) ptx::mbarrier_arrive(&shared.keys_full);
        const auto* const rows = any::row_of<Element>(params.k, walk.batch, walk.head_kv, 0);
        const auto row = [&](int i) {
            return SourceRow<Element>{rows + walk.keys[i] * params.k.row, walk.keys[i] != no_token};
        };
        copy_tile<C::panels>(row, params.head_dim, C::panels * rank, shared.keys);
        copy_last(row, shared.keys[C::panels], 0);
        ptx::cp_async_arrive(&shared.keys_full);
        keys_phase ^= 1;
    }
};

// ---- products: what warpgroup Part does ----
template <class C, Adding A, int Part>
struct GatherPairGradients {
    using Element = typename C::Element;
    static constexpr bool finds_bounds = A == Adding::bounds;
    using Rows = std::conditional_t<A == Adding::integers, IntegerRows, FloatRows>;
    static constexpr bool makes_p = Part == 0, makes_ds = Part == 2;
    // A warpgroup has a panel of the CTA's columns and 32 of another: the third panel is halved, and so is the last.
    static constexpr int own_panel = Part == 2 ? 3 : Part, halved_panel = Part == 2 ? 4 : 2;
    static constexpr int half_at = Part == 1 ? C::half_step : 0;
    static constexpr bool half_has_values = halved_panel < C::panels;

    const GatherBackwardParams& params;
    GatherPairShared<C>& shared;
    const int thread;  // of the warpgroup
    const int rank;
    uint32_t phase = 0;  // of a block's barriers
    GatherTask task;
    float of_row[2];  // of this thread's rows, what p is relative to, or scale delta
    float largest[2];  // of bounds: the largest column of dout or q of these rows
    float dq[2][48];   // of either half of the rows

    __device__ __forceinline__ bool is_first_lane() const { return thread % 32 == 0; }
    __device__ __forceinline__ static auto tag() { return tile::MatrixTag<C::dtype>{}; }
    __device__ __forceinline__ uint32_t of_other(const void* shared) const {
        return ptx::cluster_address(shared, rank ^ 1);
    }

    __device__ __forceinline__ void run() {
        for (uint32_t rows_phase = 0;; rows_phase ^= 1) {
            ptx::mbarrier_wait(&shared.rows_full, rows_phase);
            ptx::fence_async_shared();
            task = shared.task;
            if (task.blocks == end_of_work) return;
            if constexpr (makes_p || makes_ds) read_rows();
            if constexpr (finds_bounds && makes_p) find_largest(params.dout, params.head_dim_v);
            if constexpr (finds_bounds && makes_ds) find_largest(params.q, params.head_dim);
            if (task.blocks == 0) {
#pragma unroll
                for (auto& half : dq)
#pragma unroll
                    for (float& x : half) x = 0;
                release(&shared.rows_empty);
            }
#pragma unroll 1
            for (int n = 0; n < task.blocks; ++n) block(n > 0, n == task.blocks - 1);
            if constexpr (!finds_bounds) store(0), store(1);
        }
    }

    // This warp's arrival, when all its lanes are done.
    __device__ __forceinline__ void release(uint64_t* bar) const {
        __syncwarp();
        if (is_first_lane()) ptx::mbarrier_arrive(bar);
    }

    // This thread's rows are of those that the CTA finishes.
    __device__ __forceinline__ void read_rows() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const TileRow row(params.rows, params.lists, task, gather_tile * rank + tile::fragment_row(thread, 2 * h));
            const int64_t at = (int64_t(task.batch) * params.lists.heads_q + row.head) * params.lists.seq_q + row.query;
            if constexpr (makes_p) {
                // A row without a key has lse = -infinity, and an infinite offset would make NaN of its masked scores.
                const float lse = params.lse[at], offset = lse == -INFINITY ? FLT_MAX : -lse * float(M_LOG2E);
                of_row[h] = row.is_there ? offset : -INFINITY;
            } else {
                of_row[h] = row.is_there ? params.delta[at] * params.scale : 0;
            }
        }
    }

    // From memory: of these rows the CTA has half of the columns.
    __device__ __forceinline__ void find_largest(const TensorView& x, int columns) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const TileRow row(params.rows, params.lists, task, gather_tile * rank + tile::fragment_row(thread, 2 * h));
            const auto* const chunks =
                reinterpret_cast<const uint4*>(any::row_of<Element>(x, task.batch, row.head, row.query));
            uint32_t most = 0;
            for (int i = thread % 4; i < columns / 8; i += 4) {
                const uint4 chunk = chunks[i];
                raise(most, chunk.x), raise(most, chunk.y), raise(most, chunk.z), raise(most, chunk.w);
            }
            largest[h] = largest_of_quad<C::dtype>(most);
        }
    }

    __device__ __forceinline__ void block(bool accumulates, bool is_last) {
        ptx::mbarrier_wait(&shared.keys_full, phase);
        ptx::fence_async_shared();
        if constexpr (makes_p) {
            make_p();
        } else if constexpr (makes_ds) {
            send_scores();
            make_ds();
        } else {
            send_dp();
        }
        if constexpr (finds_bounds) {
            release(&shared.keys_empty);
            end_block(is_last);
        } else {
            add_products(accumulates, is_last);
        }
        phase ^= 1;
    }

    // ---- scores and dp ----
    // This CTA's part of scores, of half of the rows, begun.
    __device__ __forceinline__ void multiply_scores(float (&s)[32], int half) const {
        const uint32_t q = ptx::wgmma_descriptor(shared.q[0][half], 0), k = ptx::wgmma_descriptor(shared.keys, 0);
        const uint32_t last = ptx::wgmma_descriptor(shared.q_last, 0) + half * C::half_step;
        multiply(s, q, k);
#pragma unroll
        for (int i = 0; i < C::last_columns / 16; ++i)
            ptx::wgmma(s, last + i * 2, k + C::panels * C::panel_step + i * 2, 1, tag());
        ptx::wgmma_commit();
    }
    // The same of dp.
    __device__ __forceinline__ void multiply_dp(float (&dp)[32], int half) const {
        multiply(dp, ptx::wgmma_descriptor(shared.dout[0][half], 0), ptx::wgmma_descriptor(shared.keys, 0));
        ptx::wgmma_commit();
    }
    __device__ __forceinline__ void multiply(float (&x)[32], uint32_t rows, uint32_t keys) const {
        ptx::wgmma_fence();
#pragma unroll
        for (int panel = 0; panel < C::panels; ++panel)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                ptx::wgmma(x, rows + 2 * panel * C::panel_step + i * 2, keys + panel * C::panel_step + i * 2,
                           panel > 0 || i > 0, tag());
    }

    // What the other CTA finishes needs this one's parts. Those of dp go where ds will be, which both CTAs have read.
    __device__ __forceinline__ void send_scores() const {
        float part[32];
        multiply_scores(part, rank ^ 1);
        ptx::wgmma_wait<0>();
        ptx::mbarrier_wait(&shared.scores_read, phase ^ 1);
        send(part, shared.parts, &shared.scores_full);
    }
    __device__ __forceinline__ void send_dp() const {
        float part[32];
        multiply_dp(part, rank ^ 1);
        ptx::wgmma_wait<0>();
        ptx::mbarrier_wait(&shared.weights_empty, phase ^ 1);
        send(part, shared.ds, &shared.dp_full);
    }
    __device__ __forceinline__ void send(const float (&part)[32], const void* parts, uint64_t* full) const {
        const uint32_t to = of_other(parts) + thread * 16, bar = of_other(full);
#pragma unroll
        for (int i = 0; i < 32; i += 4)
            ptx::cluster_store(to + i / 4 * (128 * 16), {part[i], part[i + 1], part[i + 2], part[i + 3]}, bar);
    }

    // Adds the part of the other CTA, whose thread of this number has the same values.
    __device__ __forceinline__ void add_part(float (&x)[32], const void* parts, uint64_t* full, uint64_t* read) const {
        if (thread == 0) ptx::mbarrier_arrive_expect(full, sizeof shared.parts);
        ptx::mbarrier_wait(full, phase);
        const uint32_t from = ptx::shared_address(parts) + thread * 16;
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            float part[4];
            ptx::load_shared(part, from + i / 4 * (128 * 16));
#pragma unroll
            for (int e = 0; e < 4; ++e) x[i + e] += part[e];
        }
        __syncwarp();
        if (is_first_lane()) ptx::cluster_arrive_after(of_other(read), x[31]);
    }

    // Which keys of the block there are, and whether some is absent.
    __device__ __forceinline__ bool take_keys(uint32_t (&keys)[2]) const {
        const uint64_t all = shared.there;
        keys[0] = uint32_t(all), keys[1] = uint32_t(all >> 32);
        return (keys[0] & keys[1]) != ~0u;
    }

    __device__ __forceinline__ void make_p() const {
        float s[32];
        multiply_scores(s, rank);
        ptx::wgmma_wait<0>();
        add_part(s, shared.parts, &shared.scores_full, &shared.scores_read);
#pragma unroll
        for (int i = 0; i < 32; ++i)
            s[i] = ptx::exp2_approx(fmaf(s[i], params.scale_log2, of_row[tile::row_of(i)]));
        uint32_t keys[2];
        if (take_keys(keys)) [[unlikely]] {
#pragma unroll
            for (int i = 0; i < 32; ++i) ptx::zero_unless(s[i], has_key(keys, thread, i));
        }
        ptx::mbarrier_wait(&shared.weights_empty, phase ^ 1);
        if constexpr (finds_bounds) add_bounds(s);
        put(s, shared.p[rank]);
        if (is_first_lane()) ptx::mbarrier_arrive(&shared.own_p_full);
        if constexpr (!finds_bounds) share(shared.p[rank], &shared.p_full);
    }

    __device__ __forceinline__ void make_ds() const {
        float ds[32];
        multiply_dp(ds, rank);
        ptx::wgmma_wait<0>();
        add_part(ds, shared.ds, &shared.dp_full, &shared.dp_read);
        ptx::named_barrier_sync(1, 128);  // all have read the parts that ds is written over
        ptx::mbarrier_wait(&shared.own_p_full, phase);
        const int row = 16 * (thread / 32) + thread % 16;
        const uint32_t from = ptx::shared_address(shared.p[rank]) + row * 128;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            uint32_t words[4];
            ptx::load_matrix_x4(words, from + ((32 * c + 16 * (thread / 16 % 2)) ^ (row % 8 << 4)));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& x = ds[8 * c + i];
                x = tile::unpack<C::dtype>(words[i / 2], i % 2) * fmaf(x, params.scale, -of_row[tile::row_of(i)]);
            }
        }
        uint32_t keys[2];
        if (take_keys(keys)) [[unlikely]] {
#pragma unroll
            for (int i = 0; i < 32; ++i) ptx::zero_unless(ds[i], has_key(keys, thread, i));
        }
        if constexpr (finds_bounds) {
            add_bounds(ds);
        } else {
            put(ds, shared.ds[rank]);
            ptx::mbarrier_wait(&shared.dp_read, phase);
            share(shared.ds[rank], &shared.ds_full);
        }
    }

    __device__ __forceinline__ int64_t plane() const {
        return int64_t(task.batch) * params.lists.heads_kv + task.head_kv;
    }
    __device__ __forceinline__ void add_bounds(const float (&x)[32]) const {
        uint64_t* const bounds = params.dk.bounds + plane() * params.lists.seq_k * any::bound_words;
        sm90::add_bounds<C::dtype>(x, 1, largest, shared.key, bounds, thread);
    }

    __device__ __forceinline__ void put(const float (&x)[32], const void* to) const {
        uint32_t words[4][4];
        tile::pack_tile<C::dtype>(x, words);
        tile::store_swizzled(words, ptx::shared_address(to), C::panel_bytes, thread);
        ptx::fence_async_shared();
        __syncwarp();
    }

    // This warp's 16 rows of a tile are there, and go to the other CTA.
    __device__ __forceinline__ void share(const void* tile, uint64_t* full) const {
        if (!is_first_lane()) return;
        if (thread == 0)
            ptx::mbarrier_arrive_expect(full, C::panel_bytes);
        else
            ptx::mbarrier_arrive(full);
        const uint32_t first = thread / 32 * C::warp_bytes;
        ptx::cluster_copy(of_other(tile) + first, ptx::shared_address(tile) + first, C::warp_bytes, of_other(full));
    }

    // ---- products ----
    __device__ __forceinline__ void add_products(bool accumulates, bool is_last) {
        const Rows rows = rows_of_tile();
        const uint32_t p = ptx::wgmma_descriptor(shared.p, 0), ds = ptx::wgmma_descriptor(shared.ds, 0);
        const uint32_t keys = ptx::wgmma_descriptor(
            shared.keys[own_panel], (halved_panel - own_panel) * C::panel_bytes + half_at * 16);
        float sums[32];
        ptx::mbarrier_wait(&shared.p_full, phase);
        add_rows(sums, p, ptx::wgmma_descriptor(shared.dout[own_panel], 0), false);
        ptx::wgmma_commit();
        ptx::mbarrier_wait(&shared.ds_full, phase);
        ptx::wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < gather_tile / 16; ++i)
                ptx::wgmma_transposed_b(dq[half], ds + half * C::panel_step + i * 2, keys + i * 128,
                                        i > 0 || accumulates, tag());
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        release(&shared.keys_empty);
        add_rows(sums, ds, ptx::wgmma_descriptor(shared.q[own_panel], 0), true);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        add(rows, sums, own_columns());

        float half[16];
        if constexpr (half_has_values) {
            add_rows(half, p, ptx::wgmma_descriptor(shared.dout[halved_panel], 0) + half_at, false);
            add_rows(half, ds, ptx::wgmma_descriptor(shared.q[halved_panel], 0) + half_at, true);
        } else {
            const uint32_t q = ptx::wgmma_descriptor(shared.q_last, 0);
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < C::rows / 16; ++i)
                ptx::wgmma_transposed(half, ds + i * 128, q + i / 4 * C::half_step + i % 4 * 128, i > 0, tag());
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        end_block(is_last);
        add(rows, half, half_columns());
    }

    // The rows of a tile of keys' gradients for which this warp stands.
    __device__ __forceinline__ Rows rows_of_tile() const {
        if constexpr (A == Adding::integers)
            return {shared.key, params.dk.quanta + plane() * params.lists.seq_k, thread};
        else
            return {shared.key, thread};
    }

    // All that this block's products read but keys is free, and both CTAs know.
    __device__ __forceinline__ void end_block(bool is_last) const {
        __syncwarp();
        if (!is_first_lane()) return;
        ptx::mbarrier_arrive(&shared.weights_empty);
        ptx::cluster_arrive(of_other(&shared.weights_empty));
        if (is_last) ptx::mbarrier_arrive(&shared.rows_empty);
    }

    // Products of p or ds, transposed, with q or dout of all rows, begun.
    template <int Values>
    __device__ __forceinline__ void add_rows(float (&sums)[Values], uint32_t weights, uint32_t rows,
                                             bool accumulates) const {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::rows / 16; ++i)
            ptx::wgmma_transposed(sums, weights + i * 128, rows + i * 128, i > 0 || accumulates, tag());
    }

    // The first of its columns, among those of keys.
    __device__ __forceinline__ int own_columns() const { return 64 * (C::panels * rank + own_panel); }
    __device__ __forceinline__ int half_columns() const {
        return half_has_values ? 64 * (C::panels * rank + halved_panel) + half_at * 8
                               : C::head_dim_v + C::last_columns * rank;
    }

    template <int Values>
    __device__ __forceinline__ void add(const Rows& rows, const float (&x)[Values], int first) const {
        float* const sums = params.dk.sums + plane() * params.lists.seq_k * params.dk.columns;
        rows.add(x, 1, sums, params.dk.columns, first, params.head_dim, thread);
    }

    __device__ __forceinline__ void store(int half) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const TileRow row(params.rows, params.lists, task, gather_tile * half + tile::fragment_row(thread, 2 * h));
            Element* const to = any::row_of<Element>(params.dq, task.batch, row.head, row.query);
#pragma unroll
            for (int i = 0; i < 48; i += 16) {
                uint32_t words[4];
                tile::pack_row<C::dtype>(dq[half], i, h, 1, thread, words);
                const int column = (i < 32 ? own_columns() + 2 * i : half_columns()) + 8 * (thread % 4);
                if (row.is_there && column < params.head_dim)  // a multiple of 8
                    *reinterpret_cast<uint4*>(to + column) = {words[0], words[1], words[2], words[3]};
            }
        }
    }
};

// ---- kernel ----
template <class C, Adding A>
__global__ void __launch_bounds__(C::threads, 1)
    gather_backward_pair_kernel(const __grid_constant__ GatherBackwardParams params) {
    GatherPairShared<C>& shared = *ptx::swizzled_shared<GatherPairShared<C>>();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&shared.rows_full, gather_producers + gather_producers / 32);
        ptx::mbarrier_init(&shared.rows_empty, C::warps);
        ptx::mbarrier_init(&shared.keys_full, gather_producers + gather_producers / 32);
        ptx::mbarrier_init(&shared.keys_empty, C::warps);
        ptx::mbarrier_init(&shared.scores_full, 1);
        ptx::mbarrier_init(&shared.dp_full, 1);
        ptx::mbarrier_init(&shared.scores_read, 4);
        ptx::mbarrier_init(&shared.dp_read, 4);
        ptx::mbarrier_init(&shared.own_p_full, 4);
        ptx::mbarrier_init(&shared.p_full, 4);
        ptx::mbarrier_init(&shared.ds_full, 4);
        ptx::mbarrier_init(&shared.weights_empty, C::ctas * C::warps);
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    const int rank = int(ptx::cluster_rank());
    const int warpgroup =
        __shfl_sync(~0u, threadIdx.x / 128, 0);  // a shuffle, so that the compiler sees one value a warp
    const int thread = int(threadIdx.x % 128);
    if (warpgroup == C::warpgroups) {
        ptx::give_registers<C::producer_registers>();
        GatherPairProducer<C>{params, shared, rank}.run();
    } else {
        ptx::take_registers<C::consumer_registers>();
        if (warpgroup == 0)
            GatherPairGradients<C, A, 0>{params, shared, thread, rank}.run();
        else if (warpgroup == 1)
            GatherPairGradients<C, A, 1>{params, shared, thread, rank}.run();
        else
            GatherPairGradients<C, A, 2>{params, shared, thread, rank}.run();
    }
    ptx::cluster_sync();  // the other CTA still arrives at barriers of this one
}

// ---- launch ----
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherBackwardPair<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs& args) {
    using C = GatherPairConfig<D, HeadDim, HeadDimV>;
    static_assert(BlockQ == C::rows && BlockK == gather_tile, "tiles of 128 rows and 64 keys");
    const GatherBackwardParams params = make_gather_backward_params(args, C::rows);
    const int64_t clusters = std::min(params.rows.tasks, int64_t(runtime::count_processors(args.device) / C::ctas));
    make_gradients<D>(args, [&](auto adding) {
        runtime::launch(gather_backward_pair_kernel<C, decltype(adding)::value>,
                        {unsigned(clusters * C::ctas), unsigned(C::threads), sizeof(GatherPairShared<C>), C::ctas},
                        args.stream, params);
    });
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherBackwardPair<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    using C = GatherPairConfig<D, HeadDim, HeadDimV>;
    any::BlockBackward<D>::prepare(device);
    any::KeyGradients<D>::prepare(device);
    const runtime::CurrentDevice current(device);
    static_assert(sizeof(GatherPairShared<C>) <= C::most_bytes, "a CTA has no more");
    runtime::prepare(gather_backward_pair_kernel<C, Adding::floats>, sizeof(GatherPairShared<C>));
    runtime::prepare(gather_backward_pair_kernel<C, Adding::bounds>, sizeof(GatherPairShared<C>));
    runtime::prepare(gather_backward_pair_kernel<C, Adding::integers>, sizeof(GatherPairShared<C>));
}

}  // namespace spattn::sm90
