// SPDX-License-Identifier: MIT
// Reading layouts and carving workspaces.
#pragma once

#include "cpu/generic/operand.h"

namespace spattn::cpu {
namespace {

inline Slice slice_of(const ListsView& lists, int32_t head_kind, int32_t row) {
    return lists.slices[int64_t(head_kind) * lists.rows + row];
}

// Which rows of a tile have a token. Blocks are at most 64 tokens, so one word holds a set.
inline uint64_t filled_of(const TileView& at) {
    if (!at.tokens) return all_rows;
    uint64_t filled = 0;
    for (int i = 0; i < at.count; ++i) filled |= uint64_t(at.tokens[i] != no_token) << i;
    return filled;
}

// A tile of keys. One that lists tokens which all follow each other, as a page of a cache has them, is read where it lies.
inline TileView keys_at(const AxisView& axis, int block, int64_t seq, int32_t tile) {
    TileView at = tile_at(axis, block, seq, tile);
    if (!at.tokens || axis.stretch < block) return at;
    while (at.count > 0 && at.tokens[at.count - 1] == no_token) --at.count;
    return {at.tokens[0], 1, at.count, nullptr};
}

// Which rows of a block may be read: never one without a token.
inline uint64_t alive_of(const LiveView& live, int32_t rows, int32_t head_kind, int32_t row, const TileView& at) {
    const int32_t set = live.set_of ? live.set_of[int64_t(head_kind) * rows + row] : all_live;
    return set == all_live ? filled_of(at) : live.sets[int64_t(set) * live.words];
}

// Which rows of a tile are written from there: those of the tokens that it lists, and at home those not listed.
inline uint64_t owned_of(const AxisView& axis, const TileView& at, int32_t tile) {
    return !at.tokens && axis.away ? ~axis.away[tile - axis.listed] : filled_of(at);
}

// Blocks [skip, skip + take) of a row's runs, one after the other.
struct Walk {
    const Run* run;
    const Run* end;
    int32_t skip, take;
    int32_t block = 0, mask = 0;

    bool next() {
        while (run != end && skip >= run->count) skip -= run++->count;
        if (run == end || take == 0) return false;
        block = run->first + skip++;
        mask = run->mask;
        --take;
        return true;
    }
};

inline Walk walk(const ListsView& lists, Slice slice, int32_t skip, int32_t take) {
    return {lists.runs + slice.begin, lists.runs + slice.end, skip, take};
}

// ---- rounds (layout/view.h) ----

inline int32_t rounds_of(const TasksView& tasks) { return tasks.num_rounds > 0 ? tasks.num_rounds : 1; }
// rows: of the axis that rounds cut.
inline Round round_at(const TasksView& tasks, int32_t rows, int32_t i) {
    return tasks.num_rounds > 0 ? tasks.rounds[i] : Round{0, rows, 0, tasks.queues, 0, tasks.num_joins};
}

// How many blocks of a list lie before a row: runs stand in the order of rows.
inline int32_t blocks_before(const ListsView& lists, Slice slice, int32_t row) {
    int32_t blocks = 0;
    for (int32_t r = slice.begin; r < slice.end && lists.runs[r].first < row; ++r) {
        const int32_t left = row - lists.runs[r].first;
        blocks += left < lists.runs[r].count ? left : lists.runs[r].count;
    }
    return blocks;
}

// A task's share of the blocks that a list has in a round. What of the share lies beyond them is left in `skip` and `take`.
inline Walk walk_round(const ListsView& lists, Slice slice, const Round& round, int32_t& skip, int32_t& take) {
    const int32_t before = blocks_before(lists, slice, round.first_row);
    const int32_t blocks = blocks_before(lists, slice, round.end_row) - before;
    const int32_t skipped = skip < blocks ? skip : blocks, left = blocks - skipped, taken = left < take ? left : take;
    skip -= skipped, take -= taken;
    return walk(lists, slice, before + skipped, taken);
}

// Null for a full block.
inline const uint64_t* mask_bits(const LayoutView& layout, int32_t mask) {
    return mask == full_block ? nullptr : layout.masks + int64_t(mask) * layout.mask_words;
}

// Rows [first, first + count) of a tile.
struct Span {
    int first, count;
};

// Masked blocks are worked on in strips of so many lanes, each with those rows alone that it keeps something of: half
// of a block on the diagonal is never touched, three quarters of one that holds a sink of 16 keys.
constexpr int strip_lanes = 16;

// From the first to the last of the rows of a mask, `width` bits each, that keep anything in the strip of lanes from
// `lane` on.
template <int width>
inline Span rows_kept(const uint64_t* bits, int rows, int lane) {
    const uint64_t strip = uint64_t(0xffff) << lane;
    const auto is_kept = [&](int row) { return (bits[row * width / 64] >> (row * width % 64) & strip) != 0; };
    int first = 0, end = rows;
    while (end > 0 && !is_kept(end - 1)) --end;
    while (first < end && !is_kept(first)) ++first;
    return {first, end - first};
}

// Hands out pieces of the workspace, each on a cache line of its own. A null base only counts.
struct Carver {
    uintptr_t base;
    size_t used = 0;

    template <class T>
    T* take(int64_t count) {
        T* piece = (T*)(base + used);
        used += (size_t(count) * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
};

// Who takes which queue next, or so many of them; beyond every end where the call is cancelled. Relaxed: results of a
// phase are published by the end of Parallel::run.
inline int64_t next_of(int64_t& counter, Parallel& parallel, int64_t count = 1) {
    return parallel.is_cancelled() ? INT64_MAX : __atomic_fetch_add(&counter, count, __ATOMIC_RELAXED);
}

}  // namespace
}  // namespace spattn::cpu
