// SPDX-License-Identifier: MIT
// What a CTA takes of lists. Where the host does not know, each CTA adds up the lengths of all of them: a kernel that did
// so once would take longer than that, where lists are few.
#pragma once

#include "any/gather_tile.cuh"
#include "any/list_shares.h"
#include "ptx/convert.cuh"

namespace spattn::any {

// Where a share begins or ends: so many blocks into a list.
struct ListCut {
    int32_t unit, block;
};

// Lists from the first on, of which one has another number than the next by `step`, up to where the next share begins.
// Where each list has some parts evenly, it is the part of the first one that `begin` says in place of a block.
struct ListShare {
    int32_t group, of_group;  // this CTA's group, and its own number there
    ListCut begin, end;
    int32_t step, parts;

    __device__ static ListShare in_turn(const ListShares& shares, int group, int of_group) {
        return {group, of_group, {group, 0}, {shares.units, 0}, shares.groups, 1};
    }
    __device__ static ListShare evenly(const ListShares& shares, int group, int of_group) {
        const int unit = group / shares.by_most;
        return {group, of_group, {unit, group - unit * shares.most}, {min(unit + 1, shares.units), 0}, 1, shares.most};
    }
    __device__ bool has(int unit) const { return unit < end.unit || (unit == end.unit && end.block > 0); }
};

// The blocks of a list that a task has, and where a workspace keeps its rows if it has not all of them.
struct ListPart {
    int32_t first, end, tile;

    // What this CTA's share has of a unit's list of so many blocks.
    __device__ static ListPart of(const ListShares& shares, const ListShare& share, int unit, int blocks,
                                  SplitList* notes) {
        if (share.parts > 1) {
            const int parts = shares.parts_of(blocks, share.parts), part = share.begin.block;
            if (part == 0 && share.of_group == 0) notes[unit] = {unit, share.group, parts, 0};
            if (parts == 1 && part == 0) return {0, blocks, whole};
            const unsigned first = unsigned(min(part, parts)), end = unsigned(min(part + 1, parts));
            return {int(unsigned(blocks) * first / unsigned(parts)), int(unsigned(blocks) * end / unsigned(parts)),
                    row_of(shares, share, part > 0)};
        }
        const int first = unit == share.begin.unit ? share.begin.block : 0;
        const int end = unit == share.end.unit ? share.end.block : blocks;
        return {first, end, end - first < blocks ? row_of(shares, share, first > 0) : whole};
    }

    static constexpr int32_t whole = -1;

private:
    // First parts stand before all others, each in the order of groups.
    __device__ static int row_of(const ListShares& shares, const ListShare& share, bool is_behind) {
        return (is_behind * shares.groups + share.group) * shares.width + share.of_group;
    }
};

// Found by one warp, and read by all of its CTA.
struct ShareFinder {
    const ListShares& shares;
    const ListRows& rows;
    const GatherLists& lists;
    SplitList* notes;

    __device__ __forceinline__ void run(ListShare& to) const {
        const int group = int(blockIdx.x) / shares.width, of_group = int(blockIdx.x) - group * shares.width;
        if (shares.parts == 0)
            find(to, group, of_group);
        else if (threadIdx.x % 32 == 0)
            to = share_of(group, of_group, shares.parts);
    }

private:
    __device__ ListShare share_of(int group, int of_group, int parts) const {
        return parts == 1 ? ListShare::in_turn(shares, group, of_group) : ListShare::evenly(shares, group, of_group);
    }

    // Each lane has as many lists as the others, and walks them twice by one piece of code: to fetch code takes longer
    // here than to run it.
    __device__ __forceinline__ void find(ListShare& to, int group, int of_group) const {
        const int lane = int(threadIdx.x) % 32;
        const bool is_scribe = blockIdx.x == 0;
        const int own = (shares.units + 31) / 32, first = min(lane * own, shares.units);
        const int end = min(first + own, shares.units);
        int sum = 0, longest = 0, before = 0, size = 0;  // size: blocks of a share, once that is known
#pragma unroll 1
        for (;;) {
            const int from = group * size;
#pragma unroll 1
            for (int unit = first; unit < end; ++unit) {
                const int blocks = count_blocks(lists, GatherTask::at(rows, lists, unit * shares.width));
                const int with_task = blocks + shares.task_blocks;
                sum += with_task, longest = max(longest, blocks);
                if (size == 0) continue;
                const int at = from - before;
                if (at >= 0 && at < with_task) to.begin = cut(unit, blocks, at);
                if (at + size >= 0 && at + size < with_task) to.end = cut(unit, blocks, at + size);
                if (is_scribe) note(unit, blocks, before, size);
                before += with_task;
            }
            if (size > 0) return;
            before = sum;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int more = __shfl_up_sync(~0u, before, unsigned(distance));
                if (lane >= distance) before += more;
            }
            const int total = __shfl_sync(~0u, before, 31);
            before -= sum, longest = int(ptx::largest_of_warp(unsigned(longest)));
            const int parts = shares.best_parts(longest, total);
            if (lane == 0) to = share_of(group, of_group, max(parts, 1));
            if (parts > 1) return;
            if (is_scribe)
                for (int n = lane; n < shares.notes(); n += 32) notes[n] = {n, n, 1, 0};
            if (parts == 1) return;
            size = max(shares.share_of(total), shares.least_part);
            if (lane == 0) {
                to.step = 1;
                if (group * size >= total) to.begin = {shares.units, 0};
            }
            __syncwarp();  // what one lane says, and notes that nothing is split, stand before what others find
        }
    }

    // Where a share ends that would end so many blocks into a list, those of its task counted first: not so near to the
    // list's ends that a part would be too small.
    __device__ ListCut cut(int unit, int blocks, int at) const {
        if (!shares.can_split(blocks)) return {unit + (2 * at > blocks + shares.task_blocks), 0};
        const int block = at - shares.task_blocks;
        if (block < shares.least_part) return {unit, 0};
        return blocks - block < shares.least_part ? ListCut{unit + 1, 0} : ListCut{unit, block};
    }

    // Tells who joins parts of a list, whose blocks begin behind so many of those of all. Shares of so many blocks end
    // as `cut` says.
    __device__ void note(int unit, int blocks, int before, int size) const {
        if (!shares.can_split(blocks)) return;
        const int first = (before + shares.task_blocks + shares.least_part + size - 1) / size;
        const int last = (before + shares.task_blocks + blocks - shares.least_part) / size;
        if (first <= last)
            notes[shares.are_noted_by_unit() ? unit : first - 1] = {unit, first - 1, last - first + 2, 0};
    }
};

}  // namespace spattn::any
