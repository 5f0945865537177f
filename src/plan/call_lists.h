// SPDX-License-Identifier: MIT
// Lists of keys that come with each call, as backends work on them. C++17-clean.
#pragma once

#include <algorithm>

#include "core/math.h"
#include "plan/kernel.h"

namespace spattn {

// How many lists of keys a problem has, and how large they are: what workspaces and grids follow from. A list belongs
// to block_q query rows and names blocks of block_k keys: single ones where the plan made the lists. A plane is what
// has lists of its own: a kind of heads, or of a call's lists each kv head of each batch entry.
struct ListSizes {
    int64_t planes, lists, blocks;  // lists: of a plane; blocks: of keys
    int64_t entries;                // of all lists, at most
    int64_t most;                   // entries of a call's list; 0 where the plan made the lists
    int block_q, block_k;

    // Blocks end where the sequence does: one that is longer is all of it.
    static ListSizes of(const Problem& p, const TokenListsView& tokens) {
        const ListShape& shape = p.call_lists;
        if (!shape.at_run_time()) return {tokens.head_kinds, p.seq_q, p.seq_k, tokens.listed, 0, 1, 1};
        const int64_t block_q = std::min(shape.block_q, p.seq_q), block_k = std::min(shape.block_k, p.seq_k);
        const int64_t planes = p.batch * p.heads_kv, lists = ceil_div(p.seq_q, block_q);
        const int64_t entries = planes * lists * shape.most;
        return {planes, lists, ceil_div(p.seq_k, block_k), entries, shape.most, int(block_q), int(block_k)};
    }
};

// The lists by key: of a stretch s of lists, those that name block b of plane p are begin[p][b][s] ..
// begin[p][b][s + 1] of the plane's part of `lists`, which is as long as its own lists are. They rise, and one is there
// as often as it names the block. Stretches keep short what a device sorts.
// Blocks may be joined, so many neighbours to one, a power of two: then an entry is list * joined + the block's number
// among them.
struct ListsByKey {
    static constexpr int numbers = 4096;  // that the entries of a stretch may be
    int64_t* begin;  // [planes][blocks * stretches + 1]
    int32_t* lists;  // [entries]
    int64_t stretches;
    int64_t places;  // of `begin`, a plane
    int joined;

    ListsByKey() = default;
    ListsByKey(void* memory, const ListSizes& sizes, int joined = 1)
        : begin(static_cast<int64_t*>(memory)), stretches(ceil_div(sizes.lists, numbers / joined)),
          places(ceil_div(sizes.blocks, joined) * stretches + 1), joined(joined) {
        lists = reinterpret_cast<int32_t*>(static_cast<char*>(memory) + begin_bytes(sizes));
    }
    size_t begin_bytes(const ListSizes& sizes) const { return size_t(sizes.planes * places) * sizeof(int64_t); }
    static size_t bytes(const ListSizes& sizes, int joined = 1) {
        return ListsByKey(nullptr, sizes, joined).begin_bytes(sizes) + size_t(sizes.entries) * sizeof(int32_t);
    }
};

// ---- lists of blocks, for rows that read layouts ----
constexpr int32_t no_pair = -2;  // in place of a mask: nothing of a block is kept
static_assert(no_pair != full_block);

// Whether a row reads a layout that each call makes.
inline bool has_call_layout(const Kernel& kernel, const Problem& p) {
    return kernel.family == Family::block && p.call_lists.at_run_time();
}

// How many listed blocks a tile of keys joins. 1: blocks are made of tiles, or so small that most of a tile would be
// in vain.
constexpr int join_blocks(int64_t tile_k, int64_t block_k) {
    return tile_k == 4 * block_k ? 4 : tile_k == 2 * block_k ? 2 : 1;
}

// Rows that go by query meet lists as they come, where blocks of a tile may stand far apart: they join nothing.
inline int join_blocks(const Kernel& kernel, const Problem& p) {
    if (!has_call_layout(kernel, p)) return 1;
    const int64_t block_k = ListSizes::of(p, {}).block_k;
    return kernel.owner() == Owner::queries || block_k == p.seq_k ? 1 : join_blocks(kernel.block_k, block_k);
}

// The masks of a layout whose tiles of keys join listed blocks. A list may name some of a tile's blocks alone, a set of
// them (bit b: block b), and what is kept of the others is cut off. Masks as they are come first, then the cuts of a
// full block, and of each mask, to every set that is neither empty nor all.
struct CutMasks {
    static constexpr int most_joined = 4;
    int joined, known;  // known: masks as they are

    constexpr int sets() const { return (1 << joined) - 2; }
    constexpr int count() const { return known + (known + 1) * sets(); }
    constexpr int32_t cut(int32_t mask, int set) const {
        if (set > sets()) return mask;
        return known + (mask == full_block ? 0 : mask + 1) * sets() + set - 1;
    }
};

// The lists of one axis as a call makes them. A row has room for as many runs as its list may come to, so that nobody
// waits for lengths of others.
struct CallAxis {
    Slice* slices;     // [kinds][rows]
    Run* runs;         // [kinds][room]
    int32_t* lengths;  // [kinds][rows] blocks
    int32_t rows;
    int64_t room;

    ListsView view(int64_t kinds) const { return {slices, runs, rows, int32_t(kinds * room)}; }
};

// The tasks of one walk: the plan's, and where those of the call go, which are as long as their rows are then.
struct CallTasks {
    TasksView from;
    Task* to;
    Owner owner;

    TasksView view() const {
        TasksView made = from;
        made.tasks = to;
        return made;
    }
};

// What a call makes for its lists, one array after the other in its workspace. Without memory it counts bytes alone.
class CallRoom {
public:
    explicit CallRoom(void* memory) : memory_(reinterpret_cast<uintptr_t>(memory)) {}

    template <class T>
    T* take(int64_t count) {
        constexpr int64_t alignment = 256;
        T* const at = reinterpret_cast<T*>(memory_ + bytes_);
        bytes_ += size_t(round_up(count * int64_t(sizeof(T)), alignment));
        return at;
    }
    CallAxis take_axis(int64_t kinds, int32_t rows, int64_t room) {
        Slice* const slices = take<Slice>(kinds * rows);
        Run* const runs = take<Run>(kinds * room);
        return {slices, runs, take<int32_t>(kinds * rows), rows, room};
    }
    CallTasks take_tasks(const TasksView& from, Owner owner) { return {from, take<Task>(from.num_tasks), owner}; }
    size_t bytes() const { return bytes_; }

private:
    uintptr_t memory_;
    size_t bytes_ = 0;
};

// What a call's lists of blocks leave of the plan's layout, which says what else a pattern keeps. It is made at the
// start of the call's workspace, by Backend::make_call_layout.
struct CallLayout {
    LayoutView known;  // the plan's
    ListSizes sizes;
    int64_t kinds;     // of heads: those of a kv head, or query heads if the plan's layout tells a group's apart
    int group, heads_of_kind;     // query heads
    int tiles_q, tiles_k;         // of a list's block of queries, of a listed block of keys
    CutMasks masks;               // of the plan
    CallAxis by_query, by_key{};  // by_key: for backward alone, as `named`
    ListsByKey named{};
    int32_t *kind_of_head, *live_queries, *live_keys;  // live: as LiveView::set_of
    CallTasks tasks[2];
    size_t bytes = 0;

    // known, first, second: of the plan. Without a workspace only `bytes` means something.
    CallLayout(const Problem& p, const LayoutView& known, const TasksView& first, const TasksView& second,
               const Kernel& kernel, void* workspace)
        : known(known), sizes(ListSizes::of(p, {})), group(int(p.group())),
          masks{join_blocks(kernel, p), known.num_masks} {
        CallRoom room(workspace);
        const bool is_told_apart = known.head_kinds > 1, is_forward = kernel.pass == Pass::forward;
        const int32_t rows_q = known.by_query.rows, rows_k = known.by_key.rows;
        kinds = is_told_apart ? p.batch * p.heads_q : sizes.planes;
        heads_of_kind = is_told_apart ? 1 : group;
        tiles_q = int(ceil_div(sizes.block_q, known.block_q)), tiles_k = int(ceil_div(sizes.block_k, known.block_k));
        by_query = room.take_axis(kinds, rows_q, rows_q * sizes.most * tiles_k);
        if (!is_forward) {
            by_key = room.take_axis(kinds, rows_k, sizes.lists * sizes.most * tiles_q * tiles_k);
            named = ListsByKey(room.take<char>(int64_t(ListsByKey::bytes(sizes, masks.joined))), sizes, masks.joined);
        }
        kind_of_head = room.take<int32_t>(p.batch * p.heads_q);
        live_queries = room.take<int32_t>(kinds * rows_q), live_keys = room.take<int32_t>(kinds * rows_k);
        tasks[0] = room.take_tasks(first, is_forward ? Owner::queries : Owner::keys);
        tasks[1] = room.take_tasks(second, Owner::queries);
        bytes = room.bytes();
    }

    LayoutView layout() const {
        LayoutView made = known;
        made.by_query = by_query.view(kinds), made.by_key = by_key.view(kinds);
        made.by_key.rows = known.by_key.rows;  // forward, too: live keys are counted by it
        made.kind_of_head = kind_of_head, made.head_kinds = int32_t(kinds);
        made.num_masks = masks.count();
        if (made.live_queries.set_of) made.live_queries.set_of = live_queries;
        if (made.live_keys.set_of) made.live_keys.set_of = live_keys;
        return made;
    }
};

// Why such a row cannot take the lists; null where it can. It counts runs by 32 bits.
inline const char* refuse_call_lists(const Kernel& kernel, const Problem& p) {
    const ListSizes sizes = ListSizes::of(p, {});
    if (sizes.block_q % kernel.block_q && sizes.block_q < p.seq_q)
        return "lists of blocks of queries that its tiles do not divide";
    const int joined = join_blocks(kernel, p);
    if (joined == 1 && sizes.block_k % kernel.block_k && sizes.block_k < p.seq_k)
        return "lists of blocks of keys that its tiles do not divide";
    const double tiles = double(ceil_div(sizes.block_q, kernel.block_q) * ceil_div(sizes.block_k, kernel.block_k));
    const double runs = double(sizes.entries * p.group()) * tiles, numbers = double(sizes.lists) * joined;
    return std::max(runs, numbers) < double(int64_t(1) << 31) ? nullptr : "longer lists than it counts";
}

}  // namespace spattn
