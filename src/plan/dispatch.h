// SPDX-License-Identifier: MIT
// Queries dispatched to blocks of keys, as tokens are to experts: where the queries of a tile list different blocks,
// each query's row is copied for each block that its list names, copies for one block fill tiles, and block rows work
// on them as on any queries. What a query's copies come to is combined. (Mixture of block attention:
// https://arxiv.org/abs/2502.13189.) C++17-clean.
//
//     lists (block_q 1)    0: A B    1: B    2: A B          copies    A: 0 2 - -    B: 0 1 2 -        (tiles of 4)
//
// Copies take memory, and a call in which they are many has several rounds: of some batch entries, of some kv heads of
// an entry, or of some lists of a head.
#pragma once

#include <algorithm>

#include "core/math.h"
#include "plan/bit_places.h"
#include "plan/call_lists.h"

namespace spattn {

// Blocks of the layout that says what else a call's listed key must satisfy: its masks are row-major, so that a query's
// keys of a block are one word.
constexpr int known_block = 64;

// What the rounds of a pass have in common.
struct DispatchShape {
    Problem call, round;       // round: as the row sees it, with a plane for each kv head and copies for queries
    Pass pass;
    int tile_q, tile_k;        // the row's blocks
    int mask_words;
    int64_t block_q, block_k;  // of a list
    int64_t lists;             // of a round
    int64_t tiles;             // of a plane, enough for any lists
    int tiles_k;               // of a listed block of keys
    int joined;                // listed blocks that a tile of keys has, where it has several
    int64_t rounds_batch, rounds_heads, rounds_lists;

    // memory: bytes that the device has.
    DispatchShape(const Problem& p, const Kernel& kernel, double memory)
        : call(p), round(p), pass(kernel.pass), tile_q(kernel.block_q), tile_k(kernel.block_k),
          mask_words(kernel.mask_words), block_q(std::min(p.call_lists.block_q, p.seq_q)),
          block_k(std::min(p.call_lists.block_k, p.seq_k)), lists(ceil_div(p.seq_q, block_q)),
          tiles_k(int(ceil_div(block_k, tile_k))), joined(join_blocks(tile_k, block_k)),
          rounds_batch(1), rounds_heads(1), rounds_lists(1), most_bytes(int64_t(memory / share_of_memory)) {
        const int64_t all = lists;
        cut(p.batch, rounds_batch, [&](int64_t batch) { set(batch, p.heads_kv, all); });
        if (is_large()) cut(p.heads_kv, rounds_heads, [&](int64_t heads) { set(1, heads, all); });
        if (is_large()) {
            rounds_lists = std::min(ceil_div(bytes(), std::max<int64_t>(most_bytes, 1)), all);
            set(1, 1, ceil_div(all, rounds_lists));
            rounds_lists = ceil_div(all, lists);
        }
    }

    int64_t group() const { return call.group(); }
    int64_t rounds() const { return rounds_batch * rounds_heads * rounds_lists; }
    int64_t planes() const { return round.batch * round.heads_q; }
    int64_t blocks() const { return ceil_div(ceil_div(call.seq_k, block_k), joined); }  // to which queries go
    int64_t rows_k() const { return ceil_div(call.seq_k, tile_k); }
    int64_t copies_of_entry() const { return block_q * group(); }
    int64_t entries() const { return planes() * lists * call.call_lists.most; }
    // Bytes of elements that belong to a copy: q, out; backward also dout, and dq for out.
    int64_t columns() const { return round.head_dim + round.head_dim_v; }
    int64_t copy_bytes() const {
        return columns() * dtype_row(call.dtype).bytes * (pass == Pass::forward ? 1 : 2);
    }

    // Whether tiles of keys are made of whole blocks, or blocks of whole tiles.
    bool is_even() const { return joined > 1 || block_k % tile_k == 0 || block_k >= call.seq_k; }

private:
    static constexpr double share_of_memory = 64;
    int64_t most_bytes;  // of a round's copies and masks

    int64_t bytes() const {
        return planes() * tiles * (tile_q * copy_bytes() + int64_t(tiles_k) * mask_words * int64_t(sizeof(uint64_t)));
    }
    bool is_large() const { return bytes() > most_bytes; }

    void set(int64_t batch, int64_t heads, int64_t lists_of_round) {
        lists = lists_of_round;
        tiles = lists * call.call_lists.most * copies_of_entry() / tile_q + blocks();
        round.batch = batch, round.heads_q = round.heads_kv = heads, round.seq_q = tiles * tile_q;
        round.q_offset = 0, round.has_sink_logits = false;
    }
    // The fewest equal parts of an axis that are not too large, or single ones.
    template <class Set>
    void cut(int64_t length, int64_t& parts, Set set_length) {
        for (parts = 1;; ++parts) {
            if (length % parts) continue;
            set_length(length / parts);
            if (parts == length || !is_large()) return;
        }
    }
};

// Why queries cannot be dispatched to a row; null where they can.
inline const char* refuse_dispatch(const Kernel& kernel, const Problem& p, double memory) {
    if (!kernel.dispatch) return "queries cannot be dispatched to it";
    if (kernel.block_k % known_block) return "blocks of fewer keys than masks of dispatched queries are made of";
    const DispatchShape shape(p, kernel, memory);
    if (!shape.is_even()) return "lists of blocks of keys that neither divide its tiles nor are made of them";
    constexpr double most = double(int64_t(1) << 31);
    const double tiles = double(shape.planes()) * double(shape.tiles);
    if (tiles * std::max(shape.tile_q, shape.tiles_k) >= most || double(shape.lists) * shape.joined >= most)
        return "longer lists than it counts";
    return kernel.fits(shape.round);
}

// One round, in memory.
struct DispatchRound {
    ListSizes sizes;
    int64_t heads;                                   // of keys, of the round
    int64_t first_batch, first_head, first_list;     // of the call: head of keys
    int64_t rows_q, rows_k;                          // of queries: copies of a plane; rows_k: tiles of keys
    int64_t tiles, seq_k, blocks;                    // blocks: to which queries go
    int group, copies_of_entry, tile_q, tile_k, tiles_k, mask_words;
    bool is_first;                                   // round of the call
    bool is_first_of_keys, is_last_of_keys, shares_keys;  // among the rounds of the same keys, and if there are others
    const uint16_t* bits;  // [64 mask_words]
    void* sums_of_rows;    // backward: lse and delta of the whole call's queries, at the start of the workspace
    // Lists by key, where each block's tiles begin [planes][blocks + 1], and the first copy of each entry
    // [planes][lists][most], or -1.
    ListsByKey named;
    int32_t *tile_begin, *copy_of_entry;
    CallAxis by_query, by_key{};  // by_key: backward, as in CallLayout
    int32_t* states;       // [planes][tiles][tiles_k] full_block, the number of a mask, or no_pair
    uint64_t* masks;
    int32_t* kind_of_head;
    CallTasks tasks[2];
    // Tensors of copies: q; out, lse and max_logits forward, dout and dq backward. Where rounds share keys, also dk and dv
    // of one round, and sums of those before.
    TensorView q{}, out{}, dout{}, dq{}, dk{}, dv{}, lse{}, max_logits{};
    float *dk_sums = nullptr, *dv_sums = nullptr;
    size_t bytes = 0;

    // number: of the round. Without a workspace only `bytes` and sizes mean something.
    DispatchRound(const DispatchShape& shape, const TasksView& first, const TasksView& second, const uint16_t* bits,
                  int64_t number, void* workspace)
        : heads(shape.round.heads_q), rows_q(shape.tiles * shape.tile_q),
          rows_k(shape.rows_k()), tiles(shape.tiles), seq_k(shape.call.seq_k), blocks(shape.blocks()),
          group(int(shape.group())), copies_of_entry(int(shape.copies_of_entry())), tile_q(shape.tile_q),
          tile_k(shape.tile_k), tiles_k(shape.tiles_k), mask_words(shape.mask_words), bits(bits) {
        const bool is_forward = shape.pass == Pass::forward;
        const int64_t of_lists = number % shape.rounds_lists;
        const int64_t of_heads = number / shape.rounds_lists % shape.rounds_heads;
        first_batch = number / shape.rounds_lists / shape.rounds_heads * shape.round.batch, first_head = of_heads * heads;
        first_list = of_lists * shape.lists;
        const int64_t all_lists = ceil_div(shape.call.seq_q, shape.block_q), planes = shape.planes();
        const int64_t lists = std::min(shape.lists, all_lists - first_list), most = shape.call.call_lists.most;
        const int block_q = int(shape.block_q), block_k = int(shape.block_k);
        sizes = {planes, lists, ceil_div(seq_k, shape.block_k), shape.entries(), most, block_q, block_k};
        is_first = number == 0, is_first_of_keys = of_lists == 0, is_last_of_keys = of_lists + 1 == shape.rounds_lists;
        shares_keys = shape.rounds_lists > 1;

        CallRoom room(workspace);
        const Problem &p = shape.call, &inner = shape.round;
        const int64_t rows = is_forward ? 0 : p.batch * p.heads_q * p.seq_q;
        sums_of_rows = room.take<float>(2 * rows + 4);
        named = ListsByKey(room.take<char>(int64_t(ListsByKey::bytes(sizes, shape.joined))), sizes, shape.joined);
        tile_begin = room.take<int32_t>(planes * (blocks + 1));
        copy_of_entry = room.take<int32_t>(shape.entries());
        by_query = room.take_axis(planes, int32_t(tiles), tiles * tiles_k);
        if (!is_forward) by_key = room.take_axis(planes, int32_t(rows_k), tiles * tiles_k);
        states = room.take<int32_t>(planes * tiles * tiles_k);
        masks = room.take<uint64_t>(planes * tiles * tiles_k * mask_words);
        kind_of_head = room.take<int32_t>(planes);
        tasks[0] = room.take_tasks(first, is_forward ? Owner::queries : Owner::keys);
        tasks[1] = room.take_tasks(second, Owner::queries);

        const int bytes_of = dtype_row(p.dtype).bytes;
        const auto elements = [&](int64_t seq, int64_t columns) {
            return TensorView{room.take<char>(planes * seq * columns * bytes_of), heads * seq * columns, seq * columns,
                              columns, 1};
        };
        const auto floats = [&] { return TensorView{room.take<float>(planes * rows_q), heads * rows_q, rows_q, 1, 0}; };
        q = elements(rows_q, inner.head_dim);
        if (is_forward) {
            out = elements(rows_q, inner.head_dim_v), lse = floats(), max_logits = floats();
        } else {
            dout = elements(rows_q, inner.head_dim_v), dq = elements(rows_q, inner.head_dim);
            if (shares_keys) {
                dk = elements(seq_k, inner.head_dim), dk_sums = room.take<float>(planes * seq_k * inner.head_dim);
                if (!p.value_in_key) {
                    dv = elements(seq_k, inner.head_dim_v);
                    dv_sums = room.take<float>(planes * seq_k * inner.head_dim_v);
                }
            }
        }
        bytes = room.bytes();
    }

    // What the row sees, before the operands.
    LayoutView layout() const {
        LayoutView made{};
        made.block_q = tile_q, made.block_k = tile_k, made.seq_q = rows_q, made.seq_k = seq_k;
        made.queries.modulus = made.keys.modulus = 1;
        made.queries.residue_tiles = int32_t(tiles), made.keys.residue_tiles = int32_t(rows_k);
        made.by_query = by_query.view(sizes.planes), made.by_key = by_key.view(sizes.planes);
        made.by_key.rows = int32_t(rows_k);  // forward, too: as in CallLayout
        made.kind_of_head = kind_of_head, made.head_kinds = int32_t(sizes.planes);
        made.masks = masks, made.mask_words = mask_words, made.num_masks = int32_t(sizes.planes * tiles * tiles_k);
        return made;
    }
    // An operand of keys, from the round's first head on.
    TensorView of_keys(TensorView x, Dtype dtype) const {
        if (x.data)
            x.data = static_cast<char*>(x.data) +
                     (first_batch * x.batch + first_head * x.head) * int64_t(dtype_row(dtype).bytes);
        return x;
    }
};

// How queries are brought to a row of a dtype, and what came of them back to the call's tensors. args are the call's,
// with the layout of known blocks.
struct DispatchSteps {
    void (*send)(const ForwardArgs& args, const DispatchRound& to);
    void (*combine)(const ForwardArgs& args, const DispatchRound& from);
    void (*sum_rows)(const BackwardArgs& args);  // lse, delta, dsink_logits: once a call, before the rounds
    void (*send_back)(const BackwardArgs& args, const DispatchRound& to);
    void (*combine_back)(const BackwardArgs& args, const DispatchRound& from);
    void (*prepare)(int32_t device);
};

}  // namespace spattn
