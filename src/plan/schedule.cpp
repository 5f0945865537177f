// SPDX-License-Identifier: MIT
// Tasks. A policy that names its workers never looks at the machine: the same tasks, parts and joins give the same bits
// on any.
#include <algorithm>
#include <bit>
#include <numeric>
#include <span>

#include "layout/arrays.h"
#include "plan/plan.h"

namespace spattn {

TasksView shape_of(const Schedule& schedule) {
    TasksView v{};
    v.queues = schedule.begin.empty() ? 0 : int32_t(schedule.begin.size()) - 1;
    v.num_joins = int32_t(schedule.joins.size());
    v.num_parts = schedule.num_parts;
    v.num_tasks = int32_t(schedule.tasks.size());
    return v;
}

TasksView view(const Schedule& schedule) {
    TasksView v = shape_of(schedule);
    each_array(schedule, v, PointAtHost());
    return v;
}

namespace {

// Tiles of a residue class before the next residue class has its turn. More share more keys; with fewer, pages that
// residue classes share are sooner met again, and to find a page takes as long as to fetch a row of it.
constexpr int64_t tiles_in_turn = 4;
// From here on the keys' place in the cache weighs more than an even end.
constexpr size_t many_queues = 512;
constexpr ptrdiff_t last_queues = 256;
// Weights up to here are counted rather than compared, in a third of the time: a plan takes microseconds.
constexpr int64_t most_places = 1024;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of each list, [head_kinds * rows].
std::vector<int32_t> measure_lists(const ListsView& lists, int32_t head_kinds) {
    std::vector<int32_t> lengths(size_t(head_kinds) * lists.rows);
    for (size_t i = 0; i < lengths.size(); ++i) {
        const Slice slice = lists.slices[i];
        if (i && slice.begin == lists.slices[i - 1].begin && slice.end == lists.slices[i - 1].end) {
            lengths[i] = lengths[i - 1];
            continue;
        }
        for (int32_t r = slice.begin; r < slice.end; ++r) lengths[i] += lists.runs[r].count;
    }
    return lengths;
}

// Collects tasks in their natural order; finish() brings the queues into theirs.
class Scheduler {
public:
    explicit Scheduler(int64_t rows) {
        schedule_.tasks.reserve(size_t(rows));
        ends_.reserve(size_t(rows) + 1);
        weights_.reserve(size_t(rows));
    }
    void add(Task task) {
        schedule_.tasks.push_back(task);
        weight_ += std::max(task.take, 1);  // a row without keys is still written
    }
    int64_t weight() const { return weight_; }
    void close_queue() {
        if (ends_.back() == int32_t(schedule_.tasks.size())) return;
        ends_.push_back(int32_t(schedule_.tasks.size()));
        weights_.push_back(weight_);
        weight_ = 0;
    }

    // The last `parts` tasks are parts of one row.
    void join(size_t parts) {
        Task* tasks = &schedule_.tasks[schedule_.tasks.size() - parts];
        schedule_.joins.push_back({tasks->head, tasks->row, schedule_.num_parts, int32_t(parts)});
        for (size_t i = 0; i < parts; ++i) tasks[i].part = schedule_.num_parts++;
    }

    // Longest queue first; about equal ones as they came, so that a head's stay together.
    Schedule finish() {
        const std::vector<int32_t> order = sort_queues();
        Schedule out;
        out.tasks.reserve(schedule_.tasks.size());
        out.begin.reserve(order.size() + 1);
        out.begin.push_back(0);
        for (int32_t w : order) {
            for (int32_t task = ends_[size_t(w)]; task < ends_[size_t(w) + 1]; ++task)
                out.tasks.push_back(schedule_.tasks[size_t(task)]);
            out.begin.push_back(int32_t(out.tasks.size()));
        }
        out.joins = std::move(schedule_.joins);
        out.num_parts = schedule_.num_parts;
        return out;
    }

private:
    // Sorted to the block, a head's queues would be scattered over the call, and its keys leave the cache in between:
    // where queues are many, lengths count by their leading bit, and in full only among the last, which must end
    // together.
    std::vector<int32_t> sort_queues() const {
        std::vector<int32_t> order(weights_.size());
        std::iota(order.begin(), order.end(), 0);
        if (order.size() < many_queues) {
            sort_longest_first(order);
            return order;
        }
        constexpr int64_t widths = 64;
        sort_by_place(order, widths, [&](int32_t w) { return widths - std::bit_width(uint64_t(weights_[size_t(w)])); });
        sort_longest_first({order.end() - last_queues, order.end()});
        return order;
    }

    void sort_longest_first(std::span<int32_t> order) const {
        int64_t longest = 0;
        for (int32_t w : order) longest = std::max(longest, weights_[size_t(w)]);
        if (longest <= most_places)
            sort_by_place(order, longest, [&](int32_t w) { return longest - weights_[size_t(w)]; });
        else
            std::stable_sort(order.begin(), order.end(),
                             [&](int32_t a, int32_t b) { return weights_[size_t(a)] > weights_[size_t(b)]; });
    }

    // Sorts by places in [0, last], and keeps what has the same place as it came.
    template <class Place>
    static void sort_by_place(std::span<int32_t> order, int64_t last, Place place) {
        std::vector<int32_t> at(size_t(last) + 2);
        const std::vector<int32_t> unsorted(order.begin(), order.end());
        for (int32_t w : unsorted) ++at[size_t(place(w)) + 1];
        for (size_t p = 1; p < at.size(); ++p) at[p] += at[p - 1];
        for (int32_t w : unsorted) order[size_t(at[size_t(place(w))]++)] = w;
    }

    Schedule schedule_;
    std::vector<int32_t> ends_{0};  // of queues, in tasks
    std::vector<int64_t> weights_;  // of queues: blocks, and 1 for a task without
    int64_t weight_ = 0;
};

// The row whose tasks come at place `at`: tiles of the residue classes in turns.
int32_t row_in_turn(const AxisView& queries, int32_t at) {
    if (at < queries.listed || queries.modulus == 1) return at;
    const int64_t turn = int64_t(queries.modulus) * tiles_in_turn, home = at - queries.listed;
    const int64_t first = home / turn * tiles_in_turn, tiles = std::min(tiles_in_turn, queries.residue_tiles - first);
    return int32_t(queries.listed + home % turn / tiles * queries.residue_tiles + first + home % turn % tiles);
}

// How many heads own tasks, and how many blocks each of their rows has.
class Work {
public:
    Work(const Problem& problem, const LayoutView& layout, Owner owner)
        : layout_(layout),
          lists_(owner == Owner::keys ? layout.by_key : layout.by_query),
          members_(owner == Owner::keys ? int32_t(problem.group()) : 1),
          heads_(int32_t(problem.batch * problem.heads_q) / members_),
          lengths_(measure_lists(lists_, layout.head_kinds)),
          of_row_(size_t(lists_.rows)) {}

    int32_t heads() const { return heads_; }
    int32_t rows() const { return lists_.rows; }

    // Blocks of each row of a head; where keys own the tasks, over the query heads of its group. Valid until the next.
    const std::vector<int64_t>& of(int32_t head) {
        std::fill(of_row_.begin(), of_row_.end(), 0);
        for (int32_t member = head * members_; member < (head + 1) * members_; ++member) {
            const int32_t* of_kind = &lengths_[size_t(layout_.kind_of_head[member]) * size_t(rows())];
            for (int32_t row = 0; row < rows(); ++row) of_row_[size_t(row)] += of_kind[row];
        }
        return of_row_;
    }

    int64_t total() const {
        std::vector<int64_t> of_kind(size_t(layout_.head_kinds));
        for (size_t i = 0; i < lengths_.size(); ++i) of_kind[i / size_t(rows())] += lengths_[i];
        int64_t sum = 0;
        for (int32_t head = 0; head < heads_ * members_; ++head) sum += of_kind[size_t(layout_.kind_of_head[head])];
        return sum;
    }

private:
    const LayoutView& layout_;
    const ListsView& lists_;
    const int32_t members_, heads_;  // query heads of a head that owns tasks; heads that do
    const std::vector<int32_t> lengths_;
    std::vector<int64_t> of_row_;
};

Schedule schedule_rows(Work& work, const AxisView& axis, const SchedulePolicy& policy, int64_t workers) {
    const int64_t total = work.total();
    const int64_t longest = std::max(policy.longest_task, total / workers);
    const int64_t most_single = axis.modulus > 1 ? policy.most_single_residue : policy.most_single;
    const int64_t target = std::clamp<int64_t>(total / most_single, 1, policy.shared_blocks);
    Scheduler scheduler(int64_t(work.heads()) * work.rows());
    for (int32_t head = 0; head < work.heads(); ++head) {
        const std::vector<int64_t>& lengths = work.of(head);
        for (int32_t at = 0; at < work.rows(); ++at) {
            const int32_t row = row_in_turn(axis, at);
            const int64_t blocks = lengths[size_t(row)];
            if (blocks >= target) scheduler.close_queue();
            if (blocks <= longest) {
                scheduler.add({head, row, 0, int32_t(blocks), whole_row});
                if (scheduler.weight() >= target) scheduler.close_queue();
                continue;
            }
            const int64_t parts = divide_up(blocks, longest);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t skip = blocks * part / parts, end = blocks * (part + 1) / parts;
                scheduler.add({head, row, int32_t(skip), int32_t(end - skip), whole_row});
                if (scheduler.weight() >= target) scheduler.close_queue();
            }
            scheduler.join(size_t(parts));
        }
        scheduler.close_queue();
    }
    return scheduler.finish();
}

// One head: its rows, one after the other, in queues of equal work.
void share_rows(const std::vector<int64_t>& lengths, int32_t head, int64_t queues, Scheduler& scheduler) {
    int64_t total = 0, done = 0, queue = 0;
    for (int64_t length : lengths) total += length;
    for (size_t row = 0; row < lengths.size(); ++row) {
        int64_t skip = 0;
        size_t parts = 0;
        do {
            // Rows without blocks stay with what comes before them.
            if (lengths[row] > 0)
                while (done >= total * (queue + 1) / queues) {
                    scheduler.close_queue();
                    ++queue;
                }
            const int64_t take = std::min(lengths[row] - skip, total * (queue + 1) / queues - done);
            scheduler.add({head, int32_t(row), int32_t(skip), int32_t(take), whole_row});
            skip += take;
            done += take;
            ++parts;
        } while (skip < lengths[row]);
        if (parts > 1) scheduler.join(parts);
    }
    scheduler.close_queue();
}

Schedule schedule_shares(Work& work, int64_t workers) {
    const int64_t queues = std::clamp<int64_t>(divide_up(workers, work.heads()), 1, work.rows());
    Scheduler scheduler(int64_t(work.heads()) * work.rows());
    for (int32_t head = 0; head < work.heads(); ++head) share_rows(work.of(head), head, queues, scheduler);
    return scheduler.finish();
}

}  // namespace

Schedule make_schedule(const Problem& problem, const LayoutView& layout, const Walk& walk, int lanes) {
    Work work(problem, layout, walk.owner);
    const int64_t workers = walk.policy.workers ? walk.policy.workers : lanes;
    if (walk.policy.equal_shares) return schedule_shares(work, workers);
    return schedule_rows(work, walk.owner == Owner::keys ? layout.keys : layout.queries, walk.policy, workers);
}

}  // namespace spattn
