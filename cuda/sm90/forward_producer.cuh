// SPDX-License-Identifier: MIT
// The producers of block_forward.cuh: who walks the lists, who clears rows of v that no query sees, who copies rows that
// no box brings, and who sends for tiles of many boxes. Who widens those of float8 stands in forward_widener.cuh.
#pragma once

#include "any/row_end.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward_widener.cuh"
#include "sm90/pair.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/row_end.cuh"
#include "sm90/token_tiles.cuh"

namespace spattn::sm90 {

constexpr int helper_warps = 3;

// What the walker asks of its helpers.
struct Request {
    enum What : int32_t { q_rows, k_rows, v_rows, sum_rows, empty_row, dead_rows, no_more };
    What what;
    int32_t tile, batch, head;
    int32_t set, to;  // live keys, or all_live, or which part of the sums; the tile of q, or the slot
    int32_t mask;     // of the block, with k
    uint32_t phase;   // of the slot
};
// Copiers and senders take requests in turns: with as many slots as are a multiple of theirs, each warp has its own. A
// clearer takes all.
template <int Size>
struct Requests {
    Request request[Size];
    uint64_t asked[Size];  // the walker, for the clearer with the block's bytes; a helper waits
    uint64_t taken[Size];  // the helper; the walker waits

    __device__ __forceinline__ void init() {
        for (int i = 0; i < Size; ++i) ptx::mbarrier_init(&asked[i], 1), ptx::mbarrier_init(&taken[i], 1);
    }
};

// Sums of floats stand in the ring as boxes of a warpgroup's rows and 32 columns: those of a panel side by side, and as
// many boxes a slot as it has room for.
template <class C>
struct SumBox {
    int panel, warpgroup;
    // Box n of that part of the sums which has a slot.
    __device__ __forceinline__ SumBox(int part, int n)
        : panel((part * C::slot_boxes + n) / C::warpgroups), warpgroup((part * C::slot_boxes + n) % C::warpgroups) {}
};

// Keys of a block of consecutive ones that are not in that set of live ones, a bit each. What lies beyond the last key
// comes as zeros anyway.
template <int Words>
__device__ __forceinline__ void find_dead_keys(const LayoutView& layout, int set, int block, uint64_t (&dead)[Words]) {
    const uint64_t* alive = layout.live_keys.sets + set * layout.live_keys.words;
#pragma unroll
    for (int word = 0; word < Words; ++word) {
        const int64_t keys = layout.seq_k - (int64_t(block) * Words + word) * 64;  // from here on
        dead[word] = keys >= 64 ? ~alive[word] : keys > 0 ? ~alive[word] & ((1ull << keys) - 1) : 0;
    }
}

// ---- walker: one warp walks the lists and keeps the ring full ----
template <class C>
struct Walker {
    using Element = typename C::Element;

    const typename C::Params& params;
    typename C::Shared& shared;
    const int lane;
    Cursor<C::q_tiles> q;
    Cursor<C::slots> slot;
    Cursor<C::requests> request;
    Cursor<C::multiplies_float8 ? C::factor_blocks : 1> factors;  // of float8 products: the next block's
    int batch, head_kv;  // of the task
    int live;
    int pending = -1, pending_batch, pending_head, pending_set;  // the v block that follows the next k block
    int pending_scales = 0;  // of float8, where its scales are
    int pending_sums = -1, sums_head;  // of pieces: the tile whose last v that is, if its sums follow
    NextTask next{0};
    uint32_t tasks_phase = 0;  // of what two CTAs that share tiles agree on
    std::conditional_t<C::reads_bytes, ByteLoader<C>, StageLoader<C>> stages{params, shared, lane};  // of float8

    // task: the first.
    __device__ __forceinline__ void run(Task task) {
        for (int at = int(blockIdx.x) / C::tile_ctas;;) {
            next = NextTask(task.take);
            if (task.take) {
                load_task(task, at);
            } else {
                next.ask(params.next_task, counts_tasks());
                if (task.part == whole_row) store_empty(task);  // parts without blocks are none of a row's (plan/cache.h)
            }
            at = number_after(at);
            if (at >= params.tasks.num_tasks) break;
            task = params.tasks.tasks[at];
        }
        if constexpr (!C::reads_bytes)
            if (pending >= 0) load_pending_v();
        announce({{0, 0, 0, end_of_work, 0, 0}, false, 0});
        if constexpr (C::reads_bytes)
            return;
        else if constexpr (C::is_float8)
            stages.end();
        else if (C::any_order || params.layout.keys.stretch)
            for (int helper = 0; helper < helper_warps; ++helper) ask({Request::no_more});
        else if (params.layout.live_keys.set_of)
            ask({Request::no_more});
    }

    // Where each CTA has two tasks at most nobody counts: who had the longest first has the shortest second, or none.
    __device__ __forceinline__ int number_after(int at) {
        const int tiles = int(gridDim.x) / C::tile_ctas;  // that are worked on at once
        if constexpr (C::in_pair)
            if (params.next_task) return shared.pair.agree_on(next.taken, tasks_phase, lane) + tiles;
        if (params.next_task) return int(__shfl_sync(~0u, next.taken, 0)) + tiles;
        return at < tiles ? 2 * tiles - 1 - at : params.tasks.num_tasks;
    }
    // Where two CTAs share tiles the first one takes tasks for both.
    __device__ __forceinline__ bool counts_tasks() const { return lane == 0 && tile_rank<C>() == 0; }

    // A row of blocks without a key: out 0, lse -infinity or the sink's. Consumers never hear of it: one that waited
    // for the message after such a task would still hold the tile that this message needs.
    __device__ __forceinline__ void store_empty(const Task& task) {
        const int entry = task.head / params.heads_q, head = task.head - entry * params.heads_q;
        if constexpr (C::any_order)
            ask({Request::empty_row, task.row, entry, head});
        else if (tile_rank<C>() == 0)
            clear_rows(task.row, entry, head);
    }

    __device__ __forceinline__ void clear_rows(int tile, int entry, int head) {
        const any::TileRows& of = params.tile;
        const QuerySpan span = any::span_of(params.layout, entry, tile);
        const int first = span.first, begin = (span.begin - first) << of.bits, rows = (span.end - first) << of.bits;
        const int words = params.head_dim_v / 2;  // of two elements: head_dim_v is a multiple of 8
        for (int row = begin; row < rows; ++row) {
            auto* out = any::row_of<Element>(params.to.out, entry, head + of.head(row), first + of.place(row));
            for (int word = lane; word < words; word += 32) reinterpret_cast<uint32_t*>(out)[word] = 0;
        }
        for (int row = begin + lane; row < rows; row += 32) {
            const int of_row = head + of.head(row), token = first + of.place(row);
            if (params.to.lse.data)
                *any::row_of<float>(params.to.lse, entry, of_row, token) =
                    end_row(params, of_row, whole_row, -INFINITY, 0, 0).lse;
            if (params.to.max_logits.data)
                *any::row_of<float>(params.to.max_logits, entry, of_row, token) = -INFINITY;
        }
    }

    __device__ __forceinline__ void load_task(const Task& task, int index) {
        const LayoutView& layout = params.layout;
        const int list = layout.head_kinds == 1 ? 0 : layout.kind_of_head[task.head];
        const Slice slice = layout.by_query.slices[list * layout.by_query.rows + task.row];
        batch = task.head / params.heads_q;
        const int head = task.head - batch * params.heads_q;
        head_kv = head / params.group;
        live = list * layout.by_key.rows;
        const QuerySpan queries = C::any_order ? QuerySpan{} : any::span_of(layout, batch, task.row);
        announce({{batch, head, task.row, task.take, task.part, index}, leaves_by_rows(queries, task.row), queries});
        // Last blocks first: where few rows see a row's first block (windows), all see its last, and their maxima are
        // known from there on. Parts of a row are counted from the end just so.
        int skip = task.skip, left = task.take, end = slice.end;
        if (skip) end = pass_over_many(slice, skip);
        for (; end > slice.begin && left; end -= 32) {
            const int runs = min(32, end - slice.begin);
            Run mine{0, 0, full_block};
            if (lane < runs) mine = layout.by_query.runs[end - 1 - lane];
            for (int r = skip ? pass_over(mine.count, skip) : 0; r < runs && left; ++r) {
                const int first = __shfl_sync(~0u, mine.first, r), count = __shfl_sync(~0u, mine.count, r);
                const int mask = __shfl_sync(~0u, mine.mask, r);
                const int from = min(skip, count), take = min(count - from, left);
                skip -= from, left -= take;
                for (int n = from; n < from + take; ++n) load_block(first + count - 1 - n, mask);
            }
        }
        if constexpr (C::in_pieces)
            if (task.part == whole_row) pending_sums = task.row, sums_head = head;
    }

    // Parts of a row begin behind runs of others, which may be hundreds: from the end of a list, those that lie before
    // the first `skip` blocks are done, so many at once. Where to go on.
    __device__ __forceinline__ int pass_over_many(const Slice& slice, int& skip) const {
        constexpr int at_once = 8;  // of a lane: one wait for memory
        int end = slice.end;
        for (; end - slice.begin > 32 * at_once; end -= 32 * at_once) {
            int blocks = 0;
#pragma unroll
            for (int i = 0; i < at_once; ++i) blocks += params.layout.by_query.runs[end - 1 - 32 * i - lane].count;
            blocks = int(__reduce_add_sync(~0u, unsigned(blocks)));
            if (blocks > skip) break;
            skip -= blocks;
        }
        return end;
    }
    // The same of a run each lane has, or nothing: the lane of the first that goes beyond, or 32.
    __device__ __forceinline__ int pass_over(int count, int& skip) const {
        int before = count;  // and with it
#pragma unroll
        for (int n = 1; n < 32; n *= 2) {
            const int more = __shfl_up_sync(~0u, before, n);
            before += lane >= n ? more : 0;
        }
        const int passed = __popc(__ballot_sync(~0u, before <= skip));
        if (passed) skip -= __shfl_sync(~0u, before, passed - 1);
        return passed;
    }

    // Whether out cannot leave as boxes: rows of a listed tile stand anywhere, those away from home leave elsewhere, and
    // places of a box may be those of other sequences, or before all. (The copy engine loads a box that begins below 0;
    // to store one is an illegal instruction.)
    __device__ __forceinline__ bool leaves_by_rows(const QuerySpan& queries, int tile) const {
        const int places = params.layout.block_q;
        if constexpr (!C::any_order)
            return params.layout.spans && (queries.begin > queries.first || queries.end < queries.first + places);
        const AxisView& axis = params.layout.queries;
        if (tile < axis.listed) return true;
        if (!axis.away) return false;
        uint64_t away = 0;
        for (int word = 0; word < C::block_q / 64; ++word)
            away |= axis.away[int64_t(tile - axis.listed) * (C::block_q / 64) + word];
        return away != 0;
    }

    // Publishes a task with its q tile, or the end of work with none.
    __device__ __forceinline__ void announce(const ForwardMessage& message) {
        uint64_t* full = &shared.q_full[q.index];
        ptx::mbarrier_wait(&shared.q_empty[q.index], q.phase ^ 1);
        if (ptx::elect()) shared.task[q.index] = message;
        if (message.count != end_of_work)
            load_q(message, full);
        else if (ptx::elect())
            ptx::mbarrier_arrive(full);
        q.advance();
    }

    __device__ __forceinline__ void load_q(const ForwardMessage& message, uint64_t* full) {
        uint8_t* tile = shared.q[q.index][0];
        if constexpr (C::any_order)
            load_q({Request::q_rows, message.row, message.batch, message.head, all_live, q.index}, tile, full);
        else if (ptx::elect())
            load<C::key_panels, C::panel_bytes, C::key_panel_columns>(&params.maps.q, message.queries.first, message.head,
                                                                      message.batch, tile, full);
    }

    __device__ __forceinline__ void load_q(const Request& what, uint8_t* tile, uint64_t* full) {
        if (is_copied(what)) return ask(what);
        send_tile<C::panel_bytes>(what, params.maps.q, params.layout.queries, C::block_q, tile, full);
    }

    __device__ __forceinline__ void load_block(int block, int mask) {
        if constexpr (C::reads_bytes) {
            next.begin_block(params.next_task, counts_tasks());
            stages.load_block(block, mask, batch, head_kv);
        } else if constexpr (C::is_float8) {
            next.begin_block(params.next_task, counts_tasks());
            const int scales_at = stages.scales.index;
            stages.load_k(block, mask, batch, head_kv);
            follow_with_v(block, scales_at);
        } else {
            load_k(block, mask);
        }
    }
    // Begins the tile for which the next slot is: whether the walker is to load it, once the slot is free. Copiers wait
    // for that themselves, and look up where their rows stand meanwhile. Here what was in the slot is waited for to have
    // come: a barrier tells a phase from the next one alone, and a copier might not have waited yet for the one before.
    __device__ __forceinline__ bool begin_tile(const Request& what) {
        if constexpr (C::any_order) {
            ptx::mbarrier_wait(&shared.full[slot.index], slot.phase ^ 1);
            if (is_copied(what)) return ask(what), false;
        }
        ptx::mbarrier_wait(&shared.empty[slot.index], slot.phase ^ 1);
        return true;
    }

    __device__ __forceinline__ void load_k(int block, int mask) {
        const Request what{Request::k_rows, block, batch, head_kv, all_live, slot.index, mask, slot.phase};
        const bool is_ours = begin_tile(what);
        next.begin_block(params.next_task, counts_tasks());
        if (is_ours) {
            uint64_t* const full = &shared.full[slot.index];
            uint8_t* const tile = shared.ring[slot.index][0];
            if (ptx::elect()) shared.mask[slot.index] = mask;
            if constexpr (C::any_order)
                send_tile<C::box_bytes>(what, params.maps.k, params.layout.keys, C::block_k, tile, full);
            else if constexpr (C::multiplies_float8)
                load_float8_keys(block, tile, full);
            else
                load_keys<C::panels>(what, params.maps.k, tile, full);
        }
        slot.advance();
        follow_with_v(block);
    }
    __device__ __forceinline__ void follow_with_v(int block, int scales_at = 0) {
        if (pending >= 0) load_pending_v();
        pending = block, pending_scales = scales_at, pending_batch = batch, pending_head = head_kv;
        pending_set = params.layout.live_keys.set_of ? params.layout.live_keys.set_of[live + block] : all_live;
    }

    __device__ __forceinline__ void load_pending_v() {
        if constexpr (C::is_float8)
            stages.load_v(pending, pending_batch, pending_head, pending_scales);
        else
            load_v();
        pending = -1;
        if constexpr (C::in_pieces)
            if (pending_sums >= 0) load_sums();
    }
    __device__ __forceinline__ void load_v() {
        if (C::any_order && pending_set != all_live && holds_what_others_see(pending, pending_set))
            pending_set = all_live;
        const Request what{Request::v_rows, pending,    pending_batch, pending_head,
                           pending_set,     slot.index, full_block,    slot.phase};
        if (begin_tile(what)) {
            uint64_t* full = &shared.full[slot.index];
            uint8_t* const tile = shared.ring[slot.index][0];
            if constexpr (C::any_order) {
                send_tile<C::box_bytes>(what, params.maps.v, params.layout.keys, C::block_k, tile, full);
            } else {
                if (pending_set != all_live)
                    full = ask<false>({Request::dead_rows, pending, 0, 0, pending_set, slot.index});
                load_keys<C::v_panels>(what, params.maps.v, tile, full);
            }
        }
        slot.advance();
    }

    // What pieces before left of a task's rows comes behind its last v, and where there is none, room for what this one
    // leaves.
    __device__ __forceinline__ void load_sums() {
        for (int part = 0; part < C::sum_slots; ++part) {
            const Request what{Request::sum_rows, pending_sums, pending_batch, sums_head,
                               part,              slot.index,   full_block,    slot.phase};
            if (begin_tile(what) && ptx::elect()) load_sums(part, &shared.full[slot.index]);
            slot.advance();
        }
        pending_sums = -1;
    }
    __device__ __forceinline__ void load_sums(int part, uint64_t* full) {
        if (params.to.piece.is_first) return ptx::mbarrier_arrive(full);
        ptx::mbarrier_arrive_expect(full, C::slot_boxes * C::warpgroup_bytes);
        const HomePlace at(params.layout.queries, params.query_residue_tiles, C::block_q, pending_sums);
        for (int n = 0; n < C::slot_boxes; ++n) {
            const SumBox<C> box(part, n);
            ptx::tma_load_5d(shared.ring[slot.index][0] + n * C::warpgroup_bytes, at.map(params.maps.sums),
                             line_columns<float> * box.panel, sums_head, at.in_map(params.maps.sums),
                             at.first + box.warpgroup * C::warpgroup_rows, pending_batch, full);
        }
    }

    // Whether all keys that no query sees in a home are away: what they hold is no padding, and may come as it is.
    __device__ __forceinline__ bool holds_what_others_see(int tile, int set) const {
        const AxisView& axis = params.layout.keys;
        if (!axis.away || tile < axis.listed) return false;
        const int home = tile - axis.listed;
        uint64_t dead[C::block_k / 64], left = 0;
        find_dead_keys(params.layout, set, home, dead);
#pragma unroll
        for (int word = 0; word < C::block_k / 64; ++word)
            left |= dead[word] & ~axis.away[int64_t(home) * (C::block_k / 64) + word];
        return left == 0;
    }

    // A block of keys: a box, or one for each stretch of a listed tile, which senders bring.
    template <int Panels>
    __device__ __forceinline__ void load_keys(const Request& what, const CUtensorMap& map, uint8_t* to, uint64_t* bar) {
        if (params.layout.keys.stretch) return ask(what);
        if (ptx::elect())
            load<Panels, C::box_bytes>(&map, what.tile * C::block_k, what.head, what.batch, to, bar);
    }
    // A block of float8, with the factors of its keys, if these have any. Their place is free: consumers have released
    // the v of the block that was there, or there would be no slot for this one.
    __device__ __forceinline__ void load_float8_keys(int block, uint8_t* to, uint64_t* bar) {
        static_assert(2 * C::factor_blocks >= 3 + C::slots, "v of block j is the tile 2 j + 2, k the tile 2 j - 1");
        const int first = block * C::block_k, bytes = C::block_k * int(sizeof(float));
        if (ptx::elect()) {
            const bool has_factors = params.k_scales.data != nullptr;
            load<C::key_panels, C::box_bytes, C::key_panel_columns>(&params.maps.k, first, head_kv, batch, to, bar,
                                                                    has_factors ? bytes : 0);
            if (has_factors)
                ptx::bulk_load(shared.factors[factors.index],
                               any::row_of<float>(params.k_scales, batch, head_kv, first), bytes, bar);
        }
        factors.advance();
    }
    // more: bytes that the caller lets follow.
    template <int Panels, int Bytes, int Columns = C::panel_columns>
    __device__ __forceinline__ void load(const CUtensorMap* map, int row, int head, int entry, uint8_t* to,
                                         uint64_t* bar, int more = 0) {
        ptx::mbarrier_arrive_expect(bar, Panels * Bytes + more);
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_load_4d(to + panel * Bytes, map, first_column<C>() + Columns * panel, head, row, entry, bar);
    }

    // Tiles where tokens stand in any order: homes and packed tiles come as boxes, and copiers bring what else is
    // listed, and what has dead keys.
    __device__ __forceinline__ bool is_copied(const Request& what) const {
        const AxisView& queries = params.layout.queries;
        if (what.what == Request::q_rows) return what.tile < queries.listed;
        if (what.what == Request::sum_rows) return !params.to.piece.is_first && what.tile < queries.listed;
        if (what.tile < params.packed_tiles) return false;
        return what.tile < params.layout.keys.listed || what.set != all_live;
    }
    // v has as many panels as k.
    template <int Bytes>
    __device__ __forceinline__ void send_tile(const Request& what, const runtime::ResidueMaps& maps,
                                              const AxisView& axis, int block, uint8_t* to, uint64_t* bar) {
        if (!ptx::elect()) return;
        if (what.what != Request::q_rows && what.tile < params.packed_tiles) {
            ptx::wait_for_grid_ahead();  // which packs
            const CUtensorMap& map = what.what == Request::k_rows ? params.maps.packed_k : params.maps.packed_v;
            return load<C::panels, Bytes>(&map, what.tile * block, what.head, what.batch, to, bar);
        }
        ptx::mbarrier_arrive_expect(bar, C::panels * Bytes);
        const HomePlace at(axis, residue_tiles_of(params, what.what == Request::q_rows), block, what.tile);
        send_home<C::panels, Bytes>(maps, at, 0, what.batch, what.head, to, bar);
    }

    __device__ __forceinline__ void ask(const Request& what) { ask<true>(what); }
    // IsAll: nothing follows. Else the bytes that the helper waits for arrive at the barrier that is returned.
    template <bool IsAll>
    __device__ __forceinline__ uint64_t* ask(const Request& what) {
        uint64_t* const asked = &shared.helper.asked[request.index];
        ptx::mbarrier_wait(&shared.helper.taken[request.index], request.phase ^ 1);
        if (ptx::elect()) {
            shared.helper.request[request.index] = what;
            if (IsAll) ptx::mbarrier_arrive(asked);
        }
        request.advance();
        return asked;
    }
};

// ---- clearer: one warp writes zeros where no query sees a key of v ----
// 0 * NaN is NaN: rows of v that no query sees must not hold what the caller left there. Consumers would repair what
// comes of it, but padding is no exception, and a repair takes long. The walker does not wait for it: blocks with such
// keys may be many, as where single queries list blocks smaller than the tiles.
template <class C>
struct Clearer {
    static constexpr int words = C::block_k / 64;

    const typename C::Params& params;
    typename C::Shared& shared;
    const int lane;
    Cursor<C::requests> request;
    int block = -1, set = -1;   // of the last request: under a sink, its block comes once a task
    uint64_t dead[words] = {};  // the keys of that block which no query sees

    __device__ __forceinline__ void run() {
        for (;; request.advance()) {
            ptx::mbarrier_wait(&shared.helper.asked[request.index], request.phase);
            const Request what = shared.helper.request[request.index];
            if (what.what == Request::no_more) break;
            clear(what);
            ptx::fence_async_shared();
            __syncwarp();  // all lanes have read the request, and written their zeros, before lane 0 says so
            if (lane != 0) continue;
            ptx::mbarrier_arrive(&shared.helper.taken[request.index]);
            ptx::mbarrier_arrive(&shared.full[what.to]);
        }
    }

    // Eight lanes write a row, so that four are written at once. The compiler knows where a lane's rows lie: each of them
    // takes the test of a bit and a store.
    __device__ __forceinline__ void clear(const Request& what) {
        static_assert(C::row_bytes == 8 * 16);
        if (what.tile != block || what.set != set) {
            block = what.tile, set = what.set;
            find_dead_keys(params.layout, set, block, dead);
        }
        const uint32_t to = ptx::shared_address(shared.ring[what.to][0]) + 16 * lane;
#pragma unroll
        for (int word = 0; word < words; ++word) {
            if (!dead[word]) continue;
            const uint64_t own = dead[word] >> (lane / 8);
#pragma unroll
            for (int row = 0; row < 64; row += 4)
                if (own >> row & 1)
                    for (int panel = 0; panel < C::v_panels; ++panel)
                        ptx::store_shared(to + panel * C::box_bytes + (64 * word + row) * C::row_bytes, {0, 0, 0, 0});
        }
    }
};

// ---- helpers: three warps take requests in turns ----
template <class C>
struct Helper {
    typename C::Shared& shared;
    const int warp, lane;
    Cursor<C::requests / helper_warps> request{};

    __device__ __forceinline__ int slot() const { return helper_warps * request.index + warp; }
    __device__ __forceinline__ bool is_asked() const {
        return __any_sync(~0u, ptx::mbarrier_test(&shared.helper.asked[slot()], request.phase));
    }
    __device__ __forceinline__ Request take() {
        ptx::mbarrier_wait(&shared.helper.asked[slot()], request.phase);
        const Request what = shared.helper.request[slot()];
        __syncwarp();  // all lanes have read it before lane 0 says so
        if (lane == 0) ptx::mbarrier_arrive(&shared.helper.taken[slot()]);
        request.advance();
        return what;
    }
};

// ---- senders: helpers that ask for a tile of keys box by box ----
// A tile of 128 keys in pages of 16 comes as 16 boxes, which takes a warp as long as products take: the walker alone was
// waited for.
template <class C>
struct Sender : Helper<C> {
    using Helper<C>::shared, Helper<C>::lane;
    const typename C::Params& params;

    __device__ __forceinline__ void run() {
        for (;;) {
            const Request what = this->take();
            if (what.what == Request::no_more) break;
            const bool is_k = what.what == Request::k_rows;
            send(what, is_k ? params.maps.k : params.maps.v, is_k ? C::panels : C::v_panels);
        }
    }

    // A lane each knows where a stretch begins. What is no token comes from beyond all rows, where there are zeros.
    __device__ __forceinline__ void send(const Request& what, const CUtensorMap& map, int panels) const {
        const AxisView& keys = params.layout.keys;
        const int place = lane * keys.stretch;
        int row = no_token;
        if (place < C::block_k) row = keys.tokens[int64_t(what.tile) * C::block_k + place];
        if (row == no_token) row = int(params.layout.seq_k);
        uint64_t* const full = &shared.full[what.to];
        if (ptx::elect()) ptx::mbarrier_arrive_expect(full, panels * C::box_bytes);
        __syncwarp();  // what is expected is known before it comes
        uint8_t* to = shared.ring[what.to][0];
        for (int n = 0; n * keys.stretch < C::block_k; ++n, to += keys.stretch * C::row_bytes) {
            const int first = __shfl_sync(~0u, row, n);
            if (!ptx::elect()) continue;
            for (int panel = 0; panel < panels; ++panel)
                ptx::tma_load_4d(to + panel * C::box_bytes, &map, first_column<C>() + C::panel_columns * panel, what.head,
                                 first, what.batch, full);
        }
    }
};

// ---- copiers: helpers that bring what stands at no place of a box, and write rows that see no key ----
// A warp brings a whole tile, and then waits for it alone: the fence that lets products read copied rows waits for all
// copies that its threads have under way. When warps shared tiles, of which several were under way, each was waited for
// with all others, and scattered keys took more than twice as long. While a tile lands its copier looks up where the
// rows of the next one stand, if it has been asked for that.
template <class C>
struct Copier : Helper<C> {
    using Helper<C>::shared, Helper<C>::lane;
    using Element = typename C::Element;
    using Tokens = WarpTokens<(C::block_q > C::block_k ? C::block_q : C::block_k)>;

    const typename C::Params& params;

    __device__ __forceinline__ void run() {
        for (uint64_t* full = nullptr;;) {  // of the tile that is landing
            if (full && !this->is_asked()) end_tile(full), full = nullptr;
            const Request what = this->take();
            const Tokens tokens = find_rows(what);
            if (full) end_tile(full), full = nullptr;
            if (what.what == Request::no_more) break;
            if (what.what == Request::empty_row)
                end_empty_row(what);
            else
                full = copy(what, tokens);
        }
    }

    // It is there, and products may read what all lanes have written.
    __device__ __forceinline__ void end_tile(uint64_t* full) const {
        ptx::cp_async_wait_all();
        ptx::fence_async_shared();
        __syncwarp();  // all lanes' rows are there before lane 0 tells the consumers
        if (lane == 0) ptx::mbarrier_arrive(full);
    }
    // Bits of the live keys of a tile; null where all are.
    __device__ __forceinline__ const uint64_t* live_keys(int set) const {
        const LiveView& live = params.layout.live_keys;
        return set == all_live ? nullptr : live.sets + set * live.words;
    }

    // Where rows of q, k or v stand. Dead rows stand nowhere.
    __device__ __forceinline__ Tokens find_rows(const Request& what) const {
        const LayoutView& layout = params.layout;
        const bool is_q = what.what == Request::q_rows;
        if (!is_q && what.what != Request::k_rows && what.what != Request::v_rows) return {};
        const AxisView& axis = is_q ? layout.queries : layout.keys;
        const int rows = is_q ? C::block_q : C::block_k;
        const int64_t seq = is_q ? layout.seq_q : layout.seq_k;
        return {any::tokens_of(axis, rows, seq, what.tile), 0, rows, live_keys(what.set)};
    }

    // Returns the barrier that waits for the tile.
    __device__ __forceinline__ uint64_t* copy(const Request& what, const Tokens& tokens) {
        const LayoutView& layout = params.layout;
        const bool is_q = what.what == Request::q_rows, is_k = what.what == Request::k_rows;
        if (!is_q) ptx::mbarrier_wait(&shared.empty[what.to], what.phase ^ 1);  // until consumers have released the slot
        if constexpr (C::in_pieces)
            if (what.what == Request::sum_rows) return copy_sums(what);
        if (is_k && lane == 0) shared.mask[what.to] = what.mask;
        const TensorView& view = is_q ? params.q : is_k ? params.k : params.v;
        const int rows = is_q ? C::block_q : C::block_k, columns = is_q || is_k ? params.head_dim : params.head_dim_v;
        const TileSource from{is_q ? params.maps.q : params.maps.k, view, is_q ? layout.queries : layout.keys,
                              residue_tiles_of(params, is_q), is_q ? layout.seq_q : layout.seq_k, rows, columns};
        const uint32_t to = ptx::shared_address(is_q ? shared.q[what.to][0] : shared.ring[what.to][0]);
        copy_tokens<C::panels, Element>(from, tokens, rows, what.batch, what.head, to, rows * C::row_bytes);
        return is_q ? &shared.q_full[what.to] : &shared.full[what.to];
    }

    __device__ __forceinline__ uint64_t* copy_sums(const Request& what) {
        const LayoutView& layout = params.layout;
        const any::TileTokens tokens = any::tokens_of(layout.queries, C::block_q, layout.seq_q, what.tile);
        const uint32_t to = ptx::shared_address(shared.ring[what.to][0]);
        for (int n = 0; n < C::slot_boxes; ++n) {
            const SumBox<C> box(what.set, n);
            const int first = line_columns<float> * box.panel;
            const TensorView view = from_column<float>(params.sums, first);
            const TileSource from{params.maps.sums, view,      layout.queries, params.query_residue_tiles,
                                  layout.seq_q,     C::block_q, params.head_dim_v - first};
            const WarpTokens<C::warpgroup_rows> rows(tokens, box.warpgroup * C::warpgroup_rows, C::warpgroup_rows, nullptr);
            copy_tokens<1, float>(from, rows, C::warpgroup_rows, what.batch, what.head, to + n * C::warpgroup_bytes, 0);
        }
        return &shared.full[what.to];
    }

    __device__ __forceinline__ void end_empty_row(const Request& what) {
        const any::OwnTokens own =
            any::own_tokens_of(params.layout.queries, C::block_q, params.layout.seq_q, what.tile);
        if constexpr (C::in_pieces)
            end_rows(own, what.batch, what.head);
        else
            clear_rows(own, what.batch, what.head);
    }

    __device__ __forceinline__ void clear_rows(const any::OwnTokens& own, int entry, int head) {
        clear_tokens<C::block_q, 1, Element>(own, params.to.out, entry, head, params.head_dim_v, 0);
        const float lse = end_row(params, head, whole_row, -INFINITY, 0, 0).lse;
        for (int place = lane; place < C::block_q; place += 32) {
            const int token = own.at(place);
            if (token == no_token) continue;
            if (params.to.lse.data) *any::row_of<float>(params.to.lse, entry, head, token) = lse;
            if (params.to.max_logits.data) *any::row_of<float>(params.to.max_logits, entry, head, token) = -INFINITY;
        }
    }

    // Rows of which a piece sees no key, four at a time. No piece both reads and writes what is handed on of them.
    __device__ __forceinline__ void end_rows(const any::OwnTokens& own, int entry, int head) {
        const PieceView& piece = params.to.piece;
        if (!piece.is_first && !piece.is_last) return;
        for (int place = lane / 8; place < C::block_q; place += 4) {
            const int token = own.at(place);
            if (token == no_token) continue;
            any::RowEnd<C::dtype> end(params.to, entry, head, token);
            any::RowState<float> state{-INFINITY, 0, -INFINITY};
            end.take_on(state, 0);
            end.finish(state);
            auto* const out = any::row_of<Element>(params.to.out, entry, head, token);
            for (int column = lane % 8 * 8; column < params.head_dim_v; column += 64)
                pass_on<C::dtype>(piece, end.sums + column, out + column, end.share);
            if (lane % 8 == 0) end.write_state(state, 0);
        }
    }
};

}  // namespace spattn::sm90
