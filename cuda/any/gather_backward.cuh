// SPDX-License-Identifier: MIT
// Gradients over lists of keys, without an assumption.
//
//     lse, delta   by rows:   the step of the block rows
//     lists        by key:    gather_transpose.cuh
//     dq           by query:  p = exp(s - lse), ds = p (dp - delta), dq += ds k         keys of its list
//     dv, dk       by key:    p and ds once more, dv += p dout, dk += ds q              rows that list it
//     dsink        by head:   the step of the block rows
//
// Each sum has its warps and one order, which follows from the problem and the lists: bits are the same in every call,
// for two products more than with atomics.
//
//   grid: by query as in forward. By key a warp has a key of a kv head, unless so many rows list it, some keys by nearly
//         all, that the warps of its CTA take turns at it: 32 rows at a time, head after head of the group. Sums of
//         warps are joined in order.
//   lists by key name blocks and lists as the call does; which of their pairs the known part of the pattern keeps is
//         asked again, pair by pair.
//   doubles: lse comes as float32, which would leave p seven digits. A pass by query of its own sums p, and the
//         logarithm of that sum puts right what rounding took (block_backward.cuh).
//   isolation: a pair that is not listed is not read.
//   binds: as forward, with twice the rows by query and by key.
//
// Measured (H200, bf16, L2 cold, TFLOP/s of 5 heads queries list (head_dim + head_dim_v), 2026-11): 128 heads, 576/512,
// lists of 512 among 4K keys 3.5; 16 heads of 128, lists of 2,048 among 16K 3.6. Those before a key had a warp; 16K
// tokens, 8 heads of 64, random lists of 0.05, 0.2 and 0.5 %: 957, 1,577 and 2,637 us since, 2,183, 3,066 and 3,761
// when it had a CTA.
#pragma once

#include "any/gather_backward.h"
#include "any/gather_transpose.cuh"
#include "any/gather_warp.cuh"
#include "ptx/shared.cuh"
#include "runtime/launch.h"

namespace spattn::any {

template <class Real>
struct GatherBackwardParams {
    TensorView q, k, v, dout, dq, dk, dv, sink_logits;
    TransposeParams by_key;
    GatherSpace<Real> space;
    int64_t rows, keys;  // of all query heads, and of all kv heads
    int head_dim, head_dim_v, share;
    unsigned warp_bytes;
    Real scale, softcap;
    bool value_in_key;

    __device__ const GatherLists& lists() const { return by_key.lists; }
    __device__ int64_t row(int64_t batch, int64_t head, int64_t token) const {
        return (batch * lists().heads_q + head) * lists().seq_q + token;
    }
    __device__ Real sink(int64_t head) const {
        return sink_logits.data ? Real(static_cast<const float*>(sink_logits.data)[head * sink_logits.head])
                                : Real(-INFINITY);
    }

    // p of a product q . k, and ds for each unit of dp - delta: p times the slope of the softcap.
    struct Weights {
        Real p, ds;
    };
    __device__ Weights weights(Real product, Real lse) const {
        Real s = product * scale, slope = 1;
        if (softcap != 0) {
            const Real y = s / softcap, c = cosh(y);
            s = softcap * tanh(y), slope = 1 / (c * c);
        }
        const Real p = exp(s - lse);
        return {p, p * slope};
    }
};

// ---- by query ----
template <Dtype D, int Width>
struct GatheredQuery : GatherRow<D, Width> {
    using Base = GatherRow<D, Width>;
    using typename Base::T, typename Base::Real;
    using Base::lane, Base::tile, Base::count, Base::batch, Base::head, Base::head_kv, Base::token, Base::share;

    const GatherBackwardParams<Real>& params;
    Real *const q, *const dout, *const sums;
    const HeadRows<T> k, v;
    const int64_t row;
    const Real lse, delta;

    __device__ GatheredQuery(const GatherBackwardParams<Real>& params, void* memory)
        : Base(params.lists(), memory, params.warp_bytes, params.share, params.rows),
          params(params),
          q(Base::vectors()),
          dout(q + padded(params.head_dim)),
          sums(dout + padded(params.head_dim_v)),
          k(params.k, batch, head_kv),
          v(params.v, batch, head_kv),
          row(params.row(batch, head, token)),
          lse(params.space.lse[row]),
          delta(params.space.delta[row]) {
        Base::load(params.q, row_of<T>(params.q, batch, head, token), params.head_dim, q);
    }

    // dq
    __device__ void differentiate() {
        Base::load(params.dout, row_of<T>(params.dout, batch, head, token), params.head_dim_v, dout);
        Base::clear(sums, params.head_dim);
        while (Base::next()) {
            Base::dots(q, k, params.head_dim, tile.products[0]);
            Base::dots(dout, v, params.head_dim_v, tile.products[1]);
            if (lane < count)
                tile.products[0][lane] =
                    params.weights(tile.products[0][lane], lse).ds * (tile.products[1][lane] - delta);
            __syncwarp();  // all weights are there
            Base::add(tile.products[0], k, params.head_dim, 1, sums);
        }
        __syncthreads();  // sums of all warps of the row are there
        if (!Base::is_there) return;
        T* const dq = row_of<T>(params.dq, batch, head, token);
        for (int column = Base::thread(); column < params.head_dim; column += 32 * share) {
            Real x = 0;
            for (int n = 0; n < share; ++n) x += Base::theirs(sums[column], n);
            from_real(params.scale * x, dq[column * params.dq.column]);
        }
    }

    // lse of doubles: the softmax's sum, as p would have it, is 1 but for rounding.
    __device__ void correct_lse() {
        Real sum = 0;
        while (Base::next()) {
            Base::dots(q, k, params.head_dim, tile.products[0]);
            if (lane < count) sum += params.weights(tile.products[0][lane], lse).p;
        }
        for (int n = 16; n; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
        __syncwarp();  // all have read their products
        if (lane == 0) tile.products[0][0] = sum;
        __syncthreads();  // sums of all warps of the row are there
        if (!Base::is_there || Base::thread() != 0 || lse == -INFINITY) return;
        Real all = exp(params.sink(head) - lse);
        for (int n = 0; n < share; ++n) all += Base::theirs(tile.products[0][0], n);
        params.space.lse[row] = lse + log(all);
    }
};

// ---- by key ----
template <Dtype D, int Width>
struct GatheredKey : GatherWarp<D, Width> {
    using Base = GatherWarp<D, Width>;
    using typename Base::T, typename Base::Real;
    using Base::lane, Base::tile, Base::count, Base::share;
    static constexpr int64_t few_rows = 256;  // eight tiles of a warp; other numbers were not tried

    const GatherBackwardParams<Real>& params;
    const GatherLists& lists;
    const int key, head_kv, batch;
    Real *const k, *const v, *const dk, *const dv;

    // n: of all keys of all kv heads. share: warps that take turns at its rows.
    __device__ GatheredKey(const GatherBackwardParams<Real>& params, void* memory, int64_t n, int share)
        : Base(memory, params.warp_bytes, share),
          params(params),
          lists(params.lists()),
          key(int(n % lists.seq_k)),
          head_kv(int(n / lists.seq_k % lists.heads_kv)),
          batch(int(n / lists.seq_k / lists.heads_kv)),
          k(Base::vectors()),
          v(k + padded(params.head_dim)),
          dk(v + padded(params.head_dim_v)),
          dv(dk + padded(params.head_dim)) {}

    // The rows of one head that list the key.
    struct Rows {
        const int32_t* lists;
        int64_t places;
    };
    __device__ Rows rows_of(int head) const {
        const int64_t plane = lists.plane_of(batch, head);
        const TransposeParams::Span span = params.by_key.span_of(plane, key / lists.sizes.block_k);
        return {params.by_key.lists_of(plane) + span.begin, span.count * lists.sizes.block_q};
    }
    __device__ int first_head() const { return head_kv * lists.group; }

    __device__ bool has_few_rows() const {
        int64_t places = 0;
        for (int n = 0; n < lists.group; ++n) places += rows_of(first_head() + n).places;
        return places <= few_rows;
    }

    __device__ void run() {
        Base::load(params.k, row_of<T>(params.k, batch, head_kv, key), params.head_dim, k);
        Base::load(params.v, row_of<T>(params.v, batch, head_kv, key), params.head_dim_v, v);
        Base::clear(dk, params.head_dim);
        Base::clear(dv, params.head_dim_v);
        int turn = 0;  // whose the next tile is
        for (int n = 0; n < lists.group; ++n) turn = walk(first_head() + n, turn);
        if (share > 1) __syncthreads();  // sums of all warps are there
        const int columns = max(params.head_dim, params.head_dim_v);
        for (int column = Base::thread(); column < columns; column += 32 * share) write(column);
    }

    // Returns whose turn is next.
    __device__ int walk(int head, int turn) {
        const Rows rows = rows_of(head);
        for (int64_t place = 32 * ((Base::turn() + share - turn) % share); place < rows.places; place += 32 * share) {
            const int64_t at = place + lane;
            if (Base::take(at < rows.places ? row_at(rows.lists, at, head) : no_token)) step(head);
        }
        return int((turn + (rows.places + 31) / 32) % share);
    }

    // The row at a place of the lists by key, or no_token where none keeps the pair there.
    __device__ int row_at(const int32_t* listed, int64_t place, int head) const {
        const int block = lists.sizes.block_q;
        const int64_t row = int64_t(listed[place / block]) * block + place % block;
        const bool is_kept = row < lists.seq_q && lists.keeps(int64_t(batch) * lists.heads_q + head, row, key);
        return is_kept ? int(row) : no_token;
    }

    __device__ void step(int head) {
        const HeadRows<T> q(params.q, batch, head), dout(params.dout, batch, head);
        Base::dots(k, q, params.head_dim, tile.products[0]);
        Base::dots(v, dout, params.head_dim_v, tile.products[1]);
        if (lane < count) {
            const int64_t row = params.row(batch, head, tile.tokens[lane]);
            const auto [p, ds] = params.weights(tile.products[0][lane], params.space.lse[row]);
            tile.products[0][lane] = ds * (tile.products[1][lane] - params.space.delta[row]);
            tile.products[1][lane] = p;
        }
        __syncwarp();  // all weights are there
        Base::add(tile.products[0], q, params.head_dim, 1, dk);
        Base::add(tile.products[1], dout, params.head_dim_v, 1, dv);
    }

    // Where values are columns of keys, dk takes both.
    __device__ void write(int column) {
        Real of_k = 0, of_v = 0;
        for (int n = 0; n < share; ++n) {
            if (column < params.head_dim) of_k += Base::theirs(dk[column], n);
            if (column < params.head_dim_v) of_v += Base::theirs(dv[column], n);
        }
        if (column < params.head_dim)
            from_real(params.value_in_key ? params.scale * of_k + of_v : params.scale * of_k,
                      row_of<T>(params.dk, batch, head_kv, key)[column * params.dk.column]);
        if (column < params.head_dim_v && !params.value_in_key)
            from_real(of_v, row_of<T>(params.dv, batch, head_kv, key)[column * params.dv.column]);
    }
};

// A CTA has as many keys as warps. Those that few rows list have a warp each; then all warps share each of the others.
template <Dtype D, int Width>
__device__ void differentiate_keys(const GatherBackwardParams<RealOf<D>>& params, void* memory) {
    const int warps = int(blockDim.x) / 32, warp = int(threadIdx.x) / 32;
    const int64_t first = int64_t(blockIdx.x) * warps;
#pragma unroll 1
    for (int n = -1; n < warps; ++n) {
        const bool is_shared = n >= 0;
        const int64_t at = first + (is_shared ? n : warp);
        if (at >= params.keys) continue;
        GatheredKey<D, Width> key(params, memory, at, is_shared ? warps : 1);
        if (key.has_few_rows() == is_shared) continue;
        if (is_shared) __syncthreads();  // nobody reads sums of the key before
        key.run();
    }
}

// ---- kernels ----
enum class GatherStep { lse, queries, keys };

template <Dtype D, int Width, GatherStep Step>
__global__ void __launch_bounds__(most_gather_warps * 32, gather_ctas)
    gather_backward_kernel(const __grid_constant__ GatherBackwardParams<RealOf<D>> params) {
    void* const memory = ptx::dynamic_shared<void>();
    if constexpr (Step == GatherStep::lse) GatheredQuery<D, Width>(params, memory).correct_lse();
    if constexpr (Step == GatherStep::queries) GatheredQuery<D, Width>(params, memory).differentiate();
    if constexpr (Step == GatherStep::keys) differentiate_keys<D, Width>(params, memory);
}

// ---- launch ----
template <Dtype D>
struct GatherBackwardLaunch {
    using Real = RealOf<D>;
    const BackwardArgs& args;
    const Problem& p;
    const GatherLists lists;
    const GatherSpace<Real> space;
    GatherBackwardParams<Real> params;

    explicit GatherBackwardLaunch(const BackwardArgs& args)
        : args(args), p(*args.problem), lists(GatherLists::of(args)),
          space(GatherSpace<Real>::at(args.workspace, p, lists.sizes)),
          params{args.q,  args.k,  args.v,           args.dout,
                 args.dq, args.dk, args.dv,          args.sink_logits,
                 {lists, space.by_key},              space,
                 p.batch * p.heads_q * p.seq_q,      p.batch * p.heads_kv * p.seq_k,
                 int(p.head_dim),                    int(p.head_dim_v),
                 1,                                  0,
                 Real(p.scale),                      Real(p.softcap),
                 p.value_in_key} {}

    void transpose() const { transpose_lists(params.by_key, args.stream); }

    template <GatherStep Step>
    void walk() {
        const bool by_key = Step == GatherStep::keys;
        const int64_t own = padded(p.head_dim) + padded(p.head_dim_v);
        const GatherShape shape = gather_shape<Real>(args.device, own + (by_key ? own : padded(p.head_dim)));
        params.share = share_of_row(params.rows, shape);  // of queries: by key the kernel sees how many rows there are
        params.warp_bytes = shape.warp_bytes;
        const int64_t ctas = divide_up(by_key ? params.keys : params.rows * params.share, shape.warps);
        const bool is_wide = by_key ? reads_wide<D>(p, {args.q, args.dout}) : reads_wide<D>(p, {args.k, args.v});
        runtime::launch(is_wide ? gather_backward_kernel<D, wide<D>, Step> : gather_backward_kernel<D, 1, Step>,
                        {unsigned(ctas), shape.threads(), shape.bytes()}, args.stream, params);
    }
};

template <Dtype D>
void GatherBackward<D>::run(const BackwardArgs& args) {
    GatherBackwardLaunch<D> launch(args);
    BlockBackward<D>::rows(args);
    launch.transpose();
    if constexpr (D == Dtype::f64) launch.template walk<GatherStep::lse>();
    launch.template walk<GatherStep::queries>();
    launch.template walk<GatherStep::keys>();
    BlockBackward<D>::sinks(args);
}

template <Dtype D, GatherStep Step>
void prepare_gather(int32_t device) {
    runtime::prepare(gather_backward_kernel<D, wide<D>, Step>, most_gather_bytes(device));
    runtime::prepare(gather_backward_kernel<D, 1, Step>, most_gather_bytes(device));
}

template <Dtype D>
void GatherBackward<D>::prepare(int32_t device) {
    BlockBackward<D>::prepare(device);
    const runtime::CurrentDevice current(device);
    prepare_transpose();
    if constexpr (D == Dtype::f64) prepare_gather<D, GatherStep::lse>(device);
    prepare_gather<D, GatherStep::queries>(device);
    prepare_gather<D, GatherStep::keys>(device);
}

}  // namespace spattn::any
