// SPDX-License-Identifier: MIT
// The producers of block_backward_apart.cuh: who walks the lists and brings tokens, as boxes or row by row.
#pragma once

#include <type_traits>

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/apart_walk.cuh"

namespace spattn::sm90 {

// ---- producer ----
// One warp, or four where tokens stand in any order. Of these all load where some tiles are copied; else the first
// does, and the others are its helpers, for tasks without blocks. What a thread of theirs keeps from task to task:
template <class T>
struct ApartProducerState {
    const ApartParams<T::order>& params;
    ApartShared<T>& shared;
    const int lane;
    const bool is_leader, helps;  // one lane of all producers; whether this warp loads nothing
    Cursor<T::tiles> tile;
    Cursor<T::slots> slot;
    Cursor<T::second_slots> second;
    NextTask next{0};
    int turn = 0;              // of shared.next
    uint32_t tasks_phase = 0;  // of what two CTAs that share tiles agree on

    // The same, of producers that are one warp: see elect.
    __device__ __forceinline__ bool leads() const {
        if constexpr (T::copies)
            return is_leader;
        else
            return ptx::elect();
    }

    // Publishes a task, or the end of work; load(full) begins its own tokens.
    template <class Load>
    __device__ __forceinline__ void announce(const ApartMessage& message, Load load) {
        uint64_t* full = &shared.own_full[tile.index];
        ptx::mbarrier_wait(&shared.own_empty[tile.index], tile.phase ^ 1);
        if (leads()) shared.task[tile.index] = message;
        load(full);
        tile.advance();
    }
    __device__ __forceinline__ void announce_end() {
        announce({{0, 0, 0, end_of_work, 0, 0}, 0}, [&](uint64_t* full) {
            if constexpr (T::copies)
                for (int i = 0; i < T::own_tiles; ++i) arrive_without_tile(full);
            else if (leads())
                ptx::mbarrier_arrive(full);
        });
    }

    // The task after the one at hand.
    __device__ __forceinline__ int take_next() {
        if (!params.next_task) return params.num_tasks();
        const int tiles = int(gridDim.x) / T::tile_ctas;  // that are worked on at once
        if constexpr (T::in_pair) return shared.pair.agree_on(next.taken, tasks_phase, lane) + tiles;
        return int(tell_producers<T::producers>(next.taken, is_leader, shared.next, turn, 1 + T::warpgroups)) + tiles;
    }
};

// A task of a walk.
template <class C>
struct ApartProducer {
    using Element = typename C::Element;

    ApartProducerState<typename C::Tiles>& state;
    const ApartWalk<C::order>& walk;
    const ApartParams<C::order>& params = state.params;
    ApartShared<typename C::Tiles>& shared = state.shared;
    int batch, head_q, head_kv;

    __device__ __forceinline__ void run(int index) {
        const Task& task = walk.tasks.tasks[index];
        state.next = NextTask(task.take);
        const any::Divisor& heads = C::by_query ? params.heads_q : params.heads_kv;
        batch = task.head / heads;
        head_q = task.head - batch * heads, head_kv = C::by_query ? head_q / params.group : head_q;
        if (C::has_helpers && state.helps) {
            if (!task.take) store_empty(task);
            return;
        }
        if (task.take) return load_task(task, index);
        state.next.ask(params.next_task, state.is_leader);
        if constexpr (!C::has_helpers) store_empty(task);
    }

    // Tokens that see nothing, or that nobody sees. Consumers never hear of them, as in the forward.
    __device__ __forceinline__ void store_empty(const Task& task) {
        if constexpr (C::any_order) {
            end_empty(task);
            return;
        }
        if constexpr (C::by_query) {
            clear_tile(task, params.dq, head_q, params.head_dim);
        } else {
            if (C::has_dp) clear_tile(task, params.dk, head_kv, params.head_dim);
            if (C::sums_p && !params.value_in_key) clear_tile(task, params.dv, head_kv, params.head_dim_v);
        }
    }
    // The CTA's columns of them.
    __device__ __forceinline__ void clear_tile(const Task& task, const TensorView& sums, int head, int columns) {
        const int first = task.row * C::own_rows;
        const int rows = min(C::own_rows, (C::by_query ? params.seq_q : params.seq_k) - first);
        const int own_columns = min(columns - first_column<C>(), C::head_dim);
        if (own_columns > 0)
            clear_rows<Element>(from_column<Element>(sums, first_column<C>()), batch, head, first, rows, own_columns,
                                state.lane);
    }

    __device__ __forceinline__ void end_empty(const Task& task) {
        if (!params.piece.is_first || !params.piece.is_last) {
            if (params.piece.is_first || params.piece.is_last) hand_on(task);
            return;
        }
        if constexpr (C::by_query)
            clear_own(task, params.dq, head_q, params.head_dim);
        else if constexpr (C::has_dp)
            clear_own(task, params.dk, head_kv, params.head_dim);
        if (C::sums_p && !params.value_in_key) clear_own(task, params.dv, head_kv, params.head_dim_v);
    }
    // Those that write for empty tasks, and which of them this one is.
    static constexpr int warps = C::producers / 32 - C::has_helpers;
    __device__ __forceinline__ static int warp() { return int(threadIdx.x) / 32 % 4 - C::has_helpers; }
    __device__ __forceinline__ void clear_own(const Task& task, const TensorView& sums, int head, int columns) {
        clear_tokens<C::own_rows, warps, Element>(own_tokens<C>(params.layout, task.row), sums, batch, head, columns,
                                                  warp());
    }
    // Other pieces of the pattern may have sums for these tokens. A warp has four at a time.
    __device__ __forceinline__ void hand_on(const Task& task) {
        const any::OwnTokens own = own_tokens<C>(params.layout, task.row);
        for (int place = 4 * warp() + state.lane / 8; place < C::own_rows; place += 4 * warps) {
            const int token = own.at(place);
            if (token == no_token) continue;
            const int64_t query = (int64_t(batch) * params.heads_q + head_q) * params.seq_q + token;
            const int64_t key = (int64_t(batch) * params.heads_kv + head_kv) * params.seq_k + token;
            float* const dv = params.carried.dv + key * params.head_dim_v;
            if constexpr (C::by_query)
                hand_on(params.carried.dq + query * params.head_dim, params.dq, head_q, token, params.head_dim,
                        params.scale);
            else if constexpr (C::has_dp)
                hand_on(params.carried.dk + key * params.head_dim, params.dk, head_kv, token, params.head_dim,
                        params.scale, params.value_in_key && C::sums_p ? dv : nullptr);
            if (C::sums_p && (params.piece.is_first || !params.value_in_key))
                hand_on(dv, params.dv, head_kv, token, params.head_dim_v, 1);
        }
    }
    // The CTA's columns of a row; `also` is a row of values.
    __device__ __forceinline__ void hand_on(float* sums, const TensorView& to, int head, int token, int columns,
                                            float factor, const float* also = nullptr) {
        auto* const out = any::row_of<Element>(to, batch, head, token);
        const int end = min(columns, first_column<C>() + C::head_dim);
        for (int column = first_column<C>() + state.lane % 8 * 8; column < end; column += 64)
            pass_on<C::dtype>(params.piece, sums + column, out + column, factor,
                              also && column < params.head_dim_v ? also + column : nullptr);
    }

    // Queries walk their own list, keys those of all query heads of the group.
    __device__ __forceinline__ void load_task(const Task& task, int index) {
        const LayoutView& layout = params.layout;
        const ApartMessage message{
            {batch, C::by_query ? head_q : head_kv, task.row, C::steps * task.take, task.part, index},
            int(&walk - params.walks)};
        state.announce(message, [&](uint64_t* full) { load_own(message, full); });
        const auto load = [&](int head, int block, int mask) {
            state.next.begin_block(params.next_task, state.is_leader);
            head_q = head - batch * params.heads_q;
            const Place place(C::by_query ? layout.keys : layout.queries, residue_tiles_of(params, !C::by_query),
                              C::block_q, block);
            uint32_t quarters = quarters_of(mask);
#pragma unroll(C::copies ? 1 : C::steps)
            for (int n = 0; n < C::steps; ++n, quarters >>= 2)
                if (quarters & 3) load_step(place, block, n, mask, quarters & 3, state.next.due == 0 && quarters < 4);
        };
        if constexpr (C::by_query) {
            int skip = task.skip, left = task.take;
            const int list = layout.head_kinds == 1 ? 0 : layout.kind_of_head[task.head];
            each_block(layout.by_query, list, task.row, state.lane, task.head, 1, skip, left, load);
        } else {
            each_block_of_group(layout, task, params.group, state.lane, load);
        }
    }

    __device__ __forceinline__ void load_own(const TaskMessage& task, uint64_t* full) {
        auto& own = shared.own[state.tile.index];
        if constexpr (C::copies) {
            const auto load = [&]<int Panels>(const runtime::ResidueMaps& maps, const TensorView& view, int columns,
                                              uint8_t* to) {
                load_rows<C::own_rows, Panels, Element>(source<C::by_query>(maps, view, columns), task.row, 0,
                                                        task.batch, task.head, nullptr, to, full);
            };
            load.template operator()<C::panels>(walk.maps.own, C::by_query ? params.q : params.k, params.head_dim,
                                                own[0]);
            if constexpr (C::has_dp)
                load.template operator()<C::v_panels>(walk.maps.own_second, C::by_query ? params.dout : params.v,
                                                      params.head_dim_v, own[C::panels]);
        } else if (state.leads()) {
            ptx::mbarrier_arrive_expect(full, C::tile_bytes);
            const Place at(C::by_query ? params.layout.queries : params.layout.keys,
                           residue_tiles_of(params, C::by_query), C::own_rows, task.row);
            send_boxes<C::panels, C::own_bytes>(walk.maps.own, at, task.head, 0, own[0], full);
            if constexpr (C::has_dp)
                send_boxes<C::v_panels, C::own_bytes>(walk.maps.own_second, at, task.head, 0, own[C::panels], full);
        }
    }

    // Where a tile's tokens stand; and those from place `begin` on, as boxes of 64 columns, for the leader to call.
    struct RowPlace {
        int first;
        __device__ __forceinline__ RowPlace(const AxisView&, const any::Divisor&, int block, int tile)
            : first(tile * block) {}
    };
    template <int Panels, int PanelBytes>
    __device__ __forceinline__ void send_boxes(const CUtensorMap& map, const RowPlace& at, int head, int begin,
                                               uint8_t* to, uint64_t* full) {
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_load_4d(to + panel * PanelBytes, &map, first_column<C>() + C::panel_columns * panel, head,
                             at.first + begin, batch, full);
    }
    template <int Panels, int PanelBytes>
    __device__ __forceinline__ void send_boxes(const runtime::ResidueMaps& maps, const HomePlace& at, int head,
                                               int begin, uint8_t* to, uint64_t* full) {
        send_home<Panels, PanelBytes>(maps, at, begin, batch, head, to, full);
    }
    struct NoPlace {
        __device__ __forceinline__ NoPlace(const AxisView&, const any::Divisor&, int, int) {}
    };
    using Place = std::conditional_t<C::copies, NoPlace, std::conditional_t<C::any_order, HomePlace, RowPlace>>;

    // An operand along the queries, or along the keys.
    template <bool IsQueries>
    __device__ __forceinline__ TileSource source(const runtime::ResidueMaps& maps, const TensorView& view,
                                                 int columns) const {
        const LayoutView& layout = params.layout;
        const AxisView& axis = IsQueries ? layout.queries : layout.keys;
        const int64_t seq = IsQueries ? layout.seq_q : layout.seq_k;
        return {maps, view, axis, residue_tiles_of(params, IsQueries), seq, C::block_q, columns};
    }

    // The query of a block's place; beyond the sequence where there is none.
    __device__ __forceinline__ int query_at(const Place& place, int block, int n) const {
        const LayoutView& layout = params.layout;
        if constexpr (C::copies)
            return any::token_at(layout.queries, C::block_q, layout.seq_q, block, n);
        else if constexpr (C::any_order)
            return place.token_at(layout.queries, layout.seq_q, n);
        else
            return place.first + n;
    }

    // Two bits for each of a block's steps: which warpgroups have kept pairs there. All have where none is left out.
    __device__ __forceinline__ uint32_t quarters_of(int mask) const {
        constexpr uint32_t all = (1 << 2 * C::steps) - 1;
        if (!C::leaves_out || mask == full_block) return all;
        return __ldg(mask_words(params.layout, mask) + C::quarters_word + C::by_query);
    }

    // Part n of a block of the other axis.
    __device__ __forceinline__ void load_step(const Place& place, int block, int n, int mask, uint32_t pairs,
                                              bool is_last) {
        QueryStats stats[C::step / 32];  // asked for before the slot is free
        const bool has_stats = !C::by_query && threadIdx.x % C::producers < 32;
        if (has_stats)
#pragma unroll
            for (int i = 0; i < C::step / 32; ++i) {
                stats[i] = query_stats<C>(params, batch * params.heads_q + head_q,
                                          query_at(place, block, n * C::step + state.lane + 32 * i));
            }
        uint64_t* const full = &shared.other_full[state.slot.index];
        ptx::mbarrier_wait(&shared.other_empty[state.slot.index], state.slot.phase ^ 1);
        begin_other(place, n, walk.maps.other, shared.other[state.slot.index], full);
        if (has_stats)
#pragma unroll
            for (int i = 0; i < C::step / 32; ++i) {
                shared.offset[state.slot.index][state.lane + 32 * i] = stats[i].offset;
                shared.delta[state.slot.index][state.lane + 32 * i] = stats[i].delta;
            }
        __syncwarp();  // all lanes' before the leader tells the consumers
        if (state.leads()) shared.step[state.slot.index] = StepMessage(mask, n, C::steps, pairs, is_last);
        finish_other(block, n, walk.maps.other, C::by_query ? params.k : params.q, params.head_dim,
                     shared.other[state.slot.index], full);
        state.slot.advance();
        auto& second = shared.other_second[state.second.index];
        uint64_t* const second_full = &shared.second_full[state.second.index];
        ptx::mbarrier_wait(&shared.second_empty[state.second.index], state.second.phase ^ 1);
        begin_other(place, n, walk.maps.other_second, second, second_full);
        finish_other(block, n, walk.maps.other_second, C::by_query ? params.v : params.dout, params.head_dim_v, second,
                     second_full);
        state.second.advance();
    }

    // Boxes are on their way before anything else is done for a step, since consumers are only two or three steps
    // behind. They may land before the barrier is told how many bytes to expect.
    template <int Panels, class Maps>
    __device__ __forceinline__ void begin_other(const Place& at, int n, const Maps& maps,
                                                uint8_t (&to)[Panels][C::step_bytes], uint64_t* full) {
        if constexpr (!C::copies)
            if (state.leads())
                send_boxes<Panels, C::step_bytes>(maps, at, C::by_query ? head_kv : head_q, n * C::step, to[0], full);
    }
    // What the barrier of a step's tile waits for besides; or the tile itself, where it may be listed.
    template <int Panels, class Maps>
    __device__ __forceinline__ void finish_other(int block, int n, const Maps& map, const TensorView& view, int columns,
                                                 uint8_t (&to)[Panels][C::step_bytes], uint64_t* full) {
        if constexpr (C::copies)
            load_rows<C::step, Panels, Element>(source<!C::by_query>(map, view, columns), block, n * C::step, batch,
                                                C::by_query ? head_kv : head_q, nullptr, to[0], full);
        else if (state.leads())
            ptx::mbarrier_arrive_expect(full, Panels * C::step_bytes);
    }
};

}  // namespace spattn::sm90
