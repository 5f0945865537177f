// SPDX-License-Identifier: MIT
// The consumers of block_forward.cuh, and how they make rows again.
#pragma once

#include "any/element.cuh"
#include "any/row_end.cuh"
#include "any/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/forward_widener.cuh"
#include "sm90/pair.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/row_end.cuh"
#include "sm90/token_tiles.cuh"
#include "tile/fragment.h"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

// ---- repair: one warp makes a row from the pairs that it keeps, and from nothing else ----
template <class C>
struct Repair {
    using Element = typename C::Element;
    static constexpr int columns = C::head_dim / 32, key_columns = C::tile_ctas * columns;  // a lane's, 32 apart

    const typename C::Params& params;
    const Task& task;
    const int lane;
    const int first = first_column<C>() + lane;  // of out
    float q[key_columns], out[columns];
    float m, l;

    __device__ __noinline__ void row(int in_block) {
        const any::TileRows& rows = params.tile;
        const int batch = task.head / params.heads_q, head = task.head - batch * params.heads_q + rows.head(in_block);
        const int token = token_at(batch, rows.place(in_block));
        if (token == no_token) return;
        const auto rows_q = any::key_rows<C::dtype, C::multiplies_float8>(params.q, params.q_factors, batch, head);
        const auto* const from = rows_q.at(token);
        for (int i = 0; i < key_columns; ++i) {
            const int column = lane + 32 * i;
            q[i] = column < params.head_dim ? any::to_real(from[column]) * rows_q.scale(token) : 0;
        }
        for (int i = 0; i < columns; ++i) out[i] = 0;
        m = -INFINITY, l = 0;
        walk(batch, head / params.group, in_block);
        store(batch, head, token, in_block);
    }

    __device__ int token_at(int batch, int place) const {
        const LayoutView& layout = params.layout;
        return C::any_order ? any::own_token_at(layout.queries, layout.block_q, layout.seq_q, task.row, place)
                            : any::query_at(any::span_of(layout, batch, task.row), place);
    }

    // The task's blocks; parts of a row are counted from its end.
    __device__ void walk(int batch, int head_kv, int in_block) {
        const LayoutView& layout = params.layout;
        const int list = layout.head_kinds == 1 ? 0 : layout.kind_of_head[task.head];
        const Slice slice = layout.by_query.slices[list * layout.by_query.rows + task.row];
        int skip = task.skip, left = task.take;
        for (int r = slice.end - 1; r >= slice.begin && left; --r) {
            const Run run = layout.by_query.runs[r];
            const int from = min(skip, run.count), take = min(run.count - from, left);
            skip -= from, left -= take;
            for (int n = from; n < from + take; ++n)
                block(batch, head_kv, run.first + run.count - 1 - n, run.mask, in_block);
        }
    }

    __device__ void block(int batch, int head_kv, int block, int mask, int in_block) {
        const LayoutView& layout = params.layout;
        const uint32_t* words = mask_words(layout, mask);
        const any::TileTokens tokens = any::tokens_of(layout.keys, C::block_k, layout.seq_k, block);
        for (int base = 0; base < C::block_k; base += 32) {
            const int bit = tile::fragment_bit(in_block, base + lane, C::block_k);
            const bool kept = mask == full_block || (words[bit / 32] >> (bit % 32) & 1);
            for (unsigned keys = __ballot_sync(~0u, kept); keys; keys &= keys - 1)
                pair(batch, head_kv, tokens.at(base + __ffs(int(keys)) - 1));
        }
    }

    __device__ void pair(int batch, int head_kv, int64_t key) {
        if (isnan(l)) return;  // by its own keys: nothing can change it
        constexpr bool is_float8 = C::is_float8 || C::multiplies_float8;
        const auto k_rows = any::key_rows<C::dtype, is_float8>(params.k, params.k_scales, batch, head_kv);
        const auto v_rows = any::key_rows<C::dtype, C::is_float8>(params.v, params.v_scales, batch, head_kv);
        const auto* const k = k_rows.at(key);
        const auto* const v = v_rows.at(key);
        const float k_scale = k_rows.scale(key), v_scale = v_rows.scale(key);
        float s = 0;
        for (int i = 0; i < key_columns; ++i)
            if (lane + 32 * i < params.head_dim) s = fmaf(q[i], any::to_real(k[lane + 32 * i]) * k_scale, s);
        for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
        if (params.has_cap) s = tile::cap(s, params.into_cap);
        const float highest = fmaxf(m, s);
        const float factor = m == highest ? 1 : ptx::exp2_approx((m - highest) * params.scale_log2);
        const float p = s == -INFINITY ? 0 : ptx::exp2_approx((s - highest) * params.scale_log2);
        m = highest, l = fmaf(l, factor, p);
        for (int i = 0; i < columns; ++i)
            if (first + 32 * i < params.head_dim_v)
                out[i] = fmaf(p, any::to_real(v[first + 32 * i]) * v_scale, out[i] * factor);
    }

    __device__ void store(int batch, int head, int64_t token, int in_block) {
        const float top = m * params.scale;
        if (task.part != whole_row) return store_part(end_row(params, head, task.part, m, l, 0), top, in_block);
        any::RowEnd<C::dtype> end(params.to, batch, head, token);
        any::RowState<float> state{top, l, top};
        end.take_on(state, 0);
        __syncwarp();  // all have read what the pieces before handed on
        end.finish(state);
        for (int i = 0; i < columns; ++i)
            if (first + 32 * i < params.head_dim_v) end.write(first + 32 * i, l == 0 ? 0 : out[i]);
        if (first == 0) end.write_state(state, 0);
    }

    __device__ void store_part(const RowEnd& end, float top, int in_block) {
        const int64_t row = int64_t(task.part) * C::block_q + in_block;
        for (int i = 0; i < columns; ++i)
            if (first + 32 * i < params.head_dim_v)
                params.parts.out[row * params.head_dim_v + first + 32 * i] = l == 0 ? 0 : out[i] * end.factor;
        if (first == 0) params.parts.lse[row] = end.lse, params.parts.top[row] = top;
    }
};

// Factors of a block's keys, of which a thread has two neighbours of each eight; some pairs are on their way ahead.
struct KeyFactors {
    static constexpr int ahead = 3;
    uint32_t from;
    float window[ahead][2], pair[2];

    __device__ __forceinline__ KeyFactors(const float* factors, int thread) : from(own_scales(factors, thread)) {
#pragma unroll
        for (int n = 0; n < ahead; ++n) read(n);
    }
    __device__ __forceinline__ void read(int group) { ptx::load_shared(window[group % ahead], from + 32 * group); }
    // That of value i of so many, which are asked for in their order.
    template <int Values>
    __device__ __forceinline__ float of_value(int i) {
        const int group = i / 4;
        if (i % 4 == 0) {
            pair[0] = window[group % ahead][0], pair[1] = window[group % ahead][1];
            if (group + ahead < Values / 4) read(group + ahead);
        }
        return pair[i % 2];
    }
};

// What scores are multiplied by where keys have factors, too.
template <int Values>
struct FactorScales {
    const tile::RowScales& rows;
    KeyFactors keys;
};
template <int Values>
__device__ __forceinline__ float scale_of(const FactorScales<Values>& scales, int h) {
    return scales.rows.of[h];  // of a maximum, which has its key's factor
}
template <int Values>
__device__ __forceinline__ float scale_of_value(FactorScales<Values>& scales, int i) {
    return scales.rows.of[tile::row_of(i)] * scales.keys.template of_value<Values>(i);
}

// A task whose last scores are made, where its q tile goes then: what must be known at its end.
struct EndingTask {
    ForwardMessage message;
    int token[2];                 // in pieces: of a thread's rows
    float handed_on[2] = {0, 0};  // of their states: a lane of a quad has the first, second or third number
};

// ---- consumer: one warpgroup owns 64 rows of scores and output ----
// HasCap: with a softcap. Its code in the middle of the loop costs who has none 2 to 5 %, jumped over or not.
template <class C, bool HasCap>
struct Consumer {
    using KeyTag = std::conditional_t<C::multiplies_float8, ptx::ElementTag<ptx::MatrixElement::e4m3>,
                                      tile::MatrixTag<C::dtype>>;
    using Probabilities = uint32_t[C::block_k / 16][4];  // the a operand of p v: steps of 16 keys

    const typename C::Params& params;
    typename C::Shared& shared;
    const int warpgroup;
    int thread;                   // of the warpgroup
    Cursor<C::q_tiles> q;         // the next task's
    Cursor<C::slots> slot;
    int held = -1;      // a q tile or slot that this warpgroup's out is leaving; in pieces, the first of some slots
    int q_index, left;  // of the task whose scores come next; blocks
    bool first = true;  // the block whose p v comes next is its task's first
    int noted = -1;     // the last task of which this warp must repair rows
    Cursor<part_places> part_at;  // where the other CTA's parts of the next scores come, if two share a tile
    Cursor<C::multiplies_float8 ? C::factor_blocks : C::scale_blocks> scales;  // of float8: those of the block whose
                                                                               // scores come next
    bool has_negative = false;       // of float8 products: one of a thread's queries has a negative factor
    bool has_factors = false;        // of float8 products: scores are still to be multiplied by those of their keys
    bool idle = false;               // of float8: the warp's rows of the task are no queries
    float s[C::block_k / 2], r_out[C::head_dim_v / 2];
    tile::RowState rows;
    tile::RowScales factors;  // of float8 products: of the scores of the task at hand, into powers of two or the cap

    // The blocks of the next task, or end_of_work. Its message stays in place until its q tile is released.
    __device__ __forceinline__ int take_task(int& taken) {
        ptx::mbarrier_wait(&shared.q_full[q.index], q.phase);
        taken = q.index;
        q.advance();
        return shared.task[taken].count;
    }

    // s = q kT, begun.
    __device__ __forceinline__ void begin_scores(uint32_t a, uint32_t b) {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::head_dim / C::key_step; ++i)
            ptx::wgmma(s, a + (i / 4) * (C::panel_bytes / 16) + (i % 4) * 2,
                       b + (i / 4) * (C::box_bytes / 16) + (i % 4) * 2, i > 0, KeyTag{});
        ptx::wgmma_commit();
    }

    // r_out += p v, begun.
    __device__ __forceinline__ void begin_output(const Probabilities& p, uint32_t b) {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::block_k / 16; ++i)
            ptx::wgmma_transposed(r_out, p[i], b + i * 128, i > 0 || !first, tile::MatrixTag<C::dtype>{});
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ uint32_t q_descriptor(int tile) const {
        return ptx::wgmma_descriptor(shared.q[tile][0] + warpgroup * C::warpgroup_bytes, 0);
    }
    __device__ __forceinline__ uint32_t k_descriptor(int index) const {
        return ptx::wgmma_descriptor(shared.ring[index][0], 0);
    }
    __device__ __forceinline__ uint32_t v_descriptor(int index) const {
        return ptx::wgmma_descriptor(shared.ring[index][0], C::box_bytes);
    }

    // The barrier where a warpgroup waits until the one before it has begun its products. Those up to the number of
    // warpgroups are of one each.
    __device__ __forceinline__ static int turn_of(int warpgroup) { return 1 + C::warpgroups + warpgroup; }
    __device__ __forceinline__ int turn_of_next() const {
        return turn_of(warpgroup == C::warpgroups - 1 ? 0 : warpgroup + 1);
    }

    // The mask of the block whose k lies there; its word follows while the scores are made. Read by the lane that will
    // release the slot, so that nobody reads what the producer already overwrites.
    __device__ __forceinline__ int read_mask(int index) const { return thread % 32 ? 0 : shared.mask[index]; }
    __device__ __forceinline__ int take_mask(int of_first_lane, typename C::MaskWord& word) {
        const int mask = __shfl_sync(~0u, of_first_lane, 0);
        if (mask != full_block)
            word = __ldg(reinterpret_cast<const typename C::MaskWord*>(mask_words(params.layout, mask)) +
                         warpgroup * 128 + thread);
        return mask;
    }

    // Scores times the factors of their keys, where these have some. Where no cap and no mask needs them, exponentials
    // do that beside.
    __device__ __forceinline__ void scale_by_keys(bool is_masked) {
        has_factors = params.k_scales.data != nullptr;
        if (!has_factors || !(HasCap || is_masked)) return;
        multiply_by_keys();
        has_factors = false;
    }
    __device__ __forceinline__ void multiply_by_keys() {
        KeyFactors of_keys(shared.factors[scales.index], thread);
#pragma unroll
        for (int i = 0; i < C::block_k / 2; ++i) s[i] *= of_keys.template of_value<C::block_k / 2>(i);
    }

    // The scores of a block are there, of k in that slot, which is free then.
    __device__ __forceinline__ void finish_scores(int q_at, int k, bool is_masked) {
        release(k);
        if constexpr (C::in_pair) shared.pair.exchange(s, part_at, warpgroup, thread);
        if constexpr (scales_rows)
            if (has_negative) [[unlikely]]
                negate_rows(q_at);
        if constexpr (C::is_float8) scale_columns(s, shared.helper.scales[scales.index][0], thread);
        if constexpr (C::multiplies_float8) scale_by_keys(is_masked);
        if constexpr (HasCap && C::multiplies_float8) tile::cap(s, factors);
        else if constexpr (HasCap) tile::cap(s, params.into_cap);
    }

    // What the scores of a task are multiplied by, where each query has a factor of its own.
    __device__ __forceinline__ void find_factors(int at) {
        if constexpr (C::multiplies_float8) {
            const float own[2] = {factor_of_query(at, 0), factor_of_query(at, 1)};
            has_negative = own[0] < 0 || own[1] < 0;
#pragma unroll
            for (int h = 0; h < 2; ++h)
                factors.of[h] = HasCap ? own[h] * params.into_cap : fabsf(own[h]) * params.scale_log2;
        }
    }
    __device__ __forceinline__ float factor_of_query(int at, int h) const {
        const ForwardMessage& task = shared.task[at];
        const int token = token_of(task, h), head = task.head + params.tile.head(row_in_tile(h));
        return token == no_token ? 1 : *any::row_of<float>(params.q_factors, task.batch, head, token);
    }
    // Scores of a query whose factor is negative change their sign, so that its largest one comes of the largest score.
    __device__ __forceinline__ void negate_rows(int at) {
        for (int h = 0; h < 2; ++h) {
            const float sign = factor_of_query(at, h) < 0 ? -1 : 1;
#pragma unroll
            for (int i = 0; i < C::block_k / 2; ++i)
                if (tile::row_of(i) == h) s[i] *= sign;
        }
    }
    static constexpr bool scales_rows = C::multiplies_float8 && !HasCap;
    __device__ __forceinline__ auto scale_log2() const {
        if constexpr (scales_rows) return factors;
        else return params.scale_log2;
    }
    // From what stands for the scores of such a row to natural units.
    __device__ __forceinline__ float natural_scale(const tile::RowScales& of, int h) const {
        return scales_rows ? of.of[h] * float(M_LN2) : params.scale;
    }

    __device__ __forceinline__ void release(int index) {
        if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.empty[index]);
    }

    __device__ __forceinline__ void release_held() {
        if (held < 0) return;
        if (thread == 0) {
            ptx::bulk_wait_read();
            if constexpr (C::in_pieces)
                release_slots(held);
            else
                ptx::mbarrier_arrive(C::out_in_v ? &shared.empty[held] : &shared.q_empty[held]);
        }
        held = -1;
    }

    // out_at: the tile that out leaves through.
    __device__ __forceinline__ void store(const ForwardMessage& message, int out_at, const tile::RowState& done,
                                          const tile::RowScales& scales_of_done) {
        ptx::make_here(thread);  // places that follow from it are found here, and fill no registers in the loop
        const ForwardMessage task = message;
        const any::TileRows& of = params.tile;
        const float l[2] = {tile::quad_sum(done.l[0]), tile::quad_sum(done.l[1])};
        RowEnd ends[2];
        float top[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float scale = natural_scale(scales_of_done, h);
            ends[h] = end_row(params, task.head + of.head(row_in_tile(h)), task.part, done.m[h], l[h],
                              tile::lift<C::dtype>, scale);
            top[h] = done.m[h] * scale;
        }
        tile::scale_rows(r_out, ends[0].factor, ends[1].factor);
        note_not_finite(task.index, l);
        const float lse[2] = {ends[0].lse, ends[1].lse};
        if (!C::in_pieces && task.part == whole_row)
            store_whole(out_at, task, lse, top);
        else
            store_part(out_at, task, lse, top);
    }

    // A value that is not finite may come from a key that its row does not see: 0 * NaN. Such rows are noted, and made
    // once more when nothing else is left to do. A note: the task noted before, and a bit for each of the warp's rows.
    // Returns those bits.
    __device__ __forceinline__ unsigned note_not_finite(int index, const float (&l)[2]) {
        float is_nan[2];
        tile::find_not_finite(r_out, is_nan);
        is_nan[0] = fmaf(l[0], 0.f, is_nan[0]), is_nan[1] = fmaf(l[1], 0.f, is_nan[1]);
        if (__all_sync(~0u, is_nan[0] == 0 && is_nan[1] == 0)) [[likely]]
            return 0;
        const unsigned bits = tile::rows_with(!(is_nan[0] == 0), !(is_nan[1] == 0));
        if (thread % 32 == 0) *note_of(index) = make_int2(noted, int(bits));
        noted = index;
        return bits;
    }

    // The tile's row whose state is in rows[h].
    __device__ __forceinline__ int row_in_tile(int h) const {
        return warpgroup * C::warpgroup_rows + tile::fragment_row(thread, 2 * h);
    }

    __device__ __forceinline__ int2* note_of(int task) const {
        const size_t tile = size_t(task) * C::tile_ctas + tile_rank<C>();
        return params.notes + (tile * C::warpgroups + warpgroup) * 4 + thread / 32;
    }

    // A panel of out where it leaves: the warpgroup's rows of the q tile, or a slot, which are all its own.
    __device__ __forceinline__ uint8_t* out_panel(int at, int panel) const {
        if constexpr (C::out_in_v)
            return shared.ring[at][panel];
        else
            return shared.q[at][panel] + warpgroup * C::warpgroup_bytes;
    }
    static constexpr int out_panel_bytes = C::out_in_v ? C::box_bytes : C::panel_bytes;

    __device__ __forceinline__ void store_whole(int out_at, const ForwardMessage& task, const float (&lse)[2],
                                                const float (&top)[2]) {
        int token[2], head[2] = {task.head, task.head};
        if constexpr (C::in_pair) {
            find_queries(task, token, head);
            write_queries(task.batch, head, token);
        } else {
            const uint32_t panel = ptx::shared_address(out_panel(out_at, 0));
            uint32_t words[C::head_dim_v / 16][4];
            tile::pack_tile<C::dtype>(r_out, words);
            if constexpr (C::out_in_v) ptx::named_barrier_sync(1 + warpgroup, 128);  // p v of all warps is done with v
            tile::store_swizzled(words, panel, out_panel_bytes, thread);
            if constexpr (C::any_order) {
                find_tokens(task, token);
                task.by_rows ? write_tokens(out_at, task, panel, token) : send_home(out_at, task);
            } else {
                find_queries(task, token, head);
                if (!task.by_rows) [[likely]] {
                    send(out_at, task, task.queries.first + params.tile.place(warpgroup * C::warpgroup_rows));
                } else {
                    write_queries(task.batch, head, token);
                    release_out(out_at);
                }
            }
        }
        if (thread & 2) return;
        write_state(task.batch, head, token, lse, top);
    }

    // The first two threads of a quad, which has two rows, write one each.
    __device__ __forceinline__ void write_state(unsigned batch, const int (&heads)[2], const int (&tokens)[2],
                                                const float (&lse)[2], const float (&top)[2]) {
        const bool is_second = thread & 1;
        const unsigned head = is_second ? heads[1] : heads[0], token = is_second ? tokens[1] : tokens[0];
        if (int(token) == no_token || tile_rank<C>() != 0) return;
        const any::ForwardOutputs& to = params.to;
        if (to.lse.data) *any::row_of<float>(to.lse, batch, head, token) = is_second ? lse[1] : lse[0];
        if (to.max_logits.data) *any::row_of<float>(to.max_logits, batch, head, token) = is_second ? top[1] : top[0];
    }

    // The token of a thread's row, where tokens are consecutive.
    __device__ __forceinline__ int token_of(const ForwardMessage& task, int h) const {
        return any::query_at(task.queries, params.tile.place(row_in_tile(h)));
    }
    __device__ __forceinline__ void find_queries(const ForwardMessage& task, int (&token)[2], int (&head)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) token[h] = token_of(task, h), head[h] = task.head + params.tile.head(row_in_tile(h));
    }
    // The tokens that a thread's two rows are written to.
    __device__ __forceinline__ void find_tokens(const ForwardMessage& task, int (&token)[2]) const {
        const LayoutView& layout = params.layout;
        if (task.by_rows) {
            const any::OwnTokens own = any::own_tokens_of(layout.queries, C::block_q, layout.seq_q, task.row);
#pragma unroll
            for (int h = 0; h < 2; ++h) token[h] = own.at(row_in_tile(h));
            return;
        }
        const HomePlace home = home_of(task);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = home.token_at(layout.queries, layout.seq_q, row_in_tile(h));
            token[h] = at < layout.seq_q ? at : no_token;
        }
    }
    __device__ __forceinline__ HomePlace home_of(const TaskMessage& task) const {
        return {params.layout.queries, params.query_residue_tiles, C::block_q, task.row};
    }

    // The warpgroup's rows by the copy engine; store(panel, its rows in shared memory) begins a panel.
    template <class Store>
    __device__ __forceinline__ void send_panels(int out_at, Store store) {
        ptx::fence_async_shared();
        ptx::named_barrier_sync(1 + warpgroup, 128);  // the warpgroup's tile is written before thread 0 sends it
        if (thread == 0) {
            for (int panel = 0; panel < C::v_panels; ++panel)
                store(panel, out_panel(out_at, panel));
            ptx::bulk_commit();
        }
        hold(out_at);
    }
    // All are done with the tile but the copy engine, which thread 0 waits for, and not now.
    __device__ __forceinline__ void hold(int out_at) {
        if constexpr (C::out_in_v)
            if (thread != 0) release(out_at);
        held = out_at;
    }
    __device__ __forceinline__ void send(int out_at, const TaskMessage& task, int token) {
        send_panels(out_at, [&](int panel, const uint8_t* from) {
            ptx::tma_store_4d(&params.maps.out, C::panel_columns * panel, task.head, token, task.batch, from);
        });
    }
    // What no box may bring (see leaves_by_rows), or has the room to be sent from.
    __device__ __forceinline__ void write_queries(int batch, const int (&head)[2], const int (&token)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (token[h] == no_token) continue;
            auto* const out = any::row_of<typename C::Element>(params.to.out, batch, head[h], token[h]);
            auto* const words =
                reinterpret_cast<uint32_t*>(out + first_column<C>() + tile::fragment_column(thread, 0));
#pragma unroll
            for (int group = 0; group < C::head_dim_v / 8; ++group)  // of 8 columns, a quad's
                if (first_column<C>() + 8 * group < params.head_dim_v)
                    words[4 * group] = tile::pack<C::dtype>(r_out[4 * group + 2 * h], r_out[4 * group + 2 * h + 1]);
        }
    }
    __device__ __forceinline__ void send_home(int out_at, const TaskMessage& task) {
        const HomePlace at = home_of(task);
        send_panels(out_at, [&](int panel, const uint8_t* from) {
            ptx::tma_store_5d(at.map(params.maps.out), C::panel_columns * panel, task.head, at.in_map(params.maps.out),
                              at.first + warpgroup * C::warpgroup_rows, task.batch, from);
        });
    }
    // Each warp's 16 rows to where their tokens stand.
    __device__ __forceinline__ void write_tokens(int out_at, const TaskMessage& task, uint32_t panel,
                                                 const int (&token)[2]) {
        __syncwarp();  // the warp's rows are written before others of its lanes read them
        write_rows<C::v_panels, typename C::Element>(panel + thread / 32 * C::warp_bytes, out_panel_bytes,
                                                     params.to.out, task.batch, task.head, token, params.head_dim_v);
        release_out(out_at);
    }
    // After ordinary accesses to the tile.
    __device__ __forceinline__ void release_out(int out_at) {
        ptx::fence_async_shared();
        if constexpr (C::out_in_v) {
            __syncwarp();  // all lanes are done with it
            release(out_at);
        } else {
            ptx::named_barrier_sync(1 + warpgroup, 128);  // all are done with the q tile and its message
            if (thread == 0) ptx::mbarrier_arrive(&shared.q_empty[out_at]);
        }
    }

    // Where out does not leave through the q tile, that is free once its task's last scores are made.
    __device__ __forceinline__ void end_scores(ForwardMessage& message) {
        message = shared.task[q_index];
        __syncwarp();  // all lanes have read the message
        if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.q_empty[q_index]);
    }

    // ---- pieces: with what those before handed on, for the next one, or at the end ----
    // Results leave through the slots of the sums. Numbers of rows are asked for when the last scores are made, and
    // come under the next task's products.
    __device__ __forceinline__ void end_scores(EndingTask& task) {
        end_scores(task.message);
        find_tokens(task.message, task.token);
        if (params.to.piece.is_first || task.message.part != whole_row) return;
        const int number = min(thread % 4, 2);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (task.token[h] != no_token) {
                const int64_t row = params.to.row(task.message.batch, task.message.head, task.token[h]);
                task.handed_on[h] = params.to.template state<float>(row, 0)[number];
            }
    }

    // A row that is to be made again is left as it was handed on.
    __device__ __forceinline__ void store_piece(const EndingTask& task, const tile::RowState& done) {
        constexpr float unlift = tile::unlift<C::dtype>;
        const ForwardMessage& message = task.message;
        if (message.part != whole_row) return store(message, -1, done, factors);
        const float l[2] = {tile::quad_sum(done.l[0]), tile::quad_sum(done.l[1])};
        const unsigned odd = note_not_finite(message.index, l);
        float mine[2], share[2];  // factors of this piece's sums, and of those handed on
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const bool is_odd = odd >> (thread % 32 / 4 + 8 * h) & 1;
            const float top = done.m[h] * params.scale;
            any::RowState<float> state{top, l[h] * unlift, top}, before;
            before.m = of_quad(task.handed_on[h], 0), before.l = of_quad(task.handed_on[h], 1);
            before.top = of_quad(task.handed_on[h], 2);
            any::RowEnd<C::dtype> end(params.to, message.batch, message.head, task.token[h]);
            if (!params.to.piece.is_first) end.take_on(state, before);
            end.finish(state);
            if (thread % 4 == 0 && task.token[h] != no_token && !is_odd) end.write_state(state, 0);
            mine[h] = end.mine * unlift, share[h] = end.share;
            if (is_odd) [[unlikely]]
                clear_row(h), mine[h] = 0, share[h] = 1;
        }
        tile::scale_rows(r_out, mine[0], mine[1]);
        const int first_slot = slot.index;
        take_sums(share);
        if (params.to.piece.is_last) {
            __syncwarp();  // all have read the sums that stood where out leaves
#pragma unroll
            for (int panel = 0; panel < C::v_panels; ++panel) store_panel(first_slot, panel);
            send_rows<typename C::Element, C::v_panels>(task, first_slot, params.maps.out, params.to.out);
        } else {
            send_rows<float, C::sum_panels>(task, first_slot, params.maps.sums, params.sums);
        }
    }

    // What that lane of the quad has.
    __device__ __forceinline__ float of_quad(float x, int lane) const {
        return __shfl_sync(~0u, x, thread % 32 / 4 * 4 + lane);
    }

    __device__ __forceinline__ void clear_row(int h) {
#pragma unroll
        for (int i = 0; i < C::head_dim_v / 2; ++i)
            if (tile::row_of(i) == h) r_out[i] = 0;
    }

    // The warpgroup's box of a panel, in the slots from the first on.
    __device__ __forceinline__ uint8_t* box_at(int first_slot, int panel) const {
        const int box = panel * C::warpgroups + warpgroup, at = first_slot + box / C::slot_boxes;
        return shared.ring[at < C::slots ? at : at - C::slots][0] + box % C::slot_boxes * C::warpgroup_bytes;
    }

    // r_out += share * what was handed on. Sums for the next piece stand where those were. Slots that nothing leaves
    // through are free then.
    __device__ __forceinline__ void take_sums(const float (&share)[2]) {
        const any::ForwardOutputs& to = params.to;
#pragma unroll
        for (int part = 0; part < C::sum_slots; ++part) {
            ptx::mbarrier_wait(&shared.full[slot.index], slot.phase);
#pragma unroll
            for (int n = 0; n < C::slot_boxes; ++n) {
                const int box = part * C::slot_boxes + n;
                if (box % C::warpgroups != warpgroup) continue;
                const uint32_t at = ptx::shared_address(shared.ring[slot.index][0]) + n * C::warpgroup_bytes;
                take_panel(box / C::warpgroups, at, share);
            }
            if (to.piece.is_last && part >= C::out_slots) {
                ptx::fence_async_shared();
                __syncwarp();  // all lanes have read their sums
                release(slot.index);
            }
            slot.advance();
        }
    }
    __device__ __forceinline__ void take_panel(int panel, uint32_t box, const float (&share)[2]) {
        constexpr int values = line_columns<float> / 2;
        const int first = panel * values;
        const auto at = [&](int i) {
            const int row = tile::fragment_row(thread, i), column = tile::fragment_column(thread, i);
            return box + row * C::row_bytes + ((column / 4 ^ (row & 7)) << 4) + column % 4 * 4;
        };
        if (!params.to.piece.is_first) {
            float x[values / 2][2];  // all of them first: each would wait for its own otherwise
#pragma unroll
            for (int i = 0; i < values; i += 2) ptx::load_shared(x[i / 2], at(i));
#pragma unroll
            for (int i = 0; i < values; ++i)
                r_out[first + i] = fmaf(x[i / 2][i % 2], share[tile::row_of(i)], r_out[first + i]);
        }
        if (!params.to.piece.is_last)
#pragma unroll
            for (int i = 0; i < values; i += 2) ptx::store_shared(at(i), r_out[first + i], r_out[first + i + 1]);
    }

    __device__ __forceinline__ void store_panel(int first_slot, int panel) {
        constexpr int values = C::panel_columns / 2;
        float columns[values];
#pragma unroll
        for (int i = 0; i < values; ++i) columns[i] = r_out[panel * values + i];
        uint32_t words[values / 8][4];
        tile::pack_tile<C::dtype>(columns, words);
        tile::store_swizzled(words, ptx::shared_address(box_at(first_slot, panel)), 0, thread);
    }

    // Panels of elements or floats in the slots from the first on.
    template <class Value, int Panels>
    __device__ __forceinline__ void send_rows(const EndingTask& task, int first_slot, const runtime::ResidueMaps& maps,
                                              const TensorView& view) {
        const ForwardMessage& message = task.message;
        if (message.by_rows) {
            __syncwarp();  // the warp's rows are written before others of its lanes read them
            for (int panel = 0; panel < Panels; ++panel) {
                const uint32_t rows = ptx::shared_address(box_at(first_slot, panel)) + thread / 32 * C::warp_bytes;
                const int first = line_columns<Value> * panel;
                write_rows<1, Value>(rows, 0, from_column<Value>(view, first), message.batch, message.head, task.token,
                                     params.head_dim_v - first);
            }
        }
        ptx::fence_async_shared();
        ptx::named_barrier_sync(1 + warpgroup, 128);  // the warpgroup's tile is written, and sent if it goes by rows
        if (!message.by_rows && thread == 0) {
            const HomePlace at = home_of(message);
            for (int panel = 0; panel < Panels; ++panel)
                ptx::tma_store_5d(at.map(maps), line_columns<Value> * panel, message.head, at.in_map(maps),
                                  at.first + warpgroup * C::warpgroup_rows, message.batch, box_at(first_slot, panel));
            ptx::bulk_commit();
        }
        if (thread != 0) release_slots(first_slot);
        held = first_slot;  // thread 0 waits for the copy engine, but not now
    }
    __device__ __forceinline__ void release_slots(int first_slot) {
        const int slots = params.to.piece.is_last ? C::out_slots : C::sum_slots;
        for (int n = 0, at = first_slot; n < slots; ++n, ++at) release(at < C::slots ? at : at - C::slots);
    }

    __device__ __forceinline__ void store_part(int out_at, const ForwardMessage& task, const float (&lse)[2],
                                               const float (&top)[2]) {
        const size_t first = size_t(task.part) * C::block_q;
        float* const out =
            params.parts.out + first * params.head_dim_v + first_column<C>() + tile::fragment_column(thread, 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!C::any_order && token_of(task, h) == no_token) continue;  // of few queries most rows are none
            auto* const row = reinterpret_cast<float2*>(out + row_in_tile(h) * params.head_dim_v);
#pragma unroll
            for (int group = 0; group < C::head_dim_v / 8; ++group)  // of 8 columns, a quad's
                if (first_column<C>() + 8 * group < params.head_dim_v)
                    row[4 * group] = make_float2(r_out[4 * group + 2 * h], r_out[4 * group + 2 * h + 1]);
        }
        if (thread % 4 == 0 && tile_rank<C>() == 0)
            for (int h = 0; h < 2; ++h) {
                params.parts.lse[first + row_in_tile(h)] = lse[h];
                params.parts.top[first + row_in_tile(h)] = top[h];
            }
        if constexpr (!C::in_pieces && !C::in_pair) release_out(out_at);
    }

    // The scores of a block and q of tile `q_at`, begun, then p v of the block before, in the slot that is returned.
    // The scores are there and masked then.
    __device__ __forceinline__ int make_scores(int q_at, const Probabilities& p) {
        const Cursor<C::slots> k = slot;
        slot.advance();
        const Cursor<C::slots> v = slot;
        slot.advance();
        const uint32_t k_tile = k_descriptor(k.index), v_tile = v_descriptor(v.index), q_tile = q_descriptor(q_at);
        ptx::mbarrier_wait(&shared.full[k.index], k.phase);
        // Products of bytes are too short for what the mask takes, and delay reads of shared memory.
        int of_first_lane = 0;
        if constexpr (C::multiplies_float8) of_first_lane = read_mask(k.index);
        if constexpr (C::takes_turns) ptx::named_barrier_sync(turn_of(warpgroup), 256);
        begin_scores(q_tile, k_tile);
        typename C::MaskWord word;
        if constexpr (!C::multiplies_float8) of_first_lane = read_mask(k.index);
        const int mask = take_mask(of_first_lane, word);
        ptx::mbarrier_wait(&shared.full[v.index], v.phase);
        begin_output(p, v_tile);
        if constexpr (C::takes_turns) ptx::named_barrier_arrive(turn_of_next(), 256);
        if (held >= 0) [[unlikely]]
            release_held();
        if constexpr (C::in_pair) shared.pair.wait_for_room(part_at, warpgroup);
        ptx::wgmma_wait<1>();
        finish_scores(q_at, k.index, mask != full_block);
        if (mask != full_block) [[unlikely]]
            tile::mask(s, word);
        return v.index;
    }

    __device__ __forceinline__ void finish_output(int v) {
        ptx::wgmma_wait<0>();
        release(v);
    }

    // The same of a task's last block, whose slot may have a use yet.
    __device__ __forceinline__ void finish_last_output(int v) {
        ptx::wgmma_wait<0>();
        if constexpr (!C::out_in_v) release(v);
    }

    // Few queries, which calls on a cache mostly have, leave warps without one. What these would make is not stored, and
    // the time goes to the wideners beside them: 32 x 8K keys took 295 us instead of 310 (H200).
    __device__ __forceinline__ void find_idle(int at) {
        if constexpr (C::is_float8) {
            const bool is_there = token_of(shared.task[at], 0) != no_token || token_of(shared.task[at], 1) != no_token;
            idle = !__any_sync(~0u, is_there);
        }
    }

    // Scores into probabilities. True where r_out must be multiplied by `factor`.
    __device__ __forceinline__ bool make_probabilities(bool fresh, Probabilities& to, float (&factor)[2]) {
        if constexpr (C::multiplies_float8) {
            return make_factored_probabilities(fresh, to, factor);
        } else if constexpr (!C::is_float8) {
            const bool rescale = tile::softmax<C::dtype>(s, rows, scale_log2(), fresh, to, factor);
            if constexpr (C::in_pair) shared.pair.tell_read(s, part_at, warpgroup, thread);
            return rescale;
        } else {
            bool rescale = false;
            if (idle) {
                clear(to);
            } else if constexpr (C::weighs_values) {
                rescale = tile::softmax<C::dtype>(s, rows, params.scale_log2, fresh, to, factor);
            } else {
                ValueScales of_values(shared.helper.scales[scales.index][1], thread);
                rescale = tile::softmax<C::dtype>(s, rows, params.scale_log2, fresh, to, factor, of_values);
            }
            scales.advance();
            return rescale;
        }
    }
    // The same where keys may have factors.
    __device__ __forceinline__ bool make_factored_probabilities(bool fresh, Probabilities& to, float (&factor)[2]) {
        if (!HasCap && has_factors) {
            if (!fresh) {
                FactorScales<C::block_k / 2> all{factors, KeyFactors(shared.factors[scales.index], thread)};
                if (tile::merge<C::dtype>(s, rows, all, to)) [[likely]] {
                    scales.advance();
                    return false;
                }
            }
            multiply_by_keys();
            fresh = true;  // it was tried
        }
        scales.advance();
        return tile::softmax<C::dtype>(s, rows, scale_log2(), fresh, to, factor);
    }
    __device__ __forceinline__ static void clear(Probabilities& p) {
#pragma unroll
        for (auto& step : p)
#pragma unroll
            for (uint32_t& word : step) word = 0, ptx::make_here(word);
    }

    // From the block whose probabilities are in p to the next of its task: its scores, then p v, begun; under them its
    // probabilities into next_p. Two arrays, for p v reads p until it is done; or one, and it is waited for.
    __device__ __forceinline__ void step(const Probabilities& p, Probabilities& next_p) {
        const int v = make_scores(q_index, p);
        if constexpr (C::p_arrays == 1) finish_output(v);
        float factor[2];
        // Who asks for the largest score gets it by following the maximum in each block.
        const bool follows = params.to.max_logits.data;
        const bool rescale = make_probabilities(follows, next_p, factor);
        if constexpr (C::p_arrays == 2) finish_output(v);
        if (rescale) [[unlikely]]
            tile::scale_rows(r_out, factor[0], factor[1]);
        first = false;
        --left;
    }

    // The end of a task: p v of its last block, and under it the first probabilities of the next task, unless there is
    // none. It stands in the kernel once, and not in each of two steps: code that is seldom met has to be fetched.
    __device__ __forceinline__ void change_task(const Probabilities& p, Probabilities& next_p) {
        EndingTask task;
        if constexpr (C::in_pieces)
            end_scores(task);
        else if constexpr (C::frees_q)
            end_scores(task.message);
        else
            release_held();
        int next_q, v;
        const int blocks = take_task(next_q);
        const tile::RowState done = rows;
        const tile::RowScales scales_of_done = factors;
        if (blocks != end_of_work) [[likely]] {
            find_factors(next_q);
            v = make_scores(next_q, p);
            if constexpr (C::p_arrays == 1) finish_last_output(v);
            rows = tile::RowState{};
            float factor[2];
            find_idle(next_q);
            make_probabilities(true, next_p, factor);
            if constexpr (C::p_arrays == 2) finish_last_output(v);
        } else {
            v = slot.index;
            ptx::mbarrier_wait(&shared.full[v], slot.phase);
            begin_output(p, v_descriptor(v));
            finish_last_output(v);
            slot.advance();
        }
        if constexpr (C::in_pieces)
            store_piece(task, done);
        else if constexpr (C::frees_q)
            store(task.message, v, done, scales_of_done);
        else
            store(shared.task[q_index], q_index, done, scales_of_done);
        q_index = next_q, left = blocks;
        first = true;
    }

    // Where p v that reads `to` is done.
    __device__ __forceinline__ void move(const Probabilities& from, Probabilities& to) {
        if constexpr (C::p_arrays == 2)
#pragma unroll
            for (int i = 0; i < C::block_k / 16; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) ptx::replace(to[i][j], from[i][j], params.first_word);
    }

    __device__ __forceinline__ void run() {
        left = take_task(q_index);
        if (left == end_of_work) return;
        ptx::mbarrier_wait(&shared.full[slot.index], slot.phase);
        if constexpr (C::takes_turns)
            if (warpgroup == C::warpgroups - 1) ptx::named_barrier_arrive(turn_of_next(), 256);  // the first turn
        begin_scores(q_descriptor(q_index), k_descriptor(slot.index));
        typename C::MaskWord word;
        const int mask = take_mask(read_mask(slot.index), word);
        find_factors(q_index);
        if constexpr (C::in_pair) shared.pair.wait_for_room(part_at, warpgroup);
        ptx::wgmma_wait<0>();
        finish_scores(q_index, slot.index, mask != full_block);
        slot.advance();
        if (mask != full_block) tile::mask(s, word);
        Probabilities p[C::p_arrays];
        Probabilities &even = p[0], &odd = p[C::p_arrays - 1];
        float factor[2];
        find_idle(q_index);
        make_probabilities(true, even, factor);
        for (;;) {
            if (left > 1) {
                step(even, odd);
                if (left > 1) {
                    step(odd, even);
                    continue;
                }
                move(odd, even);
            }
            change_task(even, odd);
            if (left == end_of_work) break;
            move(odd, even);
        }
        release_held();
        repair_noted();
    }

    // The rows noted, over what the copy engine has stored of them.
    __device__ __forceinline__ void repair_noted() {
        if (thread == 0) ptx::bulk_wait();
        ptx::named_barrier_sync(1 + warpgroup, 128);  // thread 0's stores are done before others write to the same rows
        while (noted >= 0) {
            const int2 note = *note_of(noted);
            const Task task = params.tasks.tasks[noted];
            for (unsigned bits = unsigned(note.y); bits; bits &= bits - 1)
                Repair<C>{params, task, thread % 32}.row(warpgroup * C::warpgroup_rows + thread / 32 * 16 +
                                                         __ffs(int(bits)) - 1);
            noted = note.x;
        }
    }
};

}  // namespace spattn::sm90
