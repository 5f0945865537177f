// SPDX-License-Identifier: MIT
// The consumers of block_backward_apart.cuh: what makes and keeps sums of own tokens, and brings them to memory.
#pragma once

#include <type_traits>

#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/apart_walk.cuh"
#include "tile/fragment.h"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

// ---- consumer: one warpgroup owns 64 tokens ----
template <class C>
struct ApartConsumer;
// What a thread keeps from task to task.
template <class T>
struct ApartConsumerState {
    const ApartParams<T::order>& params;
    ApartShared<T>& shared;
    const int warpgroup, thread;  // of the warpgroup
    Cursor<T::tiles> tile;
    Cursor<T::slots> slot;
    Cursor<T::second_slots> second;
    int held = -1;            // a tile that this warp's sums are leaving
    int noted[2] = {-1, -1};  // of each walk the last task of which this warp must repair rows
    Cursor<part_places> part_at;  // where the other CTA's next parts come, if two share a tile
    float s[T::values], r_ds[T::of_ds], r_p[T::of_p];

    __device__ __forceinline__ void wait(uint64_t* full, uint32_t phase) const {
        ptx::mbarrier_wait(full, phase);
        if constexpr (T::copies) ptx::fence_async_shared();  // rows that threads copied are ordinary writes
    }
    // Who works on tasks of C's walk, in a kernel whose first walk is First's.
    template <class C, class First>
    __device__ __forceinline__ ApartConsumer<C> of() {
        constexpr int walk = std::is_same_v<C, First> ? 0 : 1;
        return {*this, params.walks[walk], noted[walk]};
    }
};

// A task of a walk.
template <class C>
struct ApartConsumer {
    using Tag = tile::MatrixTag<C::dtype>;
    using Words = uint32_t[C::step / 16][4];  // an a operand: steps of 16 tokens

    ApartConsumerState<typename C::Tiles>& state;
    const ApartWalk<C::order>& walk;
    int& noted;
    const ApartParams<C::order>& params = state.params;
    ApartShared<typename C::Tiles>& shared = state.shared;
    const int warpgroup = state.warpgroup, thread = state.thread;
    QueryStats own[2];  // of the thread's two rows, where own tokens are queries
    StepMessage at_hand;
    static constexpr int values = C::values, of_ds = C::of_ds, of_p = C::of_p;
    float (&s)[C::values] = state.s, (&r_ds)[C::of_ds] = state.r_ds, (&r_p)[C::of_p] = state.r_p;

    __device__ __forceinline__ void run(const TaskMessage& task) {
        if constexpr (C::by_query)
            for (int h = 0; h < 2; ++h) own[h] = stats_of(task, tile::fragment_row(thread, 2 * h));
        state.wait(&shared.other_full[state.slot.index], state.slot.phase);
        begin_scores();
        if constexpr (C::leaves_out) take_step();
        ptx::wgmma_wait<0>();
        if constexpr (C::leaves_out) {
            clear_sums();
            while (!at_hand.is_last())
                if (at_hand.has_pairs(warpgroup))
                    step<false>(false);
                else
                    pass<false>();
            if (at_hand.has_pairs(warpgroup))
                step<true>(false);
            else
                pass<true>();
        } else {
            for (int n = 0; n < task.count - 1; ++n) step<false>(n == 0);
            step<true>(task.count == 1);
        }
        store(task);
    }

    __device__ __forceinline__ QueryStats stats_of(const TaskMessage& task, int row) const {
        const int place = warpgroup * C::warpgroup_rows + row;
        const LayoutView& layout = params.layout;
        const int token = C::any_order ? any::token_at(layout.queries, C::block_q, layout.seq_q, task.row, place)
                                       : task.row * C::own_rows + place;
        return query_stats<C>(params, task.batch * params.heads_q + task.head, token);
    }

    // ---- products, begun ----
    template <int Columns, int Size>
    __device__ __forceinline__ void begin_product(float (&to)[Size], const uint8_t* left, const uint8_t* right) {
        const uint32_t a = ptx::wgmma_descriptor(left + warpgroup * C::warpgroup_rows * C::row_bytes, 0);
        const uint32_t b = ptx::wgmma_descriptor(right, 0);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Columns / 16; ++i)
            ptx::wgmma(to, a + (i / 4) * (C::own_bytes / 16) + (i % 4) * 2,
                       b + (i / 4) * (C::step_bytes / 16) + (i % 4) * 2, i > 0, Tag{});
        ptx::wgmma_commit();
    }
    __device__ __forceinline__ void begin_scores() {
        begin_product<C::head_dim>(s, shared.own[state.tile.index][0], shared.other[state.slot.index][0]);
    }
    template <int Size>
    __device__ __forceinline__ void begin_sum(float (&sum)[Size], const Words& left, const uint8_t* right, bool first) {
        const uint32_t b = ptx::wgmma_descriptor(right, C::step_bytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::step / 16; ++i) ptx::wgmma_transposed(sum, left[i], b + i * 128, i > 0 || !first, Tag{});
        ptx::wgmma_commit();
    }

    // ---- one step ----
    // Without a kept pair of this warpgroup's tokens: the scores that were made are of no use.
    template <bool IsLast>
    __device__ __forceinline__ void pass() {
        const int at = state.slot.index, second_at = state.second.index;
        state.wait(&shared.second_full[second_at], state.second.phase);
        release(&shared.second_empty[second_at]);
        state.second.advance();
        next_scores<IsLast>();
        if (state.held >= 0) [[unlikely]]
            wait_for_copies();
        ptx::wgmma_wait<0>();
        release(&shared.other_empty[at]);
    }
    __device__ __forceinline__ void clear_sums() {
#pragma unroll
        for (float& x : r_ds) x = 0;
#pragma unroll
        for (float& x : r_p) x = 0;
    }

    // Its scores are in s; leaves with those of the next, unless it is the task's last.
    template <bool IsLast>
    __device__ __forceinline__ void step(bool is_first) {
        float dp[values];
        const int at = state.slot.index, second_at = state.second.index;
        state.wait(&shared.second_full[second_at], state.second.phase);
        if constexpr (C::has_dp)
            begin_product<C::head_dim_v>(dp, shared.own[state.tile.index][C::panels],
                                         shared.other_second[second_at][0]);
        if constexpr (!C::leaves_out) take_step();
        const int mask = at_hand.mask();
        uint32_t word = ~0u;
        if (mask != full_block)
            word = __ldg(words_of(mask) + warpgroup * 128 + thread) >> mask % C::steps_of_word * C::step / 2;
        join(s);
        Words words;
        make_probabilities(at, mask, word, words);
        if (state.held >= 0) [[unlikely]]
            wait_for_copies();
        if constexpr (C::sums_p) {
            begin_sum(r_p, words, shared.other_second[second_at][0], is_first);
            if constexpr (C::has_dp) {
                ptx::wgmma_wait<1>();
                join(dp);
                finish_ds(at, dp, is_first);
            }
            next_scores<IsLast>();
            ptx::wgmma_wait<0>();
            release(&shared.second_empty[second_at]);
        } else {
            ptx::wgmma_wait<0>();
            release(&shared.second_empty[second_at]);
            join(dp);
            finish_ds(at, dp, is_first);
            next_scores<IsLast>();
            ptx::wgmma_wait<0>();
        }
        state.second.advance();
        release(&shared.other_empty[at]);
    }
    // Parts of products become those of all columns, where two CTAs share a tile.
    __device__ __forceinline__ void join(float (&part)[values]) {
        if constexpr (C::in_pair) {
            shared.pair.wait_for_room(state.part_at, warpgroup);
            shared.pair.exchange(part, state.part_at, warpgroup, thread);
            shared.pair.tell_read(part, state.part_at, warpgroup, thread);
        }
    }
    __device__ __forceinline__ void finish_ds(int at, const float (&dp)[values], bool is_first) {
        multiply_by_dp(at, dp);
        Words words;
        tile::pack_tile<C::dtype>(s, words);
        begin_sum(r_ds, words, shared.other[at][0], is_first);
    }
    template <bool IsLast>
    __device__ __forceinline__ void next_scores() {
        state.slot.advance();
        if constexpr (!IsLast) {
            state.wait(&shared.other_full[state.slot.index], state.slot.phase);
            begin_scores();
            if constexpr (C::leaves_out) take_step();
        }
    }
    // Read by the lane that will release the slot, so that nobody reads what the producer already overwrites.
    __device__ __forceinline__ void take_step() {
        at_hand = StepMessage(__shfl_sync(~0u, thread % 32 ? 0 : shared.step[state.slot.index].word, 0));
    }

    // The step's part of a mask, where tiles of keys come first, then those of queries.
    __device__ __forceinline__ const uint32_t* words_of(int mask) const {
        constexpr int half = C::block_q * C::block_k / 32;
        return mask_words(params.layout, mask / C::steps) + (C::by_query ? half : 0) +
               mask % C::steps / C::steps_of_word * C::warpgroups * 128;
    }

    // s becomes p, and its words where they are wanted; with a cap s becomes what ds is a multiple of.
    __device__ __forceinline__ void make_probabilities(int at, int mask, uint32_t word, Words& words) {
        if (!params.has_cap) [[likely]] {
#pragma unroll
            for (int i = 0; i < values; ++i)
                s[i] = ptx::exp2_approx(fmaf(s[i], params.scale_log2, stat(shared.offset, at, i, &QueryStats::offset)));
            if (mask != full_block) [[unlikely]]
                tile::keep(s, typename C::MaskWord(word));
            if constexpr (C::sums_p) tile::pack_tile<C::dtype>(s, words);
            return;
        }
#pragma unroll
        for (int i = 0; i < values; i += 2) {
            float p[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float x = tile::cap(s[i + j], params.into_cap);
                p[j] =
                    ptx::exp2_approx(fmaf(x, params.scale_log2, stat(shared.offset, at, i + j, &QueryStats::offset)));
                ptx::zero_unless(p[j], word >> (i + j) & 1);
                s[i + j] = p[j] * (1 - x * x);
            }
            words[i / 8][i % 8 / 2] = tile::pack<C::dtype>(p[0], p[1]);
        }
    }

    // What belongs to the query of value i: the thread's own row, or its column of the step.
    __device__ __forceinline__ float stat(const float (&stats)[C::slots][C::step], int at, int i,
                                          float QueryStats::*own_stat) const {
        if constexpr (C::by_query) return own[tile::row_of(i)].*own_stat;
        const float2 two = *reinterpret_cast<const float2*>(stats[at] + 2 * (thread & 3) + 2 * (i & ~3));
        return i % 2 ? two.y : two.x;
    }

    // s becomes ds. A pair that is not kept has p = 0, which leaves NaN of its dp to the repairs.
    __device__ __forceinline__ void multiply_by_dp(int at, const float (&dp)[values]) {
#pragma unroll
        for (int i = 0; i < values; ++i)
            s[i] *= fmaf(dp[i], dp_factor<C>, -stat(shared.delta, at, i, &QueryStats::delta));
    }

    __device__ __forceinline__ void release(uint64_t* empty) {
        __syncwarp();  // all lanes have read what may be overwritten
        if (thread % 32 == 0) ptx::mbarrier_arrive(empty);
    }

    // Until what this warp has sent was read.
    __device__ __forceinline__ void wait_for_copies() {
        if (ptx::elect()) {
            ptx::bulk_wait_read();
            ptx::mbarrier_arrive(&shared.own_empty[state.held]);
        }
        state.held = -1;
    }

    // ---- a task's end ----
    __device__ __forceinline__ void store(const TaskMessage& task) {
        if constexpr (C::sums_p)
            for (float& x : r_p) x *= tile::unlift<C::dtype>;
        if constexpr (C::has_dp)
            for (float& x : r_ds) x *= tile::ds_unlift<C::dtype>;
        const unsigned odd = note_not_finite(task.index);
        ptx::named_barrier_sync(1 + warpgroup, 128);  // all warps have done with the own tokens
        if (task.part != whole_row) {
            store_part(task);
        } else if (!C::any_order || leaves_as_boxes(task, odd)) {
            finish_sums();
            store_whole(task);
        } else if constexpr (C::any_order) {
            store_tokens(task, odd);
        }
        state.held = state.tile.index;
        // One tile: nothing comes that it must be free for later.
        if constexpr (C::tiles == 1) wait_for_copies();
    }

    // Returns a bit for each of the warp's rows that are noted.
    __device__ __forceinline__ unsigned note_not_finite(int index) {
        float of[2] = {0, 0}, more[2] = {0, 0};
        if constexpr (C::has_dp) tile::find_not_finite(r_ds, of);
        if constexpr (C::sums_p) tile::find_not_finite(r_p, more);
        const bool is_finite[2] = {of[0] + more[0] == 0, of[1] + more[1] == 0};
        if (__all_sync(~0u, is_finite[0] && is_finite[1])) [[likely]]
            return 0;
        const unsigned bits = tile::rows_with(!is_finite[0], !is_finite[1]);
        if (thread % 32 == 0) *note_of(index) = make_int2(noted, int(bits));
        noted = index;
        return bits;
    }
    __device__ __forceinline__ int2* note_of(int task) const {
        const size_t tile = size_t(task) * C::tile_ctas + tile_rank<C>();
        return walk.notes + (tile * C::warpgroups + warpgroup) * 4 + thread / 32;
    }

    // Sums of pairs become gradients.
    __device__ __forceinline__ void finish_sums() {
        if constexpr (C::has_dp) {
#pragma unroll
            for (int i = 0; i < of_ds; ++i) {
                r_ds[i] *= params.scale;
                if (C::sums_p && i < of_p && params.value_in_key) r_ds[i] += r_p[i];
            }
        }
    }
    // Where sums of p are staged; those of ds are before them.
    static constexpr int p_panel = C::has_dp ? C::panels : 0;
    __device__ __forceinline__ uint8_t* staged(int panel) const {
        return shared.own[state.tile.index][panel] + (4 * warpgroup + thread / 32) * C::warp_bytes;
    }
    __device__ __forceinline__ void stage_sums() {
        if constexpr (C::has_dp) stage(r_ds, staged(0));
        if constexpr (C::sums_p) stage(r_p, staged(p_panel));
    }

    __device__ __forceinline__ void store_whole(const TaskMessage& task) {
        stage_sums();
        ptx::fence_async_shared();
        __syncwarp();  // the warp's rows are written before one lane sends them
        if (!ptx::elect()) return;
        if constexpr (C::has_dp) send<C::panels>(walk.maps.ds, task, 0);
        if (C::sums_p && !params.value_in_key) send<C::v_panels>(walk.maps.p, task, p_panel);
        ptx::bulk_commit();
    }
    // A warp's rows from staged panels on.
    template <int Panels>
    __device__ __forceinline__ void send(const CUtensorMap& map, const TaskMessage& task, int first) const {
        const int row = task.row * C::own_rows + row_in_tile();
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_store_4d(&map, first_column<C>() + C::panel_columns * panel, task.head, row, task.batch,
                              staged(first + panel));
    }
    template <int Panels>
    __device__ __forceinline__ void send(const runtime::ResidueMaps& maps, const TaskMessage& task, int first) const {
        const HomePlace at(own_axis(), residue_tiles_of(params, C::by_query), C::own_rows, task.row);
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_store_5d(at.map(maps), C::panel_columns * panel, task.head, at.in_map(maps),
                              at.first + row_in_tile(), task.batch, staged(first + panel));
    }
    __device__ __forceinline__ int row_in_tile() const { return C::warp_rows * (4 * warpgroup + thread / 32); }
    __device__ __forceinline__ const AxisView& own_axis() const {
        return C::by_query ? params.layout.queries : params.layout.keys;
    }
    // Homes with all of their tokens, where no other piece has sums for them. A row that is not finite is left out: its
    // repair may need what stands there.
    __device__ __forceinline__ bool leaves_as_boxes(const TaskMessage& task, unsigned odd) const {
        return !odd && params.piece.is_first && params.piece.is_last && task.row >= own_axis().listed &&
               !own_axis().away;
    }

    // Rows whose tokens stand anywhere, after what other pieces of the pattern made of them. The repair of a row that
    // is not finite takes on what these left, so it is not written here.
    __device__ __forceinline__ void store_tokens(const TaskMessage& task, unsigned odd) {
        const any::OwnTokens own = own_tokens<C>(params.layout, task.row);
        int token[2];
        int64_t row[2];  // of all heads and batch entries
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int in_warpgroup = tile::fragment_row(thread, 2 * h);
            token[h] = odd >> in_warpgroup % 16 & 1 ? no_token : own.at(warpgroup * C::warpgroup_rows + in_warpgroup);
            row[h] = C::by_query ? (int64_t(task.batch) * params.heads_q + task.head) * params.seq_q + token[h]
                                 : (int64_t(task.batch) * params.heads_kv + task.head) * params.seq_k + token[h];
        }
        if (!params.piece.is_first || !params.piece.is_last) {
            if constexpr (C::has_dp)
                join_pieces(r_ds, token, row, C::by_query ? params.carried.dq : params.carried.dk, params.head_dim);
            if constexpr (C::sums_p) join_pieces(r_p, token, row, params.carried.dv, params.head_dim_v);
        }
        if (params.piece.is_last) {
            finish_sums();
            stage_sums();
            __syncwarp();  // the warp's rows are written before others of its lanes read them
            if constexpr (C::has_dp)
                write_rows<C::panels, typename C::Element>(ptx::shared_address(staged(0)), C::own_bytes,
                                                           C::by_query ? params.dq : params.dk, task.batch, task.head,
                                                           token, params.head_dim);
            if (C::sums_p && !params.value_in_key)
                write_rows<C::v_panels, typename C::Element>(ptx::shared_address(staged(p_panel)), C::own_bytes,
                                                             params.dv, task.batch, task.head, token,
                                                             params.head_dim_v);
        }
        ptx::fence_async_shared();  // of the tile, before the next one's boxes
        __syncwarp();               // and of all lanes, before lane 0 releases it
    }

    // Sums of the pieces before come in, sums for the pieces to come go out.
    template <int Size>
    __device__ __forceinline__ void join_pieces(float (&sums)[Size], const int (&token)[2], const int64_t (&row)[2],
                                                float* carried, int columns) const {
        const auto is_there = [&](int i) {
            return token[tile::row_of(i)] != no_token && tile::fragment_column(thread, i) < columns;
        };
        const auto place = [&](int i) {
            return reinterpret_cast<float2*>(carried + row[tile::row_of(i)] * columns +
                                             tile::fragment_column(thread, i));
        };
        constexpr int at_once = 16;  // loads do not wait for each other
        if (!params.piece.is_first)
#pragma unroll
            for (int first = 0; first < Size; first += at_once) {
                float2 theirs[at_once / 2];
#pragma unroll
                for (int i = 0; i < at_once; i += 2)
                    theirs[i / 2] = is_there(first + i) ? *place(first + i) : make_float2(0, 0);
#pragma unroll
                for (int i = 0; i < at_once; i += 2)
                    sums[first + i] += theirs[i / 2].x, sums[first + i + 1] += theirs[i / 2].y;
            }
        if (!params.piece.is_last)
#pragma unroll
            for (int i = 0; i < Size; i += 2)
                if (is_there(i)) *place(i) = make_float2(sums[i], sums[i + 1]);
    }
    template <int Size>
    __device__ __forceinline__ void stage(const float (&sums)[Size], uint8_t* to) const {
        uint32_t words[Size / 8][4];
        tile::pack_tile<C::dtype>(sums, words);
        tile::store_swizzled(words, ptx::shared_address(to), C::own_bytes, thread % 32);
    }

    // A part of keys has dk's columns, then dv's.
    __device__ __forceinline__ void store_part(const TaskMessage& task) {
        const size_t row = size_t(task.part) * C::own_rows + warpgroup * C::warpgroup_rows;
        const int width = C::by_query ? params.head_dim : params.head_dim + params.head_dim_v;
        float* part = (C::by_query ? params.space.parts_query : params.space.parts_key) + row * size_t(width);
        if constexpr (C::has_dp) write(r_ds, part, width, params.head_dim);
        if constexpr (C::sums_p) write(r_p, part + params.head_dim, width, params.head_dim_v);
    }
    template <int Size>
    __device__ __forceinline__ void write(const float (&sums)[Size], float* to, int width, int columns) const {
#pragma unroll
        for (int i = 0; i < Size; ++i) {
            const int column = first_column<C>() + tile::fragment_column(thread, i);
            if (column < columns) to[tile::fragment_row(thread, i) * width + column] = sums[i];
        }
    }

    // The rows noted, over what the copy engine has stored of them.
    __device__ __forceinline__ void repair_noted() {
        if (ptx::elect()) ptx::bulk_wait();
        __syncwarp();  // what was sent is there before others write there
        while (noted >= 0) {
            const int2 note = *note_of(noted);
            const Task task = walk.tasks.tasks[noted];
            for (unsigned bits = unsigned(note.y); bits; bits &= bits - 1) {
                const int row = warpgroup * C::warpgroup_rows + thread / 32 * 16 + __ffs(int(bits)) - 1;
                GradientRepair<C> repair{params, thread % 32,
                                         task.head / (C::by_query ? params.heads_q : params.heads_kv), C::has_dp,
                                         C::sums_p};
                if constexpr (C::by_query)
                    repair.query_row(task, row);
                else
                    repair.key_row(task, row);
            }
            noted = note.x;
        }
    }
};

}  // namespace spattn::sm90
