// SPDX-License-Identifier: MIT
// out = softmax(scale * q kT) v over the blocks of a layout, in fp32, without an assumption.
//
//   grid: a CTA has 8 rows of a task's query block. Warps share the keys 32 at a time: a lane scores one key for two
//   rows
//         from k staged in shared memory, then threads own columns of v and add 32 keys to the 8 rows of out.
//   binds: one shared-memory read a multiply; 2.5 TFLOP/s at best on an H200. It is the truth to compare with, and what
//         runs where no tuned kernel does.
#pragma once

#include "any/block_forward.h"
#include "any/combine.h"
#include "core/math.h"
#include "runtime/launch.h"
#include "tile/dtype.cuh"
#include "tile/fragment.h"

namespace spattn::any {

// ---- configuration ----
constexpr int cta_rows = 8, cta_keys = 32, threads = 128, warps = threads / 32, stage_columns = 32;
static_assert(cta_rows == 2 * warps, "a warp owns the scores of two rows");

struct Params {
    TensorView q, k, v, out, lse;
    LayoutView layout;
    TasksView tasks;
    Partials<float> parts;
    MaskOrder order;
    int heads_q, group, head_dim, head_dim_v;
    float scale;
};

// ---- shared memory ----
struct Shared {
    float k[cta_keys][stage_columns + 1];  // a column of padding: lanes read down a column
    float p[cta_rows][cta_keys];
    float m[cta_rows], l[cta_rows], factor[cta_rows];
    uint32_t seen[cta_rows];               // bit: the row keeps the key
    // then q [cta_rows][head_dim], out [cta_rows][head_dim_v]
};

__device__ __forceinline__ bool has_bit(const uint64_t* mask, int bit) { return mask[bit / 64] >> (bit % 64) & 1; }

__device__ __forceinline__ bool keeps(MaskOrder order, const LayoutView& layout, int mask, int row, int key) {
    if (mask == full_block) return true;
    const uint64_t* words = layout.masks + size_t(mask) * layout.mask_words;
    if (order == MaskOrder::rows) return has_bit(words, row * layout.block_k + key);
    return has_bit(words, tile::fragment_bit(row, key, layout.block_k));
}

// ---- one CTA's rows ----
template <class T>
struct Rows {
    const Params& params;
    Shared& shared;
    float *q, *out;  // shared memory
    Task task;
    int batch, head, first_row, in_block;  // the CTA's first row in the sequence, and in its block
    int thread = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    __device__ T* at(const TensorView& operand, int64_t h, int64_t row) const {
        return static_cast<T*>(operand.data) + batch * operand.batch + h * operand.head + row * operand.row;
    }

    __device__ void load_q() {
        for (int i = thread; i < cta_rows * params.head_dim; i += threads) {
            const int row = first_row + i / params.head_dim, column = i % params.head_dim;
            q[i] = row < params.layout.seq_q ? tile::to_float(at(params.q, head, row)[column * params.q.column]) : 0;
        }
        for (int i = thread; i < cta_rows * params.head_dim_v; i += threads) out[i] = 0;
        if (thread < cta_rows) shared.m[thread] = -INFINITY, shared.l[thread] = 0;
        __syncthreads();
    }

    // Scores of this lane's key for the warp's two rows.
    __device__ void scores(int64_t first_key, float (&s)[2]) {
        s[0] = s[1] = 0;
        for (int base = 0; base < params.head_dim; base += stage_columns) {
#pragma unroll 4
            for (int i = thread; i < cta_keys * stage_columns; i += threads) {
                const int64_t key = first_key + i / stage_columns;
                const int column = base + i % stage_columns;
                const bool inside = key < params.layout.seq_k && column < params.head_dim;
                shared.k[i / stage_columns][i % stage_columns] =
                    inside ? tile::to_float(at(params.k, head / params.group, key)[column * params.k.column]) : 0;
            }
            __syncthreads();
            const int columns = min(stage_columns, params.head_dim - base);
#pragma unroll 4
            for (int c = 0; c < columns; ++c) {
                const float k = shared.k[lane][c];
                s[0] += q[2 * warp * params.head_dim + base + c] * k;
                s[1] += q[(2 * warp + 1) * params.head_dim + base + c] * k;
            }
            __syncthreads();
        }
    }

    // 32 keys of a block, from `offset` in it.
    __device__ void step(int block, int offset, int mask) {
        const int64_t first_key = int64_t(block) * params.layout.block_k + offset;
        float s[2];
        scores(first_key, s);
        const bool in_part = offset + lane < params.layout.block_k && first_key + lane < params.layout.seq_k;
        for (int h = 0; h < 2; ++h) {
            const int row = 2 * warp + h;
            const bool kept = in_part && first_row + row < params.layout.seq_q &&
                              keeps(params.order, params.layout, mask, in_block + row, offset + lane);
            const uint32_t seen = __ballot_sync(~0u, kept);
            if (lane == 0) shared.seen[row] = seen;
            merge(row, kept ? s[h] * params.scale : -INFINITY);
        }
        __syncthreads();
        accumulate(first_key);
        __syncthreads();
    }

    // A warp brings 32 scores of a row into its state.
    __device__ void merge(int row, float s) {
        float m = s;
        for (int d = 16; d; d /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
        m = fmaxf(m, shared.m[row]);
        const float factor = m == -INFINITY ? 1 : expf(shared.m[row] - m);
        const float p = s == -INFINITY ? 0 : expf(s - m);
        float sum = p;
        for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        __syncwarp();  // all lanes have read the old maximum
        shared.p[row][lane] = p;
        if (lane == 0) shared.m[row] = m, shared.l[row] = shared.l[row] * factor + sum, shared.factor[row] = factor;
    }

    __device__ void accumulate(int64_t first_key) {
        uint32_t seen = 0;  // by any row: what other keys hold must not be touched
        for (uint32_t row : shared.seen) seen |= row;
        const T* v = at(params.v, head / params.group, first_key);
        for (int column = thread; column < params.head_dim_v; column += threads) {
            float sum[cta_rows];
            for (int r = 0; r < cta_rows; ++r) sum[r] = out[r * params.head_dim_v + column] * shared.factor[r];
#pragma unroll 4  // fully unrolled it spills
            for (int key = 0; key < cta_keys; ++key) {
                if (!(seen >> key & 1)) continue;
                const float x = tile::to_float(v[key * params.v.row + column * params.v.column]);
                for (int r = 0; r < cta_rows; ++r) sum[r] += shared.p[r][key] * x;
            }
            for (int r = 0; r < cta_rows; ++r) out[r * params.head_dim_v + column] = sum[r];
        }
    }

    __device__ void walk() {
        const LayoutView& layout = params.layout;
        const Slice slice = layout.by_query.slices[layout.class_of[task.head] * layout.by_query.rows + task.row];
        int skip = task.skip, left = task.take;
        for (int r = slice.begin; r < slice.end && left; ++r) {
            const Run run = layout.by_query.runs[r];
            const int from = min(skip, run.count), to = min(run.count, from + left);
            skip -= from, left -= to - from;
            for (int n = from; n < to; ++n)
                for (int offset = 0; offset < layout.block_k; offset += cta_keys) step(run.first + n, offset, run.mask);
        }
    }

    __device__ void store() {
        for (int i = thread; i < cta_rows * params.head_dim_v; i += threads) {
            const int r = i / params.head_dim_v, column = i % params.head_dim_v;
            const float x = shared.l[r] > 0 ? out[i] / shared.l[r] : 0;
            if (task.part != whole_row)
                params
                    .parts.out[(size_t(task.part) * params.layout.block_q + in_block + r) * params.head_dim_v + column] =
                    x;
            else if (first_row + r < params.layout.seq_q)
                at(params.out, head, first_row + r)[column * params.out.column] = tile::from_float<T>(x);
        }
        if (thread >= cta_rows) return;
        const float lse = shared.l[thread] > 0 ? shared.m[thread] + logf(shared.l[thread]) : -INFINITY;
        if (task.part != whole_row)
            params.parts.lse[size_t(task.part) * params.layout.block_q + in_block + thread] = lse;
        else if (params.lse.data && first_row + thread < params.layout.seq_q)
            static_cast<float*>(params.lse.data)[batch * params.lse.batch + head * params.lse.head +
                                                 (first_row + thread) * params.lse.row] = lse;
    }
};

// ---- kernel ----
template <class T>
__global__ void __launch_bounds__(threads, 4) block_forward_kernel(const __grid_constant__ Params params) {
    extern __shared__ float memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    float* q = memory + sizeof(Shared) / sizeof(float);
    const int ctas = params.layout.block_q / cta_rows;  // a task
    const Task task = params.tasks.tasks[blockIdx.x / ctas];
    const int in_block = int(blockIdx.x % ctas) * cta_rows, batch = task.head / params.heads_q;
    Rows<T> rows{params,
                        shared,
                        q,
                        q + cta_rows * params.head_dim,
                        task,
                        batch,
                        task.head - batch * params.heads_q,
                        task.row * params.layout.block_q + in_block,
                        in_block};
    rows.load_q();
    rows.walk();
    rows.store();
}

// One CTA puts one row together: weights exp(lse_i - lse) of normalised parts.
template <class T>
__global__ void __launch_bounds__(threads) combine_kernel(const __grid_constant__ Params params) {
    const int block_q = params.layout.block_q;
    const Join join = params.tasks.joins[blockIdx.x / block_q];
    const int in_block = blockIdx.x % block_q, batch = join.head / params.heads_q,
              head = join.head - batch * params.heads_q;
    const int64_t row = int64_t(join.row) * block_q + in_block;
    if (row >= params.layout.seq_q) return;
    const auto part_row = [&](int part) { return size_t(join.first_part + part) * block_q + in_block; };
    float m = -INFINITY, sum = 0;
    for (int part = 0; part < join.parts; ++part) m = fmaxf(m, params.parts.lse[part_row(part)]);
    const float base = m == -INFINITY ? 0 : m;
    for (int part = 0; part < join.parts; ++part) sum += expf(params.parts.lse[part_row(part)] - base);
    T* out =
        static_cast<T*>(params.out.data) + batch * params.out.batch + head * params.out.head + row * params.out.row;
    for (int column = threadIdx.x; column < params.head_dim_v; column += threads) {
        float x = 0;
        for (int part = 0; part < join.parts; ++part)
            x += expf(params.parts.lse[part_row(part)] - base) *
                 params.parts.out[part_row(part) * params.head_dim_v + column];
        out[column * params.out.column] = tile::from_float<T>(sum > 0 ? x / sum : 0);
    }
    if (threadIdx.x == 0 && params.lse.data)
        static_cast<float*>(params.lse.data)[batch * params.lse.batch + head * params.lse.head + row * params.lse.row] =
            sum > 0 ? m + logf(sum) : -INFINITY;
}

// ---- launch ----
inline Params make_params(const ForwardArgs& args, const Partials<float>& parts, MaskOrder order) {
    const Problem& p = *args.problem;
    return {args.q, args.k, args.v, args.out, args.lse, args.layout, args.tasks, parts, order, int(p.heads_q),
            int(p.group()), int(p.head_dim), int(p.head_dim_v), float(p.scale)};
}

constexpr int64_t largest_head_dim = 1024;
constexpr size_t shared_bytes(int64_t head_dim, int64_t head_dim_v) {
    return sizeof(Shared) + cta_rows * size_t(head_dim + head_dim_v) * sizeof(float);
}

template <Dtype D>
void BlockForward<D>::run(const ForwardArgs& args, MaskOrder order) {
    const Problem& p = *args.problem;
    const int64_t ctas = int64_t(args.tasks.num_tasks) * (args.layout.block_q / cta_rows);
    const auto parts = Partials<float>::at(args.workspace, p, args.layout, args.tasks);
    runtime::launch(block_forward_kernel<typename tile::Element<D>::type>,
                    {unsigned(ctas), unsigned(threads), shared_bytes(p.head_dim, p.head_dim_v)}, args.stream,
                    make_params(args, parts, order));
}

template <Dtype D>
void BlockForward<D>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(block_forward_kernel<typename tile::Element<D>::type>,
                     shared_bytes(largest_head_dim, largest_head_dim));
}

template <Dtype D>
void Combine<D>::run(const ForwardArgs& args, const Partials<RealOf<D>>& parts) {
    if (!args.tasks.num_joins) return;
    const unsigned ctas = unsigned(args.tasks.num_joins) * unsigned(args.layout.block_q);
    runtime::launch(combine_kernel<typename tile::Element<D>::type>, {ctas, unsigned(threads), 0}, args.stream,
                    make_params(args, parts, MaskOrder::rows));
}

template <Dtype D>
void Combine<D>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(combine_kernel<typename tile::Element<D>::type>, 0);
}

}  // namespace spattn::any
