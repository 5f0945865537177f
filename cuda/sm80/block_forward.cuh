// SPDX-License-Identifier: MIT
//
//     s = q kT,  p = exp2(scale_log2 s - m),  out = sum(p v) / sum(p),  lse = scale m + log(sum(p))
//
// over the blocks that a layout lists for each query block, in any order of tokens: rows are copied by token, so that
// residue classes and listed tiles cost what consecutive ones do, but for their cache lines.
//
//   grid      a CTA has BlockQ rows of a task's query block, and 64 keys a step; two CTAs an SM hide each other's waits
//   a step    v is on its way while s is made, the next k while p and p v are: one tile of each suffices
//
//               copy     | v0      | k1      | v1      | k2
//               products | q k0    | p0 v0   | q k1    | p1 v1
//
//   warps     four, of 16 or 32 rows: the more rows, the fewer times k and v are read from shared memory. Scores, p and
//             out stay in registers; p is the a operand of p v as it stands, and a masked block costs a thread a word
//             for each 16 rows (tile/fragment.h)
//   softmax   as on Hopper: relative to the maximum found last, made once more where that was not good enough
//             (tile/softmax.cuh)
//   out       leaves through the warp's rows of q, 16 bytes a lane
//   isolation out is p v, and 0 * NaN is NaN: rows whose sums are not finite are made again by their warp from kept
//             pairs alone
#pragma once

#include <cmath>

#include "any/partials.h"
#include "any/row_end.cuh"
#include "runtime/launch.h"
#include "sm80/block_forward.h"
#include "sm80/tile.cuh"
#include "tile/softmax.cuh"

namespace spattn::sm80 {

// ---- configuration ----
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ>
struct ForwardConfig {
    static constexpr Dtype dtype = D;
    using Element = typename tile::Element<D>::type;
    using KeyTile = SharedTile<HeadDim>;
    using ValueTile = SharedTile<HeadDimV>;
    static constexpr int head_dim = HeadDim, head_dim_v = HeadDimV, block_q = BlockQ;
    static constexpr int warp_rows = BlockQ / warps, groups = warp_rows / 16;
    static_assert(groups <= 2, "bits of odd rows fill one word");
    static constexpr int q_bytes = KeyTile::bytes(BlockQ), k_bytes = KeyTile::bytes(step_tokens);
    static constexpr int shared_bytes = BlockForward<D, HeadDim, HeadDimV, BlockQ>::shared_bytes;
    static_assert(shared_bytes == q_bytes + k_bytes + ValueTile::bytes(step_tokens), "what the host was told");
    static constexpr int ctas = groups * HeadDimV <= 128 ? 3 : 2;  // an SM; more would leave too few registers
};

struct ForwardParams {
    TensorView q, k, v;
    LayoutView layout;
    TasksView tasks;
    any::ForwardOutputs to;
    any::Partials<float> parts;
    int heads_q, group, head_dim, head_dim_v, row_parts;
    bool q_is_wide, k_is_wide, v_is_wide, out_is_wide;  // out: and in whole chunks
    float scale, scale_log2;  // from what stands for scores to their natural units, and to powers of two
    bool has_cap;             // scores become tanh(into_cap s) first
    float into_cap;
};

// Which of a block's rows are whose.
struct Place {
    Task task;
    int batch, head, kind, first_row;  // first_row: of the CTA, in the block

    __device__ Place(const ForwardParams& params, unsigned index, int rows)
        : task(params.tasks.tasks[index / unsigned(params.row_parts)]),
          batch(task.head / params.heads_q),
          head(task.head - batch * params.heads_q),
          kind(params.layout.kind_of_head[task.head]),
          first_row(int(index % unsigned(params.row_parts)) * rows) {}
    __device__ int head_kv(const ForwardParams& params) const { return head / params.group; }
    __device__ any::OwnTokens tokens(const LayoutView& layout) const {
        return any::own_tokens_of(layout.queries, layout.block_q, layout.seq_q, task.row);
    }
};

// ---- repair: one warp makes a row from the pairs that it keeps, and from nothing else ----
template <Dtype D, int Columns>
struct Repair {
    using Element = any::ElementOf<D>;
    static constexpr int columns = Columns / 32;  // a lane's, 32 apart

    const ForwardParams& params;
    const Place place;                              // a copy: a reference would keep the CTA's sums in memory, too
    const int row, token, lane = threadIdx.x % 32;  // row: in the CTA
    float q[columns], out[columns], m = -INFINITY, l = 0;

    __device__ Repair(const ForwardParams& params, const Place& place, int row)
        : params(params), place(place), row(row), token(place.tokens(params.layout).at(place.first_row + row)) {}

    __device__ __noinline__ void run() {
        if (token == no_token) return;
        const auto* from = any::row_of<Element>(params.q, place.batch, place.head, token);
        for (int i = 0; i < columns; ++i) {
            const int column = lane + 32 * i;
            q[i] = column < params.head_dim ? any::to_real(from[column * params.q.column]) : 0;
            out[i] = 0;
        }
        const LayoutView& layout = params.layout;
        ReverseWalk walk(layout.by_query, place.kind, place.task);
        while (walk.next()) block(walk.block, walk.mask);
        end();
    }

    __device__ void block(int block, int mask) {
        const LayoutView& layout = params.layout;
        const any::TileTokens tokens = any::tokens_of(layout.keys, layout.block_k, layout.seq_k, block);
        const uint64_t* words = layout.masks + int64_t(mask) * layout.mask_words;
        for (int base = 0; base < layout.block_k; base += 32) {
            const int bit = tile::fragment_bit(place.first_row + row, base + lane, layout.block_k);
            const bool kept = mask == full_block || (words[bit / 64] >> (bit % 64) & 1);
            for (unsigned keys = __ballot_sync(~0u, kept); keys; keys &= keys - 1)
                pair(tokens.at(base + __ffs(int(keys)) - 1));
        }
    }

    __device__ void pair(int64_t key) {
        if (isnan(l)) return;  // by its own keys: nothing can change it
        const auto* k = any::row_of<Element>(params.k, place.batch, place.head_kv(params), key);
        const auto* v = any::row_of<Element>(params.v, place.batch, place.head_kv(params), key);
        float s = 0;
        for (int i = 0; i < columns; ++i) {
            const int column = lane + 32 * i;
            if (column < params.head_dim) s = fmaf(q[i], any::to_real(k[column * params.k.column]), s);
        }
        for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
        if (params.has_cap) s = tile::cap(s, params.into_cap);
        const float highest = fmaxf(m, s);
        const float factor = m == highest ? 1 : ptx::exp2_approx((m - highest) * params.scale_log2);
        const float p = s == -INFINITY ? 0 : ptx::exp2_approx((s - highest) * params.scale_log2);
        m = highest, l = fmaf(l, factor, p);
        for (int i = 0; i < columns; ++i) {
            const int column = lane + 32 * i;
            if (column < params.head_dim_v)
                out[i] = fmaf(p, any::to_real(v[column * params.v.column]), out[i] * factor);
        }
    }

    __device__ void end() {
        any::RowState<float> state{m * params.scale, l, m * params.scale};
        if (place.task.part == whole_row) {
            any::RowEnd<D> end(params.to, place.batch, place.head, token);
            end.take_on(state, 0);
            __syncwarp();  // all lanes have read what the pieces before handed on
            end.finish(state);
            each_column([&](int column, float x) { end.write(column, l == 0 ? 0 : x); });
            if (lane == 0) end.write_state(state, 0);
            return;
        }
        const size_t to = size_t(place.task.part) * params.layout.block_q + place.first_row + row;
        const float factor = l == 0 ? 0 : 1 / l;
        each_column(
            [&](int column, float x) { params.parts.out[to * params.head_dim_v + column] = l == 0 ? 0 : x * factor; });
        if (lane) return;
        params.parts.lse[to] = l == 0 ? -INFINITY : state.m + logf(l);
        params.parts.top[to] = state.top;
    }

    template <class Body>
    __device__ void each_column(Body body) {
        for (int i = 0; i < columns; ++i)
            if (lane + 32 * i < params.head_dim_v) body(lane + 32 * i, out[i]);
    }
};

// ---- the CTA ----
template <class C>
struct Forward {
    const ForwardParams& params;
    const Place place;
    const uint32_t q_tile, k_tile, v_tile;  // shared addresses
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * C::warp_rows;
    float out[C::groups][C::head_dim_v / 2];
    tile::RowState rows[C::groups];

    __device__ Forward(const ForwardParams& params, uint32_t shared)
        : params(params),
          place(params, blockIdx.x, C::block_q),
          q_tile(shared),
          k_tile(shared + C::q_bytes),
          v_tile(k_tile + C::k_bytes) {}

    __device__ __forceinline__ void run() {
        const LayoutView& layout = params.layout;
        const int parts = layout.block_k / step_tokens;
        ReverseWalk walk(layout.by_query, place.kind, place.task);
        bool more = walk.next();
        int part = 0;  // of a block that is larger than a step
        any::TileTokens tokens = any::tokens_of(layout.keys, layout.block_k, layout.seq_k, walk.block);
        if (more) {
            load_q();
            load_k(tokens, part);
        }
        ptx::cp_async_commit();
        if (more) load_v(tokens, walk.block, part);
        ptx::cp_async_commit();
#pragma unroll
        for (int g = 0; g < C::groups; ++g)
#pragma unroll
            for (int i = 0; i < C::head_dim_v / 2; ++i) out[g][i] = 0;
        bool fresh = true;
        while (more) {
            // The first v is on its way, behind the first k.
            fresh ? ptx::cp_async_wait<1>() : ptx::cp_async_wait<0>();
            __syncthreads();  // k is there, and everyone is done with v
            if (!fresh) load_v(tokens, walk.block, part);
            ptx::cp_async_commit();
            uint32_t words[C::groups];
            const bool is_masked = walk.mask != full_block;
            if (is_masked) read_mask(walk.mask, part, parts, words);
            float s[C::groups][32];
            multiply_rows<C::dtype, typename C::KeyTile>(q_tile, warp_row, k_tile, s);
            if (++part == parts) {
                part = 0;
                more = walk.next();
                tokens = any::tokens_of(layout.keys, layout.block_k, layout.seq_k, walk.block);
            }
            ptx::cp_async_wait<0>();
            __syncthreads();  // v is there, and everyone is done with k
            if (more) load_k(tokens, part);
            ptx::cp_async_commit();
            uint32_t p[C::groups][4][4];
#pragma unroll
            for (int g = 0; g < C::groups; ++g) make_probabilities(g, s[g], is_masked, words[g], fresh, p[g]);
            fresh = false;
            add_product<C::dtype, typename C::ValueTile>(p, v_tile, out);
        }
        finish();
    }

    __device__ __forceinline__ void load_q() {
        const LayoutView& layout = params.layout;
        const Rows q(params.q, place.batch, place.head, params.head_dim, params.q_is_wide);
        const auto tokens = any::tokens_of(layout.queries, layout.block_q, layout.seq_q, place.task.row);
        load_rows<C::block_q, typename C::KeyTile>(q_tile, q, {tokens, place.first_row});
    }
    __device__ __forceinline__ void load_k(const any::TileTokens& tokens, int part) {
        const Rows k(params.k, place.batch, place.head_kv(params), params.head_dim, params.k_is_wide);
        load_rows<step_tokens, typename C::KeyTile>(k_tile, k, {tokens, part * step_tokens});
    }
    // Rows of v that no query sees are 0: what they hold would reach every row, which would all need a repair.
    __device__ __forceinline__ void load_v(const any::TileTokens& tokens, int block, int part) {
        const Rows v(params.v, place.batch, place.head_kv(params), params.head_dim_v, params.v_is_wide);
        const LiveView& live = params.layout.live_keys;
        const int set = live.set_of ? live.set_of[place.kind * params.layout.by_key.rows + block] : all_live;
        const uint64_t word = set == all_live ? ~uint64_t(0) : live.sets[set * live.words + part];
        load_rows<step_tokens, typename C::ValueTile>(v_tile, v, {tokens, part * step_tokens, word});
    }

    // A thread's 32 bits of a step for each 16 rows.
    __device__ __forceinline__ void read_mask(int mask, int part, int parts, uint32_t (&words)[C::groups]) const {
        const auto* all =
            reinterpret_cast<const uint32_t*>(params.layout.masks + int64_t(mask) * params.layout.mask_words);
#pragma unroll
        for (int g = 0; g < C::groups; ++g)
            words[g] = __ldg(all + ((place.first_row + warp_row) / 16 + g) * 32 * parts + lane * parts + part);
    }

    __device__ __forceinline__ void make_probabilities(int g, float (&s)[32], bool is_masked, uint32_t word, bool fresh,
                                                       uint32_t (&p)[4][4]) {
        if (params.has_cap) tile::cap(s, params.into_cap);
        if (is_masked) tile::mask(s, word);
        float factor[2];
        // Who asks for the largest score gets it by following the maximum in each block.
        const bool follows = fresh || params.to.max_logits.data;
        if (tile::softmax<C::dtype>(s, rows[g], params.scale_log2, follows, p, factor) && !fresh)
            tile::scale_rows(out[g], factor[0], factor[1]);
    }

    // Rows that are not finite are left to repair.
    __device__ __forceinline__ void finish() {
        const any::OwnTokens own = place.tokens(params.layout);
        unsigned odd[C::groups];
#pragma unroll
        for (int g = 0; g < C::groups; ++g) {
            const float l[2] = {tile::quad_sum(rows[g].l[0]), tile::quad_sum(rows[g].l[1])};
            float is_nan[2];
            tile::find_not_finite(out[g], is_nan);
            is_nan[0] = fmaf(l[0], 0.f, is_nan[0]), is_nan[1] = fmaf(l[1], 0.f, is_nan[1]);
            odd[g] = __all_sync(~0u, is_nan[0] == 0 && is_nan[1] == 0)
                         ? 0
                         : tile::rows_with(!(is_nan[0] == 0), !(is_nan[1] == 0));
#pragma unroll
            for (int h = 0; h < 2; ++h) finish_row(g, h, l[h], odd[g] >> (lane / 4 + 8 * h) & 1, own);
        }
        const unsigned all_odd = odd[0] | (C::groups > 1 ? odd[C::groups - 1] << 16 : 0);
        if (params.out_is_wide && params.to.piece.is_last && place.task.part == whole_row) {
            const Rows out_rows(params.to.out, place.batch, place.head, params.head_dim_v, true);
            store_rows<C::warp_rows, typename C::KeyTile>(q_tile, warp_row, out_rows, [&](int row) {
                return all_odd >> (row - warp_row) & 1 ? no_token : own.at(place.first_row + row);
            });
        }
#pragma unroll 1
        for (unsigned bits = all_odd; bits; bits &= bits - 1)
            Repair<C::dtype, C::head_dim>(params, place, warp_row + __ffs(int(bits)) - 1).run();
    }

    __device__ __forceinline__ void finish_row(int g, int h, float l, bool is_odd, const any::OwnTokens& own) {
        constexpr float unlift = tile::unlift<C::dtype>;
        const int row = warp_row + 16 * g + lane / 4 + 8 * h;
        const float m = rows[g].m[h] * params.scale;
        any::RowState<float> state{m, l * unlift, m};
        if (place.task.part != whole_row) {
            if (is_odd) return;
            const size_t to = size_t(place.task.part) * params.layout.block_q + place.first_row + row;
            const float factor = l == 0 ? 0 : 1 / l;
            float* const part = params.parts.out + to * params.head_dim_v;
            each_pair(g, h, [&](int column, float x, float y) {
                part[column] = x * factor;
                if (column + 1 < params.head_dim_v) part[column + 1] = y * factor;
            });
            if (lane % 4) return;
            params.parts.lse[to] = l == 0 ? -INFINITY : m + logf(state.l);
            params.parts.top[to] = m;
            return;
        }
        const int token = own.at(place.first_row + row);
        const bool writes = token != no_token && !is_odd;
        any::RowEnd<C::dtype> end(params.to, place.batch, place.head, max(token, 0));
        if (writes) end.take_on(state, 0);
        __syncwarp();  // the threads of the row have read what the pieces before handed on
        if (!writes) return;
        end.finish(state);
        if (params.out_is_wide) {
            each_pair(g, h, [&](int column, float x, float y) {
                x *= unlift, y *= unlift;
                if (end.join_pair(column, x, y)) stage_pair<C::dtype, typename C::KeyTile>(q_tile, row, column, x, y);
            });
        } else {
            each_pair(g, h, [&](int column, float x, float y) {
                end.write(column, x * unlift);
                if (column + 1 < params.head_dim_v) end.write(column + 1, y * unlift);
            });
        }
        if (lane % 4 == 0) end.write_state(state, 0);
    }

    // body(column, sum, the next column's sum) for this thread's columns of a row.
    template <class Body>
    __device__ __forceinline__ void each_pair(int g, int h, Body body) {
#pragma unroll
        for (int i = 2 * h; i < C::head_dim_v / 2; i += 4) {
            const int column = tile::fragment_column(lane, i);
            if (column < params.head_dim_v) body(column, out[g][i], out[g][i + 1]);
        }
    }
};

// ---- kernel ----
template <class C>
__global__ void __launch_bounds__(threads, C::ctas) block_forward_kernel(const __grid_constant__ ForwardParams params) {
    extern __shared__ __align__(128) uint8_t memory[];
    Forward<C>(params, ptx::shared_address(memory)).run();
}

// ---- launch ----
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ>
void BlockForward<D, HeadDim, HeadDimV, BlockQ>::run(const ForwardArgs& args) {
    using C = ForwardConfig<D, HeadDim, HeadDimV, BlockQ>;
    const Problem& p = *args.problem;
    ForwardParams params{};
    params.q = args.q, params.k = args.k, params.v = args.v;
    params.layout = args.layout;
    params.tasks = args.tasks;
    params.to = any::make_outputs<float>(args);
    params.parts = any::Partials<float>::at(args.workspace, p, args.layout, args.tasks);
    params.heads_q = int(p.heads_q), params.group = int(p.group());
    params.head_dim = int(p.head_dim), params.head_dim_v = int(p.head_dim_v);
    params.row_parts = args.layout.block_q / BlockQ;
    params.q_is_wide = is_wide(args.q), params.k_is_wide = is_wide(args.k), params.v_is_wide = is_wide(args.v);
    params.out_is_wide = is_wide(args.out) && p.head_dim_v % 8 == 0;
    const double scale = p.softcap != 0 ? p.softcap : p.scale;
    params.scale = float(scale), params.scale_log2 = float(scale * M_LOG2E);
    params.has_cap = p.softcap != 0;
    params.into_cap = params.has_cap ? float(p.scale / p.softcap) : 0;
    const unsigned ctas = unsigned(args.tasks.num_tasks) * unsigned(params.row_parts);
    runtime::launch(block_forward_kernel<C>, {ctas, unsigned(threads), size_t(C::shared_bytes)}, args.stream, params);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ>
void BlockForward<D, HeadDim, HeadDimV, BlockQ>::prepare(int32_t device) {
    using C = ForwardConfig<D, HeadDim, HeadDimV, BlockQ>;
    const runtime::CurrentDevice current(device);
    runtime::prepare(block_forward_kernel<C>, C::shared_bytes);
}

}  // namespace spattn::sm80
