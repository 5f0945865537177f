// SPDX-License-Identifier: MIT
// A call's lists of blocks become a layout: what they leave of the plan's, which says what else the pattern keeps.
//
//     lists     a warp a row of tiles    each lane looks up what an entry's tiles have in that row of the plan's layout
//     by key    the same, backward       of the lists by key (gather_transpose.cuh), in the order of queries
//     tasks     a thread each            as long as their rows are now
//
// An entry that stands twice in a list is two runs, and its keys count twice. Where a tile of keys joins blocks, lists by
// key have a run for all of a tile's blocks that a list names; lists by query, one for each.
#pragma once

#include "any/call_layout.h"
#include "any/gather_transpose.cuh"
#include "any/row_of_runs.cuh"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace spattn::any {

struct CallLayoutParams {
    TransposeParams lists;
    CallLayout to;

    __device__ int known_kind(int64_t kind) const {
        return to.known.head_kinds == 1 ? 0 : to.known.kind_of_head[kind * to.heads_of_kind];
    }
    __device__ int64_t plane_of(int64_t kind) const { return kind * to.heads_of_kind / to.group; }
    // A run with the mask of CutMasks::cut(), which devices cannot call.
    __device__ Run cut(const Run& run, int set) const {
        const int sets = (1 << to.masks.joined) - 2, mask = run.mask == full_block ? 0 : run.mask + 1;
        return {run.first, run.count, set > sets ? run.mask : to.masks.known + mask * sets + set - 1};
    }
};

constexpr int call_layout_threads = 256;

// act(run) for each run of a row of the plan's layout in tiles [begin, end), cut to them.
template <class Act>
__device__ __forceinline__ void each_run_within(const Run* runs, const Slice& slice, int begin, int end, Act act) {
    int low = slice.begin, high = slice.end;  // runs before low end before these tiles
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (runs[middle].first + runs[middle].count <= begin) low = middle + 1;
        else high = middle;
    }
    for (; low < slice.end; ++low) {
        const Run run = runs[low];
        if (run.first >= end) break;
        const int first = max(run.first, begin);
        act(Run{first, min(run.first + run.count, end) - first, run.mask});
    }
}

// Which of the blocks that a tile joins the run of an entry has, in lists by key; 0 where an entry before has them in its
// own. A list that names blocks several times has as many runs, the n-th of all that it names n times or more.
__device__ __forceinline__ int set_of_run(const int32_t* names, int64_t entries, int64_t entry, int joined) {
    const int32_t own = names[entry], list = own / joined;
    int64_t same = entry;  // the first with this name
    while (same > 0 && names[same - 1] == own) --same;
    const int64_t times = entry - same;
    int64_t at = same;  // the first of this list
    while (at > 0 && names[at - 1] / joined == list) --at;
    int set = 0;
    for (same = at; at < entries && names[at] / joined == list; ++at) {
        if (names[at] != names[same]) same = at;
        if (at - same == times) set |= 1 << names[at] % joined;
    }
    return set & ((1 << own % joined) - 1) ? 0 : set;
}

template <Owner O>
__global__ void __launch_bounds__(call_layout_threads)
    call_lists_kernel(const __grid_constant__ CallLayoutParams params) {
    constexpr bool by_query = O == Owner::queries;
    constexpr int warps = call_layout_threads / 32;
    const GatherLists& lists = params.lists.lists;
    const CallLayout& to = params.to;
    const ListsView& known = by_query ? to.known.by_query : to.known.by_key;
    const CallAxis& made = by_query ? to.by_query : to.by_key;
    const int joined = to.masks.joined;
    for (int64_t n = int64_t(blockIdx.x) * warps + threadIdx.x / 32; n < to.kinds * known.rows;
         n += int64_t(gridDim.x) * warps) {
        const int64_t kind = n / known.rows, plane = params.plane_of(kind);
        const int row = int(n % known.rows);
        const Slice slice = known.slices[int64_t(params.known_kind(kind)) * known.rows + row];
        int64_t begin;  // of the row's runs
        int count, blocks;
        if constexpr (by_query) {
            const KeyList list = lists.list(plane, row / to.tiles_q);
            begin = n * to.sizes.most * to.tiles_k;
            count = make_row(list.count, made.runs + begin, blocks, [&](int64_t entry, auto act) {
                const int64_t block = list.block(list.load(entry), to.sizes.blocks);
                if (block < 0) return;
                const int first = int(block) / joined * to.tiles_k, set = 1 << int(block) % joined;
                each_run_within(known.runs, slice, first, first + to.tiles_k,
                                [&](const Run& run) { act(params.cut(run, set)); });
            });
        } else {
            const TransposeParams::Span of_block = params.lists.span_of(plane, row / to.tiles_k);
            const int32_t* const names = params.lists.lists_of(plane) + of_block.begin;
            const int64_t entries = of_block.count;
            begin = kind * made.room + (of_block.begin * to.tiles_k + row % to.tiles_k * entries) * to.tiles_q;
            count = make_row(entries, made.runs + begin, blocks, [&](int64_t entry, auto act) {
                const int first = names[entry] / joined * to.tiles_q;
                const int set = joined == 1 ? 1 : set_of_run(names, entries, entry, joined);
                if (!set) return;
                each_run_within(known.runs, slice, first, first + to.tiles_q,
                                [&](const Run& run) { act(params.cut(run, set)); });
            });
        }
        if (threadIdx.x % 32) continue;
        made.slices[n] = {int32_t(begin), int32_t(begin) + count};
        made.lengths[n] = blocks;
    }
}

// How many blocks a task's row has now. Keys' tasks have those of a group's query heads, one after the other.
__device__ __forceinline__ int count_blocks(const CallLayout& to, const Task& task, Owner owner) {
    const CallAxis& axis = owner == Owner::queries ? to.by_query : to.by_key;
    const int heads = owner == Owner::queries ? 1 : to.group, first = task.head * heads;
    int blocks = 0;
    for (int head = first; head < first + heads; ++head)
        blocks += axis.lengths[int64_t(head / to.heads_of_kind) * axis.rows + task.row];
    return blocks;
}

// Tasks, and what a layout says of heads and of their kinds.
static __global__ void __launch_bounds__(call_layout_threads)
    call_tasks_kernel(const __grid_constant__ CallLayoutParams params) {
    const int64_t thread = int64_t(blockIdx.x) * call_layout_threads + threadIdx.x;
    const int64_t threads = int64_t(gridDim.x) * call_layout_threads;
    const CallLayout& to = params.to;
    for (int64_t head = thread; head < to.kinds * to.heads_of_kind; head += threads)
        to.kind_of_head[head] = int32_t(head / to.heads_of_kind);
    const auto copy_live = [&](const LiveView& from, int32_t* set_of, int rows) {
        for (int64_t n = thread; from.set_of && n < to.kinds * rows; n += threads)
            set_of[n] = from.set_of[int64_t(params.known_kind(n / rows)) * rows + n % rows];
    };
    copy_live(to.known.live_queries, to.live_queries, to.known.by_query.rows);
    copy_live(to.known.live_keys, to.live_keys, to.known.by_key.rows);
    for (const CallTasks& tasks : to.tasks)
        for (int64_t n = thread; n < tasks.from.num_tasks; n += threads) {
            Task task = tasks.from.tasks[n];
            task.take = count_blocks(to, task, tasks.owner);
            tasks.to[n] = task;
        }
}

// ---- launch ----
void make_call_layout(const CallArgs& args, const CallLayout& to) {
    const runtime::CurrentDevice current(args.device);
    const CallLayoutParams params{{GatherLists::of(args), to.named}, to};
    const auto launch = [&](auto kernel, int64_t threads) {
        const int64_t ctas = std::clamp<int64_t>(divide_up(threads, call_layout_threads), 1, most_list_ctas);
        runtime::launch(kernel, {unsigned(ctas), unsigned(call_layout_threads), 0}, args.stream, params);
    };
    launch(call_lists_kernel<Owner::queries>, 32 * to.kinds * to.known.by_query.rows);
    if (to.by_key.rows) {
        transpose_lists(params.lists, args.stream);
        launch(call_lists_kernel<Owner::keys>, 32 * to.kinds * to.known.by_key.rows);
    }
    launch(call_tasks_kernel, std::max<int64_t>(to.tasks[0].from.num_tasks, to.tasks[1].from.num_tasks));
}

void prepare_call_layout(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(call_lists_kernel<Owner::queries>, 0);
    runtime::prepare(call_lists_kernel<Owner::keys>, 0);
    runtime::prepare(call_tasks_kernel, 0);
    prepare_transpose();
}

}  // namespace spattn::any
