// SPDX-License-Identifier: MIT
// A copy of a float8 cache as elements, for rows of kernels that read no float8. A CTA has some tokens of a tile that a
// query sees, a thread some columns of a few of these at a time, so that their bytes are on their way together.
#pragma once

#include <algorithm>

#include "any/cache_rows.cuh"
#include "any/divisor.h"
#include "any/element.cuh"
#include "core/dtype.h"
#include "core/math.h"
#include "plan/cache.h"
#include "runtime/launch.h"

namespace spattn::any {

// width: columns of a thread, where rows may be accessed so. tokens: of a CTA.
constexpr int widen_threads = 256, widen_width = 8, widen_tokens = 16;

struct WidenedRows {
    TensorView from, scales, to;
    Divisor units, units_of_head;  // of a thread's width each: of a token, and of its row of one head
};
struct WidenParams {
    CacheLayout cache;
    WidenedRows k, v;   // v is all zeros where values lie in keys
    int64_t stretches;  // of tokens, of all tiles
    int of_tile;        // how many of these a tile has
};

// Tokens [begin, end) of listed tiles. Zeros where there is no token, for tiles have these places, too.
template <Dtype D, int Width>
__device__ __forceinline__ void widen_tokens_of(const CacheLayout& cache, const WidenedRows& x, int64_t entry,
                                                int64_t begin, int64_t end) {
    using T = ElementOf<D>;
    constexpr int ahead = 4;
    const int units = int(x.units) * int(end - begin);
    for (int n = int(threadIdx.x); n < units; n += ahead * widen_threads) {
        Columns<uint8_t, Width> codes[ahead] = {};
        float scale[ahead] = {};
        T* to[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            const int unit = n + i * widen_threads;
            if (unit >= units) break;
            const int number = unit / x.units, of_token = unit - number * int(x.units);
            const int head = of_token / x.units_of_head, column = (of_token - head * int(x.units_of_head)) * Width;
            to[i] = row_of<T>(x.to, entry, head, begin + number) + column;
            const int token = cache.tokens[begin + number];
            if (token == no_token) continue;
            const Float8Rows from(x.from, x.scales, entry, head);
            codes[i] = *reinterpret_cast<const Columns<uint8_t, Width>*>(from.at(token) + column * from.column);
            scale[i] = from.scale(token);
        }
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            if (n + i * widen_threads >= units) break;
            *reinterpret_cast<Columns<T, Width>*>(to[i]) = widen_columns<D, Width>(codes[i], scale[i]);
        }
    }
}

template <Dtype D, int Width>
static __global__ void __launch_bounds__(widen_threads) widen_kernel(const __grid_constant__ WidenParams params) {
    const CacheLayout& cache = params.cache;
    for (int64_t n = blockIdx.x; n < params.stretches; n += gridDim.x) {
        const int64_t seen = n / params.of_tile;
        if (!cache.seen[seen]) continue;
        const int64_t sequence = seen / cache.tiles_k, entry = cache.page_size ? 0 : sequence;
        // Tiles of all entries have the same tokens where there are no pages.
        const int64_t tile = cache.page_size ? seen : seen - sequence * cache.tiles_k;
        const int64_t begin = tile * cache.tile_k + (n - seen * params.of_tile) * widen_tokens;
        const int64_t end = min(begin + widen_tokens, (tile + 1) * cache.tile_k);
        widen_tokens_of<D, Width>(cache, params.k, entry, begin, end);
        if (params.v.to.data) widen_tokens_of<D, Width>(cache, params.v, entry, begin, end);
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

inline void launch_widening(const ForwardArgs& args, const CacheLayout& cache) {
    const Problem& p = *args.problem;
    const bool is_wide = reads_together(args.k, int(p.head_dim), widen_width) &&
                         (p.value_in_key || reads_together(args.v, int(p.head_dim_v), widen_width));
    const int width = is_wide ? widen_width : 1;
    const auto rows = [&](const TensorView& from, const TensorView& scales, const TensorView& to, int64_t columns) {
        const int units = int(columns) / width;
        return WidenedRows{from, scales, to, Divisor(int(p.heads_kv) * units), Divisor(units)};
    };
    WidenParams params{.cache = cache, .k = rows(args.k, args.k_scales, cache.k, p.head_dim), .v = {}};
    if (!p.value_in_key) params.v = rows(args.v, args.v_scales, cache.v, p.head_dim_v);
    params.of_tile = int(ceil_div(cache.tile_k, widen_tokens));
    params.stretches = cache.all_tiles() * params.of_tile;
    constexpr int64_t most_ctas = 16384;
    const unsigned ctas = unsigned(std::min(params.stretches, most_ctas));
    each_widen_kernel([&](Dtype dtype, int of, auto kernel) {
        if (dtype == p.dtype && of == width)
            runtime::launch(kernel, {ctas, unsigned(widen_threads), 0}, args.stream, params);
    });
}

inline void prepare_widening() {
    each_widen_kernel([](Dtype, int, auto kernel) { runtime::prepare(kernel, 0); });
}

}  // namespace spattn::any
