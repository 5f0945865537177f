// SPDX-License-Identifier: MIT
//
//     s = q kT,  p = exp2(scale_log2 s - m),  out = sum(p v) / sum(p),  lse = scale m + log(sum(p))
//
// over lists of keys that the heads of a group share: 64 query rows, the heads of one query or of those that have a
// list in common, meet the keys of their list 64 at a time. Values may be the first columns of keys, which then come
// once.
//
//   grid      one CTA an SM, persistent; tasks in turn, tiles of a list side by side, so that L2 has its keys
//   producer  one warpgroup finds keys in the list and copies their rows by 16 bytes into rings of tiles, swizzled. It
//             asks for the entries of the next block, or of the next task's first, before it copies a block: it would
//             wait for them nearly as long as the copies take
//   scores    one warpgroup. It holds q in registers for a whole task, so that its products read keys alone: with q in
//             shared memory, too, less would be left of that memory's rate, and less room for keys. Of 576 columns
//             256 are in registers: with more of them there producers would have too few registers, and spill.
//             The others come as boxes of the heads of a query, by the copy engine: copies of 16 bytes would wait
//             behind those of the producers. Probabilities go to shared memory, where values are columns of keys over
//             the last panel of the same keys, whose scores are done
//   output    one or two warpgroups, 256 columns each, the first of which also brings what the next task will wait for
//             into L2:
//
//               scores   s1 | softmax 1 | s2    | softmax 2 | s3
//               first       |           |       | p1 v1     |
//               second      |           | p1 v1 |           |
//
//             p v begins under the next block's softmax, when the tensor unit has nothing else to do. Where there are
//             two warpgroups, that of the second begins beside the next scores: the ring of its tiles is the shorter
//             one, and a tile that is free earlier comes again before scores want it
//   softmax   as in block_forward.cuh, relative to a maximum that may lag; output rescales when scores tell it to
//   float8    of caches: producers widen bytes where they have landed, those of two CTAs for each other where their tiles
//             have a list in common (gather_float8.cuh)
//   isolation what a list does not name is not read; absent keys are rows of zeros whose scores are masked
//   parts     where whole lists would keep some processors waiting for others, each has an equal share of all blocks
//             (any/list_shares.h). Of a list that shares divide a CTA leaves its sums as floats in memory, and a second
//             kernel joins them
//
// The plan of one warpgroup that makes 64 x 64 scores beside others that have columns of out differs from FlashMLA's,
// where two warpgroups do both and exchange probabilities (https://github.com/deepseek-ai/FlashMLA); gathering by
// producers' 16-byte copies of eight lanes a row is as there.
//
// What binds: with 576 columns, scores and exponentials one after the other, 2,900 cycles a block of which products are
// 2,176, and L2 nearly as much: 72 KiB a block at some 40 bytes a cycle.
//
// Measured (H200, bf16, L2 cold, TFLOP/s of 2 heads queries list (head_dim + head_dim_v), 2026-11, GEMM 8192^3 790 in
// the same run): 128 heads, 576/512, lists of 2,048 among 16K keys 616, among 128K 609; lists of 512 among 4K 465; 64
// heads of 256 468. Lists of 512 and 2,048 tell that a block takes 1.7 us, and a task 6 us beside its blocks. One query
// of 128 heads, a list of 2,048 among 64K keys, 25 us in sixteen parts, 29 in eight, 64 in one; sixteen queries 44 in
// four parts, 66 in one.
//
// Tried and dropped: tiles of half a block's columns, each free as soon as it is done (528, 526 and 362 where 553, 523
// and 374 were reached); p v of all columns begun as soon as p is there (538, 530 and 363). Scores of the next block
// begun before the softmax: 597, 578 and 439 where 616, 609 and 465 were reached, since their tiles are then wanted
// earlier than shared memory has room for them; with 128 and 256 columns it changes nothing. Two warpgroups of
// producers for 128 columns (76 and 302 where 77 and 307 were). Rows of the next task brought into L2 by producers (4 %
// slower). At a task's end, where a trace showed scores at work for 7,000 cycles beside their blocks (3,200 to ask for
// q behind the producers' copies, before boxes brought a part of it, 2,200 for the rows' ends, 1,000 to arrange q):
// rows of a tile found without divisions (as fast); the next task told a block sooner and its rows' places found under
// the last scores (lists of 512 +2 %, of 2,048 -1 %, 128 columns -3 %); out by the copy engine from where the last
// values lay, for which producers then wait (-3 to -5 %).
#pragma once

#include <algorithm>
#include <cmath>

#include "any/join_lists.cuh"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "runtime/launch.h"
#include "runtime/tensor_map.h"
#include "sm90/gather_float8.cuh"
#include "sm90/gather_forward.h"
#include "sm90/gather_rows.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/row_end.cuh"
#include "tile/fragment.h"
#include "tile/quad.cuh"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

template <class C>
struct GatherShared;

// ---- configuration ----
// What listed keys and values are: elements, or bytes of a float8 cache, which one CTA makes elements of, or the two of a
// cluster for each other.
enum class Listed { elements, float8, shared_float8 };

template <Dtype D, int HeadDim, int HeadDimV, Listed L>
struct GatherConfig : TileConfig<D, HeadDim, HeadDimV> {
    using Base = TileConfig<D, HeadDim, HeadDimV>;
    using Shared = GatherShared<GatherConfig>;
    static constexpr bool is_float8 = L != Listed::elements;
    static constexpr int ctas = L == Listed::shared_float8 ? 2 : 1;  // whose tiles have a list in common
    using Base::head_dim, Base::head_dim_v, Base::panels, Base::v_panels;
    static constexpr bool value_in_key = head_dim > 256;
    static constexpr int float8_lag = value_in_key ? 1 : 3;  // gather_float8.cuh
    static constexpr int output_warpgroups = head_dim_v > 256 ? 2 : 1;
    static constexpr int output_columns = head_dim_v / output_warpgroups, output_panels = output_columns / 64;
    // Columns of one product: with four warpgroups the assembler takes none that has 128 registers of sums.
    static constexpr int product_columns = output_warpgroups > 1 ? 128 : output_columns;
    static constexpr int products = output_columns / product_columns;
    static constexpr int threads = 128 * (2 + output_warpgroups);  // scores, output, producers
    static constexpr int panel_bytes = gather_panel_bytes;
    // How many panels of q are in registers, 16 each, and how many in shared memory.
    static constexpr int q_held = value_in_key ? 4 : panels, q_shared = panels - q_held;
    // Rings of tiles. Values in keys: the columns of either output warpgroup, and the last panel with p. Otherwise:
    // keys, values, p.
    static constexpr int first_panels = value_in_key ? output_panels : panels;
    static constexpr int second_panels = value_in_key ? output_panels : v_panels;
    static constexpr int most_bytes = 227 * 1024, barrier_bytes = 2048;
    static constexpr int p_stages = 3;
    static constexpr int fitting =
        ((most_bytes - barrier_bytes) / panel_bytes - q_shared - p_stages) / (first_panels + second_panels);
    static constexpr int stages = value_in_key ? 3 : std::min(fitting, 6);
    static constexpr int second_stages = value_in_key ? 2 : stages;
    static constexpr int tasks = 2;  // that warpgroups may be apart
    static constexpr int combine_warps = head_dim_v / 32;  // of a row whose list was split, where rows are few
    static constexpr int producer_registers = value_in_key ? 64 : is_float8 ? 72 : 56,
                         score_registers = value_in_key ? 128 : is_float8 ? 200 : 216,
                         output_registers = value_in_key ? 160 : 232;
    static_assert(!value_in_key || (panels == 9 && v_panels == 8), "two halves of values, and a panel for p");
    static_assert(stages >= 2, "a tile is copied while another is used");
    static_assert(producer_registers + score_registers + output_warpgroups * output_registers <=
                      launch_registers(threads, 1),
                  "roles share what the launch gives");
};

struct GatherForwardParams {
    CUtensorMap q_boxes;  // of 64 heads of a query
    TensorView q, k, v, out;
    TensorView k_scales, v_scales;            // of a float8 cache
    TensorView lse, max_logits, sink_logits;  // absent where nobody asked, or the problem has none
    any::GatherLists lists;
    ListRows rows;
    any::ListShares shares;
    any::Partials<float> partials;  // [part][tile of a group][row of a tile], of lists that are split
    any::SplitList* notes;          // which of them are
    int head_dim, head_dim_v;
    float scale, scale_log2;  // from what stands for scores to their natural units, and to powers of two
    float into_cap;           // scores become tanh(into_cap s) first, where the problem has a softcap
    bool has_boxes;           // a tile's rows are heads of one query, and q has panels in shared memory
};

// ---- shared memory ----
template <int Panels, int Stages>
struct GatherRing {
    uint8_t tiles[Stages][Panels][gather_panel_bytes];
};
template <int Stages>
struct RingBarriers {
    uint64_t full[Stages];   // who writes the tile; who reads it waits
    uint64_t empty[Stages];  // one arrival a warp that reads it; who writes it waits
};

constexpr int no_tile = -1;

// A tile with its list, or a part of that.
struct ListTask : GatherTask {
    int32_t part;  // where a workspace keeps its rows, in tiles, or ListPart::whole

    __device__ bool is_whole() const { return part == any::ListPart::whole; }
};

template <class C>
struct GatherShared {
    GatherRing<C::first_panels, C::stages> first;
    GatherRing<C::second_panels, C::second_stages> second;
    GatherRing<1, C::p_stages> third;        // p
    uint8_t q[C::q_shared][C::panel_bytes];  // none but where values are columns of keys
    float factor[C::p_stages][64];           // of sums before this p, where its warp says that they must be rescaled
    float end[C::tasks][64];                 // what sums of a task's rows are multiplied by at last
    void* out[C::tasks][64];                 // where those rows then go; null for rows beyond the last
    uint64_t keys[C::stages];                // a bit for each key of a block that there is, where its first tile lies
    ListTask task[C::tasks];
    int32_t next_tile[C::tasks];         // of the task behind it, or none
    any::ListShare share;                // of all lists, what this CTA takes
    int32_t rescales[C::p_stages][4];    // by warp of scores
    RingBarriers<C::stages> first_bars;  // full: every producer's copies, and one arrival a warp of them with keys
    RingBarriers<C::second_stages> second_bars;  // full: every producer's copies
    RingBarriers<C::p_stages> third_bars;        // full: likewise; unused where it has p alone
    uint64_t p_full[C::output_warpgroups][C::p_stages];  // for either of output: one arrival a warp of scores
    RingBarriers<C::tasks> task_bars;            // full: a producer; empty: every warp of scores and output
    uint64_t end_full[C::tasks];                 // one arrival a warp of scores
    uint64_t q_full;                             // of q that comes as boxes: the bytes
};

// Tells who writes a tile that a warp has read it.
template <class C>
__device__ __forceinline__ void release(uint64_t* empty) {
    ptx::mbarrier_arrive(empty);
    if constexpr (C::ctas > 1) ptx::cluster_arrive(ptx::cluster_address(empty, ptx::cluster_rank() ^ 1));
}

// ---- producers ----
template <class C>
struct GatherProducer {
    using Walk = std::conditional_t<C::is_float8, Float8Walk<C::ctas>, ListWalk<>>;

    const GatherForwardParams& params;
    GatherShared<C>& shared;
    Cursor<C::stages> first;
    Cursor<C::second_stages> second;
    Cursor<C::p_stages> third;
    GatherWidener<C> widener{shared};  // of float8

    // The next task's list is looked up before the last rows of the one at hand are copied.
    __device__ __forceinline__ void run() {
        Cursor<C::tasks> task_at;
        Walk walk(params.lists);
        int unit = shared.share.begin.unit;
        ListTask task = next_task(walk, unit);
        for (;;) {
            announce(task, unit, task_at);
            if constexpr (C::is_float8)
                if (task.blocks <= C::float8_lag / 2) widener.finish();  // the next announcement waits for tasks before
            if (task.blocks == end_of_work) return;
            const auto k = rows_of(params.k, params.k_scales, task);
            const auto v = C::value_in_key ? k : rows_of(params.v, params.v_scales, task);
            int left = task.blocks;
#pragma unroll 1
            do {
                const uint32_t there = left > 0 ? walk.take() : 0;
                if (left <= 1) task = next_task(walk, unit);
                if (left == 0) break;
                load(k, v, walk.keys, there);
            } while (--left > 0);
        }
    }

    __device__ __forceinline__ static auto rows_of(const TensorView& x, const TensorView& scales,
                                                   const GatherTask& task) {
        return any::key_rows<C::dtype, C::is_float8>(x, scales, task.batch, task.head_kv);
    }

    // The task of a unit, which becomes the number of the one after it.
    __device__ __forceinline__ ListTask next_task(Walk& walk, int& unit) const {
        const any::ListShare& share = shared.share;
        ListTask task{{0, 0, 0, 0, end_of_work}, any::ListPart::whole};
        if (!share.has(unit)) return task;
        static_cast<GatherTask&>(task) = GatherTask::at(params.rows, params.lists, tile_of(unit));
        const any::ListPart part = any::ListPart::of(params.shares, share, unit, walk.begin(task), params.notes);
        task.blocks = part.end - part.first, task.part = part.tile;
        if (!task.is_whole()) walk.keep(part.first, part.end);
        unit += share.step;
        return task;
    }

    __device__ __forceinline__ int tile_of(int unit) const {
        return unit * params.shares.width + shared.share.of_group;
    }

    // next: the unit behind it.
    __device__ __forceinline__ void announce(const ListTask& task, int next, Cursor<C::tasks>& at) {
        if (threadIdx.x % 128 == 0) {
            ptx::mbarrier_wait(&shared.task_bars.empty[at.index], at.phase ^ 1);
            shared.task[at.index] = task;
            shared.next_tile[at.index] = shared.share.has(next) ? tile_of(next) : no_tile;
            ptx::mbarrier_arrive(&shared.task_bars.full[at.index]);
        }
        __syncwarp();
        at.advance();
    }

    template <class Rows>
    __device__ __forceinline__ void load(const Rows& k, const Rows& v, const int (&keys)[Walk::own_rows], uint32_t there) {
        load_keys(k, keys, there);
        if constexpr (C::is_float8) widener.begin_keys();
        load_values(v, keys);
        if constexpr (C::is_float8) widener.begin_values();
    }

    template <class Rows>
    __device__ __forceinline__ void load_keys(const Rows& k, const int (&keys)[Walk::own_rows], uint32_t there) {
        ptx::mbarrier_wait(&shared.first_bars.empty[first.index], first.phase ^ 1);
        if (CopyWarp::lane() == 0) {
            reinterpret_cast<uint16_t*>(&shared.keys[first.index])[CopyWarp::first_row() / 16] = uint16_t(there);
            ptx::mbarrier_arrive(&shared.first_bars.full[first.index]);
        }
        copy<C::first_panels>(k, keys, params.head_dim, 0, shared.first.tiles, shared.first_bars, first);
        if constexpr (C::value_in_key) {
            ptx::mbarrier_wait(&shared.third_bars.empty[third.index], third.phase ^ 1);
            copy<1>(k, keys, params.head_dim, C::panels - 1, shared.third.tiles, shared.third_bars, third);
        }
    }

    template <class Rows>
    __device__ __forceinline__ void load_values(const Rows& v, const int (&keys)[Walk::own_rows]) {
        ptx::mbarrier_wait(&shared.second_bars.empty[second.index], second.phase ^ 1);
        copy<C::second_panels>(v, keys, C::value_in_key ? params.head_dim : params.head_dim_v,
                               C::value_in_key ? C::first_panels : 0, shared.second.tiles, shared.second_bars, second);
    }

    // Some panels of listed rows into a ring's next tile. Who waits for it hears when they have landed, but of bytes when
    // they are widened.
    template <int Panels, class Rows, class Tiles, class Barriers, class At>
    __device__ __forceinline__ static void copy(const Rows& rows, const int (&keys)[Walk::own_rows], int columns,
                                                int from, Tiles& tiles, Barriers& barriers, At& at) {
        if constexpr (C::is_float8) {
            copy_float8_rows<Panels, Walk>(keys, rows, columns, from, tiles[at.index]);
        } else {
            copy_rows<Panels>(keys, rows.first, rows.row, columns, from, tiles[at.index]);
            ptx::cp_async_arrive(&barriers.full[at.index]);
        }
        at.advance();
    }
};

// ---- scores: one warpgroup makes the probabilities of all keys ----
// HasCap: with a softcap. q and scores leave few registers for anything else: what a task says stays in its message.
template <class C, bool HasCap>
struct GatherScores {
    using Element = typename C::Element;

    const GatherForwardParams& params;
    GatherShared<C>& shared;
    const int thread;         // of the warpgroup
    Cursor<C::tasks> coming;  // the next task's message; the other one is that of the task at hand
    Cursor<C::stages> slot;
    Cursor<C::second_stages> second;
    Cursor<C::p_stages> p_slot;
    uint32_t q_phase = 0;     // of q that comes as boxes
    int keys_at = 0;          // the first tile of the block at hand
    bool holds_back = false;  // p of the block before, of which the first of output has not heard
    uint32_t q[4 * C::q_held][4];
    float s[gather_tile / 2];
    tile::RowState rows;

    __device__ __forceinline__ bool is_first_lane() const { return thread % 32 == 0; }
    static_assert(C::tasks == 2, "of two, the one after next lies where this one does");

    __device__ __forceinline__ void run() {
        for (int blocks = take_next(); blocks != end_of_work;) {
            if constexpr (C::q_shared > 0) wait_q();
            arrange_q();
            rows = tile::RowState{};
            int next_blocks = 0;
#pragma unroll 1
            for (int left = blocks; left > 0; --left) block(left == blocks, left == 1, next_blocks);
            if (blocks == 0) next_blocks = take_next();
            finish(coming.index);
            blocks = next_blocks;
        }
    }

    // The blocks of the next task, whose q is then on its way; or end_of_work.
    __device__ __forceinline__ int take_next() {
        ptx::mbarrier_wait(&shared.task_bars.full[coming.index], coming.phase);
        const GatherTask& task = shared.task[coming.index];
        coming.advance();
        if constexpr (C::q_shared > 0) ptx::named_barrier_sync(1, 128);  // nobody reads the q that is there any more
        if (task.blocks != end_of_work) load_q(task);
        return task.blocks;
    }

    // 8 neighbouring columns of rows r and r + 8 a thread, of 32 that its quad reads, as memory has them; nobody waits.
    __device__ __forceinline__ void load_q(const GatherTask& task) {
        const int lane = thread % 32;
        const TileRow low(params.rows, params.lists, task, tile::fragment_row(thread, 0));
        const TileRow high(params.rows, params.lists, task, tile::fragment_row(thread, 2));
        const auto* from = any::row_of<Element>(params.q, task.batch, low.head, low.query) + 8 * (lane % 4);
        const auto* from_high = any::row_of<Element>(params.q, task.batch, high.head, high.query) + 8 * (lane % 4);
        const auto read = [](uint32_t (&words)[4], const Element* at, bool is_there) {
            const uint4 x = is_there ? __ldcs(reinterpret_cast<const uint4*>(at)) : uint4{};
            words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
        };
#pragma unroll
        for (int i = 0; i < 4 * C::q_held; i += 2) {
            const bool is_there = 16 * i + 8 * (lane % 4) < params.head_dim;
            read(q[i], from + 16 * i, is_there);
            read(q[i + 1], from_high + 16 * i, is_there);
        }
        if constexpr (C::q_shared > 0) {
            if (!params.has_boxes)
                copy_q(task);
            else if (thread == 0)
                load_boxes(task);
        }
    }

    // What was read becomes the a operand of s = q kT: of rows r and r + 8 two columns each, 8 apart.
    __device__ __forceinline__ void arrange_q() {
#pragma unroll
        for (int i = 0; i < 4 * C::q_held; i += 2) {
            tile::transpose_quad(q[i], thread);
            tile::transpose_quad(q[i + 1], thread);
            const uint32_t low[4] = {q[i][0], q[i][1], q[i][2], q[i][3]};
            const uint32_t high[4] = {q[i + 1][0], q[i + 1][1], q[i + 1][2], q[i + 1][3]};
#pragma unroll
            for (int n = 0; n < 4; ++n) q[i + n / 2][n % 2 * 2] = low[n], q[i + n / 2][n % 2 * 2 + 1] = high[n];
        }
    }

    // The panels that do not fit into registers: by the copy engine, which producers' copies do not keep waiting, where
    // rows lie as boxes have them.
    __device__ __forceinline__ void load_boxes(const GatherTask& task) {
        const TileRow first(params.rows, params.lists, task, 0);
        ptx::mbarrier_arrive_expect(&shared.q_full, C::q_shared * C::panel_bytes);
#pragma unroll
        for (int panel = 0; panel < C::q_shared; ++panel)
            ptx::tma_load_4d(shared.q[panel], &params.q_boxes, 64 * (C::q_held + panel), first.head, int(first.query),
                             task.batch, &shared.q_full);
    }

    __device__ __forceinline__ void wait_q() {
        if (params.has_boxes) {
            ptx::mbarrier_wait(&shared.q_full, q_phase);
            q_phase ^= 1;
        } else {
            ptx::cp_async_wait_all();
            ptx::fence_async_shared();
            ptx::named_barrier_sync(1, 128);  // q lies in shared memory
        }
    }

    // Otherwise half a row of a panel a thread.
    __device__ __forceinline__ void copy_q(const GatherTask& task) {
        const int in_tile = thread / 2;
        const TileRow row(params.rows, params.lists, task, in_tile);
        const auto* from = any::row_of<Element>(params.q, task.batch, row.head, row.query);
#pragma unroll
        for (int panel = 0; panel < C::q_shared; ++panel)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int chunk = 4 * (thread % 2) + i, column = 64 * (C::q_held + panel) + 8 * chunk;
                const bool is_there = column < params.head_dim;
                ptx::cp_async_16(ptx::shared_address(shared.q[panel]) + in_tile * 128 + ((chunk ^ in_tile % 8) << 4),
                                 from + (is_there ? column : 0), is_there ? 16 : 0);
            }
    }

    // Products with the panels of a tile of keys, begun: with those of q from panel `from` on, which is a constant once
    // loops are unrolled.
    template <int Panels>
    __device__ __forceinline__ void multiply(int from, const void* tile) {
        const uint32_t b = ptx::wgmma_descriptor(tile, 0);
        [[maybe_unused]] uint32_t q_at = 0;
        if constexpr (C::q_shared > 0) q_at = ptx::wgmma_descriptor(shared.q, 0);
#pragma unroll
        for (int panel = from; panel < from + Panels; ++panel)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t at = b + (panel - from) * (C::panel_bytes / 16) + i * 2;
                if (panel < C::q_held)
                    ptx::wgmma(s, q[4 * panel + i], at, panel > 0 || i > 0, tile::MatrixTag<C::dtype>{});
                else
                    ptx::wgmma(s, q_at + (panel - C::q_held) * (C::panel_bytes / 16) + i * 2, at, 1,
                               tile::MatrixTag<C::dtype>{});
            }
    }

    __device__ __forceinline__ void wait_tile(uint64_t* full, uint32_t phase) {
        ptx::mbarrier_wait(full, phase);
        ptx::fence_async_shared();
    }

    __device__ __forceinline__ void make_scores() {
        wait_tile(&shared.first_bars.full[slot.index], slot.phase);
        keys_at = slot.index;
        ptx::wgmma_fence();
        multiply<C::first_panels>(0, shared.first.tiles[slot.index]);
        slot.advance();
        if constexpr (C::value_in_key) {
            wait_tile(&shared.third_bars.full[p_slot.index], p_slot.phase);
            multiply<1>(C::panels - 1, shared.third.tiles[p_slot.index]);
            wait_tile(&shared.second_bars.full[second.index], second.phase);  // the one that comes last
            multiply<C::second_panels>(C::first_panels, shared.second.tiles[second.index]);
            second.advance();
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
    }

    // One block of keys.
    __device__ __forceinline__ void block(bool is_first, bool is_last, int& next_blocks) {
        make_scores();
        publish();
        uint32_t keys[2];
        take_keys(keys);
        if (is_last) next_blocks = take_next();
        if constexpr (HasCap) tile::cap(s, params.into_cap);
        if ((keys[0] & keys[1]) != ~0u) mask(keys);
        make_probabilities(is_first || params.max_logits.data);
        p_slot.advance();
        if (is_last) publish();
    }

    // Which keys of the tile there are, read by the lane that releases it.
    __device__ __forceinline__ void take_keys(uint32_t (&keys)[2]) {
        const uint64_t all = is_first_lane() ? shared.keys[keys_at] : 0;
        keys[0] = __shfl_sync(~0u, uint32_t(all), 0), keys[1] = __shfl_sync(~0u, uint32_t(all >> 32), 0);
        if constexpr (!C::value_in_key)
            if (is_first_lane()) release<C>(&shared.first_bars.empty[keys_at]);
    }

    __device__ __forceinline__ void mask(const uint32_t (&keys)[2]) {
#pragma unroll
        for (int i = 0; i < gather_tile / 2; ++i) ptx::minus_infinity_unless(s[i], has_key(keys, thread, i));
    }

    // p into shared memory, and its sums. Made relative to the maximum found last, unless that follows or was too low.
    __device__ __forceinline__ void make_probabilities(bool follows) {
        if constexpr (C::value_in_key)
            ptx::named_barrier_sync(1, 128);  // all have done with the keys that p is written over
        else
            ptx::mbarrier_wait(&shared.third_bars.empty[p_slot.index], p_slot.phase ^ 1);
        float factor[2], sum[2];
        if (follows) tile::raise_maximum(s, rows, params.scale_log2, factor);
        while (!store_exponentials(sum) && !follows) {
            tile::raise_maximum(s, rows, params.scale_log2, factor);
            follows = true;
        }
        rows.l[0] += sum[0], rows.l[1] += sum[1];
        if (follows && thread % 4 == 0)
            for (int h = 0; h < 2; ++h) shared.factor[p_slot.index][tile::fragment_row(thread, 2 * h)] = factor[h];
        if (is_first_lane()) shared.rescales[p_slot.index][thread / 32] = follows;
        ptx::fence_async_shared();
        __syncwarp();  // all lanes' p before lane 0 tells output
        if (C::output_warpgroups > 1 && is_first_lane()) ptx::mbarrier_arrive(&shared.p_full[1][p_slot.index]);
        holds_back = true;
    }

    // As tile::exponentials, 16 columns at a time. False where a sum is so large that the maximum must follow.
    __device__ __forceinline__ bool store_exponentials(float (&sum)[2]) {
        const int row = 16 * (thread / 32) + thread % 16;
        const uint32_t at = ptx::shared_address(shared.third.tiles[p_slot.index]) + row * 128;
        const uint32_t swizzle = (thread % 8 << 4) ^ (thread / 16 % 2 << 4);
        float offset[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
            offset[h] = fminf(tile::lift<C::dtype> - rows.m[h] * params.scale_log2, FLT_MAX), sum[h] = 0;
#pragma unroll
        for (int n = 0; n < gather_tile / 16; ++n) {
            uint32_t p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i % 2;
                const float x = ptx::exp2_approx(fmaf(s[8 * n + 2 * i], params.scale_log2, offset[h]));
                const float y = ptx::exp2_approx(fmaf(s[8 * n + 2 * i + 1], params.scale_log2, offset[h]));
                sum[h] += x, sum[h] += y;
                p[i] = tile::pack<C::dtype>(x, y);
            }
            ptx::store_matrix_x4(at + (swizzle ^ (n << 5)), p[0], p[1], p[2], p[3]);
        }
        return __all_sync(~0u, sum[0] <= tile::most<C::dtype> && sum[1] <= tile::most<C::dtype>);
    }

    // Tells the first of output of the p before: late, so that its products run when the tensor unit has nothing else
    // to do.
    __device__ __forceinline__ void publish() {
        const int before = (p_slot.index + C::p_stages - 1) % C::p_stages;
        if (holds_back && is_first_lane()) ptx::mbarrier_arrive(&shared.p_full[0][before]);
        holds_back = false;
    }

    __device__ __forceinline__ void finish(int at) {
        const ListTask& task = shared.task[at];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int in_tile = tile::fragment_row(thread, 2 * h);
            const TileRow row(params.rows, params.lists, task, in_tile);
            const auto* sinks = static_cast<const float*>(params.sink_logits.data);
            const bool is_part = !task.is_whole();
            const RowEnd end = end_row(rows.m[h], tile::quad_sum(rows.l[h]), tile::lift<C::dtype>, params.scale,
                                       sinks && !is_part ? sinks[row.head * params.sink_logits.head] : -INFINITY);
            if (thread % 4) continue;
            shared.end[at][in_tile] = end.factor;
            if (is_part) {
                const int64_t to = int64_t(task.part) * gather_tile + in_tile;
                shared.out[at][in_tile] = row.is_there ? params.partials.out + to * params.head_dim_v : nullptr;
                params.partials.lse[to] = end.lse, params.partials.top[to] = rows.m[h] * params.scale;
                continue;
            }
            shared.out[at][in_tile] =
                row.is_there ? any::row_of<Element>(params.out, task.batch, row.head, row.query) : nullptr;
            if (!row.is_there) continue;
            if (params.lse.data) *any::row_of<float>(params.lse, task.batch, row.head, row.query) = end.lse;
            if (params.max_logits.data)
                *any::row_of<float>(params.max_logits, task.batch, row.head, row.query) = rows.m[h] * params.scale;
        }
        __syncwarp();  // all lanes' factors before lane 0 tells output
        if (is_first_lane()) {
            ptx::mbarrier_arrive(&shared.end_full[at]);
            ptx::mbarrier_arrive(&shared.task_bars.empty[at]);
        }
    }
};

// ---- output: a warpgroup has up to 256 columns of out ----
// Its sums leave few registers for anything else: scores tell where its rows go.
template <class C, int Part>
struct GatherOutput {
    using Element = typename C::Element;
    static constexpr bool is_second = !C::value_in_key || Part == 1;  // where its values lie

    const GatherForwardParams& params;
    GatherShared<C>& shared;
    const int thread;  // of the warpgroup
    Cursor<(is_second ? C::second_stages : C::stages)> slot;
    Cursor<C::p_stages> p_slot;
    float r_out[C::products][C::product_columns / 2];

    __device__ __forceinline__ void run() {
        Cursor<C::tasks> at;
        for (;;) {
            ptx::mbarrier_wait(&shared.task_bars.full[at.index], at.phase);
            const ListTask& task = shared.task[at.index];
            const int blocks = task.blocks;
            if (blocks == end_of_work) return;
            const int next = Part == 0 ? shared.next_tile[at.index] : no_tile;
            if (next != no_tile) fetch(next);
            if (blocks == 0) clear();
#pragma unroll 1
            for (int block = 0; block < blocks; ++block) add(block);
            ptx::mbarrier_wait(&shared.end_full[at.index], at.phase);
            task.is_whole() ? store(at.index) : store_part(at.index);
            __syncwarp();  // all lanes have read their rows' ends
            if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.task_bars.empty[at.index]);
            at.advance();
        }
    }

    // What the next task will wait for comes into L2, while this warpgroup has nothing to do and no sums to keep.
    __device__ __forceinline__ void fetch(int at) const {
        const any::GatherLists& lists = params.lists;
        const GatherTask task = GatherTask::at(params.rows, lists, at);
        if (thread < gather_tile) {
            const TileRow row(params.rows, lists, task, thread);
            ptx::prefetch_l2(any::row_of<Element>(params.q, task.batch, row.head, row.query),
                             params.head_dim * sizeof(Element));
        } else if (thread == gather_tile) {
            const any::KeyList list =
                lists.list_of_head(task.batch, task.head_kv * lists.group, task.query / lists.sizes.block_q);
            if (list.step == 1) ptx::prefetch_l2(list.entries, size_t(list.count) * (list.is_wide ? 8 : 4));
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (auto& sums : r_out)
#pragma unroll
            for (float& x : sums) x = 0;
    }

    template <class First, class Second>
    __device__ __forceinline__ static auto& of_values(First& first, Second& second) {
        if constexpr (is_second)
            return second;
        else
            return first;
    }

    // out += p v, where block 0 begins anew
    __device__ __forceinline__ void add(int block) {
        ptx::mbarrier_wait(&shared.p_full[Part][p_slot.index], p_slot.phase);
        if (block > 0 && shared.rescales[p_slot.index][thread / 32]) [[unlikely]] {
            const float* factor = shared.factor[p_slot.index] + tile::fragment_row(thread, 0);
#pragma unroll
            for (auto& sums : r_out) tile::scale_rows(sums, factor[0], factor[8]);
        }
        auto& bars = of_values(shared.first_bars, shared.second_bars);
        auto& ring = of_values(shared.first, shared.second);
        const uint32_t p = ptx::wgmma_descriptor(shared.third.tiles[p_slot.index], 0);
        ptx::mbarrier_wait(&bars.full[slot.index], slot.phase);  // scores have seen it full: this never waits long
        ptx::fence_async_shared();
        ptx::wgmma_fence();
        multiply(p, ptx::wgmma_descriptor(ring.tiles[slot.index], C::panel_bytes), block > 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        if (thread % 32 == 0) {
            release<C>(&bars.empty[slot.index]);
            release<C>(&shared.third_bars.empty[p_slot.index]);
        }
        slot.advance();
        p_slot.advance();
    }

    // The products of a tile of values, begun.
    __device__ __forceinline__ void multiply(uint32_t p, uint32_t v, bool accumulates) {
#pragma unroll
        for (int n = 0; n < C::products; ++n)
#pragma unroll
            for (int i = 0; i < gather_tile / 16; ++i)
                ptx::wgmma_transposed_b(r_out[n], p + i * 2,
                                        v + n * (C::product_columns / 64 * C::panel_bytes / 16) + i * 128,
                                        i > 0 || accumulates, tile::MatrixTag<C::dtype>{});
    }

    __device__ __forceinline__ void store_part(int task) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile::fragment_row(thread, 2 * h);
            auto* const to = static_cast<float*>(shared.out[task][row]);
            const float factor = shared.end[task][row];
#pragma unroll
            for (int n = 0; n < C::products; ++n)
#pragma unroll
                for (int i = 2 * h; i < C::product_columns / 2; i += 4) {
                    const int column =
                        Part * C::output_columns + n * C::product_columns + tile::fragment_column(thread, i);
                    if (to && column < params.head_dim_v)  // a multiple of 8
                        *reinterpret_cast<float2*>(to + column) =
                            make_float2(r_out[n][i] * factor, r_out[n][i + 1] * factor);
                }
        }
    }

    __device__ __forceinline__ void store(int task) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile::fragment_row(thread, 2 * h);
            auto* const to = static_cast<Element*>(shared.out[task][row]);
            const float factor = shared.end[task][row];
#pragma unroll
            for (int n = 0; n < C::products; ++n)
#pragma unroll
                for (int i = 0; i < C::product_columns / 2; i += 16) {
                    uint32_t words[4];
                    tile::pack_row<C::dtype>(r_out[n], i, h, factor, thread, words);
                    const int column = Part * C::output_columns + n * C::product_columns + 2 * i + 8 * (thread % 4);
                    if (to && column < params.head_dim_v)  // a multiple of 8
                        __stcs(reinterpret_cast<uint4*>(to + column), uint4{words[0], words[1], words[2], words[3]});
                }
        }
    }
};

// ---- kernel ----
template <class C, bool HasCap>
__global__ void __launch_bounds__(C::threads, 1)
    gather_forward_kernel(const __grid_constant__ GatherForwardParams params) {
    GatherShared<C>& shared = *ptx::swizzled_shared<GatherShared<C>>();
    constexpr int scores = 4 * C::ctas, output = scores * C::output_warpgroups;  // warps that read a tile
    constexpr int readers = C::value_in_key ? 4 * C::ctas : output;              // of the columns of values
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::stages; ++i) {
            ptx::mbarrier_init(&shared.first_bars.full[i], gather_producers + gather_producers / 32);
            ptx::mbarrier_init(&shared.first_bars.empty[i], scores);
        }
        for (int i = 0; i < C::second_stages; ++i) {
            ptx::mbarrier_init(&shared.second_bars.full[i], gather_producers);
            ptx::mbarrier_init(&shared.second_bars.empty[i], readers);
        }
        for (int i = 0; i < C::p_stages; ++i) {
            ptx::mbarrier_init(&shared.third_bars.full[i], gather_producers);
            ptx::mbarrier_init(&shared.third_bars.empty[i], output);
            for (auto& full : shared.p_full) ptx::mbarrier_init(&full[i], 4);
        }
        for (int i = 0; i < C::tasks; ++i) {
            ptx::mbarrier_init(&shared.task_bars.full[i], 1);
            ptx::mbarrier_init(&shared.task_bars.empty[i], 4 * (1 + C::output_warpgroups));
            ptx::mbarrier_init(&shared.end_full[i], 4);
        }
        ptx::mbarrier_init(&shared.q_full, 1);
        ptx::fence_mbarrier_init();
    }
    if (threadIdx.x / 32 == 1) {
        ptx::wait_for_grid_ahead();  // which makes the lists of calls on a cache
        ptx::let_next_grid_begin();  // which joins parts, if there are some, when this one has ended
        any::ShareFinder{params.shares, params.rows, params.lists, params.notes}.run(shared.share);
    }
    C::ctas > 1 ? ptx::cluster_sync() : __syncthreads();
    const int warpgroup =
        __shfl_sync(~0u, threadIdx.x / 128, 0);  // a shuffle, so that the compiler sees one value a warp
    const int thread = int(threadIdx.x % 128);
    if (warpgroup == 0) {
        ptx::take_registers<C::score_registers>();
        GatherScores<C, HasCap>{params, shared, thread}.run();
    } else if (warpgroup <= C::output_warpgroups) {
        ptx::take_registers<C::output_registers>();
        if (C::output_warpgroups == 1 || warpgroup == 1)
            GatherOutput<C, 0>{params, shared, thread}.run();
        else
            GatherOutput<C, 1>{params, shared, thread}.run();
    } else {
        ptx::give_registers<C::producer_registers>();
        GatherProducer<C>{params, shared}.run();
    }
    if (C::ctas > 1) ptx::cluster_sync();  // the other CTA still sends to this one, and arrives at its barriers
}

// ---- launch ----
template <class C>
GatherForwardParams make_gather_params(const ForwardArgs& args, const any::GatherLists& lists, const ListRows& rows,
                                       const any::SharedLists& space) {
    const Problem& p = *args.problem;
    const double scale = p.softcap != 0 ? p.softcap : p.scale;
    GatherForwardParams params{{},
                               args.q,
                               args.k,
                               args.v,
                               args.out,
                               args.k_scales,
                               args.v_scales,
                               args.lse,
                               args.max_logits,
                               args.sink_logits,
                               lists,
                               rows,
                               space.of_call(lists.sizes, lists.call),
                               space.partials(args),
                               space.noted(args),
                               int(p.head_dim),
                               int(p.head_dim_v),
                               float(scale),
                               float(scale * M_LOG2E),
                               p.softcap != 0 ? float(p.scale / p.softcap) : 0,
                               C::q_shared > 0 && (rows.queries == 1 || rows.group % gather_tile == 0)};
    if (params.has_boxes)
        params.q_boxes = runtime::make_tensor_map(args.q, runtime::q_sizes(p), C::dtype, 1, gather_tile);
    return params;
}

template <class C>
void launch_gather(const ForwardArgs& args, const GatherForwardParams& params) {
    const auto kernel = args.problem->softcap != 0 ? gather_forward_kernel<C, true> : gather_forward_kernel<C, false>;
    const runtime::Shape shape{unsigned(params.shares.ctas()), unsigned(C::threads), sizeof(GatherShared<C>), C::ctas};
    args.cache.starts.data ? runtime::launch_early(kernel, shape, args.stream, params)
                           : runtime::launch(kernel, shape, args.stream, params);
}

template <Dtype D, int HeadDim, int HeadDimV>
void launch_gather_float8(const ForwardArgs& args, const GatherForwardParams& params) {
    using C = GatherConfig<D, HeadDim, HeadDimV, Listed::float8>;
    if constexpr (C::value_in_key)
        if (widens_for_two(params.head_dim, params.rows.tiles))
            return launch_gather<GatherConfig<D, HeadDim, HeadDimV, Listed::shared_float8>>(args, params);
    launch_gather<C>(args, params);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const ForwardArgs& args) {
    static_assert(BlockQ == gather_tile && BlockK == gather_tile, "tiles of 64 rows and 64 keys");
    using C = GatherConfig<D, HeadDim, HeadDimV, Listed::elements>;
    const any::GatherLists lists = any::GatherLists::of(args);
    const ListRows rows = ListRows::of(*args.problem, lists.sizes, lists.known);
    const any::SharedLists space = share_lists(*args.problem, rows, lists.sizes, runtime::count_processors(args.device));
    const GatherForwardParams params = make_gather_params<C>(args, lists, rows, space);
    if (args.problem->float8_cache)
        launch_gather_float8<D, HeadDim, HeadDimV>(args, params);
    else
        launch_gather<C>(args, params);
    any::join_lists<D, C::combine_warps, true>(args, lists, rows, space);
}

template <class C>
void prepare_gather() {
    static_assert(sizeof(GatherShared<C>) <= C::most_bytes, "a CTA has no more");
    runtime::prepare(gather_forward_kernel<C, false>, sizeof(GatherShared<C>));
    runtime::prepare(gather_forward_kernel<C, true>, sizeof(GatherShared<C>));
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void GatherForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    using C = GatherConfig<D, HeadDim, HeadDimV, Listed::elements>;
    if (C::q_shared > 0) runtime::prepare_tensor_maps();
    const runtime::CurrentDevice current(device);
    any::prepare_join_lists<D, C::combine_warps, true>();
    prepare_gather<C>();
    prepare_gather<GatherConfig<D, HeadDim, HeadDimV, Listed::float8>>();
    if constexpr (C::value_in_key) prepare_gather<GatherConfig<D, HeadDim, HeadDimV, Listed::shared_float8>>();
}

}  // namespace spattn::sm90
