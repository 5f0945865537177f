// SPDX-License-Identifier: MIT
// What the backward kernels share: their operands, what belongs to a query, how a warp walks the blocks of a task, and
// how it makes a row of gradients again where 0 * NaN may have reached it.
#pragma once

#include <algorithm>
#include <cmath>

#include "any/divisor.h"
#include "any/block_backward.h"
#include "any/element.cuh"
#include "any/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "runtime/launch.h"
#include "runtime/tensor_map.h"
#include "sm90/block_backward.h"
#include "sm90/pair.cuh"
#include "sm90/pipeline.cuh"
#include "tile/fragment.h"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

struct GradientParams {
    TensorView q, k, v, dout, dq, dk, dv;
    LayoutView layout;  // in device memory
    any::BackwardSpace<float> space;
    any::BackwardCarried<float> carried;
    PieceView piece;
    unsigned* next_task;  // tasks taken beyond the first of each block; null where there is but one
    any::Divisor heads_q, heads_kv, group, query_residue_tiles, key_residue_tiles;
    int seq_q, seq_k, head_dim, head_dim_v;
    float scale, scale_log2;  // of gradients; from what stands for scores to powers of two
    bool has_cap, value_in_key;
    float into_cap;
};

inline void fill(GradientParams& params, const BackwardArgs& args) {
    const Problem& p = *args.problem;
    params.q = args.q, params.k = args.k, params.v = args.v, params.dout = args.dout;
    params.dq = args.dq, params.dk = args.dk, params.dv = args.dv;
    params.layout = args.layout;
    params.space = any::BackwardSpace<float>::at(args.workspace, p, args.layout, args.tasks);
    params.carried = any::BackwardCarried<float>::at(args.piece.carried, p);
    params.piece = args.piece;
    params.next_task = nullptr;
    params.heads_q = any::Divisor(p.heads_q), params.heads_kv = any::Divisor(p.heads_kv);
    params.group = any::Divisor(p.group());
    params.query_residue_tiles = any::Divisor(args.layout.queries.residue_tiles);
    params.key_residue_tiles = any::Divisor(args.layout.keys.residue_tiles);
    params.seq_q = int(p.seq_q), params.seq_k = int(p.seq_k);
    params.head_dim = int(p.head_dim), params.head_dim_v = int(p.head_dim_v);
    params.has_cap = p.softcap != 0, params.value_in_key = p.value_in_key;
    params.scale = float(p.scale);
    params.scale_log2 = float((params.has_cap ? p.softcap : p.scale) * M_LOG2E);
    params.into_cap = params.has_cap ? float(p.scale / p.softcap) : 0;
}

// What belongs to a query: p = exp2(scale_log2 s + offset), ds = p (dp dp_factor - delta). p is lifted as in the
// forward, ds by ds_lift.
template <class C>
constexpr float dp_factor = tile::unlift<C::dtype> * tile::ds_lift<C::dtype>;
struct QueryStats {
    float offset, delta;
};
// token is one of the head that `plane` counts over the batch; of no_token, and beyond the sequence, p and ds are 0.
template <class C>
__device__ __forceinline__ QueryStats query_stats(const GradientParams& params, int plane, int token) {
    if (unsigned(token) >= unsigned(params.seq_q)) return {-INFINITY, 0};
    const int64_t at = int64_t(plane) * params.seq_q + token;
    return {tile::lift<C::dtype> - params.space.lse[at] * float(M_LOG2E),
            params.space.delta[at] * dp_factor<C>};
}

// load(head, block, mask) for each block that a task has in one list, by one warp: for `heads` heads from `first_head`
// of the batch on, which share it. The last block comes first, for there the rows of causal patterns begin alike: tasks
// that run at the same time then meet the same tokens while L2 has them. For that, too, heads take turns after so many
// blocks. With turns of one block, windows of 1K over 16K tokens took 1.5 times as long, probably because a task then
// touches pages of all heads at a time.
constexpr int turn_of_head = 32;
template <class Load>
__device__ __forceinline__ void each_block(const ListsView& lists, int list, int row, int lane, int first_head,
                                           int heads, int& skip, int& left, Load load) {
    const Slice slice = lists.slices[list * lists.rows + row];
    int run = slice.end - 1, passed = 0;  // blocks of that run, from its end
    int held = slice.end;                 // the first run that lanes hold, one each
    Run mine{0, 0, full_block};
    while (run >= slice.begin && left) {
        const int begin_run = run, begin_passed = passed;
        for (int head = first_head; head < first_head + heads; ++head) {
            run = begin_run, passed = begin_passed;
            for (int n = 0; n < turn_of_head && run >= slice.begin;) {
                if (run < held || run >= held + 32) {
                    held = max(run - 31, slice.begin);
                    if (held + lane < slice.end) mine = lists.runs[held + lane];
                }
                const int first = __shfl_sync(~0u, mine.first, run - held);
                const int blocks = __shfl_sync(~0u, mine.count, run - held);
                const int mask = __shfl_sync(~0u, mine.mask, run - held);
                const int count = min(blocks - passed, turn_of_head - n), last = first + blocks - 1 - passed;
                const int from = min(skip, count), take = min(count - from, left);
                skip -= from, left -= take;
                for (int i = from; i < from + take; ++i) load(head, last - i, mask);
                n += count, passed += count;
                if (passed == blocks) --run, passed = 0;
            }
        }
    }
}

// The blocks of queries that a task of keys has, of all query heads of the group.
template <class Load>
__device__ __forceinline__ void each_block_of_group(const LayoutView& layout, const Task& task, int group, int lane,
                                                    Load load) {
    const auto list_of = [&](int head) { return layout.head_kinds == 1 ? 0 : layout.kind_of_head[head]; };
    int skip = task.skip, left = task.take;
    for (int head = task.head * group, end = head + group; head < end && left;) {
        int alike = 1;
        while (head + alike < end && list_of(head + alike) == list_of(head)) ++alike;
        each_block(layout.by_key, list_of(head), task.row, lane, head, alike, skip, left, load);
        head += alike;
    }
}

// Zeros into rows of a head, by one warp: 16 bytes a lane, and as many rows at once as it has lanes for. Columns are a
// multiple of 8, and 256 at most.
template <class Element>
__device__ __forceinline__ void clear_rows(const TensorView& x, int batch, int head, int first, int rows, int columns,
                                           int lane) {
    const int units = columns / 8, together = 32 / units, own = lane / units;
    if (own >= together) return;
    auto* to = any::row_of<Element>(x, batch, head, first + own) + (lane - own * units) * 8;
    for (int row = own; row < rows; row += together, to += together * x.row) ptx::store_global(to, {0, 0, 0, 0});
}

// ---- repair: one warp makes a row of gradients from the pairs that it keeps, and from nothing else ----
template <class C>
struct GradientRepair {
    using Element = typename C::Element;
    static constexpr int columns = C::head_dim / 32;  // of sums, a lane's, 32 apart

    const GradientParams& params;
    const int lane, batch;
    const bool makes_dk = true, makes_dv = true;  // of keys: what the kernel owns that asks
    const int first = first_column<C>() + lane;
    float dk[columns] = {}, dv[columns] = {}, dq[columns] = {};

    // Sums of a pair into dk and dv, or into dq. The other's are not used.
    __device__ void pair(int head_q, int64_t query, int64_t key) {
        const int head_kv = head_q / params.group;
        const auto* q = any::row_of<Element>(params.q, batch, head_q, query);
        const auto* k = any::row_of<Element>(params.k, batch, head_kv, key);
        const auto* v = any::row_of<Element>(params.v, batch, head_kv, key);
        const auto* dout = any::row_of<Element>(params.dout, batch, head_q, query);
        float s = dot(q, k, params.head_dim), slope = 1;
        const float dp = dot(dout, v, params.head_dim_v);
        if (params.has_cap) s = tile::cap(s, params.into_cap), slope = 1 - s * s;
        const int64_t row = (int64_t(batch) * params.heads_q + head_q) * params.seq_q + query;
        const float lse = params.space.lse[row], delta = params.space.delta[row];
        const float p = ptx::exp2_approx(s * params.scale_log2 - lse * float(M_LOG2E)), ds = p * slope * (dp - delta);
        for (int i = 0; i < columns; ++i) {
            const int column = first + 32 * i;
            if (column < params.head_dim_v) dv[i] = fmaf(p, any::to_real(dout[column]), dv[i]);
            if (column >= params.head_dim) continue;
            dk[i] = fmaf(ds, any::to_real(q[column]), dk[i]);
            dq[i] = fmaf(ds, any::to_real(k[column]), dq[i]);
        }
    }

    __device__ float dot(const Element* a, const Element* b, int width) const {
        float sum = 0;
        for (int column = lane; column < width; column += 32)
            sum = fmaf(any::to_real(a[column]), any::to_real(b[column]), sum);
        for (int n = 16; n; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
        return sum;
    }

    // Which of 32 pairs are kept; each lane asks for its own.
    __device__ unsigned kept(int mask, int query, int key) const {
        if (mask == full_block) return ~0u;
        const uint32_t* words = mask_words(params.layout, mask);
        const int bit = tile::key_fragment_bit(query, key, C::block_k);
        return __ballot_sync(~0u, words[bit / 32] >> (bit % 32) & 1);
    }

    // ---- a row of keys, or the task's part of it ----
    __device__ __noinline__ void key_row(const Task& task, int in_block) {
        const int head_kv = task.head - batch * params.heads_kv;
        const LayoutView& layout = params.layout;
        const int key = any::own_token_at(layout.keys, C::block_k, layout.seq_k, task.row, in_block);
        if (key == no_token) return;
        each_block_of_group(layout, task, params.group, lane, [&](int head, int block, int mask) {
            queries_of(head - batch * params.heads_q, block, mask, in_block, key);
        });
        store_key(task, head_kv, key, in_block);
    }
    __device__ void queries_of(int head_q, int block, int mask, int in_block, int64_t key) {
        const any::TileTokens queries =
            any::tokens_of(params.layout.queries, C::block_q, params.layout.seq_q, block);
        for (int base = 0; base < C::block_q; base += 32)
            for (unsigned bits = kept(mask, base + lane, in_block); bits; bits &= bits - 1)
                pair(head_q, queries.at(base + __ffs(int(bits)) - 1), key);
    }
    // Adds what pieces before left. True where x is final.
    __device__ bool join(float& x, float* carried) const {
        if (!params.piece.is_first) x += *carried;
        if (!params.piece.is_last) *carried = x;
        return params.piece.is_last;
    }
    __device__ __forceinline__ void store_key(const Task& task, int head_kv, int64_t key, int in_block) {
        float* const part = params.space.parts_key +
                            (int64_t(task.part) * C::block_k + in_block) * (params.head_dim + params.head_dim_v);
        const int64_t row = (int64_t(batch) * params.heads_kv + head_kv) * params.seq_k + key;
        for (int i = 0; i < columns; ++i) {
            const int column = first + 32 * i;
            if (makes_dv && column < params.head_dim_v) {
                if (task.part != whole_row)
                    part[params.head_dim + column] = dv[i];
                else if (join(dv[i], params.carried.dv + row * params.head_dim_v + column) && !params.value_in_key)
                    any::from_real(dv[i], any::row_of<Element>(params.dv, batch, head_kv, key)[column]);
            }
            if (makes_dk && column < params.head_dim) {
                if (task.part != whole_row)
                    part[column] = dk[i];
                else if (join(dk[i], params.carried.dk + row * params.head_dim + column))
                    any::from_real(params.scale * dk[i] + (params.value_in_key ? dv[i] : 0),
                                   any::row_of<Element>(params.dk, batch, head_kv, key)[column]);
            }
        }
    }

    // ---- a row of queries, or the task's part of it ----
    __device__ __noinline__ void query_row(const Task& task, int in_block) {
        const LayoutView& layout = params.layout;
        const int head_q = task.head - batch * params.heads_q;
        const int query = any::own_token_at(layout.queries, C::block_q, layout.seq_q, task.row, in_block);
        if (query == no_token) return;
        const int list = layout.head_kinds == 1 ? 0 : layout.kind_of_head[task.head];
        int skip = task.skip, left = task.take;
        each_block(layout.by_query, list, task.row, lane, task.head, 1, skip, left,
                   [&](int, int block, int mask) { keys_of(head_q, block, mask, in_block, query); });
        store_query(task, head_q, query, in_block);
    }
    __device__ void keys_of(int head_q, int block, int mask, int in_block, int64_t query) {
        const any::TileTokens keys = any::tokens_of(params.layout.keys, C::block_k, params.layout.seq_k, block);
        for (int base = 0; base < C::block_k; base += 32)
            for (unsigned bits = kept(mask, in_block, base + lane); bits; bits &= bits - 1)
                pair(head_q, query, keys.at(base + __ffs(int(bits)) - 1));
    }
    __device__ __forceinline__ void store_query(const Task& task, int head_q, int64_t query, int in_block) {
        const int64_t row = (int64_t(batch) * params.heads_q + head_q) * params.seq_q + query;
        for (int i = 0; i < columns; ++i) {
            const int column = first + 32 * i;
            if (column >= params.head_dim) continue;
            if (task.part != whole_row)
                params.space.parts_query[(int64_t(task.part) * C::block_q + in_block) * params.head_dim + column] =
                    dq[i];
            else if (join(dq[i], params.carried.dq + row * params.head_dim + column))
                any::from_real(params.scale * dq[i], any::row_of<Element>(params.dq, batch, head_q, query)[column]);
        }
    }
};

}  // namespace spattn::sm90
