// SPDX-License-Identifier: MIT
// Operands of float8 as elements, and factors of scores: what rows of kernels are given in their place.
//
//     copies    a CTA has some rows of q, k or v, a thread some columns of a few of them at a time, so that their bytes
//               are on their way together
//     factors   of rows that multiply bytes: a thread has a row's
#pragma once

#include <algorithm>

#include "any/cache_rows.cuh"
#include "any/divisor.h"
#include "any/element.cuh"
#include "any/float8.h"
#include "core/math.h"
#include "runtime/launch.h"

namespace spattn::any {

// width: columns of a thread, where rows may be read so. rows: of a CTA.
constexpr int float8_threads = 256, float8_width = 8, float8_rows = 16;
constexpr int64_t most_float8_ctas = 8192;

// One operand. Heads of a token stand side by side in copies, as they mostly do in what is copied.
struct WidenedOperand {
    TensorView from, scales, to;
    int64_t rows;                  // of an entry
    Divisor ctas_of_entry;
    Divisor units, units_of_head;  // of a thread's width each: of a row of all heads, and of one
    unsigned ctas;

    static WidenedOperand of(const TensorView& from, const TensorView& scales, const TensorView& to, const Problem& p,
                             int64_t heads, int64_t rows, int64_t columns, int width) {
        if (!to.data) return {};
        const int64_t of_entry = ceil_div(rows, int64_t(float8_rows)), units = columns / width;
        return {from, scales, to, rows, Divisor(of_entry), Divisor(heads * units), Divisor(units),
                unsigned(p.batch * of_entry)};
    }
};
struct WidenOperandsParams {
    WidenedOperand operands[3];
};

// The CTA's rows.
template <int Width>
__device__ __forceinline__ void widen_rows(const WidenedOperand& x, int cta) {
    using T = ElementOf<Dtype::bf16>;
    constexpr int ahead = 4;
    const int entry = cta / x.ctas_of_entry;
    const int64_t first = int64_t(cta - entry * int(x.ctas_of_entry)) * float8_rows;
    const int units = int(x.units) * int(min(int64_t(float8_rows), x.rows - first));
    const Float8* const from = row_of<Float8>(x.from, entry, 0, first);
    const float* const scales = x.scales.data ? row_of<float>(x.scales, entry, 0, first) : nullptr;
    T* const to = row_of<T>(x.to, entry, 0, first);
#pragma unroll 1
    for (int n = int(threadIdx.x); n < units; n += ahead * float8_threads) {
        Columns<uint8_t, Width> codes[ahead];
        float scale[ahead];
        int64_t at[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            const int unit = min(n + i * float8_threads, units - 1);  // the last one may be made several times
            const int row = unit / x.units, of_row = unit - row * int(x.units);
            const int head = of_row / x.units_of_head, column = (of_row - head * int(x.units_of_head)) * Width;
            codes[i] = *reinterpret_cast<const Columns<uint8_t, Width>*>(from + row * x.from.row + head * x.from.head +
                                                                        column * x.from.column);
            scale[i] = scales ? scales[row * x.scales.row + head * x.scales.head] : 1;
            at[i] = row * x.to.row + head * x.to.head + column;
        }
#pragma unroll
        for (int i = 0; i < ahead; ++i)
            *reinterpret_cast<Columns<T, Width>*>(to + at[i]) = widen_columns<Dtype::bf16, Width>(codes[i], scale[i]);
    }
}

template <int Width>
static __global__ void __launch_bounds__(float8_threads, 4)
    widen_operands_kernel(const __grid_constant__ WidenOperandsParams params) {
    unsigned cta = blockIdx.x;
    int which = 0;
    while (cta >= params.operands[which].ctas) cta -= params.operands[which++].ctas;
    widen_rows<Width>(params.operands[which], int(cta));
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
inline void launch_widening(const CallArgs& args, const Float8Copies& to) {
    const Problem& p = *args.problem;
    const auto reads_wide = [&](const TensorView& from, const TensorView& copy, int64_t columns) {
        return !copy.data || reads_together(from, int(columns), float8_width);
    };
    const TensorView values = p.value_in_key ? TensorView{} : to.v;
    const bool is_wide = reads_wide(args.q, to.q, p.head_dim) && reads_wide(args.k, to.k, p.head_dim) &&
                         reads_wide(args.v, values, p.head_dim_v);
    const int width = is_wide ? float8_width : 1;
    const WidenOperandsParams params{
        {WidenedOperand::of(args.q, args.q_scales, to.q, p, p.heads_q, p.seq_q, p.head_dim, width),
         WidenedOperand::of(args.k, args.k_scales, to.k, p, p.heads_kv, p.seq_k, p.head_dim, width),
         WidenedOperand::of(args.v, args.v_scales, values, p, p.heads_kv, p.seq_k, p.head_dim_v, width)}};
    unsigned ctas = 0;
    for (const WidenedOperand& x : params.operands) ctas += x.ctas;
    if (ctas)
        runtime::launch(is_wide ? widen_operands_kernel<float8_width> : widen_operands_kernel<1>,
                        {ctas, unsigned(float8_threads), 0}, args.stream, params);
}

inline void launch_factors(const CallArgs& args, const Float8Copies& to) {
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

void widen_operands(const CallArgs& args, const Float8Copies& to) {
    const runtime::CurrentDevice current(args.device);
    if (to.q_factors.data) launch_factors(args, to);
    launch_widening(args, to);
}

void prepare_float8(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(widen_operands_kernel<float8_width>, 0);
    runtime::prepare(widen_operands_kernel<1>, 0);
    runtime::prepare(make_factors_kernel, 0);
}

Float8Steps float8_steps() { return {widen_operands, prepare_float8}; }

}  // namespace spattn::any
