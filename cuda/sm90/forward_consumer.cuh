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
    static constexpr int columns = C::head_dim / 32;  // a lane's, 32 apart

    const typename C::Params& params;
    const Task& task;
    const int lane;
    float q[columns], out[columns];
    float m, l;

    __device__ __noinline__ void row(int in_block) {
        const any::TileRows& rows = params.tile;
        const int batch = task.head / params.heads_q, head = task.head - batch * params.heads_q + rows.head(in_block);
        const int token = any::own_token_at(params.layout.queries, params.layout.block_q, params.layout.seq_q, task.row,
                                            rows.place(in_block));
        if (token == no_token) return;
        const auto* from = any::row_of<Element>(params.q, batch, head, token);
        for (int i = 0; i < columns; ++i) {
            const int column = lane + 32 * i;
            q[i] = column < params.head_dim ? any::to_real(from[column]) : 0;
            out[i] = 0;
        }
        m = -INFINITY, l = 0;
        walk(batch, head / params.group, in_block);
        store(batch, head, token, in_block);
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
        const auto* k = any::row_of<Element>(params.k, batch, head_kv, key);
        const auto* v = any::row_of<Element>(params.v, batch, head_kv, key);
        float s = 0;
        for (int i = 0; i < columns; ++i)
            if (lane + 32 * i < params.head_dim) s = fmaf(q[i], any::to_real(k[lane + 32 * i]), s);
        for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
        if (params.has_cap) s = tile::cap(s, params.into_cap);
        const float highest = fmaxf(m, s);
        const float factor = m == highest ? 1 : ptx::exp2_approx((m - highest) * params.scale_log2);
        const float p = s == -INFINITY ? 0 : ptx::exp2_approx((s - highest) * params.scale_log2);
        m = highest, l = fmaf(l, factor, p);
        for (int i = 0; i < columns; ++i)
            if (lane + 32 * i < params.head_dim_v) out[i] = fmaf(p, any::to_real(v[lane + 32 * i]), out[i] * factor);
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
            if (lane + 32 * i < params.head_dim_v) end.write(lane + 32 * i, l == 0 ? 0 : out[i]);
        if (lane == 0) end.write_state(state, 0);
    }

    __device__ void store_part(const RowEnd& end, float top, int in_block) {
        const int64_t row = int64_t(task.part) * C::block_q + in_block;
        for (int i = 0; i < columns; ++i)
            if (lane + 32 * i < params.head_dim_v)
                params.parts.out[row * params.head_dim_v + lane + 32 * i] = l == 0 ? 0 : out[i] * end.factor;
        if (lane == 0) params.parts.lse[row] = end.lse, params.parts.top[row] = top;
    }
};

// ---- pieces: a warp's 16 rows, some columns at a time ----
template <class C>
struct PieceRows {
    // A panel of floats; of 64 columns a thread would have to hold more than it has registers for.
    static constexpr int columns = 32;
    static constexpr int chunks = columns / 4, steps = C::warp_rows * chunks / 32;  // of four, a row; of a warp

    const typename C::Params& params;
    const TaskMessage& task;
    const uint32_t rows;  // in shared memory
    const int lane, first;

    __device__ __forceinline__ uint32_t at(int row, int column) const {
        return rows + row * C::row_bytes + ((column / 4 ^ (row & 7)) << 4) + column % 4 * 4;
    }
    __device__ __forceinline__ int column() const { return first + lane % chunks * 4; }

    // What a lane that has them says of the row that this one meets in a step.
    template <class T>
    __device__ __forceinline__ static T of_row(const T (&x)[2], int step, int lane) {
        return __shfl_sync(~0u, x[step < steps / 2 ? 0 : 1], (32 * step + lane) / chunks % 8 * 4);
    }

    // sums: a thread's values of the tile; token, share: of its two rows.
    template <int Values>
    __device__ __forceinline__ void store(const float (&sums)[Values], const int (&token)[2], const float (&share)[2]) {
        const any::ForwardOutputs& to = params.to;
        float* const handed_on = static_cast<float*>(to.piece.carried) +
                                 (task.batch * to.heads_q + task.head) * to.seq_q * to.head_dim_v + column();
        auto* const out = any::row_of<typename C::Element>(to.out, task.batch, task.head, 0) + column();
        const bool is_there = column() < params.head_dim_v;
        int of_step[steps];
        float handed[steps][4];  // all of them first: each would wait for its own otherwise
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            of_step[step] = of_row(token, step, lane);
            if (!is_there) of_step[step] = no_token;
            if (!to.piece.is_first && of_step[step] != no_token)
                ptx::load_global(handed[step], handed_on + of_step[step] * to.head_dim_v);
        }
#pragma unroll
        for (int i = first / 2; i < (first + columns) / 2; i += 2)
            ptx::store_shared(at(tile::fragment_row(lane, i), tile::fragment_column(lane, i) - first), sums[i],
                              sums[i + 1]);
        __syncwarp();  // the rows are there
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            const float factor = of_row(share, step, lane);
            float x[4];
            ptx::load_shared(x, at((32 * step + lane) / chunks, lane % chunks * 4));
            if (of_step[step] == no_token) continue;
            if (!to.piece.is_first)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = fmaf(handed[step][i], factor, x[i]);
            if (to.piece.is_last)
                ptx::store_global(out + of_step[step] * to.out.row,
                                  {tile::pack<C::dtype>(x[0], x[1]), tile::pack<C::dtype>(x[2], x[3])});
            else
                ptx::store_global(handed_on + of_step[step] * to.head_dim_v, x);
        }
        __syncwarp();  // all are done with these columns
    }
};

// ---- consumer: one warpgroup owns 64 rows of scores and output ----
// HasCap: with a softcap. Its code in the middle of the loop costs who has none 2 to 5 %, jumped over or not.
template <class C, bool HasCap>
struct Consumer {
    using Probabilities = uint32_t[C::block_k / 16][4];  // the a operand of p v: steps of 16 keys

    const typename C::Params& params;
    typename C::Shared& shared;
    const int warpgroup;
    int thread;                   // of the warpgroup
    Cursor<C::q_tiles> q;         // the next task's
    Cursor<C::slots> slot;
    int held = -1;      // a q tile that this warpgroup's out is leaving
    int q_index, left;  // of the task whose scores come next; blocks
    bool first = true;  // the block whose p v comes next is its task's first
    int noted = -1;     // the last task of which this warp must repair rows
    float s[C::block_k / 2], r_out[C::head_dim_v / 2];
    tile::RowState rows;

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
        for (int i = 0; i < C::head_dim / 16; ++i)
            ptx::wgmma(s, a + (i / 4) * (C::panel_bytes / 16) + (i % 4) * 2,
                       b + (i / 4) * (C::box_bytes / 16) + (i % 4) * 2, i > 0, tile::MatrixTag<C::dtype>{});
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
    __device__ __forceinline__ int take_mask(int index, typename C::MaskWord& word) {
        const int mask = __shfl_sync(~0u, thread % 32 ? 0 : shared.mask[index], 0);
        if (mask != full_block)
            word = __ldg(reinterpret_cast<const typename C::MaskWord*>(mask_words(params.layout, mask)) +
                         warpgroup * 128 + thread);
        return mask;
    }

    __device__ __forceinline__ void cap_scores() {
        if constexpr (HasCap) tile::cap(s, params.into_cap);
    }

    __device__ __forceinline__ void release(int index) {
        if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.empty[index]);
    }

    __device__ __forceinline__ void release_held() {
        if (held < 0) return;
        if (thread == 0) {
            ptx::bulk_wait_read();
            ptx::mbarrier_arrive(&shared.q_empty[held]);
        }
        held = -1;
    }

    __device__ __forceinline__ void store(int q_index, const tile::RowState& done) {
        ptx::make_here(thread);  // places that follow from it are found here, and fill no registers in the loop
        const ForwardMessage task = shared.task[q_index];
        const any::TileRows& of = params.tile;
        const float l[2] = {tile::quad_sum(done.l[0]), tile::quad_sum(done.l[1])};
        if constexpr (C::has_pieces)
            if (params.is_piece && task.part == whole_row) return store_piece(q_index, task, done, l);
        RowEnd ends[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
            ends[h] = end_row(params, task.head + of.head(row_in_tile(h)), task.part, done.m[h], l[h],
                              tile::lift<C::dtype>);
        tile::scale_rows(r_out, ends[0].factor, ends[1].factor);
        note_not_finite(task.index, l);
        const float lse[2] = {ends[0].lse, ends[1].lse}, top[2] = {done.m[0] * params.scale, done.m[1] * params.scale};
        if (task.part == whole_row)
            store_whole(q_index, task, lse, top);
        else
            store_part(q_index, task, lse, top);
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
        return params.notes + (size_t(task) * C::warpgroups + warpgroup) * 4 + thread / 32;
    }

    __device__ __forceinline__ void store_whole(int q_index, const ForwardMessage& task, const float (&lse)[2],
                                                const float (&top)[2]) {
        const uint32_t panel = ptx::shared_address(shared.q[q_index][0] + warpgroup * C::warpgroup_bytes);
        uint32_t words[C::head_dim_v / 16][4];
        tile::pack_tile<C::dtype>(r_out, words);
        tile::store_swizzled(words, panel, C::panel_bytes, thread);
        int token[2], head[2] = {task.head, task.head};
        if constexpr (C::any_order) {
            find_tokens(task, token);
            task.by_rows ? write_tokens(q_index, task, panel, token) : send_home(q_index, task);
        } else {
            const any::TileRows& of = params.tile;
            const int first = task.row * params.layout.block_q;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                token[h] = first + of.place(row_in_tile(h)), head[h] += of.head(row_in_tile(h));
                if (token[h] >= int(params.layout.seq_q)) token[h] = no_token;
            }
            send(q_index, task, first + of.place(warpgroup * C::warpgroup_rows));
        }
        if (thread % 4) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (token[h] == no_token) continue;
            if (params.to.lse.data) *any::row_of<float>(params.to.lse, task.batch, head[h], token[h]) = lse[h];
            if (params.to.max_logits.data)
                *any::row_of<float>(params.to.max_logits, task.batch, head[h], token[h]) = top[h];
        }
    }

    // The tokens that a thread's two rows are written to.
    __device__ __forceinline__ void find_tokens(const ForwardMessage& task, int (&token)[2]) const {
        const LayoutView& layout = params.layout;
        any::OwnTokens own{any::tokens_of(layout.queries, C::block_q, layout.seq_q, task.row), nullptr};
        if (task.by_rows) own = any::own_tokens_of(layout.queries, C::block_q, layout.seq_q, task.row);
#pragma unroll
        for (int h = 0; h < 2; ++h) token[h] = own.at(row_in_tile(h));
    }

    // The warpgroup's rows by the copy engine; store(panel, its rows in shared memory) begins a panel.
    template <class Store>
    __device__ __forceinline__ void send_panels(int q_index, Store store) {
        ptx::fence_async_shared();
        ptx::named_barrier_sync(1 + warpgroup, 128);  // the warpgroup's tile is written before thread 0 sends it
        if (thread == 0) {
            for (int panel = 0; panel < C::v_panels; ++panel)
                store(panel, shared.q[q_index][panel] + warpgroup * C::warpgroup_bytes);
            ptx::bulk_commit();
        }
        held = q_index;
    }
    __device__ __forceinline__ void send(int q_index, const TaskMessage& task, int token) {
        send_panels(q_index, [&](int panel, const uint8_t* from) {
            ptx::tma_store_4d(&params.maps.out, C::panel_columns * panel, task.head, token, task.batch, from);
        });
    }
    __device__ __forceinline__ void send_home(int q_index, const TaskMessage& task) {
        send_panels(q_index, [&](int panel, const uint8_t* from) {
            const HomePlace at(params.layout.queries, C::block_q, task.row);
            ptx::tma_store_5d(at.map(params.maps.out), C::panel_columns * panel, task.head, at.in_map(params.maps.out),
                              at.first + warpgroup * C::warpgroup_rows, task.batch, from);
        });
    }
    // Each warp's 16 rows to where their tokens stand.
    __device__ __forceinline__ void write_tokens(int q_index, const TaskMessage& task, uint32_t panel,
                                                 const int (&token)[2]) {
        __syncwarp();  // the warp's rows are written before others of its lanes read them
        write_rows<C::v_panels, typename C::Element>(panel + thread / 32 * C::warp_bytes, C::panel_bytes, params.to.out,
                                                     task.batch, task.head, token, params.head_dim_v);
        release_q(q_index);
    }
    // After ordinary accesses to the q tile.
    __device__ __forceinline__ void release_q(int q_index) {
        ptx::fence_async_shared();
        ptx::named_barrier_sync(1 + warpgroup, 128);  // all are done with the q tile and its message
        if (thread == 0) ptx::mbarrier_arrive(&shared.q_empty[q_index]);
    }

    // ---- pieces: with what those before handed on, for the next one, or at the end ----
    // Some columns at a time go through the q tile as floats, where a warp has its rows as memory has them. A row that
    // is to be made again is left as it was handed on.
    __device__ __forceinline__ void store_piece(int q_index, const ForwardMessage& task, const tile::RowState& done,
                                                const float (&l)[2]) {
        constexpr float unlift = tile::unlift<C::dtype>;
        const unsigned odd = note_not_finite(task.index, l);
        int token[2];
        find_tokens(task, token);
        any::RowState<float> state[2];
        float mine[2], share[2];  // factors of this piece's sums, and of those handed on
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (odd >> (thread % 32 / 4 + 8 * h) & 1) token[h] = no_token;
            state[h] = {done.m[h] * params.scale, l[h] * unlift, done.m[h] * params.scale};
            any::RowEnd<C::dtype> end(params.to, task.batch, task.head, token[h]);
            if (token[h] != no_token) end.take_on(state[h], 0);
            end.finish(state[h]);
            mine[h] = end.mine * unlift, share[h] = end.share;
        }
        tile::scale_rows(r_out, mine[0], mine[1]);
        const uint32_t rows = ptx::shared_address(shared.q[q_index][0] + warpgroup * C::warpgroup_bytes) +
                              thread / 32 * C::warp_bytes;
#pragma unroll
        for (int first = 0; first < C::head_dim_v; first += PieceRows<C>::columns)
            PieceRows<C>{params, task, rows, thread % 32, first}.store(r_out, token, share);
        if (thread % 4 == 0)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (token[h] != no_token)
                    any::RowEnd<C::dtype>(params.to, task.batch, task.head, token[h]).write_state(state[h], 0);
        release_q(q_index);
    }

    __device__ __forceinline__ void store_part(int q_index, const TaskMessage& task, const float (&lse)[2],
                                               const float (&top)[2]) {
        const size_t first = size_t(task.part) * C::block_q;
        float* const out = params.parts.out + first * params.head_dim_v + tile::fragment_column(thread, 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            auto* const row = reinterpret_cast<float2*>(out + row_in_tile(h) * params.head_dim_v);
#pragma unroll
            for (int group = 0; group < C::head_dim_v / 8; ++group)  // of 8 columns, a quad's
                if (8 * group < params.head_dim_v)
                    row[4 * group] = make_float2(r_out[4 * group + 2 * h], r_out[4 * group + 2 * h + 1]);
        }
        if (thread % 4 == 0)
            for (int h = 0; h < 2; ++h) {
                params.parts.lse[first + row_in_tile(h)] = lse[h];
                params.parts.top[first + row_in_tile(h)] = top[h];
            }
        held = q_index;
        ptx::named_barrier_sync(1 + warpgroup, 128);  // all are done with the q tile and its message
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
        if constexpr (C::takes_turns) ptx::named_barrier_sync(turn_of(warpgroup), 256);
        begin_scores(q_tile, k_tile);
        typename C::MaskWord word;
        const int mask = take_mask(k.index, word);
        ptx::mbarrier_wait(&shared.full[v.index], v.phase);
        begin_output(p, v_tile);
        if constexpr (C::takes_turns) ptx::named_barrier_arrive(turn_of_next(), 256);
        if (held >= 0) [[unlikely]]
            release_held();
        ptx::wgmma_wait<1>();
        release(k.index);
        cap_scores();
        if (mask != full_block) [[unlikely]]
            tile::mask(s, word);
        return v.index;
    }

    __device__ __forceinline__ void finish_output(int v) {
        ptx::wgmma_wait<0>();
        release(v);
    }

    // From the block whose probabilities are in p to the next of its task: its scores, then p v, begun; under them its
    // probabilities into next_p. Two arrays, for p v reads p until it is done; or one, and it is waited for.
    __device__ __forceinline__ void step(const Probabilities& p, Probabilities& next_p) {
        const int v = make_scores(q_index, p);
        if constexpr (C::p_arrays == 1) finish_output(v);
        float factor[2];
        // Who asks for the largest score gets it by following the maximum in each block.
        const bool follows = params.to.max_logits.data;
        const bool rescale = tile::softmax<C::dtype>(s, rows, params.scale_log2, follows, next_p, factor);
        if constexpr (C::p_arrays == 2) finish_output(v);
        if (rescale) [[unlikely]]
            tile::scale_rows(r_out, factor[0], factor[1]);
        first = false;
        --left;
    }

    // The end of a task: p v of its last block, and under it the first probabilities of the next task, unless there is
    // none. It stands in the kernel once, and not in each of two steps: code that is seldom met has to be fetched.
    __device__ __forceinline__ void change_task(const Probabilities& p, Probabilities& next_p) {
        release_held();
        int next_q;
        const int blocks = take_task(next_q);
        const tile::RowState done = rows;
        if (blocks != end_of_work) [[likely]] {
            const int v = make_scores(next_q, p);
            if constexpr (C::p_arrays == 1) finish_output(v);
            rows = tile::RowState{};
            float factor[2];
            tile::softmax<C::dtype>(s, rows, params.scale_log2, true, next_p, factor);
            if constexpr (C::p_arrays == 2) finish_output(v);
        } else {
            ptx::mbarrier_wait(&shared.full[slot.index], slot.phase);
            begin_output(p, v_descriptor(slot.index));
            ptx::wgmma_wait<0>();
        }
        store(q_index, done);
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
        const int mask = take_mask(slot.index, word);
        ptx::wgmma_wait<0>();
        release(slot.index);
        slot.advance();
        cap_scores();
        if (mask != full_block) tile::mask(s, word);
        Probabilities p[C::p_arrays];
        Probabilities &even = p[0], &odd = p[C::p_arrays - 1];
        float factor[2];
        tile::softmax<C::dtype>(s, rows, params.scale_log2, true, even, factor);
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
