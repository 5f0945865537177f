// SPDX-License-Identifier: MIT
// A copy of a float8 cache as elements, for rows of kernels that read no float8. A warp has a token's row of k and of v
// of one head, a lane some columns of either at a time.
#pragma once

#include <algorithm>

#include "any/cache_call.cuh"
#include "any/element.cuh"
#include "core/dtype.h"
#include "runtime/launch.h"

namespace spattn::any {

constexpr int widen_threads = 256, widen_width = 8;  // width: columns of a lane, where rows may be accessed so

struct WidenedRows {
    TensorView from, scales, to;
    int columns;
};
struct WidenParams {
    CacheParams call;
    WidenedRows k, v;  // v has no columns where values lie in keys
    int heads, ctas;   // ctas: of a sequence
};

// A lane's columns of a sequence's rows, several rows at a time, so that their bytes are on their way together. Zeros
// where there is no token, for tiles have these places, too.
template <Dtype D, int Width>
__device__ __forceinline__ void widen_columns(const WidenParams& params, const WidenedRows& x, int column,
                                              int64_t sequence) {
    using T = ElementOf<D>;
    constexpr int ahead = 4;
    constexpr unsigned warps = widen_threads / 32;  // of a CTA
    const CacheLayout& cache = params.call.cache;
    const int64_t entry = cache.page_size ? 0 : sequence;
    const int64_t first = cache.page_size ? sequence * cache.tiles_k * cache.tile_k : 0;
    const int64_t tiles = (params.call.seen_tokens(sequence) + cache.tile_k - 1) / cache.tile_k;
    const unsigned heads = unsigned(params.heads), rows = unsigned(tiles * cache.tile_k) * heads;
    const unsigned ctas = unsigned(params.ctas), stride = ctas * warps;
    for (unsigned n = blockIdx.x % ctas * warps + threadIdx.x / 32; n < rows; n += ahead * stride) {
        Columns<uint8_t, Width> codes[ahead] = {};
        float scale[ahead] = {};
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            const unsigned row = n + i * stride;
            const int token = row < rows ? cache.tokens[first + row / heads] : no_token;
            if (token == no_token) continue;
            const Float8Rows from(x.from, x.scales, entry, row % heads);
            codes[i] = *reinterpret_cast<const Columns<uint8_t, Width>*>(from.at(token) + column * from.column);
            scale[i] = from.scale(token);
        }
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            const unsigned row = n + i * stride;
            if (row >= rows) break;
            Columns<T, Width> elements;
#pragma unroll
            for (int c = 0; c < Width; ++c) from_real(widen_float8(codes[i].x[c]) * scale[i], elements.x[c]);
            T* const to = row_of<T>(x.to, entry, row % heads, first + row / heads) + column;
            *reinterpret_cast<Columns<T, Width>*>(to) = elements;
        }
    }
}

template <Dtype D, int Width>
static __global__ void __launch_bounds__(widen_threads) widen_kernel(const __grid_constant__ WidenParams params) {
    const int all = params.k.columns + params.v.columns;
    for (int column = int(threadIdx.x % 32) * Width; column < all; column += 32 * Width) {
        const bool is_k = column < params.k.columns;
        const WidenedRows x = is_k ? params.k : params.v;
        const int64_t step = gridDim.x / unsigned(params.ctas), sequences = params.call.cache.sequences;
        for (int64_t sequence = blockIdx.x / unsigned(params.ctas); sequence < sequences; sequence += step)
            widen_columns<D, Width>(params, x, is_k ? column : column - params.k.columns, sequence);
    }
}

// body(dtype, width, kernel) for each of them.
template <class Body>
void each_widen_kernel(Body body) {
    each_dtype([&]<Dtype D>() {
        body(D, widen_width, widen_kernel<D, widen_width>);
        body(D, 1, widen_kernel<D, 1>);
    });
}

inline void launch_widening(const ForwardArgs& args, const CacheParams& call) {
    const Problem& p = *args.problem;
    const CacheLayout& cache = call.cache;
    WidenParams params{.call = call, .k = {args.k, args.k_scales, cache.k, int(p.head_dim)}, .heads = int(p.heads_kv)};
    if (!p.value_in_key) params.v = {args.v, args.v_scales, cache.v, int(p.head_dim_v)};
    const bool is_wide = reads_together(args.k, params.k.columns, widen_width) &&
                         (p.value_in_key || reads_together(args.v, params.v.columns, widen_width));
    constexpr int64_t most_ctas = 4096;
    const int64_t sequences = std::min(cache.sequences, most_ctas), rows = cache.seq_k * p.heads_kv;
    params.ctas = int(std::clamp<int64_t>(rows / (4 * (widen_threads / 32)), 1, most_ctas / sequences));
    each_widen_kernel([&](Dtype dtype, int width, auto kernel) {
        if (dtype == p.dtype && width == (is_wide ? widen_width : 1))
            runtime::launch(kernel, {unsigned(sequences * params.ctas), unsigned(widen_threads), 0}, args.stream, params);
    });
}

inline void prepare_widening() {
    each_widen_kernel([](Dtype, int, auto kernel) { runtime::prepare(kernel, 0); });
}

}  // namespace spattn::any
