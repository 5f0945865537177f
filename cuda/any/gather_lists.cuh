// SPDX-License-Identifier: MIT
// Lists of keys as kernels walk them, whether the plan made them or the call brings them.
#pragma once

#include "any/gather_lists.h"

namespace spattn::any {

// An entry as memory has it: what is loaded is not waited for before somebody asks what it names.
struct ListEntry {
    int32_t low, high;  // high: of int64 alone
};

// The entries of one list.
struct KeyList {
    const void* entries;
    bool is_wide;  // int64
    int64_t step;  // elements
    int count;

    __device__ ListEntry load(int64_t entry) const {
        const int32_t* const at = static_cast<const int32_t*>(entries) + (entry * step << int(is_wide));
        return {at[0], is_wide ? at[1] : 0};
    }

    // The block that an entry names, or -1: entries of a call below 0 or beyond the keys are absent.
    __device__ int64_t block(const ListEntry& entry, int64_t blocks) const {
        const int64_t block = is_wide ? int64_t(entry.high) << 32 | uint32_t(entry.low) : int64_t(entry.low);
        return block < blocks ? max(block, int64_t(-1)) : -1;
    }
};

struct GatherLists {
    ListSizes sizes;
    TokenListsView tokens;
    CallLists call;
    LayoutView known;  // what else a call's listed key must satisfy, in blocks of consecutive tokens; or no lists
    int64_t seq_q, seq_k;
    int heads_q, heads_kv, group;

    static GatherLists of(const CallArgs& args) {
        const Problem& p = *args.problem;
        return {ListSizes::of(p, args.tokens), args.tokens, args.call_lists, args.layout, p.seq_q, p.seq_k,
                int(p.heads_q), int(p.heads_kv), int(p.group())};
    }

    __device__ int64_t plane_of(int64_t batch, int64_t head) const {
        return sizes.most ? batch * heads_kv + head / group : tokens.kind_of_head[batch * heads_q + head];
    }

    __device__ KeyList list(int64_t plane, int64_t list) const {
        const unsigned at = unsigned(plane), heads = unsigned(heads_kv);  // in 64 bits a division takes ten times as long
        return sizes.most ? list_of_call(at / heads, at % heads, list) : list_of_plan(plane, list);
    }
    // The list of a query head.
    __device__ KeyList list_of_head(int64_t batch, int head, int64_t list) const {
        return sizes.most ? list_of_call(batch, head / group, list)
                          : list_of_plan(tokens.kind_of_head[batch * heads_q + head], list);
    }

    // How many entries the planes before have room for.
    __device__ int64_t entries_before(int64_t plane) const {
        return sizes.most ? plane * sizes.lists * sizes.most : tokens.begin[plane * tokens.rows];
    }

    // The entry of a place of a list, and the key of a query row's list that it means there, or no_token where that
    // place has none. head counts over the batch.
    // Lists mostly name single keys, which need satisfy nothing else. Then nothing is divided, and hardly anything asked:
    // a division takes as long as some rows' copies, and all questions took producers a fourth of their time.
    __device__ ListEntry entry_at(const KeyList& list, int place) const {
        return list.load(sizes.block_k == 1 ? place : place / sizes.block_k);
    }
    __device__ int key_at(const KeyList& list, const ListEntry& entry, int place, int64_t head, int64_t row) const {
        if (sizes.block_k == 1 && !known.kind_of_head)
            return entry.high == 0 && unsigned(entry.low) < unsigned(seq_k) ? entry.low : no_token;
        int64_t key = list.block(entry, sizes.blocks);
        if (key < 0) return no_token;
        if (sizes.block_k > 1) key = key * sizes.block_k + place % sizes.block_k;
        return key < seq_k && keeps(head, row, key) ? int(key) : no_token;
    }
    __device__ int key_at(const KeyList& list, int place, int64_t head, int64_t row) const {
        return key_at(list, entry_at(list, place), place, head, row);
    }

    // Whether the known part of the pattern keeps a pair.
    __device__ bool keeps(int64_t head, int64_t row, int64_t key) const {
        if (!known.kind_of_head) return true;
        const int at_row = int(row), at_key = int(key);
        const int mask = known_mask(head, at_row / known.block_q, at_key / known.block_k);
        if (mask < 0) return mask == full_block;
        const int bit = at_row % known.block_q * known.block_k + at_key % known.block_k;
        return known.masks[int64_t(mask) * known.mask_words + bit / 64] >> (bit % 64) & 1;
    }

    // What the known part has at a block: full_block, a mask, or no_pair.
    __device__ int known_mask(int64_t head, int block_row, int block) const {
        const ListsView& lists = known.by_query;
        const Slice slice = lists.slices[int64_t(known.kind_of_head[head]) * lists.rows + block_row];
        int32_t low = slice.begin, high = slice.end;  // runs before low start at the block or before it
        while (low < high) {
            const int32_t middle = low + (high - low) / 2;
            if (lists.runs[middle].first <= block) low = middle + 1;
            else high = middle;
        }
        if (low == slice.begin) return no_pair;
        const Run run = lists.runs[low - 1];
        return block < run.first + run.count ? run.mask : no_pair;
    }

private:
    __device__ KeyList list_of_plan(int64_t kind, int64_t list) const {
        const int64_t* begin = tokens.begin + kind * tokens.rows + list;
        return {tokens.keys + begin[0], false, 1, int(begin[1] - begin[0])};
    }
    __device__ KeyList list_of_call(int64_t batch, int64_t head, int64_t list) const {
        const IndexView& x = call.indices;
        const int64_t first = batch * x.batch + list * x.row + head * x.head, most = sizes.most;
        const int64_t count = call.counts.data ? read(call.counts, batch, list, head) : most;
        return {x.is_wide ? static_cast<const void*>(static_cast<const int64_t*>(x.data) + first)
                          : static_cast<const void*>(static_cast<const int32_t*>(x.data) + first),
                x.is_wide, x.entry, int(max(min(count, most), int64_t(0)))};
    }
    __device__ static int64_t read(const IndexView& x, int64_t batch, int64_t row, int64_t head) {
        const int64_t at = batch * x.batch + row * x.row + head * x.head;
        return x.is_wide ? static_cast<const int64_t*>(x.data)[at] : int64_t(static_cast<const int32_t*>(x.data)[at]);
    }
};

}  // namespace spattn::any
