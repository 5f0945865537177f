// SPDX-License-Identifier: MIT
// What lies before and after additions to sums of keys' rows: zeros, bounds into quanta, and sums into the elements of
// dk and dv.
#pragma once

#include <algorithm>

#include "any/key_gradients.h"
#include "any/key_sums.cuh"
#include "any/shape.h"
#include "runtime/launch.h"

namespace spattn::any {

constexpr int sums_threads = 256;

static __global__ void __launch_bounds__(sums_threads) quanta_kernel(KeySums of, int64_t rows) {
    for (int64_t at = int64_t(blockIdx.x) * sums_threads + threadIdx.x; at < rows;
         at += int64_t(gridDim.x) * sums_threads)
        of.quanta[at] = quanta_of(of.bounds + at * bound_words);
}

struct SumsParams {
    KeySums from;
    TensorView to;
    int64_t chunks;  // of all rows
    int columns, heads_kv;
    int64_t seq_k;
    bool is_wide;  // 8 elements of `to` are an aligned word
};

template <Dtype D, Adding A>
__global__ void __launch_bounds__(sums_threads) sums_kernel(const __grid_constant__ SumsParams params) {
    const int chunks_of_row = params.from.columns / sums_chunk;
    for (int64_t at = int64_t(blockIdx.x) * sums_threads + threadIdx.x; at < params.chunks;
         at += int64_t(gridDim.x) * sums_threads) {
        const int64_t row = at / chunks_of_row, plane = row / params.seq_k;
        const int column = int(at % chunks_of_row) * sums_chunk;
        const float* const from = params.from.sums + at * sums_chunk;
        const float quantum = A == Adding::integers ? 1 / params.from.quanta[row] : 1;
        float x[sums_chunk];
#pragma unroll
        for (int i = 0; i < sums_chunk; i += 2) read_sums<A>(from + i, quantum, x + i);
        auto* const to = row_of<ElementOf<D>>(params.to, plane / params.heads_kv, plane % params.heads_kv,
                                              row % params.seq_k) + column * params.to.column;
        if (params.is_wide && column + sums_chunk <= params.columns) {
            *reinterpret_cast<uint4*>(to) = uint4{pack_anywhere<D>(x[0], x[1]), pack_anywhere<D>(x[2], x[3]),
                                                  pack_anywhere<D>(x[4], x[5]), pack_anywhere<D>(x[6], x[7])};
        } else {
#pragma unroll
            for (int i = 0; i < sums_chunk; ++i)
                if (column + i < params.columns) from_real(x[i], to[i * params.to.column]);
        }
    }
}

// ---- launch ----
inline unsigned sums_ctas(int64_t threads) {
    constexpr int64_t most = 1 << 16;
    return unsigned(std::min(divide_up(threads, sums_threads), most));
}

template <Dtype D>
void KeyGradients<D>::clear(const BackwardArgs& args) {
    const KeySumsSpace space(*args.problem);
    runtime::clear(static_cast<char*>(args.workspace) + space.begin, space.cleared, args.stream);
}

template <Dtype D>
void KeyGradients<D>::find_quanta(const BackwardArgs& args) {
    const Problem& p = *args.problem;
    const KeySumsSpace space(p);
    const int64_t rows = p.batch * p.heads_kv * p.seq_k;
    const auto find = [&](const KeySums& of) {
        runtime::launch(quanta_kernel, {sums_ctas(rows), unsigned(sums_threads), 0}, args.stream, of, rows);
    };
    find(space.dk_at(args.workspace, p));
    if (!p.value_in_key) find(space.dv_at(args.workspace, p));
}

template <Dtype D>
void KeyGradients<D>::write(const BackwardArgs& args) {
    const Problem& p = *args.problem;
    const KeySumsSpace space(p);
    const auto kernel = p.deterministic ? sums_kernel<D, Adding::integers> : sums_kernel<D, Adding::floats>;
    const auto write = [&](const KeySums& sums, const TensorView& to, int64_t columns) {
        const int64_t chunks = p.batch * p.heads_kv * p.seq_k * sums.columns / sums_chunk;
        const SumsParams params{sums, to, chunks, int(columns), int(p.heads_kv), p.seq_k, is_wide(to)};
        runtime::launch(kernel, {sums_ctas(chunks), unsigned(sums_threads), 0}, args.stream, params);
    };
    write(space.dk_at(args.workspace, p), args.dk, p.head_dim);
    if (!p.value_in_key) write(space.dv_at(args.workspace, p), args.dv, p.head_dim_v);
}

template <Dtype D>
void KeyGradients<D>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(quanta_kernel, 0);
    runtime::prepare(sums_kernel<D, Adding::floats>, 0);
    runtime::prepare(sums_kernel<D, Adding::integers>, 0);
}

}  // namespace spattn::any
