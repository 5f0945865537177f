// SPDX-License-Identifier: MIT
// Queries go to the blocks of keys that their lists name, and come back: see plan/dispatch.h.
//
//     lists      by key          gather_transpose.cuh
//     starts     a CTA a plane   where each block's tiles begin: copies of one block fill them, the last one partly
//     entries    a thread each   where an entry's copies stand
//     tiles      a CTA each      what of the block the tile's queries see, as masks; their rows, copied
//     columns    a warp each     backward: the tiles of each block of keys
//     tasks      a thread each   as long as their rows are now
//     combine    lanes a row     forward: results of a row's copies, weighted by exp(lse_i - lse); backward: sums of dq
//
// Rows without a query, and queries that see nothing of a block, are zeros: what a query holds that sees nothing does
// not reach dk and dv. Backward a copy is told its query's lse and delta: p and ds are then those of the whole row, of
// which the copy sees a part, and dk and dv are sums over copies as over any queries.
//
// What limits it: a copy forward is a row of q read, written and read, and one of out written and read, 1.25 KiB at
// head_dim 128, for 64 KFLOP in blocks of 128 keys. That would let 8 blocks of 128 a query, 16 heads of 16K tokens, take
// 0.6 ms of an H200's memory. They take 1.06: the row 0.46, copies 0.21 to write (2.8 TB/s) and 0.22 to combine
// (2.7 TB/s), and what is done with lists 0.14. Combining took 0.51 while each warp had one row, with 8 bytes a lane:
// divisions and exchanges among lanes are paid for once a warp. Counting and filling took 0.35 while all entries met at
// counters in memory. With eight copies of a row on their way, not four, registers leave room for fewer rows, and
// combining took 0.26.
//
// Where a tile of 128 keys is two blocks, each tile of queries has a mask of 16,384 bits, whose places a table tells. A
// thread makes 32 of them: tiles backward of 64 heads on 4 over 16K tokens, 16 blocks of 64 a query, take 4.1 ms, the
// 8.6 GB that they write among it. While each lane made a bit, and a warp voted, they took 12.2.
#pragma once

#include <algorithm>

#include "any/block_backward.h"
#include "any/dispatch.h"
#include "any/gather_transpose.cuh"
#include "any/row_end.cuh"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace spattn::any {

struct DispatchParams {
    TransposeParams lists;
    DispatchRound to;
    int64_t seq_q, heads_q;                  // of the call
    TensorView q, dout;                      // of the call
    // Backward: of the call's rows, and of copies, at the start of the row's workspace.
    const float *row_lse, *row_delta;
    float *copy_lse, *copy_delta;
    int head_dim, head_dim_v;
    bool has_words;                          // rows of q and dout are words of 16 bytes

    __device__ int64_t batch_of(int plane) const { return to.first_batch + unsigned(plane) / unsigned(to.heads); }
    __device__ int first_head_of(int plane) const {  // of queries
        return (int(to.first_head) + int(unsigned(plane) % unsigned(to.heads))) * to.group;
    }
};

constexpr int tile_threads = 128, most_tile_rows = 256, step_threads = 256, combine_threads = 256;
constexpr int combine_ctas = 4;    // of a processor, at least: many rows must be on their way
constexpr int copies_at_once = 4;  // of a row, whose columns are on their way

// How many neighbouring lanes have a row of so many words: a power of two, so that a warp has several short rows.
__host__ __device__ inline int lanes_of_row(int words) {
    int lanes = 32;
    while (lanes / 2 >= words) lanes /= 2;
    return lanes;
}

// ---- starts and entries ----
static __global__ void __launch_bounds__(scan_threads) starts_kernel(const __grid_constant__ DispatchParams params) {
    const int64_t blocks = params.to.blocks;
    int32_t* const starts = params.to.tile_begin + int64_t(blockIdx.x) * (blocks + 1);
    const int64_t copies = params.to.copies_of_entry, rows = params.to.tile_q;
    scan<int32_t>(
        blocks,
        [&](int64_t block) {
            return int32_t((params.lists.span_of(blockIdx.x, block).count * copies + rows - 1) / rows);
        },
        [&](int64_t block, int32_t, int32_t before) { starts[block] = before; });
}

// An entry is looked for among those of its stretch.
static __global__ void __launch_bounds__(step_threads) entries_of_copies_kernel(
    const __grid_constant__ DispatchParams params) {
    const DispatchRound& to = params.to;
    const ListSizes& sizes = to.sizes;
    const unsigned most = unsigned(sizes.most), lists = unsigned(sizes.lists);
    const unsigned all = unsigned(sizes.planes) * lists * most;
    for (unsigned n = blockIdx.x * step_threads + threadIdx.x; n < all; n += gridDim.x * step_threads) {
        const unsigned of_list = n / most, plane = of_list / lists, list = of_list % lists;
        const KeyList entries = params.lists.lists.list(plane, list);
        const int entry = int(n % most);
        const int64_t named = entry < entries.count ? entries.block(entries.load(entry), sizes.blocks) : -1;
        int copy = -1;
        if (named >= 0) {
            const unsigned block = unsigned(named) / unsigned(to.named.joined);
            const int number = params.lists.number_of(list, named);
            const int64_t* const stretch = params.lists.begin_of(plane) + params.lists.place_of(list, named);
            const int64_t begin = params.lists.span_of(plane, block).begin;
            const int32_t* const names = params.lists.lists_of(plane) + begin;
            int low = int(stretch[0] - begin), high = int(stretch[1] - begin);
            while (low < high) {  // the first that is this one; those of equal entries are equal
                const int middle = (low + high) / 2;
                if (names[middle] < number) low = middle + 1;
                else high = middle;
            }
            copy = to.tile_begin[plane * unsigned(to.blocks + 1) + block] * to.tile_q + low * to.copies_of_entry;
        }
        to.copy_of_entry[n] = copy;
    }
}

// ---- tiles ----
// Bits [first, first + count) of a word, which may begin before it or end behind it.
__device__ __forceinline__ uint64_t keys_of_part(int first, int count) {
    const auto below = [](int end) { return end <= 0 ? 0 : end >= 64 ? ~uint64_t(0) : (uint64_t(1) << end) - 1; };
    return below(first + count) & ~below(first);
}

// Rows of a tile, one after the other, from those of their tokens, which are no_token where a row is zeros. has_words: a
// row is so many words of 16 bytes, one for each of some neighbouring threads, which have several rows on their way.
template <class T>
__device__ __forceinline__ void copy_rows(T* to, const TensorView& from, int64_t batch, const int* tokens,
                                          const int* heads, int rows, int columns, bool has_words) {
    constexpr int at_once = 4, width = 16 / sizeof(T);
    if (!has_words) {
        for (int n = int(threadIdx.x); n < rows * columns; n += tile_threads) {
            const int row = n / columns, column = n % columns;
            to[n] = tokens[row] != no_token ? row_of<T>(from, batch, heads[row], tokens[row])[column * from.column]
                                            : T(0.0f);
        }
        return;
    }
    const int words = columns / width, lanes = lanes_of_row(words);
    const int rows_at_once = tile_threads / lanes, lane = int(threadIdx.x) % lanes;
    for (int first = int(threadIdx.x) / lanes; first < rows; first += at_once * rows_at_once)
        for (int word = lane; word < words; word += lanes) {
            uint4 x[at_once];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int row = first + i * rows_at_once;
                x[i] = uint4{};
                if (row < rows && tokens[row] != no_token)
                    x[i] = reinterpret_cast<const uint4*>(row_of<T>(from, batch, heads[row], tokens[row]))[word];
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int row = first + i * rows_at_once;
                if (row < rows) reinterpret_cast<uint4*>(to + row * columns)[word] = x[i];
            }
        }
}

template <class T, bool IsBackward>
__global__ void __launch_bounds__(tile_threads) tiles_kernel(const __grid_constant__ DispatchParams params) {
    constexpr int most_words = 2;  // of a row: blocks have 64 or 128 keys
    // Two words for each row and 64 keys, and one for the bits of masks that are always 1, or 0.
    __shared__ uint32_t kept[2 * most_tile_rows * most_words + 1];
    __shared__ int row_tokens[most_tile_rows], row_heads[most_tile_rows], row_parts[most_tile_rows];
    __shared__ int found_block;
    const DispatchRound& to = params.to;
    const ListSizes& sizes = to.sizes;
    const GatherLists& lists = params.lists.lists;
    const int thread = int(threadIdx.x), words = to.tile_k / known_block, joined = to.named.joined;
    static_assert(bit_of_all % 32 == 30 && bit_of_none % 32 == 31, "bits of the word behind all others");
    const unsigned behind = 2 * unsigned(to.tile_q * words);
    if (thread == 0) kept[behind] = 1u << 30;
    const int tiles = int(to.tiles), all_tiles = int(sizes.planes) * tiles;  // 32 bits: fits() sees to that
    for (int n = int(blockIdx.x); n < all_tiles; n += int(gridDim.x)) {
        const int plane = n / tiles, tile = n % tiles;
        const int64_t batch = params.batch_of(plane);
        const int32_t* const starts = to.tile_begin + int64_t(plane) * (to.blocks + 1);
        Slice slice{n * to.tiles_k, n * to.tiles_k};
        if (tile >= starts[to.blocks]) {
            if (thread == 0) to.by_query.slices[n] = slice, to.by_query.lengths[n] = 0;
            continue;
        }
        for (int i = thread; i < to.blocks; i += tile_threads)
            if (starts[i] <= tile && tile < starts[i + 1]) found_block = i;
        __syncthreads();  // somebody has found it
        const int block = found_block;
        const TransposeParams::Span span = params.lists.span_of(plane, block);
        const int32_t* const names = params.lists.lists_of(plane) + span.begin;
        const int entries = int(span.count);
        for (int row = thread; row < to.tile_q; row += tile_threads) {
            const int copy = (tile - starts[block]) * to.tile_q + row, entry = copy / to.copies_of_entry;
            const int within = copy % to.copies_of_entry;
            int64_t token = params.seq_q;
            const int number = entry < entries ? names[entry] : 0;
            if (entry < entries) token = (to.first_list + number / joined) * int64_t(sizes.block_q) + within / to.group;
            row_parts[row] = number % joined;
            row_tokens[row] = token < params.seq_q ? int(token) : no_token;
            row_heads[row] = params.first_head_of(plane) + within % to.group;
        }
        __syncthreads();  // all rows are known
        unsigned sees = 0;  // bit i: what this thread's i-th row sees of the block is not nothing
        int found = 0, length = 0, last = no_pair;
        for (int part = 0; part < to.tiles_k; ++part) {
            const int tile_of_keys = block * to.tiles_k + part;
            if (tile_of_keys >= to.rows_k) break;
            bool is_full = true, is_seen = false;
            for (int row = thread, i = 0; row < to.tile_q; row += tile_threads, ++i)
                for (int word = 0; word < words; ++word) {
                    uint64_t bits = 0;
                    if (row_tokens[row] != no_token) {
                        const int token = row_tokens[row];
                        const int mask = lists.known_mask(batch * params.heads_q + row_heads[row], token / known_block,
                                                          tile_of_keys * words + word);
                        bits = mask == full_block ? ~uint64_t(0)
                               : mask == no_pair
                                   ? 0
                                   : lists.known.masks[int64_t(mask) * lists.known.mask_words + token % known_block];
                        if (joined > 1)
                            bits &= keys_of_part(row_parts[row] * sizes.block_k - word * known_block, sizes.block_k);
                        is_full &= bits == ~uint64_t(0);
                        if (bits) is_seen = true, sees |= 1u << i;
                    }
                    const int at = 2 * (row * words + word);
                    kept[at] = uint32_t(bits), kept[at + 1] = uint32_t(bits >> 32);
                }
            is_full = !__syncthreads_or(!is_full), is_seen = __syncthreads_or(is_seen);
            const int state = !is_seen ? no_pair : is_full ? full_block : n * to.tiles_k + part;
            if (state >= 0) {
                uint32_t* const mask = reinterpret_cast<uint32_t*>(to.masks + int64_t(state) * to.mask_words);
                // 32 bits are made by a thread: each enters at the top, and moves those before it down.
                for (int word = thread; word < 2 * to.mask_words; word += tile_threads) {
                    const uint4* const at = reinterpret_cast<const uint4*>(to.bits + 32 * word);
                    unsigned made = 0;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const uint4 pairs = at[i];
                        for (const unsigned pair : {pairs.x, pairs.y, pairs.z, pairs.w})
                            for (const unsigned from : {pair & 0xFFFF, pair >> 16})
                                made = made >> 1 | kept[min(from / 32, behind)] >> from % 32 << 31;
                    }
                    mask[word] = made;
                }
                __syncthreads();  // before the next part overwrites what is kept
            }
            if (thread) continue;
            to.states[n * to.tiles_k + part] = state;
            if (state == no_pair) {
                last = no_pair;
                continue;
            }
            Run* const runs = to.by_query.runs + slice.begin;
            if (state == full_block && last == full_block) ++runs[found - 1].count;
            else runs[found++] = {tile_of_keys, 1, state};
            last = state, ++length;
        }
        for (int row = thread, i = 0; row < to.tile_q; row += tile_threads, ++i)
            if (!(sees >> i & 1)) row_tokens[row] = no_token;
        if (thread == 0) {
            slice.end += found;
            to.by_query.slices[n] = slice, to.by_query.lengths[n] = length;
        }
        __syncthreads();  // it is known of each row whether it sees something
        const int64_t first = int64_t(plane) * to.rows_q + int64_t(tile) * to.tile_q;
        const auto copy = [&](const TensorView& into, const TensorView& from, int columns) {
            copy_rows(static_cast<T*>(into.data) + first * columns, from, batch, row_tokens, row_heads, to.tile_q,
                      columns, params.has_words);
        };
        copy(to.q, params.q, params.head_dim);
        if constexpr (IsBackward) {
            copy(to.dout, params.dout, params.head_dim_v);
            for (int row = thread; row < to.tile_q; row += tile_threads) {
                const bool is_there = row_tokens[row] != no_token;
                const int64_t at = (batch * params.heads_q + row_heads[row]) * params.seq_q + row_tokens[row];
                params.copy_lse[first + row] = is_there ? params.row_lse[at] : 0;
                params.copy_delta[first + row] = is_there ? params.row_delta[at] : 0;
            }
        }
        __syncthreads();  // before the rows are another tile's
    }
}

// ---- columns and tasks ----
static __global__ void __launch_bounds__(step_threads) columns_kernel(const __grid_constant__ DispatchParams params) {
    constexpr int warps = step_threads / 32;
    const DispatchRound& to = params.to;
    const int lane = int(threadIdx.x) % 32;
    for (int64_t n = int64_t(blockIdx.x) * warps + threadIdx.x / 32; n < to.sizes.planes * to.rows_k;
         n += int64_t(gridDim.x) * warps) {
        const int64_t plane = n / to.rows_k;
        const int row = int(n % to.rows_k), block = row / to.tiles_k, part = row % to.tiles_k;
        const int32_t* const starts = to.tile_begin + plane * (to.blocks + 1) + block;
        const int first = starts[0], end = starts[1];
        const int64_t begin = plane * to.by_key.room + int64_t(first) * to.tiles_k + int64_t(part) * (end - first);
        int found = 0;
        for (int tile = first + lane; tile - lane < end; tile += 32) {
            const int state = tile < end ? to.states[(plane * to.tiles + tile) * to.tiles_k + part] : no_pair;
            const unsigned all = __ballot_sync(~0u, state != no_pair);
            if (state != no_pair)
                to.by_key.runs[begin + found + __popc(all & ((1u << lane) - 1))] = {tile, 1, state};
            found += __popc(all);
        }
        if (lane) continue;
        to.by_key.slices[n] = {int32_t(begin), int32_t(begin) + found};
        to.by_key.lengths[n] = found;
    }
}

static __global__ void __launch_bounds__(step_threads) round_tasks_kernel(
    const __grid_constant__ DispatchParams params) {
    const int64_t thread = int64_t(blockIdx.x) * step_threads + threadIdx.x;
    const int64_t threads = int64_t(gridDim.x) * step_threads;
    const DispatchRound& to = params.to;
    for (int64_t head = thread; head < to.sizes.planes; head += threads) to.kind_of_head[head] = int32_t(head);
    for (const CallTasks& tasks : to.tasks) {
        const CallAxis& axis = tasks.owner == Owner::queries ? to.by_query : to.by_key;
        for (int64_t n = thread; n < tasks.from.num_tasks; n += threads) {
            Task task = tasks.from.tasks[n];
            task.take = axis.lengths[int64_t(task.head) * axis.rows + task.row];
            tasks.to[n] = task;
        }
    }
}

// ---- combine ----
// A row of the call that is of this round. All counts are of 32 bits, which divide in a tenth of the time.
struct RoundRow {
    int plane, token, head, within;  // of the call; within: its copy among those of an entry
    int64_t batch;
    const int32_t* copies;           // of its list's entries

    __device__ static unsigned of_head(const DispatchParams& params) {
        const ListSizes& sizes = params.to.sizes;
        return unsigned(min(sizes.lists * sizes.block_q, params.seq_q - params.to.first_list * sizes.block_q));
    }
    __device__ static unsigned heads(const DispatchParams& params) {
        return unsigned(params.to.sizes.planes) * unsigned(params.to.group);
    }
    __device__ RoundRow(const DispatchParams& params, unsigned n, unsigned rows) {  // rows: of a head
        const DispatchRound& to = params.to;
        const unsigned group = unsigned(to.group), block_q = unsigned(to.sizes.block_q);
        const unsigned row = n / group % rows, in_group = n % group, list = row / block_q;
        plane = int(n / group / rows), batch = params.batch_of(plane);
        token = int(to.first_list * block_q + row), head = params.first_head_of(plane) + int(in_group);
        within = int(row % block_q * group + in_group);
        copies = to.copy_of_entry + (int64_t(plane) * to.sizes.lists + list) * to.sizes.most;
    }
    // The row of a copy among those of the plane, or -1.
    __device__ int copy(int entry, int most) const {
        const int first = entry < most ? copies[entry] : -1;
        return first < 0 ? -1 : first + within;
    }
};

// The lanes of a row of the call, which have Width neighbouring columns each.
template <int Width>
struct RowLanes {
    int count, lane;

    __host__ __device__ static int count_of(int columns) {
        return max(lanes_of_row((columns + Width - 1) / Width), copies_at_once);
    }
    __device__ explicit RowLanes(int columns) : count(count_of(columns)), lane(int(threadIdx.x) % count) {}
    // join(a, b) of all lanes' x, in all of them.
    template <class Join>
    __device__ float join(float x, Join join) const {
        for (int n = count / 2; n; n /= 2) x = join(x, __shfl_xor_sync(~0u, x, n));
        return x;
    }
    template <class X>
    __device__ X of_lane(X x, int lane) const {
        return __shfl_sync(~0u, x, lane, count);
    }
};

// work(row, is_there) for each row of the round. Where rows have run out, lanes work on the last one, which they leave
// as it is.
template <int Width, class Work>
__device__ __forceinline__ void for_each_row(const DispatchParams& params, const RowLanes<Width>& lanes, Work work) {
    const unsigned of_head = RoundRow::of_head(params), rows = RoundRow::heads(params) * of_head;
    const unsigned at_once = combine_threads / unsigned(lanes.count);
    for (unsigned first = blockIdx.x * at_once; first < rows; first += gridDim.x * at_once) {
        const unsigned n = first + threadIdx.x / unsigned(lanes.count);
        work(RoundRow(params, min(n, rows - 1), of_head), n < rows);
    }
}

// Neighbouring elements, as memory has them.
template <class T, int Width>
struct alignas(Width * sizeof(T)) Columns {
    T x[Width];
};

// put(column, sums) for each Width columns of the sum of copies' rows, with weights weigh(copy). Rows with weight 0 are
// not read into the sum: what they hold may be NaN.
template <Dtype D, int Width, class Weigh, class Put>
__device__ __forceinline__ void sum_copies(const DispatchRound& to, const RoundRow& row, const RowLanes<Width>& lanes,
                                           const TensorView& rows, int columns, Weigh weigh, Put put) {
    using T = ElementOf<D>;
    const int most = int(to.sizes.most);
    const T* const of_plane = static_cast<const T*>(rows.data) + row.plane * to.rows_q * columns;
    for (int first_column = 0; first_column < columns; first_column += lanes.count * Width) {
        const int column = first_column + lanes.lane * Width;
        float sum[Width] = {};
        for (int first = 0; first < most; first += lanes.count) {
            const int mine = row.copy(first + lanes.lane, most);
            const float own = mine < 0 ? 0 : weigh(mine);
            const int count = min(most - first, lanes.count);
            for (int next = 0; next < count; next += copies_at_once) {
                Columns<T, Width> x[copies_at_once];
                float weight[copies_at_once];
#pragma unroll
                for (int i = 0; i < copies_at_once; ++i) {  // what is behind the count has weight 0
                    weight[i] = lanes.of_lane(own, next + i);
                    const int copy = lanes.of_lane(mine, next + i);
                    x[i] = Columns<T, Width>{};
                    if (weight[i] != 0 && column < columns)
                        x[i] = *reinterpret_cast<const Columns<T, Width>*>(of_plane + int64_t(copy) * columns + column);
                }
#pragma unroll
                for (int i = 0; i < copies_at_once; ++i)
#pragma unroll
                    for (int c = 0; c < Width; ++c) sum[c] = fmaf(weight[i], to_real(x[i].x[c]), sum[c]);
            }
        }
        if (column < columns) put(column, sum);
    }
}

// Width columns of a row whose columns follow each other, or one of any row.
template <class T, int Width>
__device__ __forceinline__ void put_columns(T* row, const TensorView& of, int column, const float (&x)[Width],
                                            float factor) {
    Columns<T, Width> made;
#pragma unroll
    for (int c = 0; c < Width; ++c) from_real(x[c] * factor, made.x[c]);
    *reinterpret_cast<Columns<T, Width>*>(row + column * of.column) = made;
}

template <Dtype D, int Width>
__global__ void __launch_bounds__(combine_threads, combine_ctas)
    combine_copies_kernel(const __grid_constant__ DispatchParams params,
                          const __grid_constant__ ForwardOutputs outputs) {
    const DispatchRound& to = params.to;
    const int columns = params.head_dim_v, most = int(to.sizes.most);
    const RowLanes<Width> lanes(columns);
    for_each_row(params, lanes, [&](const RoundRow& row, bool is_there) {
        const float* const lse = static_cast<const float*>(to.lse.data) + row.plane * to.rows_q;
        const float* const top = static_cast<const float*>(to.max_logits.data) + row.plane * to.rows_q;
        const auto highest = [](float a, float b) { return fmaxf(a, b); };
        RowState<float> state{-INFINITY, 0, -INFINITY};
        for (int entry = lanes.lane; entry < most; entry += lanes.count) {
            const int copy = row.copy(entry, most);
            if (copy < 0) continue;
            state.m = fmaxf(state.m, lse[copy]);
            if (outputs.max_logits.data) state.top = fmaxf(state.top, top[copy]);
        }
        state.m = lanes.join(state.m, highest);
        if (outputs.max_logits.data) state.top = lanes.join(state.top, highest);
        const auto weigh = [&](int copy) { return weight(lse[copy], state.m); };
        for (int entry = lanes.lane; entry < most; entry += lanes.count) {
            const int copy = row.copy(entry, most);
            if (copy >= 0) state.l += weigh(copy);
        }
        state.l = lanes.join(state.l, [](float a, float b) { return a + b; });
        RowEnd<D> end(outputs, row.batch, row.head, row.token);
        end.finish(state);
        auto* const out = row_of<ElementOf<D>>(outputs.out, row.batch, row.head, row.token);
        sum_copies<D>(to, row, lanes, to.out, columns, weigh, [&](int column, const float(&x)[Width]) {
            if (is_there) put_columns(out, outputs.out, column, x, end.mine);
        });
        if (is_there && lanes.lane == 0) end.write_state(state, 0);
    });
}

template <Dtype D, int Width>
__global__ void __launch_bounds__(combine_threads, combine_ctas)
    sum_copies_kernel(const __grid_constant__ DispatchParams params, const __grid_constant__ TensorView dq) {
    const RowLanes<Width> lanes(params.head_dim);
    for_each_row(params, lanes, [&](const RoundRow& row, bool is_there) {
        auto* const to = row_of<ElementOf<D>>(dq, row.batch, row.head, row.token);
        sum_copies<D>(params.to, row, lanes, params.to.dq, params.head_dim, [](int) { return 1.0f; },
                      [&](int column, const float(&x)[Width]) {
                          if (is_there) put_columns(to, dq, column, x, 1);
                      });
    });
}

// Gradients of keys that several rounds add to.
struct AddParams {
    TensorView from, to;  // of the round; of the call, from the round's first head on
    float* sums;
    int64_t rows, seq_k, heads;
    int columns;
    bool is_first, is_last;
};

template <Dtype D>
__global__ void __launch_bounds__(step_threads) add_keys_kernel(const __grid_constant__ AddParams params) {
    for (int64_t n = int64_t(blockIdx.x) * step_threads + threadIdx.x; n < params.rows * params.columns;
         n += int64_t(gridDim.x) * step_threads) {
        float x = to_real(static_cast<const ElementOf<D>*>(params.from.data)[n]);
        if (!params.is_first) x += params.sums[n];
        if (!params.is_last) {
            params.sums[n] = x;
            continue;
        }
        const int64_t row = n / params.columns, plane = row / params.seq_k;
        const int64_t column = n % params.columns;
        from_real(x, row_of<ElementOf<D>>(params.to, plane / params.heads, plane % params.heads,
                                          row % params.seq_k)[column * params.to.column]);
    }
}

// ---- launch ----
inline unsigned dispatch_ctas(int64_t wanted) { return unsigned(std::clamp<int64_t>(wanted, 1, most_list_ctas)); }

inline DispatchParams make_dispatch_params(const CallArgs& args, const DispatchRound& to, const TensorView& q) {
    const Problem& p = *args.problem;
    GatherLists lists = GatherLists::of(args);
    lists.sizes = to.sizes, lists.heads_kv = int(to.heads);
    const auto shift = [&](IndexView& x) {
        const int64_t by = to.first_batch * x.batch + to.first_list * x.row + to.first_head * x.head;
        if (x.data) x.data = static_cast<const char*>(x.data) + by * (x.is_wide ? 8 : 4);
    };
    shift(lists.call.indices), shift(lists.call.counts);
    return {{lists, to.named}, to, p.seq_q, p.heads_q, q, {}, nullptr, nullptr, nullptr, nullptr, int(p.head_dim),
            int(p.head_dim_v), is_wide(q) && p.head_dim % 8 == 0};
}

template <class T, bool IsBackward>
void send_copies(const DispatchParams& params, void* stream) {
    const DispatchRound& to = params.to;
    const ListSizes& sizes = to.sizes;
    const auto launch = [&](auto kernel, int64_t threads) {
        runtime::launch(kernel, {dispatch_ctas(divide_up(threads, step_threads)), unsigned(step_threads), 0}, stream,
                        params);
    };
    transpose_lists(params.lists, stream);
    runtime::launch(starts_kernel, {unsigned(sizes.planes), unsigned(scan_threads), 0}, stream, params);
    launch(entries_of_copies_kernel, sizes.planes * sizes.lists * sizes.most);
    runtime::launch(tiles_kernel<T, IsBackward>,
                    {dispatch_ctas(sizes.planes * to.tiles), unsigned(tile_threads), 0}, stream, params);
    if (IsBackward) launch(columns_kernel, 32 * sizes.planes * to.rows_k);
    launch(round_tasks_kernel, std::max<int64_t>(to.tasks[0].from.num_tasks, to.tasks[1].from.num_tasks));
}

// launch(width, shape): lanes have 16 bytes of a row where both copies and `to` allow that, or an element.
template <class Launch>
void launch_combine(const DispatchParams& params, const TensorView& to, int columns, Launch launch) {
    const int64_t rows = params.to.sizes.planes * params.to.sizes.lists * params.to.copies_of_entry;
    const auto launch_with = [&](auto width) {
        const int64_t lanes = rows * RowLanes<width>::count_of(columns);
        launch(width, runtime::Shape{dispatch_ctas(divide_up(lanes, combine_threads)), unsigned(combine_threads), 0});
    };
    if (is_wide(to) && columns % 8 == 0) launch_with(std::integral_constant<int, 8>());
    else launch_with(std::integral_constant<int, 1>());
}

template <Dtype D>
void Dispatch<D>::send(const ForwardArgs& args, const DispatchRound& to) {
    const runtime::CurrentDevice current(args.device);
    send_copies<ElementOf<D>, false>(make_dispatch_params(args, to, args.q), args.stream);
}

template <Dtype D>
void Dispatch<D>::combine(const ForwardArgs& args, const DispatchRound& from) {
    const runtime::CurrentDevice current(args.device);
    const DispatchParams params = make_dispatch_params(args, from, args.q);
    launch_combine(params, args.out, params.head_dim_v, [&](auto width, const runtime::Shape& shape) {
        runtime::launch(combine_copies_kernel<D, width>, shape, args.stream, params, make_outputs<float>(args));
    });
}

template <Dtype D>
void Dispatch<D>::sum_rows(const BackwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    BlockBackward<D>::rows(args);
    BlockBackward<D>::sinks(args);
}

template <Dtype D>
void Dispatch<D>::send_back(const BackwardArgs& args, const DispatchRound& to) {
    const runtime::CurrentDevice current(args.device);
    DispatchParams params = make_dispatch_params(args, to, args.q);
    const auto rows = BackwardSpace<float>::at(to.sums_of_rows, *args.problem, args.layout, args.tasks);
    params.dout = args.dout, params.row_lse = rows.lse, params.row_delta = rows.delta;
    params.copy_lse = reinterpret_cast<float*>(static_cast<char*>(args.workspace) + to.bytes);
    params.copy_delta = params.copy_lse + to.sizes.planes * to.rows_q;
    params.has_words &= is_wide(args.dout) && args.problem->head_dim_v % 8 == 0;
    send_copies<ElementOf<D>, true>(params, args.stream);
}

template <Dtype D>
void Dispatch<D>::combine_back(const BackwardArgs& args, const DispatchRound& from) {
    const runtime::CurrentDevice current(args.device);
    const DispatchParams params = make_dispatch_params(args, from, args.q);
    launch_combine(params, args.dq, params.head_dim, [&](auto width, const runtime::Shape& shape) {
        runtime::launch(sum_copies_kernel<D, width>, shape, args.stream, params, args.dq);
    });
    if (!from.shares_keys) return;
    const Problem& p = *args.problem;
    const auto add = [&](const TensorView& made, const TensorView& to, float* sums, int64_t columns) {
        const int64_t rows = from.sizes.planes * p.seq_k;
        const AddParams add{made,      from.of_keys(to, D), sums, rows, p.seq_k, from.heads, int(columns),
                            from.is_first_of_keys, from.is_last_of_keys};
        runtime::launch(add_keys_kernel<D>,
                        {dispatch_ctas(divide_up(rows * columns, step_threads)), unsigned(step_threads), 0},
                        args.stream, add);
    };
    add(from.dk, args.dk, from.dk_sums, p.head_dim);
    if (!p.value_in_key) add(from.dv, args.dv, from.dv_sums, p.head_dim_v);
}

template <Dtype D>
void Dispatch<D>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    prepare_transpose();
    runtime::prepare(starts_kernel, 0);
    runtime::prepare(entries_of_copies_kernel, 0);
    runtime::prepare(tiles_kernel<ElementOf<D>, false>, 0);
    runtime::prepare(tiles_kernel<ElementOf<D>, true>, 0);
    runtime::prepare(columns_kernel, 0);
    runtime::prepare(round_tasks_kernel, 0);
    runtime::prepare(combine_copies_kernel<D, 8>, 0);
    runtime::prepare(combine_copies_kernel<D, 1>, 0);
    runtime::prepare(sum_copies_kernel<D, 8>, 0);
    runtime::prepare(sum_copies_kernel<D, 1>, 0);
    runtime::prepare(add_keys_kernel<D>, 0);
    BlockBackward<D>::prepare(device);
}

}  // namespace spattn::any
