// SPDX-License-Identifier: MIT
// New tokens of a cache. A CTA has one token or several, a thread 16 bytes of a token's keys and of its values, or an
// element each: all threads of a token find its place, which the same few numbers say to them. Where the cache is of
// float8, a warp has a row of one head, of which it finds the largest magnitude first.
#pragma once

#include <algorithm>

#include "any/cache_append.h"
#include "any/cache_rows.cuh"
#include "any/divisor.h"
#include "any/element.cuh"
#include "core/dtype.h"
#include "core/math.h"
#include "ptx/prefetch.cuh"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace spattn::any {

constexpr int append_threads = 256;

// Where the rows of a call go.
struct AppendPlaces {
    CallCache cache;
    IndexView counts;
    CacheRowsOfCall rows;
    int64_t tokens;  // of the call, of all sequences
    Divisor page_size;
    bool has_pages;

    static AppendPlaces of(const CacheAppend& args) {
        const Problem& p = *args.problem;
        return {args.cache,         args.counts, CacheRowsOfCall::of(p), p.batch * p.seq_q, Divisor(p.page_size),
                p.page_size != 0};
    }

    struct Row {
        int64_t batch, row;
    };
    __device__ Row row(int64_t token) const {
        const int64_t batch = divide(token, rows.seq_q);
        return {batch, token - batch * rows.seq_q};
    }

    // In the cache; row -1: nowhere. What stands before an entry's new rows is padding.
    __device__ Row place_of(const Row& from) const {
        if (counts.data && rows.seq_q - from.row > integer_at(counts, from.batch, 0)) return {0, -1};
        const CacheRowsOfCall::Owner owner = rows.owner_of(cache, from.batch, from.row);
        const int64_t token = rows.token_of(cache, owner);
        if (token < 0 || !has_pages) return {owner.sequence, token};
        const int of_sequence = int(token) / page_size;
        const int64_t page = integer_at(cache.page_table, owner.sequence, of_sequence);
        if (page < 0 || page >= cache.pages) return {0, -1};
        return {0, page * cache.page_rows + token - int64_t(of_sequence) * page_size};
    }
};

// ---- rows of the problem's dtype ----
struct AppendParams {
    AppendPlaces places;
    CopiedRows k, v;  // v has no units where values lie in keys
    int heads, tokens_of_cta;
    Divisor threads_of_token, units_k, units_v;
};

template <class Unit>
__device__ __forceinline__ void append_units(const CopiedRows& rows, const Divisor& units, int heads,
                                             AppendPlaces::Row row, AppendPlaces::Row to, int first, int step) {
    const TensorView &call = rows.call, &copy = rows.copy;
    const Unit* const from = static_cast<const Unit*>(call.data) + row.batch * call.batch + row.row * call.row;
    Unit* const place = static_cast<Unit*>(copy.data) + to.batch * copy.batch + to.row * copy.row;
    for (int n = first; n < heads * rows.units; n += step) {
        const int head = n / units;
        const int64_t unit = n - head * units;
        place[head * copy.head + unit * copy.column] = from[head * call.head + unit * call.column];
    }
}

__device__ __forceinline__ void append_rows(const CopiedRows& rows, const Divisor& units, int heads,
                                            AppendPlaces::Row row, AppendPlaces::Row to, int first, int step) {
    switch (rows.unit) {
        case 16: return append_units<uint4>(rows, units, heads, row, to, first, step);
        case 8: return append_units<uint64_t>(rows, units, heads, row, to, first, step);
        case 4: return append_units<uint32_t>(rows, units, heads, row, to, first, step);
        default: return append_units<uint16_t>(rows, units, heads, row, to, first, step);
    }
}

// What a thread reads first, on its way while the token's place is looked up.
__device__ __forceinline__ void prefetch_row(const CopiedRows& rows, const Divisor& units, int heads,
                                             AppendPlaces::Row row, int first) {
    if (first >= heads * rows.units) return;
    const TensorView& call = rows.call;
    const int head = first / units;
    const int64_t unit = first - head * units;
    const int64_t at = row.batch * call.batch + row.row * call.row + head * call.head + unit * call.column;
    ptx::prefetch_l2(static_cast<const char*>(call.data) + at * rows.unit);
}

static __global__ void __launch_bounds__(append_threads)
    append_kernel(const __grid_constant__ AppendParams params) {
    const int of_cta = int(threadIdx.x) / params.threads_of_token, step = params.threads_of_token;
    const int first = int(threadIdx.x) - of_cta * step;
    if (of_cta >= params.tokens_of_cta) return;
    const int64_t all = int64_t(gridDim.x) * params.tokens_of_cta;
    for (int64_t n = int64_t(blockIdx.x) * params.tokens_of_cta + of_cta; n < params.places.tokens; n += all) {
        const AppendPlaces::Row row = params.places.row(n);
        prefetch_row(params.k, params.units_k, params.heads, row, first);
        prefetch_row(params.v, params.units_v, params.heads, row, first);
        const AppendPlaces::Row to = params.places.place_of(row);
        if (to.row < 0) continue;
        append_rows(params.k, params.units_k, params.heads, row, to, first, step);
        append_rows(params.v, params.units_v, params.heads, row, to, first, step);
    }
}

// ---- rows of float8 ----
struct NarrowedRows {
    TensorView from, to, scales;
    int columns;
};
struct NarrowParams {
    AppendPlaces places;
    NarrowedRows k, v;
    int rows_of_token, heads;  // keys of heads, and their values unless these lie in keys
    bool writes_scales;
};

// A row of k or v, by a warp.
template <Dtype D, int Width>
__device__ void narrow_row(const NarrowParams& params, const NarrowedRows& rows, int head, AppendPlaces::Row row,
                           AppendPlaces::Row place) {
    using T = ElementOf<D>;
    const T* const from = row_of<T>(rows.from, row.batch, head, row.row);
    auto* const to = row_of<uint8_t>(rows.to, place.batch, head, place.row);
    const auto each = [&](auto body) {
        for (int c = int(threadIdx.x) % 32 * Width; c < rows.columns; c += 32 * Width)
            body(c, *reinterpret_cast<const Columns<T, Width>*>(from + c * rows.from.column));
    };
    float* const written = rows.scales.data ? row_of<float>(rows.scales, place.batch, head, place.row) : nullptr;
    float scale = written && !params.writes_scales ? *written : 1;
    if (params.writes_scales) {
        uint32_t largest = 0;  // bits of magnitudes have their order; those of NaN are above infinity's
        each([&](int, const auto& columns) {
            for (const T x : columns.x) largest = max(largest, __float_as_uint(fabsf(float(to_real(x)))));
        });
        for (int n = 16; n; n /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, n));
        scale = scale_for(__uint_as_float(largest));
        if (threadIdx.x % 32 == 0) *written = scale;
    }
    each([&](int c, const auto& columns) {
        Columns<uint8_t, Width> narrow;
#pragma unroll
        for (int i = 0; i < Width; ++i) narrow.x[i] = narrow_float8(float(to_real(columns.x[i])) / scale);
        *reinterpret_cast<Columns<uint8_t, Width>*>(to + c * rows.to.column) = narrow;
    });
}

template <Dtype D, int Width>
static __global__ void __launch_bounds__(append_threads) narrow_kernel(const __grid_constant__ NarrowParams params) {
    const int64_t warps = int64_t(gridDim.x) * (append_threads / 32);
    const int64_t first = int64_t(blockIdx.x) * (append_threads / 32) + threadIdx.x / 32;
    for (int64_t n = first; n < params.places.tokens * params.rows_of_token; n += warps) {
        const int64_t token = divide(n, params.rows_of_token);
        const int of_token = int(n - token * params.rows_of_token);
        const AppendPlaces::Row row = params.places.row(token), to = params.places.place_of(row);
        if (to.row < 0) continue;
        const bool is_value = of_token >= params.heads;
        narrow_row<D, Width>(params, is_value ? params.v : params.k, is_value ? of_token - params.heads : of_token, row,
                             to);
    }
}

// ---- launch ----
constexpr int64_t most_append_ctas = 4096;
constexpr int narrow_width = 4;  // columns

// body(dtype, width, kernel) for each kernel that writes rows of float8.
template <class Body>
void each_narrow_kernel(Body body) {
    each_dtype([&]<Dtype D>() {
        body(D, narrow_width, narrow_kernel<D, narrow_width>);
        body(D, 1, narrow_kernel<D, 1>);
    });
}

// Whether the rows of both may be accessed `narrow_width` columns at once.
inline bool narrows_wide(const NarrowedRows& rows, int element) {
    const auto is_even = [](const TensorView& x, int bytes) {
        return x.column == 1 && (x.batch | x.head | x.row) % narrow_width == 0 &&
               uintptr_t(x.data) % uintptr_t(bytes * narrow_width) == 0;
    };
    return rows.columns % narrow_width == 0 && is_even(rows.from, element) && is_even(rows.to, 1);
}

inline void append_float8(const CacheAppend& args) {
    const Problem& p = *args.problem;
    const bool has_values = args.v.data != nullptr;
    NarrowParams params{AppendPlaces::of(args),
                        {args.k_new, args.k, args.k_scales, int(p.head_dim)},
                        {args.v_new, args.v, args.v_scales, int(p.head_dim_v)},
                        int(p.heads_kv) * (has_values ? 2 : 1),
                        int(p.heads_kv),
                        args.writes_scales};
    const int element = dtype_row(p.dtype).bytes;
    const bool is_wide = narrows_wide(params.k, element) && (!has_values || narrows_wide(params.v, element));
    const int64_t rows = params.places.tokens * params.rows_of_token;
    const unsigned ctas = unsigned(std::min(ceil_div(rows, int64_t(append_threads / 32)), most_append_ctas));
    each_narrow_kernel([&](Dtype dtype, int width, auto kernel) {
        if (dtype == p.dtype && width == (is_wide ? narrow_width : 1))
            runtime::launch(kernel, {ctas, unsigned(append_threads), 0}, args.stream, params);
    });
}

inline void append_same(const CacheAppend& args) {
    const Problem& p = *args.problem;
    const int64_t element = dtype_row(p.dtype).bytes;
    AppendParams params{};
    params.places = AppendPlaces::of(args), params.heads = int(p.heads_kv);
    params.k = CopiedRows::of(args.k_new, args.k, p.head_dim, element);
    if (args.v.data) params.v = CopiedRows::of(args.v_new, args.v, p.head_dim_v, element);
    const int64_t threads = std::min<int64_t>(params.heads * int64_t(std::max(params.k.units, params.v.units)),
                                              append_threads);
    params.threads_of_token = Divisor(threads), params.tokens_of_cta = int(append_threads / threads);
    params.units_k = Divisor(params.k.units), params.units_v = Divisor(params.v.units);
    const int64_t tokens = params.places.tokens;
    const unsigned ctas = unsigned(std::min(ceil_div(tokens, int64_t(params.tokens_of_cta)), most_append_ctas));
    runtime::launch(append_kernel, {ctas, unsigned(append_threads), 0}, args.stream, params);
}

void append_to_cache(const CacheAppend& args) {
    const runtime::CurrentDevice current(args.device);
    args.problem->float8_cache ? append_float8(args) : append_same(args);
}

void prepare_cache_append(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(append_kernel, 0);
    each_narrow_kernel([](Dtype, int, auto kernel) { runtime::prepare(kernel, 0); });
}

}  // namespace spattn::any
