// SPDX-License-Identifier: MIT
// Operands of float8 as elements, and factors of scores: what rows of kernels are given in their place.
//
//     copies    a CTA has some rows of a head of q, k or v, one after the other; a thread some columns of a few of them
//               at a time, so that their bytes are on their way together
//     factors   of rows that multiply bytes: a thread has a row's
#pragma once

#include <algorithm>

#include "any/divisor.h"
#include "any/element.cuh"
#include "any/float8.h"
#include "core/math.h"
#include "runtime/launch.h"

namespace spattn::any {

// width: columns of a thread, where rows may be read so. rows: of a CTA at a time.
constexpr int float8_threads = 256, float8_width = 8, float8_rows = 64;
constexpr int64_t most_float8_ctas = 8192;

// One operand, all heads of it.
struct WidenedHeads {
    TensorView from, scales, to;
    Divisor heads;
    int64_t rows, stretches;  // of a head; stretches of float8_rows
    Divisor units;            // of a row, of a thread's width each
    int64_t all;              // stretches of all heads

    static WidenedHeads of(const TensorView& from, const TensorView& scales, const TensorView& to, const Problem& p,
                           int64_t heads, int64_t rows, int64_t columns, int width) {
        if (!to.data) return {};
        const int64_t stretches = ceil_div(rows, int64_t(float8_rows));
        return {from, scales, to, Divisor(heads), rows, stretches, Divisor(columns / width), p.batch * heads * stretches};
    }
};
struct WidenHeadsParams {
    WidenedHeads operands[3];
};

// Rows [begin, end) of a head.
template <int Width>
__device__ __forceinline__ void widen_rows(const WidenedHeads& x, int batch, int head, int64_t begin, int64_t end) {
    using T = ElementOf<Dtype::bf16>;
    constexpr int ahead = 4;
    const Float8Rows from(x.from, x.scales, batch, head);
    T* const to = row_of<T>(x.to, batch, head, 0);
    const int units = int(x.units) * int(end - begin);
    for (int n = int(threadIdx.x); n < units; n += ahead * float8_threads) {
        Columns<uint8_t, Width> codes[ahead] = {};
        float scale[ahead] = {};
        int64_t at[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            const int unit = n + i * float8_threads;
            if (unit >= units) break;
            const int row = unit / x.units, column = (unit - row * int(x.units)) * Width;
            codes[i] = *reinterpret_cast<const Columns<uint8_t, Width>*>(from.at(begin + row) + column * from.column);
            scale[i] = from.scale(begin + row);
            at[i] = (begin + row) * x.to.row + column;
        }
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            if (n + i * float8_threads >= units) break;
            Columns<T, Width> elements;
#pragma unroll
            for (int c = 0; c < Width; ++c) from_real(widen_float8(codes[i].x[c]) * scale[i], elements.x[c]);
            *reinterpret_cast<Columns<T, Width>*>(to + at[i]) = elements;
        }
    }
}

template <int Width>
static __global__ void __launch_bounds__(float8_threads)
    widen_heads_kernel(const __grid_constant__ WidenHeadsParams params) {
    int64_t first = 0;
    for (const WidenedHeads& x : params.operands) {
        // A CTA goes on where it would in one list of the stretches of all operands.
        for (int64_t n = (blockIdx.x + gridDim.x - first % gridDim.x) % gridDim.x; n < x.all; n += gridDim.x) {
            const int64_t plane = n / x.stretches, begin = (n - plane * x.stretches) * float8_rows;
            const int batch = int(plane) / x.heads, head = int(plane) - batch * int(x.heads);
            widen_rows<Width>(x, batch, head, begin, min(begin + float8_rows, x.rows));
        }
        first += x.all;
    }
}

// ---- factors ----
struct FactorParams {
    TensorView q_scales, k_scales, q_factors, k_factors;
    Divisor heads_q, heads_kv, group;
    int64_t planes_q, planes_k, rows_q, rows_k;
    bool has_key_factors;  // else the scale of a head's keys is one of its queries' factors
};

__device__ __forceinline__ float scale_of(const TensorView& scales, int batch, int head, int64_t row) {
    return scales.data ? *row_of<float>(scales, batch, head, row) : 1;
}

static __global__ void __launch_bounds__(float8_threads)
    make_factors_kernel(const __grid_constant__ FactorParams params) {
    const int64_t step = int64_t(gridDim.x) * float8_threads, first = int64_t(blockIdx.x) * float8_threads + threadIdx.x;
    for (int64_t n = first; n < params.planes_q * params.rows_q; n += step) {
        const int64_t plane = n / params.rows_q, row = n - plane * params.rows_q;
        const int batch = int(plane) / params.heads_q, head = int(plane) - batch * int(params.heads_q);
        const float of_keys = params.has_key_factors ? 1 : scale_of(params.k_scales, batch, head / params.group, 0);
        *row_of<float>(params.q_factors, batch, head, row) = scale_of(params.q_scales, batch, head, row) * of_keys;
    }
    if (!params.has_key_factors) return;
    for (int64_t n = first; n < params.planes_k * params.rows_k; n += step) {
        const int64_t plane = n / params.rows_k, row = n - plane * params.rows_k;
        const int batch = int(plane) / params.heads_kv, head = int(plane) - batch * int(params.heads_kv);
        *row_of<float>(params.k_factors, batch, head, row) = scale_of(params.k_scales, batch, head, row);
    }
}

// ---- launch ----
inline void launch_widening(const ForwardArgs& args, const Float8Copies& to) {
    const Problem& p = *args.problem;
    const auto reads_wide = [&](const TensorView& from, const TensorView& copy, int64_t columns) {
        return !copy.data || reads_together(from, int(columns), float8_width);
    };
    const TensorView values = p.value_in_key ? TensorView{} : to.v;
    const bool is_wide = reads_wide(args.q, to.q, p.head_dim) && reads_wide(args.k, to.k, p.head_dim) &&
                         reads_wide(args.v, values, p.head_dim_v);
    const int width = is_wide ? float8_width : 1;
    const WidenHeadsParams params{
        {WidenedHeads::of(args.q, args.q_scales, to.q, p, p.heads_q, p.seq_q, p.head_dim, width),
         WidenedHeads::of(args.k, args.k_scales, to.k, p, p.heads_kv, p.seq_k, p.head_dim, width),
         WidenedHeads::of(args.v, args.v_scales, values, p, p.heads_kv, p.seq_k, p.head_dim_v, width)}};
    int64_t all = 0;
    for (const WidenedHeads& x : params.operands) all += x.all;
    runtime::launch(is_wide ? widen_heads_kernel<float8_width> : widen_heads_kernel<1>,
                    {unsigned(std::clamp<int64_t>(all, 1, most_float8_ctas)), unsigned(float8_threads), 0}, args.stream,
                    params);
}

inline void launch_factors(const ForwardArgs& args, const Float8Copies& to) {
    const Problem& p = *args.problem;
    const FactorParams params{args.q_scales,
                              args.k_scales,
                              to.q_factors,
                              to.k_factors,
                              Divisor(p.heads_q),
                              Divisor(p.heads_kv),
                              Divisor(p.group()),
                              p.batch * p.heads_q,
                              p.batch * p.heads_kv,
                              p.seq_q,
                              p.seq_k,
                              !have_one_scale(args.k_scales)};
    const int64_t rows = std::max(params.planes_q * p.seq_q, params.planes_k * p.seq_k);
    const unsigned ctas = unsigned(std::min(ceil_div(rows, int64_t(float8_threads)), most_float8_ctas));
    runtime::launch(make_factors_kernel, {ctas, unsigned(float8_threads), 0}, args.stream, params);
}

void widen_operands(const ForwardArgs& args, const Float8Copies& to) {
    const runtime::CurrentDevice current(args.device);
    if (to.q_factors.data) launch_factors(args, to);
    launch_widening(args, to);
}

void prepare_float8(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(widen_heads_kernel<float8_width>, 0);
    runtime::prepare(widen_heads_kernel<1>, 0);
    runtime::prepare(make_factors_kernel, 0);
}

Float8Steps float8_steps() { return {widen_operands, prepare_float8}; }

}  // namespace spattn::any
