// SPDX-License-Identifier: MIT
// A call's lists of blocks become a layout: what they leave of the plan's, which says what else the pattern keeps.
// Lanes share kinds of heads. An entry that stands twice in a list is two runs, and its keys count twice. Where a tile of
// keys joins blocks, lists by key have a run for all of a tile's blocks that a list names; lists by query, one for each.
#include <algorithm>
#include <array>
#include <utility>

#include "cpu/share.h"
#include "plan/call_lists.h"

namespace spattn::cpu {
namespace {

// act(run) for each run of a row of the plan's layout in tiles [begin, end), cut to them.
template <class Act>
void each_run_within(const Run* runs, const Slice& slice, int32_t begin, int32_t end, Act act) {
    const auto ends_before = [](const Run& run, int32_t tile) { return run.first + run.count <= tile; };
    const Run* run = std::lower_bound(runs + slice.begin, runs + slice.end, begin, ends_before);
    for (; run != runs + slice.end && run->first < end; ++run) {
        const int32_t first = std::max(run->first, begin);
        act(Run{first, std::min(run->first + run->count, end) - first, run->mask});
    }
}

class ListLayout {
public:
    ListLayout(const CallArgs& args, const CallLayout& to) : args_(args), to_(to) {}

    void make() {
        if (to_.by_key.rows) share(*args_.parallel, *this, to_.sizes.planes, &ListLayout::name_lists);
        share(*args_.parallel, *this, to_.kinds, &ListLayout::make_kind);
        const int64_t heads = to_.kinds * to_.heads_of_kind;
        for (int64_t head = 0; head < heads; ++head) to_.kind_of_head[head] = int32_t(head / to_.heads_of_kind);
        for (const CallTasks& tasks : to_.tasks)
            for (int32_t n = 0; n < tasks.from.num_tasks; ++n) {
                tasks.to[n] = tasks.from.tasks[n];
                tasks.to[n].take = count_blocks(tasks.to[n], tasks.owner);
            }
    }

private:
    // visit(block) for each entry of a list that names one.
    template <class Visit>
    void each_block(int64_t plane, int64_t list, Visit visit) const {
        const CallLists& lists = args_.call_lists;
        const int64_t heads_kv = args_.problem->heads_kv, batch = plane / heads_kv, head = plane % heads_kv;
        const int64_t count = lists.count(batch, list, head, to_.sizes.most);
        for (int64_t entry = 0; entry < count; ++entry) {
            const int64_t block = lists.indices.at(batch, list, head, entry);
            if (block >= 0 && block < to_.sizes.blocks) visit(block);
        }
    }

    // The lists of a plane by key: counted, and then each in its place, which moves on.
    void name_lists(int64_t plane) {
        const ListSizes& sizes = to_.sizes;
        const int64_t places = to_.named.places;
        int64_t* const begin = to_.named.begin + plane * places;
        int32_t* const lists = to_.named.lists + plane * sizes.lists * sizes.most;
        const int64_t joined = to_.named.joined;
        const auto place = [&](int64_t list, int64_t block) -> int64_t& {
            return begin[block / joined * to_.named.stretches + list * joined / ListsByKey::numbers];
        };
        std::fill(begin, begin + places, 0);
        for (int64_t list = 0; list < sizes.lists; ++list)
            each_block(plane, list, [&](int64_t block) { ++place(list, block); });
        int64_t end = 0;
        for (int64_t at = 0; at < places; ++at) end += std::exchange(begin[at], end);
        for (int64_t list = 0; list < sizes.lists; ++list)
            each_block(plane, list, [&](int64_t block) {
                lists[place(list, block)++] = int32_t(list * joined + block % joined);
            });
        std::copy_backward(begin, begin + places - 1, begin + places);  // each is where the next one begins
        begin[0] = 0;
        if (joined == 1) return;
        for (int64_t at = 0; at + 1 < places; ++at) std::sort(lists + begin[at], lists + begin[at + 1]);
    }

    Run cut(const Run& run, int set) const { return {run.first, run.count, to_.masks.cut(run.mask, set)}; }

    // visit(list, set) for each list of a tile's, and the blocks of the tile that it names: once, and again for those
    // that it names several times.
    template <class Visit>
    void for_each_set(const int32_t* names, const int32_t* end, Visit visit) const {
        const int32_t joined = to_.named.joined;
        while (names != end) {
            const int32_t list = *names / joined;
            std::array<int32_t, CutMasks::most_joined> times{};
            for (; names != end && *names / joined == list; ++names) ++times[size_t(*names % joined)];
            for (int set = 1; set;) {
                set = 0;
                for (size_t part = 0; part < times.size(); ++part) set |= int(times[part]-- > 0) << part;
                if (set) visit(list, set);
            }
        }
    }

    void make_kind(int64_t kind) {
        const LayoutView& known = to_.known;
        const int64_t joined = to_.masks.joined;
        const int64_t plane = kind * to_.heads_of_kind / to_.group;
        const int64_t of_known = known.head_kinds == 1 ? 0 : known.kind_of_head[kind * to_.heads_of_kind];
        for (int64_t row = 0; row < known.by_query.rows; ++row) {
            const int64_t n = kind * to_.by_query.rows + row;
            make_row(to_.by_query, n, n * to_.sizes.most * to_.tiles_k, [&](auto act) {
                const Slice slice = known.by_query.slices[of_known * known.by_query.rows + row];
                each_block(plane, row / to_.tiles_q, [&](int64_t block) {
                    const int32_t first = int32_t(block / joined) * to_.tiles_k;
                    each_run_within(known.by_query.runs, slice, first, first + to_.tiles_k,
                                    [&](const Run& run) { act(cut(run, 1 << block % joined)); });
                });
            });
        }
        for (int64_t row = 0; row < to_.by_key.rows; ++row) {
            const ListsByKey& named = to_.named;
            const int64_t* const of_block = named.begin + plane * named.places + row / to_.tiles_k * named.stretches;
            const int64_t begin = of_block[0], end = of_block[named.stretches];
            const int32_t* const lists = to_.named.lists + plane * to_.sizes.lists * to_.sizes.most;
            const int64_t before = begin * to_.tiles_k + row % to_.tiles_k * (end - begin);
            const int64_t first_run = kind * to_.by_key.room + before * to_.tiles_q;
            make_row(to_.by_key, kind * to_.by_key.rows + row, first_run, [&](auto act) {
                const Slice slice = known.by_key.slices[of_known * known.by_key.rows + row];
                for_each_set(lists + begin, lists + end, [&](int32_t list, int set) {
                    const int32_t first = list * to_.tiles_q;
                    each_run_within(known.by_key.runs, slice, first, first + to_.tiles_q,
                                    [&](const Run& run) { act(cut(run, set)); });
                });
            });
        }
        copy_live(known.live_queries, to_.live_queries, known.by_query.rows, kind, of_known);
        copy_live(known.live_keys, to_.live_keys, known.by_key.rows, kind, of_known);
    }

    // each(act) calls act(run) for every run of row n, which go to where the axis has them from `first` on.
    template <class Each>
    static void make_row(const CallAxis& axis, int64_t n, int64_t first, Each each) {
        Run* to = axis.runs + first;
        int32_t blocks = 0;
        each([&](const Run& run) { *to++ = run, blocks += run.count; });
        axis.slices[n] = {int32_t(first), int32_t(to - axis.runs)};
        axis.lengths[n] = blocks;
    }

    static void copy_live(const LiveView& from, int32_t* set_of, int64_t rows, int64_t kind, int64_t of_known) {
        if (from.set_of) std::copy_n(from.set_of + of_known * rows, rows, set_of + kind * rows);
    }

    // How many a task's row has. Keys' tasks have the blocks of a group's query heads, one after the other.
    int32_t count_blocks(const Task& task, Owner owner) const {
        const CallAxis& axis = owner == Owner::queries ? to_.by_query : to_.by_key;
        const int32_t heads = owner == Owner::queries ? 1 : to_.group, first = task.head * heads;
        int32_t blocks = 0;
        for (int32_t head = first; head < first + heads; ++head)
            blocks += axis.lengths[int64_t(head / to_.heads_of_kind) * axis.rows + task.row];
        return blocks;
    }

    const CallArgs& args_;
    const CallLayout& to_;
};

}  // namespace

void make_call_layout(const CallArgs& args, const CallLayout& to) { ListLayout(args, to).make(); }

}  // namespace spattn::cpu
