// SPDX-License-Identifier: MIT
// New tokens of a cache. A CTA has one token or several, a thread 16 bytes of a token's keys and of its values, or an
// element each: all threads of a token find its place, which the same few numbers say to them.
#pragma once

#include <algorithm>

#include "any/cache_append.h"
#include "any/cache_rows.cuh"
#include "any/divisor.h"
#include "core/dtype.h"
#include "core/math.h"
#include "ptx/prefetch.cuh"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace spattn::any {

constexpr int append_threads = 256;

struct AppendParams {
    CallCache cache;
    IndexView counts;
    CopiedRows k, v;      // v has no units where values lie in keys
    CacheRowsOfCall rows;
    int64_t tokens;       // of the call, of all sequences
    int heads;
    int tokens_of_cta;
    Divisor threads_of_token, units_k, units_v, page_size;
    bool has_pages;

    struct Place {
        int64_t batch, row;  // row -1: nowhere
    };
    // Where the row of a batch entry goes. What stands before an entry's new rows is padding.
    __device__ Place place_of(int64_t batch, int64_t row) const {
        if (counts.data && rows.seq_q - row > integer_at(counts, batch, 0)) return {0, -1};
        const CacheRowsOfCall::Owner owner = rows.owner_of(cache, batch, row);
        const int64_t token = rows.token_of(cache, owner);
        if (token < 0 || !has_pages) return {owner.sequence, token};
        const int of_sequence = int(token) / page_size;
        const int64_t page = integer_at(cache.page_table, owner.sequence, of_sequence);
        if (page < 0 || page >= cache.pages) return {0, -1};
        return {0, page * cache.page_rows + token - int64_t(of_sequence) * page_size};
    }
};

template <class Unit>
__device__ __forceinline__ void append_units(const CopiedRows& rows, const Divisor& units, int heads, int64_t batch,
                                             int64_t row, AppendParams::Place to, int first, int step) {
    const TensorView &call = rows.call, &copy = rows.copy;
    const Unit* const from = static_cast<const Unit*>(call.data) + batch * call.batch + row * call.row;
    Unit* const place = static_cast<Unit*>(copy.data) + to.batch * copy.batch + to.row * copy.row;
    for (int n = first; n < heads * rows.units; n += step) {
        const int head = n / units;
        const int64_t unit = n - head * units;
        place[head * copy.head + unit * copy.column] = from[head * call.head + unit * call.column];
    }
}

__device__ __forceinline__ void append_rows(const CopiedRows& rows, const Divisor& units, int heads, int64_t batch,
                                            int64_t row, AppendParams::Place to, int first, int step) {
    switch (rows.unit) {
        case 16: return append_units<uint4>(rows, units, heads, batch, row, to, first, step);
        case 8: return append_units<uint64_t>(rows, units, heads, batch, row, to, first, step);
        case 4: return append_units<uint32_t>(rows, units, heads, batch, row, to, first, step);
        default: return append_units<uint16_t>(rows, units, heads, batch, row, to, first, step);
    }
}

// What a thread reads first, on its way while the token's place is looked up.
__device__ __forceinline__ void prefetch_row(const CopiedRows& rows, const Divisor& units, int heads, int64_t batch,
                                             int64_t row, int first) {
    if (first >= heads * rows.units) return;
    const TensorView& call = rows.call;
    const int head = first / units;
    const int64_t unit = first - head * units;
    const int64_t at = batch * call.batch + row * call.row + head * call.head + unit * call.column;
    ptx::prefetch_l2(static_cast<const char*>(call.data) + at * rows.unit);
}

static __global__ void __launch_bounds__(append_threads)
    append_kernel(const __grid_constant__ AppendParams params) {
    const int of_cta = int(threadIdx.x) / params.threads_of_token, step = params.threads_of_token;
    const int first = int(threadIdx.x) - of_cta * step;
    if (of_cta >= params.tokens_of_cta) return;
    const int64_t all = int64_t(gridDim.x) * params.tokens_of_cta;
    for (int64_t n = int64_t(blockIdx.x) * params.tokens_of_cta + of_cta; n < params.tokens; n += all) {
        // In 64 bits a division takes ten times as long.
        const int64_t seq_q = params.rows.seq_q;
        const int64_t batch = n <= INT32_MAX ? unsigned(n) / unsigned(seq_q) : n / seq_q;
        const int64_t row = n - batch * seq_q;
        prefetch_row(params.k, params.units_k, params.heads, batch, row, first);
        prefetch_row(params.v, params.units_v, params.heads, batch, row, first);
        const AppendParams::Place to = params.place_of(batch, row);
        if (to.row < 0) continue;
        append_rows(params.k, params.units_k, params.heads, batch, row, to, first, step);
        append_rows(params.v, params.units_v, params.heads, batch, row, to, first, step);
    }
}

// ---- launch ----
void append_to_cache(const CacheAppend& args) {
    const runtime::CurrentDevice current(args.device);
    const Problem& p = *args.problem;
    const int64_t element = dtype_row(p.dtype).bytes;
    AppendParams params{};
    params.cache = args.cache, params.counts = args.counts;
    params.k = CopiedRows::of(args.k_new, args.k, p.head_dim, element);
    if (args.v.data) params.v = CopiedRows::of(args.v_new, args.v, p.head_dim_v, element);
    params.rows = CacheRowsOfCall::of(p), params.tokens = p.batch * p.seq_q, params.heads = int(p.heads_kv);
    const int64_t threads = std::min<int64_t>(params.heads * int64_t(std::max(params.k.units, params.v.units)),
                                              append_threads);
    params.threads_of_token = Divisor(threads), params.tokens_of_cta = int(append_threads / threads);
    params.units_k = Divisor(params.k.units), params.units_v = Divisor(params.v.units);
    params.page_size = Divisor(p.page_size), params.has_pages = p.page_size != 0;
    constexpr int64_t most_ctas = 4096;
    const unsigned ctas = unsigned(std::min(ceil_div(params.tokens, int64_t(params.tokens_of_cta)), most_ctas));
    runtime::launch(append_kernel, {ctas, unsigned(append_threads), 0}, args.stream, params);
}

void prepare_cache_append(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(append_kernel, 0);
}

}  // namespace spattn::any
