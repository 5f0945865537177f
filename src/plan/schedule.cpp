// SPDX-License-Identifier: MIT
// Tasks. A policy that names its workers never looks at the machine: the same tasks, parts and joins give the same bits
// on any.
#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "core/cancel.h"
#include "layout/arrays.h"
#include "layout/tables.h"
#include "plan/plan.h"

namespace spattn {

TasksView shape_of(const Schedule& schedule) {
    TasksView v{};
    v.queues = schedule.begin.empty() ? 0 : int32_t(schedule.begin.size()) - 1;
    v.num_joins = int32_t(schedule.joins.size());
    v.num_parts = schedule.num_parts;
    v.num_rounds = int32_t(schedule.rounds.size());
    v.num_tasks = int32_t(schedule.tasks.size());
    v.tile_heads = schedule.tile_heads;
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

// Rows [first, end) of the axis that does not own the tasks.
struct Across {
    int32_t first = 0, end = std::numeric_limits<int32_t>::max();
};

// Blocks of each list that lie there, [head_kinds * rows].
std::vector<int32_t> measure_lists(const ListsView& lists, int32_t head_kinds, const Across& across) {
    std::vector<int32_t> lengths(size_t(head_kinds) * lists.rows);
    Pace pace;
    for (size_t i = 0; i < lengths.size(); ++i) {
        pace.step();
        const Slice slice = lists.slices[i];
        if (i && slice.begin == lists.slices[i - 1].begin && slice.end == lists.slices[i - 1].end) {
            lengths[i] = lengths[i - 1];
            continue;
        }
        for (int32_t r = slice.begin; r < slice.end; ++r) {
            pace.step();
            const Run& run = lists.runs[r];
            lengths[i] += std::max(std::min(run.first + run.count, across.end) - std::max(run.first, across.first), 0);
        }
    }
    return lengths;
}

// Collects tasks in their natural order; finish() brings the queues into theirs. Tasks of heads that see the same are
// collected once: queues say whose they are.
class Scheduler {
public:
    Scheduler(size_t tasks, const SchedulePolicy& policy)
        : heads_in_turn_(policy.heads_in_turn), alike_(policy.alike) {
        tasks_.reserve(tasks);
        queues_.reserve(tasks);
    }
    void begin_head(int32_t head) {
        head_ = head;
        cut_ = {queues_.size(), joins_.size(), num_parts_};
    }
    void add(int32_t row, int64_t skip, int64_t take) {
        tasks_.emplace_back(head_, row, int32_t(skip), int32_t(take), whole_row);
        weight_ += std::max<int64_t>(take, 1);  // a row without keys is still written
    }
    int64_t weight() const { return weight_; }
    void close_queue() {
        if (weight_ == 0) return;
        const int32_t end = int32_t(tasks_.size());
        queues_.emplace_back(weight_, begin_, end - begin_, head_, 0);
        num_tasks_ += size_t(end - begin_);
        longest_ = std::max(longest_, weight_);
        weight_ = 0, begin_ = end;
    }

    // The last `parts` tasks are parts of one row.
    void join(size_t parts) {
        Task* tasks = &tasks_[tasks_.size() - parts];
        joins_.push_back({head_, tasks->row, num_parts_, int32_t(parts)});
        for (size_t i = 0; i < parts; ++i) tasks[i].part = num_parts_++;
    }

    // One head more that sees what the last one sees.
    void repeat_head(int32_t head) {
        const Cut last = cut_;
        begin_head(head);
        const int32_t parts = num_parts_ - last.parts;
        for (size_t i = last.queues; i < cut_.queues; ++i) {
            Queue& queue = queues_.emplace_back(queues_[i]);
            queue.head = head;
            queue.parts += parts;
            num_tasks_ += size_t(queue.tasks);
        }
        for (size_t i = last.joins; i < cut_.joins; ++i) {
            Join& join = joins_.emplace_back(joins_[i]);
            join.head = head;
            join.first_part += parts;
        }
        num_parts_ += parts;
    }

    // Longest queue first, about equal ones as they came, so that a head's stay together; or in the order of rows.
    Schedule finish() {
        const std::vector<int32_t> order = sort_queues();
        Schedule out;
        out.tasks = make_table<Task>(num_tasks_);
        out.begin = make_table<int32_t>(queues_.size() + 1);
        Task* end = out.tasks.data();
        Pace pace;
        for (size_t w = 0; w < order.size(); ++w) {
            pace.step();
            const Queue& queue = queues_[size_t(order[w])];
            const Task* task = &tasks_[size_t(queue.begin)];
            for (int32_t i = 0; i < queue.tasks; ++i, ++task) {
                const int32_t part = task->part == whole_row ? whole_row : task->part + queue.parts;
                *end++ = {queue.head, task->row, task->skip, task->take, part};
            }
            out.begin[w + 1] = int32_t(end - out.tasks.data());
        }
        out.joins = std::move(joins_);
        out.num_parts = num_parts_;
        return out;
    }

private:
    struct Queue {
        int64_t weight;  // blocks, and 1 for a task without
        int32_t begin, tasks, head;
        int32_t parts;   // what to add to the numbers of parts that its tasks have
    };

    // Sorted to the block, a head's queues would be scattered over the call, and its keys leave the cache in between:
    // where queues are many, lengths count by their leading bit, and in full only among the last, which must end
    // together.
    std::vector<int32_t> sort_queues() const {
        std::vector<int32_t> order(queues_.size());
        std::iota(order.begin(), order.end(), 0);
        if (heads_in_turn_) {
            sort_by_row(order);
            return order;
        }
        if (order.size() < many_queues) {
            sort_longest_first(order);
            return order;
        }
        constexpr int64_t widths = 64;
        sort_by_place(order, widths, [](int64_t weight) { return widths - std::bit_width(uint64_t(weight)); });
        sort_longest_first({order.end() - last_queues, order.end()});
        return order;
    }

    void sort_by_row(std::span<int32_t> order) const {
        const auto place_of = [&](int32_t w) {
            const Queue& queue = queues_[size_t(w)];
            return std::pair(queue.head / heads_in_turn_, tasks_[size_t(queue.begin)].row);
        };
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return place_of(a) < place_of(b); });
    }

    void sort_longest_first(std::span<int32_t> order) const {
        const auto weight_of = [&](int32_t w) { return divide_up(queues_[size_t(w)].weight, alike_); };
        if (longest_ <= most_places)
            sort_by_place(order, longest_, [&](int64_t weight) { return longest_ - divide_up(weight, alike_); });
        else
            std::stable_sort(order.begin(), order.end(),
                             [&](int32_t a, int32_t b) { return weight_of(a) > weight_of(b); });
    }

    // Sorts by places in [0, last], and keeps what has the same place as it came.
    template <class PlaceOf>
    void sort_by_place(std::span<int32_t> order, int64_t last, PlaceOf place_of) const {
        std::vector<int32_t> at(size_t(last) + 2);
        const std::vector<int32_t> unsorted(order.begin(), order.end());
        Pace pace;
        for (int32_t w : unsorted) {
            pace.step();
            ++at[size_t(place_of(queues_[size_t(w)].weight)) + 1];
        }
        for (size_t p = 1; p < at.size(); ++p) at[p] += at[p - 1];
        for (int32_t w : unsorted) {
            pace.step();
            order[size_t(at[size_t(place_of(queues_[size_t(w)].weight))]++)] = w;
        }
    }

    // Where a head begins.
    struct Cut {
        size_t queues, joins;
        int32_t parts;
    };

    std::vector<Task> tasks_;
    std::vector<Queue> queues_;
    std::vector<Join> joins_;
    const int32_t heads_in_turn_;
    const int64_t alike_;
    size_t num_tasks_ = 0;  // of all heads
    int32_t num_parts_ = 0, head_ = 0;
    Cut cut_{};            // of the last head
    int64_t longest_ = 0;  // of the weights
    int64_t weight_ = 0;   // of the queue that is open; every task has some
    int32_t begin_ = 0;    // its first task
};

// The row whose tasks come at place `at`: tiles of the residue classes in turns.
int32_t row_in_turn(const AxisView& queries, int32_t at) {
    if (at < queries.listed) return at;
    const int64_t turn = int64_t(queries.modulus) * tiles_in_turn, home = at - queries.listed;
    const int64_t first = home / turn * tiles_in_turn, tiles = std::min(tiles_in_turn, queries.residue_tiles - first);
    return int32_t(queries.listed + home % turn / tiles * queries.residue_tiles + first + home % turn % tiles);
}

// How many heads own tasks, and how many blocks each of their rows has.
class Work {
public:
    Work(const Problem& problem, const LayoutView& layout, const Walk& walk, const Across& across = {})
        : layout_(layout),
          lists_(walk.owner == Owner::keys ? layout.by_key : layout.by_query),
          members_(walk.owner == Owner::keys ? int32_t(problem.group()) : walk.tile_heads),
          counted_(walk.owner == Owner::keys ? members_ : 1),
          heads_(int32_t(problem.batch * problem.heads_q) / members_),
          is_first_(across.first == 0),
          lengths_(measure_lists(lists_, layout.head_kinds, across)) {
        find_left(walk.owner);
        if (across.end != Across().end) everywhere_ = measure_lists(lists_, layout.head_kinds, {});
    }

    int32_t heads() const { return heads_; }
    int32_t rows() const { return lists_.rows; }
    // What tasks call a head that owns some: key heads by their own number, query heads by that of the first in a tile.
    int32_t name(int32_t head) const { return head * (members_ / counted_); }

    // Whether a head sees what the head before it sees.
    bool repeats(int32_t head) const {
        if (head == 0) return false;
        const int32_t* kinds = layout_.kind_of_head + head * members_;
        return std::equal(kinds, kinds + members_, kinds - members_);
    }

    // Blocks of each row of a head; where keys own the tasks, over the query heads of its group. no_task: the row has
    // blocks in other rounds, or nowhere and this is not the first, or all of its tokens are away. Valid until the next
    // head is asked for.
    const std::vector<int64_t>& of(int32_t head) {
        sum_members(lengths_, head, of_row_);
        for (int32_t row : left_) of_row_[size_t(row)] = no_task;
        if (everywhere_.empty()) return of_row_;
        sum_members(everywhere_, head, of_row_everywhere_);
        for (size_t row = 0; row < of_row_.size(); ++row)
            if (of_row_[row] == 0 && (!is_first_ || of_row_everywhere_[row] > 0)) of_row_[row] = no_task;
        return of_row_;
    }

    int64_t total() const {
        std::vector<int64_t> of_kind;
        for (auto row = lengths_.begin(); row != lengths_.end(); row += rows())
            of_kind.push_back(std::accumulate(row, row + rows(), int64_t(0)));
        int64_t sum = 0;
        for (int32_t head = 0; head < heads_ * members_; ++head) sum += of_kind[size_t(layout_.kind_of_head[head])];
        return sum * counted_ / members_;
    }

    // How many rows have so many blocks, over all heads.
    std::map<int64_t, int64_t> count_rows() {
        std::map<int64_t, int64_t> rows;
        Pace pace;
        for (int32_t head = 0; head < heads_; ++head)
            for (int64_t blocks : of(head)) {
                pace.step();
                ++rows[blocks];
            }
        return rows;
    }
    // No row has more blocks.
    int64_t longest() const {
        return lengths_.empty() ? 0 : counted_ * int64_t(*std::max_element(lengths_.begin(), lengths_.end()));
    }

    static constexpr int64_t no_task = -1;

private:
    // Homes that all tokens have left.
    void find_left(Owner owner) {
        const AxisView& axis = owner == Owner::keys ? layout_.keys : layout_.queries;
        if (!axis.away) return;
        const int32_t block = owner == Owner::keys ? layout_.block_k : layout_.block_q, words = words_for(block);
        const int64_t seq = owner == Owner::keys ? layout_.seq_k : layout_.seq_q;
        for (int32_t row = axis.listed; row < rows(); ++row) {
            const uint64_t* const bits = axis.away + int64_t(row - axis.listed) * words;
            int32_t away = 0;
            for (int32_t w = 0; w < words; ++w) away += std::popcount(bits[w]);
            if (away == tile_at(axis, block, seq, row).count) left_.push_back(row);
        }
    }

    void sum_members(const std::vector<int32_t>& lengths, int32_t head, std::vector<int64_t>& sums) const {
        sums.assign(size_t(rows()), 0);
        for (int32_t member = head * members_; member < head * members_ + counted_; ++member) {
            const int32_t* of_kind = &lengths[size_t(layout_.kind_of_head[member]) * size_t(rows())];
            for (int32_t row = 0; row < rows(); ++row) sums[size_t(row)] += of_kind[row];
        }
    }

    const LayoutView& layout_;
    const ListsView& lists_;
    // Query heads of a head that owns tasks; those of them whose blocks add up, for heads that share a tile share its
    // blocks, too; heads that own tasks.
    const int32_t members_, counted_, heads_;
    const bool is_first_;  // of the rounds
    const std::vector<int32_t> lengths_;
    std::vector<int32_t> left_;
    std::vector<int32_t> everywhere_;  // where there are several rounds
    std::vector<int64_t> of_row_, of_row_everywhere_;
};

// `cut` collects the tasks of one head, whose rows have so many blocks.
template <class Cut>
Schedule schedule_heads(Work& work, const SchedulePolicy& policy, Cut cut) {
    Scheduler scheduler(size_t(work.heads()) * size_t(work.rows()), policy);
    for (int32_t head = 0; head < work.heads(); ++head) {
        check_cancelled();
        if (work.repeats(head)) {
            scheduler.repeat_head(work.name(head));
            continue;
        }
        scheduler.begin_head(work.name(head));
        cut(work.of(head), scheduler);
        scheduler.close_queue();
    }
    return scheduler.finish();
}

// Into how many parts a row is split.
int64_t parts_of(int64_t blocks, int64_t longest, const SchedulePolicy& policy) {
    return blocks > std::max(longest, policy.whole_rows) ? divide_up(blocks, longest) : 1;
}

// The time of a walk whose rows are split into parts of at most so many blocks. A task waits about a block's time for
// its first one. Workers take the longest task that is left: of the tasks that are as long as one, or longer, some
// worker has its share, rounded up; and where they have several, they end some of the longest task's time apart.
double walk_us(const std::map<int64_t, int64_t>& rows, int64_t longest, const SchedulePolicy& policy, int64_t workers) {
    constexpr double apart = 0.25;
    std::map<int64_t, int64_t, std::greater<>> tasks;
    int64_t parts_in_all = 0;
    for (const auto& [blocks, count] : rows) {
        if (blocks <= 0) continue;
        const int64_t parts = parts_of(blocks, longest, policy), longer = blocks % parts;
        if (longer) tasks[blocks / parts + 1] += count * longer;
        tasks[blocks / parts] += count * (parts - longer);
        if (parts > 1) parts_in_all += count * parts;
    }
    const auto task_us = [&](int64_t blocks) { return double(blocks + 1) * policy.block_us + policy.task_us; };
    int64_t met = 0;
    double busiest = 0, total = 0;
    for (const auto& [blocks, count] : tasks) {
        met += count, total += double(count) * task_us(blocks);
        busiest = std::max(busiest, double(divide_up(met, workers)) * task_us(blocks));
    }
    const double several = std::clamp(double(met - workers) / double(workers), 0.0, 1.0);
    const double unevenness = met > 0 ? several * apart * task_us(tasks.begin()->first) : 0;
    const double join = parts_in_all ? policy.join_us + double(parts_in_all) * policy.part_us : 0;
    return std::max(busiest, total / double(workers) + unevenness) + join;
}

// The length of parts with which the walk takes the least time, the longest of several. Workers may have a few parts
// each, which are then shorter than their share of the work.
int64_t fit_machine(Work& work, const SchedulePolicy& policy, int64_t workers) {
    constexpr int64_t most_each = 4, steps = 8;  // steps: from a length to half of it, about
    const int64_t shortest = divide_up(work.total(), workers * most_each);
    if (work.longest() <= std::max(shortest, policy.whole_rows)) return std::max<int64_t>(work.longest(), 1);
    const std::map<int64_t, int64_t> rows = work.count_rows();
    const int64_t whole = rows.rbegin()->first;
    int64_t best = whole;
    double least = walk_us(rows, whole, policy, workers);
    for (int64_t longest = whole; longest > shortest;) {
        longest = std::max(longest - divide_up(longest, steps), shortest);
        const double us = walk_us(rows, longest, policy, workers);
        if (us < least) best = longest, least = us;
    }
    return best;
}

Schedule schedule_rows(Work& work, const AxisView& axis, const SchedulePolicy& policy, int64_t workers) {
    const int64_t total = work.total();
    int64_t longest = policy.workers ? std::max(policy.longest_task, total / workers)
                                     : fit_machine(work, policy, workers);
    // In the order of rows, one that is far longer than most would keep all that follow waiting.
    if (policy.heads_in_turn)
        longest = std::min(longest, std::max<int64_t>(divide_up(2 * total, int64_t(work.heads()) * work.rows()), 32));
    const bool in_turns = axis.modulus > 1;
    const int64_t most_single = in_turns ? policy.most_single_residue : policy.most_single;
    const int64_t target =
        policy.heads_in_turn ? 1 : std::clamp<int64_t>(total / most_single, 1, policy.shared_blocks);
    return schedule_heads(work, policy, [&](const std::vector<int64_t>& lengths, Scheduler& scheduler) {
        Pace pace;
        for (int32_t at = 0; at < work.rows(); ++at) {
            pace.step();
            const int32_t row = in_turns ? row_in_turn(axis, at) : at;
            const int64_t blocks = lengths[size_t(row)];
            if (blocks == Work::no_task) continue;
            if (blocks >= target) scheduler.close_queue();
            const int64_t parts = parts_of(blocks, longest, policy);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t skip = blocks * part / parts, end = blocks * (part + 1) / parts;
                scheduler.add(row, skip, end - skip);
                if (scheduler.weight() >= target) scheduler.close_queue();
            }
            if (parts > 1) scheduler.join(size_t(parts));
        }
    });
}

// One head: its rows, one after the other, in queues of equal work.
void share_rows(const std::vector<int64_t>& lengths, int64_t queues, int64_t whole_rows, Scheduler& scheduler) {
    int64_t total = 0, done = 0, queue = 0;
    for (int64_t length : lengths) total += std::max<int64_t>(length, 0);
    Pace pace;
    for (size_t row = 0; row < lengths.size(); ++row) {
        pace.step();
        if (lengths[row] == Work::no_task) continue;
        int64_t skip = 0;
        size_t parts = 0;
        do {
            // Rows without blocks stay with what comes before them.
            if (lengths[row] > 0)
                while (done >= total * (queue + 1) / queues) {
                    scheduler.close_queue();
                    ++queue;
                }
            const bool is_whole = lengths[row] <= whole_rows;
            const int64_t share = is_whole ? lengths[row] : total * (queue + 1) / queues - done;
            const int64_t take = std::min(lengths[row] - skip, share);
            scheduler.add(int32_t(row), skip, take);
            skip += take;
            done += take;
            ++parts;
        } while (skip < lengths[row]);
        if (parts > 1) scheduler.join(parts);
    }
}

Schedule schedule_shares(Work& work, const SchedulePolicy& policy, int64_t workers) {
    const int64_t queues = std::clamp<int64_t>(divide_up(workers, work.heads()), 1, work.rows());
    return schedule_heads(work, policy, [&](const std::vector<int64_t>& lengths, Scheduler& scheduler) {
        share_rows(lengths, queues, policy.whole_rows, scheduler);
    });
}

// Tasks of one round more.
void append(const Schedule& round, const Across& across, Schedule& all) {
    const TasksView before = shape_of(all), added = shape_of(round);
    all.rounds.push_back({across.first, across.end, before.queues, before.queues + added.queues, before.num_joins,
                          before.num_joins + added.num_joins});
    if (all.begin.empty()) all.begin.push_back(0);
    for (int32_t w = 0; w < added.queues; ++w) all.begin.push_back(before.num_tasks + round.begin[size_t(w) + 1]);
    all.tasks.insert(all.tasks.end(), round.tasks.begin(), round.tasks.end());
    all.joins.insert(all.joins.end(), round.joins.begin(), round.joins.end());
    all.num_parts = std::max(all.num_parts, round.num_parts);
}

Schedule schedule_rounds(const Problem& problem, const LayoutView& layout, const Walk& walk, int64_t workers,
                         int32_t rounds) {
    const int64_t rows = (walk.owner == Owner::keys ? layout.by_query : layout.by_key).rows;
    Schedule all;
    for (int64_t round = 0; round < rounds; ++round) {
        const Across across{int32_t(rows * round / rounds), int32_t(rows * (round + 1) / rounds)};
        Work work(problem, layout, walk, across);
        append(schedule_shares(work, walk.policy, workers), across, all);
    }
    return all;
}

}  // namespace

Schedule make_schedule(const Problem& problem, const LayoutView& layout, const Walk& walk, int lanes,
                       int32_t rounds) {
    SchedulePolicy policy = walk.policy;
    const bool by_key = walk.owner == Owner::keys;
    const int64_t tokens = by_key ? problem.seq_k : problem.seq_q, block = by_key ? layout.block_k : layout.block_q;
    policy.part_us *= double(std::min(tokens, block)) / double(block);
    const int64_t workers =
        policy.workers ? policy.workers : std::max(int64_t(lanes * policy.workers_of_lane), int64_t(1));
    if (rounds > 1) return schedule_rounds(problem, layout, walk, workers, rounds);
    Work work(problem, layout, walk);
    Schedule schedule =
        policy.equal_shares
            ? schedule_shares(work, policy, workers)
            : schedule_rows(work, by_key ? layout.keys : layout.queries, policy, workers);
    schedule.tile_heads = walk.tile_heads;
    return schedule;
}

}  // namespace spattn
