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

// Zeros where there is no token, for tiles have these places, too.
template <Dtype D, int Width>
__device__ __forceinline__ void widen_columns(const WidenedRows& x, int column, int64_t entry, int head, int token,
                                              int64_t place) {
    using T = ElementOf<D>;
    struct alignas(Width) Codes {
        uint8_t x[Width];
    };
    struct alignas(Width * sizeof(T) < 16 ? Width * sizeof(T) : 16) Elements {
        T x[Width];
    };
    const Float8Rows rows(x.from, x.scales, entry, head);
    Codes codes{};
    float scale = 0;
    if (token != no_token) {
        codes = *reinterpret_cast<const Codes*>(rows.at(token) + column * rows.column);
        scale = rows.scale(token);
    }
    Elements elements;
#pragma unroll
    for (int i = 0; i < Width; ++i) from_real(widen_float8(codes.x[i]) * scale, elements.x[i]);
    *reinterpret_cast<Elements*>(row_of<T>(x.to, entry, head, place) + column) = elements;
}

template <Dtype D, int Width>
static __global__ void __launch_bounds__(widen_threads) widen_kernel(const __grid_constant__ WidenParams params) {
    const CacheLayout& cache = params.call.cache;
    constexpr unsigned warps = widen_threads / 32;  // of a CTA
    const int columns = params.k.columns + params.v.columns;
    const unsigned ctas = unsigned(params.ctas), cta = blockIdx.x % ctas;
    for (int64_t sequence = blockIdx.x / ctas; sequence < cache.sequences; sequence += gridDim.x / ctas) {
        const int64_t entry = cache.page_size ? 0 : sequence;
        const int64_t first = cache.page_size ? sequence * cache.tiles_k * cache.tile_k : 0;
        const int64_t tiles = (params.call.seen_tokens(sequence) + cache.tile_k - 1) / cache.tile_k;
        const unsigned rows = unsigned(tiles * cache.tile_k * params.heads);
        for (unsigned n = cta * warps + threadIdx.x / 32; n < rows; n += ctas * warps) {
            const int64_t place = first + n / unsigned(params.heads);
            const int head = int(n % unsigned(params.heads)), token = cache.tokens[place];
            for (int column = int(threadIdx.x % 32) * Width; column < columns; column += 32 * Width) {
                const bool is_k = column < params.k.columns;
                widen_columns<D, Width>(is_k ? params.k : params.v, is_k ? column : column - params.k.columns, entry,
                                        head, token, place);
            }
        }
    }
}

// body(dtype, width, kernel) for each of them.
template <class Body>
void each_widen_kernel(Body body) {
    const auto each_width = [&]<Dtype D>() {
        body(D, widen_width, widen_kernel<D, widen_width>);
        body(D, 1, widen_kernel<D, 1>);
    };
    each_width.template operator()<Dtype::f32>();
    each_width.template operator()<Dtype::f16>();
    each_width.template operator()<Dtype::bf16>();
    each_width.template operator()<Dtype::f64>();
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
    params.ctas = int(std::clamp<int64_t>(rows / (widen_threads / 32), 1, most_ctas / sequences));
    each_widen_kernel([&](Dtype dtype, int width, auto kernel) {
        if (dtype == p.dtype && width == (is_wide ? widen_width : 1))
            runtime::launch(kernel, {unsigned(sequences * params.ctas), unsigned(widen_threads), 0}, args.stream, params);
    });
}

inline void prepare_widening() {
    each_widen_kernel([](Dtype, int, auto kernel) { runtime::prepare(kernel, 0); });
}

}  // namespace spattn::any
