// SPDX-License-Identifier: MIT
// Gradients over the blocks of a layout, without an assumption.
//
//     lse, delta   by rows:   delta = rowsum(dout * out) - dlse
//     dv, dk       by key:    p = exp(s - lse), dv += pT dout;  dp = dout vT, ds = p (dp - delta), dk += dsT q
//     dq           by query:  s, dp and ds once more, dq += ds k
//     dsink        by head:   dz = -sum over rows of exp(z - lse) delta
//
// Each sum has one CTA and one order: the query heads of a group one after the other, and parts of a split row in
// theirs. So bits are the same in every call, for seven products where atomics would need five.
//
//   grid: a CTA has up to 64 rows of a task's block, keys or queries, and sums of 1 KiB a row (fewer rows where it has
//         no room for that); what is wider is shared by CTAs that each find p anew. Tiles of queries that only repeat
//         tokens have no CTA: the home of their tokens looks for them and walks their lists, too, with the rows that it
//         owns.
//   doubles: lse comes as float32, which would leave p seven digits. A pass by query of its own sums p, and the
//         logarithm of that sum puts right what rounding took (src/cpu/generic/block_backward_f64.h).
//   isolation: as in forward; p and ds are selected, and products meet what is not finite pair by pair.
//   binds: as forward.
#pragma once

#include <algorithm>
#include <bit>
#include <climits>

#include "any/block_backward.h"
#include "any/divisor.h"
#include "any/gradients.cuh"
#include "any/tile.cuh"
#include "ptx/shared.cuh"
#include "runtime/launch.h"

namespace spattn::any {

constexpr int row_threads = 128, row_warps = row_threads / 32;

// ---- rows: lse and delta ----
// Each CTA has a few queries of one head, whose loads it asks for as soon as it knows where they stand.
constexpr int delta_threads = 128;
struct DeltaShape {
    int lane_bits;              // 2^lane_bits lanes share a query
    Divisor plane_ctas, heads;  // CTAs of a head and batch entry
};

// A query's lanes read `Width` neighbouring columns at once. One that saw no key has lse = -infinity, or exactly that
// of its sink and an out of zeros; what its dout holds must not matter. 16 heads of 16K queries of 128 columns take 42
// us on an H200, CTAs of 256 threads 43, of 512 46; with true divisions, and steps over columns unrolled, it was 49.
// Tried and dropped: four queries a thread, all read first (65 us instead of 54, on an H100).
template <Dtype D, int Width>
__global__ void __launch_bounds__(delta_threads)
    rows_kernel(const __grid_constant__ BackwardParams<RealOf<D>> params, const DeltaShape shape) {
    using T = ElementOf<D>;
    using Real = RealOf<D>;
    struct alignas(Width * sizeof(T)) Columns {
        T x[Width];
    };
    const int lanes = 1 << shape.lane_bits, lane = int(threadIdx.x) & (lanes - 1);
    const int plane = int(blockIdx.x) / shape.plane_ctas, in_plane = int(blockIdx.x) - plane * shape.plane_ctas;
    const int batch = plane / shape.heads, head = plane - batch * shape.heads;
    const int64_t at = (int64_t(in_plane) * delta_threads + threadIdx.x) >> shape.lane_bits;
    const int64_t token = min(at, params.seq_q - 1);  // whole warps meet in shuffles
    const int64_t row = params.row_q(batch, head, token);
    const T *out = row_of<T>(params.out, batch, head, token), *dout = row_of<T>(params.dout, batch, head, token);
    const float lse = *row_of<float>(params.lse, batch, head, token);
    Real sum = 0;
    int is_zero = true;
    const int64_t out_step = Width > 1 ? 1 : params.out.column, dout_step = Width > 1 ? 1 : params.dout.column;
#pragma unroll 1  // mostly once
    for (int column = lane * Width; column < params.head_dim_v; column += lanes * Width) {
        const Columns a = *reinterpret_cast<const Columns*>(out + column * out_step);
        const Columns b = *reinterpret_cast<const Columns*>(dout + column * dout_step);
#pragma unroll
        for (int i = 0; i < Width; ++i) {
            const Real x = to_real(a.x[i]);
            is_zero &= x == 0;
            sum = fma(x, to_real(b.x[i]), sum);
        }
    }
    for (int n = lanes / 2; n; n /= 2) {
        sum += __shfl_xor_sync(~0u, sum, n);
        is_zero &= __shfl_xor_sync(~0u, is_zero, n);
    }
    if (lane || token != at) return;
    if (is_zero && lse == float(params.sink(head))) sum = 0;
    if (params.dlse.data && lse != -INFINITY) sum -= *row_of<float>(params.dlse, batch, head, token);
    params.space.delta[row] = sum;
    params.space.lse[row] = params.piece.sweep ? params.carried.lse[row] : Real(lse);
}

// ---- tiles ----
// Scores of a tile, and how to go through all that its rows see or are seen by.
template <Dtype D, bool ByKey>
struct BackwardTile : Tile<D, ByKey> {
    using Base = Tile<D, ByKey>;
    using Base::at, Base::shared, Base::layout, Base::is_kept;
    using typename Base::T, typename Base::Real, typename Base::S;

    const BackwardParams<Real>& params;
    const Task task;
    const int first_row, batch, head;  // head: of keys where rows are keys
    int head_q = 0, tile = 0;          // tile: where to look for repeated queries next
    Real lse[4], delta[4];             // of the rows or of the step's tokens, whichever are queries

    __device__ BackwardTile(const BackwardParams<Real>& params, Shared<Real>& shared, unsigned task_index, int row_part)
        : Base(params.layout, params.order, shared),
          params(params),
          task(params.tasks.tasks[task_index]),
          first_row(row_part * at.rows),
          batch(int(task.head / (ByKey ? params.heads_kv : params.heads_q))),
          head(int(task.head % (ByKey ? params.heads_kv : params.heads_q))) {}

    __device__ int head_kv() const { return ByKey ? head : head / params.group; }
    __device__ HeadRows<T> queries(const TensorView& x) const { return {x, batch, head_q}; }
    __device__ HeadRows<T> keys(const TensorView& x) const { return {x, batch, head_kv()}; }

    // Makes ready to walk what the task lists: next_step() is true for each step of it.
    __device__ void start(int take) {
        Base::take_rows(task.row, first_row);
        head_q = ByKey ? head * params.group : head;
        if constexpr (!ByKey) {
#pragma unroll
            for (int i = 0; i < 4; ++i) read_row(shared.own[at.row(i)], i);
        }
        Base::open(head_kind(), task.row, task.skip, take);
    }
    __device__ bool next_step() {
        while (!Base::next())
            if (!open_next()) return false;
        return true;
    }

    // The column's blocks of the group's next head; or the list of the next tile that repeats some of these queries.
    __device__ bool open_next() {
        if constexpr (ByKey) {
            if (Base::walk.take == 0 || (head_q + 1) % params.group == 0) return false;
            ++head_q;
            Base::open(head_kind(), task.row, Base::walk.skip, Base::walk.take);
            return true;
        } else {
            const int tiles = task.skip == 0 ? repeating_tiles(layout.queries) : 0;
            for (; tile < tiles; ++tile) {
                const int in_batch = tile % int(blockDim.x);
                if (in_batch == 0) flag_repeating(tile, tiles);
                if (shared.flags[in_batch / 32] >> (in_batch % 32) & 1) {
                    open_repeating(tile++);
                    return true;
                }
            }
            return false;
        }
    }

    __device__ int head_kind() const { return layout.kind_of_head[batch * params.heads_q + head_q]; }

    __device__ void read_row(int token, int i) {
        const int64_t row = params.row_q(batch, head_q, max(token, 0));
        lse[i] = params.space.lse[row], delta[i] = params.space.delta[row];
    }

    // ---- tiles that repeat these queries ----
    // Each thread looks at one, from `first` on.
    __device__ void flag_repeating(int first, int tiles) {
        const int tile = first + int(threadIdx.x);
        const bool repeats = tile < tiles && repeats_any(tile);
        const uint32_t flags = __ballot_sync(~0u, repeats);
        __syncthreads();  // the flags before have been read
        if (threadIdx.x % 32 == 0) shared.flags[threadIdx.x / 32] = flags;
        __syncthreads();  // all flags are there
    }

    __device__ void open_repeating(int tile) {
        for (int row = threadIdx.x; row < at.rows; row += blockDim.x) shared.place[row] = -1;
        __syncthreads();  // before places are set
        for (int place = threadIdx.x; place < layout.block_q; place += blockDim.x) {
            const int row = repeated_row(tile, place);  // a tile has a token once: no two places share a row
            if (row >= 0) shared.place[row] = place;
        }
        __syncthreads();  // before they are read
        Base::open(head_kind(), tile, 0, INT_MAX);
    }

    __device__ bool repeats_any(int tile) const {
        bool any = false;
#pragma unroll 8
        for (int place = 0; place < layout.block_q; ++place) any |= repeated_row(tile, place) >= 0;
        return any;
    }

    // Which of these rows the token at a tile's place is, or -1.
    __device__ int repeated_row(int tile, int place) const {
        const int block = layout.block_q, token = layout.queries.tokens[int64_t(tile) * block + place];
        if (token == no_token) return -1;
        const int64_t first = int64_t(task.row - layout.queries.listed) * block + first_row;
        const int64_t row = home_place(layout.queries, block, token) - first;
        return row >= 0 && row < at.rows ? int(row) : -1;
    }

    // ---- scores ----
    // p, and p times the slope of the softcap: ds for each unit of dp - delta.
    __device__ void probabilities(Real (&p)[4][4], Real (&weights)[4][4]) {
        if (ByKey) {
#pragma unroll
            for (int j = 0; j < 4; ++j) read_row(shared.tokens[token_of<Real>(at.x, j)], j);
            Base::dots(keys(params.k), queries(params.q), params.head_dim, p);
        } else {
            Base::dots(queries(params.q), keys(params.k), params.head_dim, p);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                Real s = p[i][j] * params.scale, slope = 1;
                if (params.softcap != 0) {
                    const Real y = s / params.softcap, c = cosh(y);
                    s = params.softcap * tanh(y), slope = 1 / (c * c);
                }
                p[i][j] = is_kept(i, j) ? exp(s - lse[ByKey ? j : i]) : 0;
                weights[i][j] = is_kept(i, j) ? p[i][j] * slope : 0;
            }
    }
};

template <Dtype D, bool ByKey>
struct Backward : BackwardTile<D, ByKey> {
    using Base = BackwardTile<D, ByKey>;
    using Base::at, Base::shared, Base::params, Base::is_kept, Base::task;
    using typename Base::Real, typename Base::S;

    const int first_column;
    Real *const first_sums, *const second_sums;  // dq, or dk and dv

    __device__ Backward(const BackwardParams<Real>& params, Shared<Real>& shared, unsigned index)
        : Base(params, shared, index / unsigned(params.row_parts * params.column_parts),
               int(index / unsigned(params.column_parts) % unsigned(params.row_parts))),
          first_column(int(index % unsigned(params.column_parts)) * (S::most_columns / (ByKey ? 2 : 1))),
          first_sums(shared.sums()),
          second_sums(first_sums + at.rows * params.room) {}

    __device__ void run() {
        if (!ByKey && task.row < repeating_tiles(Base::layout.queries)) return;
        Base::clear(first_sums, at.rows * params.room * (ByKey ? 2 : 1));
        Base::start(task.take);
        while (Base::next_step()) step();
#pragma unroll
        for (int i = 0; i < 4; ++i) finish_row(i);
    }

    __device__ void step() {
        Real p[4][4], ds[4][4];
        Base::probabilities(p, ds);
        Real dp[4][4];
        const auto v = Base::keys(params.v), dout = Base::queries(params.dout);
        if (ByKey)
            Base::dots(v, dout, params.head_dim_v, dp);
        else
            Base::dots(dout, v, params.head_dim_v, dp);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                ds[i][j] = is_kept(i, j) ? ds[i][j] * (dp[i][j] - Base::delta[ByKey ? j : i]) : 0;
        if (ByKey) {
            multiply(p, dout, params.head_dim_v, second_sums);
            multiply(ds, Base::queries(params.q), params.head_dim, first_sums);
        } else {
            multiply(ds, Base::keys(params.k), params.head_dim, first_sums);
        }
    }

    __device__ void multiply(const Real (&left)[4][4], const HeadRows<typename Base::T>& other, int columns,
                             Real* sums) {
        constexpr Real ones[4] = {1, 1, 1, 1};
        Base::share(left);
        Base::add(other, first_column, min(columns, first_column + params.room), ones, sums, params.room);
    }

    __device__ void finish_row(int i) {
        const int token = shared.own[at.row(i)];
        const size_t place = size_t(Base::first_row + at.row(i));
        for (int c = 0; c < params.room; c += S::width)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int in_sums = c + column_of<Real>(at.x, j), column = first_column + in_sums;
                const Real first = first_sums[at.row(i) * params.room + in_sums];
                if constexpr (ByKey) {
                    const Real second = second_sums[at.row(i) * params.room + in_sums];
                    finish_key(token, place, column, first, second);
                } else {
                    finish_query(token, place, column, first);
                }
            }
    }

    __device__ void finish_query(int token, size_t place, int column, Real dq) {
        if (column >= params.head_dim) return;
        const size_t part_row = task.part * size_t(Base::layout.block_q) + place;
        if (task.part != whole_row)
            params.space.parts_query[part_row * params.head_dim + column] = dq;
        else if (token != no_token)
            Gradients<D>{params}.write_query(Base::batch, Base::head, token, column, dq);
    }

    // A part has dk's columns, then dv's.
    __device__ void finish_key(int token, size_t place, int column, Real dk, Real dv) {
        if (task.part != whole_row) {
            Real* part = params.space.parts_key +
                         (task.part * size_t(Base::layout.block_k) + place) * (params.head_dim + params.head_dim_v);
            if (column < params.head_dim) part[column] = dk;
            if (column < params.head_dim_v) part[params.head_dim + column] = dv;
        } else if (token != no_token) {
            Gradients<D>{params}.write_key(Base::batch, Base::head, token, column, dk, dv);
        }
    }
};

template <Dtype D, bool ByKey>
__global__ void __launch_bounds__(Shape<RealOf<D>>::most_threads, 2)
    block_backward_kernel(const __grid_constant__ BackwardParams<RealOf<D>> params) {
    Backward<D, ByKey>(params, *ptx::dynamic_shared<Shared<RealOf<D>>>(), blockIdx.x).run();
}

// ---- doubles: lse again ----
template <Dtype D>
struct RowSums : BackwardTile<D, false> {
    using Base = BackwardTile<D, false>;
    using Base::at, Base::shared, Base::params, Base::task;
    using typename Base::Real, typename Base::S;

    __device__ RowSums(const BackwardParams<Real>& params, Shared<Real>& shared, unsigned index)
        : Base(params, shared, index / unsigned(params.row_parts), int(index % unsigned(params.row_parts))) {}

    // The first part of a split row has all of it: this pass has but one product.
    __device__ void run() {
        if (task.row < repeating_tiles(Base::layout.queries) || task.skip > 0) return;
        Real sums[4] = {};
        Base::start(INT_MAX);
        while (Base::next_step()) {
            Real p[4][4], weights[4][4];
            Base::probabilities(p, weights);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i] += p[i][j];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            for (int n = S::across / 2; n; n /= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], n);
            if (at.x == 0 && shared.own[at.row(i)] != no_token) finish(sums[i], i, shared.own[at.row(i)]);
        }
    }

    __device__ void finish(Real sum, int i, int token) {
        const int64_t row = params.row_q(Base::batch, Base::head, token);
        Real* const carried = params.carried.lse + row;
        if (!params.piece.is_first) sum += *carried;
        const Real lse = Base::lse[i];
        if (params.piece.is_last && lse != -INFINITY) sum = lse + log(sum + exp(params.sink(Base::head) - lse));
        if (params.piece.is_last && lse == -INFINITY) sum = lse;
        *(params.is_whole() ? params.space.lse + row : carried) = sum;
    }
};

template <Dtype D>
__global__ void __launch_bounds__(Shape<RealOf<D>>::most_threads, 2)
    row_sums_kernel(const __grid_constant__ BackwardParams<RealOf<D>> params) {
    RowSums<D>(params, *ptx::dynamic_shared<Shared<RealOf<D>>>(), blockIdx.x).run();
}

// ---- joins and sinks ----
// A warp sums the parts of one row, in their order. It has four columns a lane of four parts on their way at once, for a
// part takes the time to fetch it, not to add it.
template <Dtype D, bool ByKey>
__global__ void __launch_bounds__(row_threads) join_kernel(const __grid_constant__ BackwardParams<RealOf<D>> params) {
    using Real = RealOf<D>;
    constexpr int at_once = 4;
    const LayoutView& layout = params.layout;
    const unsigned block = unsigned(ByKey ? layout.block_k : layout.block_q);
    const unsigned at = blockIdx.x * row_warps + threadIdx.x / 32;
    if (at / block >= unsigned(params.tasks.num_joins)) return;
    const int place = int(at % block);
    const Join join = params.tasks.joins[at / block];
    if (!ByKey && join.row < repeating_tiles(layout.queries)) return;
    const int token = own_token_at(ByKey ? layout.keys : layout.queries, int(block),
                                   ByKey ? layout.seq_k : layout.seq_q, join.row, place);
    if (token == no_token) return;
    const int64_t heads = ByKey ? params.heads_kv : params.heads_q;
    const int of_keys = params.head_dim, of_values = ByKey ? params.head_dim_v : 0;
    const int columns = of_keys + of_values, most = max(of_keys, of_values);
    const Real* const parts = ByKey ? params.space.parts_key : params.space.parts_query;
    const int64_t batch = join.head / heads, head = join.head % heads;
    for (int first = int(threadIdx.x % 32); first < most; first += 32 * at_once) {
        Real x[at_once] = {}, y[at_once] = {};  // of dk, or dq, and of dv
#pragma unroll 4
        for (int part = 0; part < join.parts; ++part) {
            const Real* const row = parts + (size_t(join.first_part + part) * block + unsigned(place)) * columns;
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int column = first + 32 * i;
                if (column < of_keys) x[i] += row[column];
                if (column < of_values) y[i] += row[of_keys + column];
            }
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int column = first + 32 * i;
            if (column >= most) break;
            if constexpr (ByKey)
                Gradients<D>{params}.write_key(batch, head, token, column, x[i], y[i]);
            else
                Gradients<D>{params}.write_query(batch, head, token, column, x[i]);
        }
    }
}

// A CTA has a head. Sums go through one tree, in double.
template <Dtype D>
__global__ void __launch_bounds__(row_threads) sinks_kernel(const __grid_constant__ BackwardParams<RealOf<D>> params) {
    double* const sums = ptx::dynamic_shared<double>();
    const int64_t head = blockIdx.x;
    const double z = params.sink(head);
    double sum = 0;
    for (int64_t i = threadIdx.x; z != -INFINITY && i < params.batch * params.seq_q; i += row_threads) {
        const int64_t row = params.row_q(i / params.seq_q, head, i % params.seq_q);
        sum -= exp(z - double(params.space.lse[row])) * double(params.space.delta[row]);
    }
    sums[threadIdx.x] = sum;
    for (int n = row_threads / 2; n; n /= 2) {
        __syncthreads();  // the level before is there
        if (int(threadIdx.x) < n) sums[threadIdx.x] += sums[threadIdx.x + n];
    }
    float* const dsinks = static_cast<float*>(params.dsink_logits.data);
    if (threadIdx.x == 0) dsinks[head * params.dsink_logits.head] = float(sums[0]);
}

// ---- launch ----
template <Dtype D>
struct BackwardLaunch {
    using Real = RealOf<D>;
    using S = Shape<Real>;
    const BackwardArgs& args;
    const Problem& p;
    BackwardParams<Real> params;

    explicit BackwardLaunch(const BackwardArgs& args, MaskOrder order = MaskOrder::rows)
        : args(args), p(*args.problem), params(make_params<D>(args, order)) {}

    // Sixteen bytes at a time where both tensors allow it. The pieces of a call find what the first one left; not those
    // of doubles, whose lse a later sweep has better.
    void rows() {
        if (args.has_rows || (D != Dtype::f64 && !args.piece.is_first)) return;
        constexpr int width = 16 / sizeof(ElementOf<D>);
        const auto is_wide = [&](const TensorView& x) {
            const int64_t steps = x.batch | x.head | x.row;
            return x.column == 1 && steps % width == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
        };
        if (p.head_dim_v % width == 0 && is_wide(args.out) && is_wide(args.dout)) {
            launch_rows(rows_kernel<D, width>, std::min(int64_t(32), divide_up(p.head_dim_v, width)));
        } else {
            launch_rows(rows_kernel<D, 1>, 32);
        }
    }
    template <class Kernel>
    void launch_rows(Kernel kernel, int64_t lanes) {
        const int lane_bits = std::bit_width(uint64_t(lanes - 1));
        const int64_t ctas = divide_up(p.seq_q << lane_bits, delta_threads);
        runtime::launch(kernel, {unsigned(p.batch * p.heads_q * ctas), unsigned(delta_threads), 0}, args.stream, params,
                        DeltaShape{lane_bits, Divisor(ctas), Divisor(p.heads_q)});
    }

    template <class Kernel>
    void tiles(Kernel kernel, const TasksView& tasks, int block, int64_t columns, int sums) {
        params.tasks = tasks;
        params.column_parts = sums ? column_parts<Real>(columns, sums) : 1;
        params.room = sums ? room_for<Real>(columns, sums) : 0;
        const int rows = rows_for<Real>(args.device, block, params.room * sums);
        params.row_parts = block / rows;
        const unsigned ctas = unsigned(tasks.num_tasks) * unsigned(params.row_parts * params.column_parts);
        runtime::launch(kernel, {ctas, unsigned(S::threads(rows)), shared_bytes<Real>(rows, params.room * sums)},
                        args.stream, params);
    }

    template <bool ByKey>
    void gradients(const TasksView& tasks) {
        const int block = ByKey ? args.layout.block_k : args.layout.block_q;
        const int64_t columns = ByKey && p.head_dim_v > p.head_dim ? p.head_dim_v : p.head_dim;
        tiles(block_backward_kernel<D, ByKey>, tasks, block, columns, ByKey ? 2 : 1);
        join<ByKey>(tasks);
    }

    template <bool ByKey>
    void join(const TasksView& tasks) {
        if (!tasks.num_joins) return;
        const unsigned block = unsigned(ByKey ? args.layout.block_k : args.layout.block_q);
        params.tasks = tasks;
        const unsigned ctas = (unsigned(tasks.num_joins) * block + row_warps - 1) / row_warps;
        runtime::launch(join_kernel<D, ByKey>, {ctas, unsigned(row_threads), 0}, args.stream, params);
    }

    void sinks() const {
        if (!args.dsink_logits.data || !args.piece.is_last) return;
        runtime::launch(sinks_kernel<D>, {unsigned(p.heads_q), unsigned(row_threads), row_threads * sizeof(double)},
                        args.stream, params);
    }
};

template <Dtype D>
void BlockBackward<D>::run(const BackwardArgs& args) {
    BackwardLaunch<D> launch(args);
    launch.rows();
    if constexpr (D == Dtype::f64) {
        if (args.piece.sweep == 0) launch.tiles(row_sums_kernel<D>, args.second_tasks, args.layout.block_q, 0, 0);
        if (args.piece.sweep == 0 && !launch.params.is_whole()) return;
    }
    launch.template gradients<true>(args.tasks);
    launch.template gradients<false>(args.second_tasks);
    launch.sinks();
}

template <Dtype D>
void BlockBackward<D>::rows(const BackwardArgs& args) {
    BackwardLaunch<D>(args).rows();
}

template <Dtype D>
void BlockBackward<D>::by_query(const BackwardArgs& args) {
    BackwardLaunch<D>(args, MaskOrder::key_fragments).template gradients<false>(args.second_tasks);
}

template <Dtype D>
void BlockBackward<D>::join_keys(const BackwardArgs& args) {
    BackwardLaunch<D>(args).template join<true>(args.tasks);
}

template <Dtype D>
void BlockBackward<D>::join_queries(const BackwardArgs& args) {
    BackwardLaunch<D>(args).template join<false>(args.second_tasks);
}

template <Dtype D>
void BlockBackward<D>::sinks(const BackwardArgs& args) {
    BackwardLaunch<D>(args).sinks();
}

template <Dtype D>
void BlockBackward<D>::prepare(int32_t device) {
    using Real = RealOf<D>;
    const runtime::CurrentDevice current(device);
    const size_t bytes = most_shared_bytes<Real>(device);
    runtime::prepare(block_backward_kernel<D, true>, bytes);
    runtime::prepare(block_backward_kernel<D, false>, bytes);
    if constexpr (D == Dtype::f64) runtime::prepare(row_sums_kernel<D>, shared_bytes<Real>(Shape<Real>::most_rows, 0));
    runtime::prepare(rows_kernel<D, 1>, 0);
    runtime::prepare(rows_kernel<D, 16 / sizeof(ElementOf<D>)>, 0);
    runtime::prepare(join_kernel<D, true>, 0);
    runtime::prepare(join_kernel<D, false>, 0);
    runtime::prepare(sinks_kernel<D>, row_threads * sizeof(double));
}

}  // namespace spattn::any
