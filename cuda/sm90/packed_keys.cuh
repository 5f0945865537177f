// SPDX-License-Identifier: MIT
// Keys that many queries see stand in listed tiles, and there alone. Every block of queries visits these tiles, so
// their rows of k and v are copied once a call to where the copy engine brings them as boxes, and not row by row each
// time.
#pragma once

#include <algorithm>

#include "any/element.cuh"
#include "core/math.h"
#include "ptx/global.cuh"
#include "ptx/grid.cuh"
#include "runtime/launch.h"
#include "sm90/block_forward.h"

namespace spattn::sm90 {

struct PackedKeys {
    TensorView k, v;                // operands
    TensorView packed_k, packed_v;  // [batch, head, place, column], in the workspace
    const int32_t* tokens;          // [place], in device memory
    int places, heads, batch;
    int chunks_k, chunks_v;  // of 16 bytes, a row
    unsigned* counter;       // to be cleared as well, or null
};

constexpr int pack_threads = 256;

// A warp a row of k and of v, of elements of 16 bits. A place without a token gets zeros.
static __global__ void __launch_bounds__(pack_threads) pack_keys_kernel(const __grid_constant__ PackedKeys keys) {
    ptx::let_next_grid_begin();
    if (keys.counter && blockIdx.x == 0 && threadIdx.x == 0) *keys.counter = 0;
    constexpr int warps = pack_threads / 32;
    const int lane = int(threadIdx.x % 32);
    for (int64_t row = int64_t(blockIdx.x) * warps + threadIdx.x / 32;
         row < int64_t(keys.batch) * keys.heads * keys.places; row += int64_t(gridDim.x) * warps) {
        const int64_t entry = row / keys.places / keys.heads, head = row / keys.places % keys.heads;
        const int64_t place = row % keys.places, token = keys.tokens[place];
        for (int chunk = lane; chunk < keys.chunks_k + keys.chunks_v; chunk += 32) {
            const bool is_k = chunk < keys.chunks_k;
            const TensorView &from = is_k ? keys.k : keys.v, &to = is_k ? keys.packed_k : keys.packed_v;
            const int column = 8 * (is_k ? chunk : chunk - keys.chunks_k);
            uint32_t x[4] = {0, 0, 0, 0};
            if (token != no_token) ptx::load_global(x, any::row_of<uint16_t>(from, entry, head, token) + column);
            ptx::store_global(any::row_of<uint16_t>(to, entry, head, place) + column, x);
        }
    }
}

inline PackedKeys make_packed_keys(const ForwardArgs& args, void* to) {
    const Problem& p = *args.problem;
    PackedKeys keys{};
    keys.k = args.k, keys.v = args.v;
    keys.tokens = args.layout.keys.tokens;
    keys.places = int(packed_places(args.layout)), keys.heads = int(p.heads_kv), keys.batch = int(p.batch);
    keys.chunks_k = int(p.head_dim) / 8, keys.chunks_v = int(p.head_dim_v) / 8;
    const int64_t rows = p.heads_kv * keys.places;  // of a batch entry
    keys.packed_k = {to, rows * p.head_dim, keys.places * p.head_dim, p.head_dim, 1};
    char* const v = static_cast<char*>(to) + p.batch * rows * p.head_dim * dtype_row(p.dtype).bytes;
    keys.packed_v = {v, rows * p.head_dim_v, keys.places * p.head_dim_v, p.head_dim_v, 1};
    return keys;
}

inline void launch_packing(const PackedKeys& keys, const ForwardArgs& args) {
    constexpr int64_t ctas = 4;  // a processor
    const int64_t rows = int64_t(keys.batch) * keys.heads * keys.places;
    const int64_t blocks = std::min(ceil_div(rows, pack_threads / 32), ctas * runtime::count_processors(args.device));
    runtime::launch(pack_keys_kernel, {unsigned(blocks), pack_threads, 0}, args.stream, keys);
}

}  // namespace spattn::sm90
