// SPDX-License-Identifier: MIT
// out = softmax(scale * q kT) v over the blocks of a layout, without an assumption.
//
//     s = q kT                   4 x 4 pairs a thread, 64 columns at a time through shared memory
//     m, l, p                    online softmax; the 16 threads of a row agree by shuffles
//     sums = factor sums + p v   64 columns at a time, sums in shared memory
//
//   grid: a CTA has up to 64 rows of a task's query block, and up to 1 KiB a row of out; wider rows are shared by CTAs
//         that each find p anew. 256 threads where rows are 64; doubles are half as many a step. Where a CTA has less
//         shared memory than 64 such rows take (99 KiB), it has 32 or 16 rows.
//   isolation: what a row does not see is selected away from its scores. A product p v with p = 0 would let NaN and
//         infinity through, so tiles of v that hold such are added pair by pair, where the row sees the key.
//   binds: shared memory and FMA about alike, 12 reads' worth of cycles beside 16 of multiply-adds.
#pragma once

#include "any/block_forward.h"
#include "any/row_end.cuh"
#include "any/tile.cuh"
#include "ptx/shared.cuh"
#include "runtime/launch.h"

namespace spattn::any {

template <class Real>
struct ForwardParams {
    TensorView q, k, v, k_scales, v_scales;
    LayoutView layout;
    TasksView tasks;
    ForwardOutputs to;
    Partials<Real> parts;
    int heads_q, group, head_dim, row_parts, column_parts, room;  // room: columns of sums
    Real scale, softcap;
};

template <Dtype D, bool IsFloat8>
struct Forward : Tile<D, false> {
    using Base = Tile<D, false>;
    using Base::at, Base::shared, Base::is_kept;
    using typename Base::T, typename Base::Real, typename Base::S;

    const ForwardParams<Real>& params;
    const Task task;
    const int first_row, column_part, first_column, last_column, batch, head;
    Real m[4], l[4];  // l: this thread's share

    __device__ Forward(const ForwardParams<Real>& params, Shared<Real>& shared, unsigned index)
        : Base(params.layout, MaskOrder::rows, shared),
          params(params),
          task(params.tasks.tasks[index / unsigned(params.row_parts * params.column_parts)]),
          first_row(int(index / unsigned(params.column_parts) % unsigned(params.row_parts)) * at.rows),
          column_part(int(index % unsigned(params.column_parts))),
          first_column(column_part * S::most_columns),
          last_column(min(params.to.head_dim_v, first_column + S::most_columns)),
          batch(task.head / params.heads_q),
          head(task.head % params.heads_q) {}

    __device__ void run() {
        if (task.part != whole_row && task.take == 0) return;  // of no row: another task may have that part
        Base::take_rows(task.row, first_row);
        Base::clear(shared.sums(), at.rows * params.room);
#pragma unroll
        for (int i = 0; i < 4; ++i) m[i] = -INFINITY, l[i] = 0;
        Base::open(params.layout.kind_of_head[task.head], task.row, task.skip, task.take);
        const int64_t head_kv = head / params.group;
        const HeadRows<T> q(params.q, batch, head);
        const auto k = key_rows<D, IsFloat8>(params.k, params.k_scales, batch, head_kv);
        const auto v = key_rows<D, IsFloat8>(params.v, params.v_scales, batch, head_kv);
        while (Base::next()) {
            Real s[4][4], factor[4];
            Base::dots(q, k, params.head_dim, s);
            softmax(s, factor);
            Base::share(s);
            Base::add(v, first_column, last_column, factor, shared.sums(), params.room);
        }
        finish();
    }

    // Products become probabilities relative to m.
    __device__ void softmax(Real (&s)[4][4], Real (&factor)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Real top = m[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                s[i][j] *= params.scale;
                if (params.softcap != 0) s[i][j] = params.softcap * tanh(s[i][j] / params.softcap);
                if (is_kept(i, j)) top = fmax(top, s[i][j]);
            }
            for (int n = S::across / 2; n; n /= 2) top = fmax(top, __shfl_xor_sync(~0u, top, n));
            factor[i] = weight(m[i], top);
            m[i] = top;
            const Real base = top == -INFINITY ? 0 : top;  // all scores so far may be NaN
            Real sum = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                s[i][j] = is_kept(i, j) ? exp(s[i][j] - base) : 0;
                sum += s[i][j];
            }
            l[i] = fma(l[i], factor[i], sum);
        }
    }

    __device__ void finish() {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            for (int n = S::across / 2; n; n /= 2) l[i] += __shfl_xor_sync(~0u, l[i], n);
#pragma unroll
        for (int i = 0; i < 4; ++i) task.part == whole_row ? finish_row(i, {m[i], l[i], m[i]}) : keep(i);
    }

    __device__ void finish_row(int i, RowState<Real> row) {
        const int token = shared.own[at.row(i)];
        RowEnd<D> end(params.to, batch, head, max(token, 0));
        if (token != no_token) end.take_on(row, column_part);
        __syncwarp();  // the threads of the row have read what the pieces before handed on
        if (token == no_token) return;
        end.finish(row);
        each_column(i, [&](int column, Real sum) { end.write(column, sum); });
        if (at.x == 0) end.write_state(row, column_part);
    }

    // A part of a row.
    __device__ void keep(int i) {
        const size_t to = size_t(task.part) * params.layout.block_q + first_row + at.row(i);
        const Real factor = l[i] == 0 ? 0 : 1 / l[i];
        Real* const out = params.parts.out + to * params.to.head_dim_v;
        each_column(i, [&](int column, Real sum) { out[column] = sum * factor; });
        if (at.x != 0 || column_part != 0) return;
        params.parts.lse[to] = l[i] == 0 ? Real(-INFINITY) : m[i] + log(l[i]);
        params.parts.top[to] = m[i];
    }

    template <class Body>
    __device__ __forceinline__ void each_column(int i, Body body) {
        for (int c = 0; first_column + c < last_column; c += S::width)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int column = c + column_of<Real>(at.x, j);
                if (first_column + column < last_column)
                    body(first_column + column, shared.sums()[at.row(i) * params.room + column]);
            }
    }
};

// ---- kernel ----
template <Dtype D, bool IsFloat8>
__global__ void __launch_bounds__(Shape<RealOf<D>>::most_threads, 2)
    block_forward_kernel(const __grid_constant__ ForwardParams<RealOf<D>> params) {
    Forward<D, IsFloat8>(params, *ptx::dynamic_shared<Shared<RealOf<D>>>(), blockIdx.x).run();
}

// ---- launch ----
template <Dtype D>
void BlockForward<D>::run(const ForwardArgs& args) {
    using Real = RealOf<D>;
    const Problem& p = *args.problem;
    const int room = room_for<Real>(p.head_dim_v), rows = rows_for<Real>(args.device, args.layout.block_q, room);
    const ForwardParams<Real> params{args.q,
                                     args.k,
                                     args.v,
                                     args.k_scales,
                                     args.v_scales,
                                     args.layout,
                                     args.tasks,
                                     make_outputs<Real>(args),
                                     Partials<Real>::at(args.workspace, p, args.layout, args.tasks),
                                     int(p.heads_q),
                                     int(p.group()),
                                     int(p.head_dim),
                                     args.layout.block_q / rows,
                                     column_parts<Real>(p.head_dim_v),
                                     room,
                                     Real(p.scale),
                                     Real(p.softcap)};
    const unsigned ctas = unsigned(args.tasks.num_tasks) * unsigned(params.row_parts * params.column_parts);
    runtime::launch(p.float8_cache ? block_forward_kernel<D, true> : block_forward_kernel<D, false>,
                    {ctas, unsigned(Shape<Real>::threads(rows)), shared_bytes<Real>(rows, params.room)}, args.stream,
                    params);
}

template <Dtype D>
void BlockForward<D>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(block_forward_kernel<D, false>, most_shared_bytes<RealOf<D>>(device));
    runtime::prepare(block_forward_kernel<D, true>, most_shared_bytes<RealOf<D>>(device));
}

}  // namespace spattn::any
