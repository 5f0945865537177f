// SPDX-License-Identifier: MIT
// A plan: the kernel rows of each pass, the layouts those rows read, their tasks, and the reasons.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "layout/token_lists.h"
#include "plan/cache.h"
#include "plan/dispatch.h"
#include "plan/kernel.h"
#include "plan/lower.h"
#include "plan/portions.h"

namespace spattn {

// Owns what TasksView points to.
struct Schedule {
    std::vector<Task> tasks;
    std::vector<int32_t> begin;  // [queues + 1]
    std::vector<Join> joins;
    std::vector<Round> rounds;   // none where there is only one
    int32_t num_parts = 0, tile_heads = 1;
};

// See layout/arrays.h.
template <class Visit>
void each_array(const Schedule& schedule, TasksView& view, Visit&& visit) {
    visit(schedule.tasks, view.tasks);
    visit(schedule.begin, view.begin);
    visit(schedule.joins, view.joins);
    visit(schedule.rounds, view.rounds);
}
TasksView shape_of(const Schedule& schedule);
TasksView view(const Schedule& schedule);

// A task a block of the owning axis and head, longest first; rows far longer than the rest are split. Or, in equal
// shares: the blocks of a head, row after row, are cut into queues of equal work; a row that a cut crosses is joined.
// `lanes`, those of the machine, count only for policies that do not name their workers. Where keys own the tasks, a
// head is one of heads_kv, and the lists of its group follow each other; equal shares of them may be cut for each of some
// rounds (layout/view.h). A row has a task in the rounds in which it has blocks, and one that has none in the first.
Schedule make_schedule(const Problem& problem, const LayoutView& layout, const Walk& walk, int lanes,
                       int32_t rounds = 1);

// The tasks of each portion of a pass, and what they need. Portions whose heads see the same share a schedule.
struct PortionTasks {
    std::vector<Schedule> schedules;
    std::vector<int32_t> schedule_of;              // [portions]
    size_t workspace = 0, one_lane_workspace = 0;  // bytes of the largest
};

// A row that was looked at, with its blocks in an order, and what became of it.
struct Candidate {
    const Kernel* kernel;
    Order order;
    std::string refused;  // why it is out; empty where it has a cost
    Cost cost{};
    LayoutStats stats{};  // where queries are dispatched, of a round
    bool could_serve = true;  // false: refused for the problem or the machine, whatever the pattern and its cost
};

// What works on one pattern: the whole, or a piece of it.
struct PiecePlan {
    std::string pattern_text;
    const Kernel* kernel = nullptr;
    Order order = Order::plain;
    // What a block row reads, shared between passes with equal blocks; where lists come at run time, what each call
    // makes its own of. A gather row of such lists has one, too, if the pattern says more of a listed key: its masks are
    // that condition.
    std::shared_ptr<const Layout> layout;
    std::shared_ptr<const std::vector<uint64_t>> masks;  // the layout's, in the kernel's order
    std::shared_ptr<const TokenLists> tokens;  // gather rows, unless calls bring the lists
    std::optional<DispatchShape> dispatch;     // of dispatched queries alone
    std::vector<uint16_t> bit_places;          // the same: how each call makes masks
    std::optional<CacheShape> cache;           // of calls on one, where the row reads a layout
    std::optional<CacheLists> cache_lists;     // of calls on one, where it reads lists. Without lists of a call the layout
                                               // is what they are made from
    Schedule schedule, second_schedule;  // of the kernel's walks; where the pass goes in portions, none
    PortionTasks portions;               // there
    Cost cost{};
    LayoutStats stats{};
    std::vector<Candidate> considered;
    size_t workspace = 0;  // bytes

    LayoutView layout_view() const;
    // Whether the masks' bits are in an order of the row's.
    bool has_kernel_masks() const { return kernel->permute && order != Order::dispatched; }
};

// One pass of a plan. Nearly all are of one piece, the whole pattern; where there are more, they share no pair.
struct PassPlan {
    std::vector<PiecePlan> pieces;  // none where the pass is not planned
    Cost cost{};
    std::vector<Candidate> whole;   // of plans in several pieces: what was looked at for the whole pattern
    size_t carried = 0;             // bytes at the start of the workspace that pieces hand on
    size_t workspace = 0;           // bytes in all: pieces use what is not carried one after the other
    std::optional<Portions> portions;  // each goes through all pieces; none where the pass has all heads at once
};

struct PlanOptions {
    int32_t device = SPATTN_CPU;  // spattn_device_type
    int32_t device_index = 0;     // among the devices of that type
    bool backward = false;
    bool reference = false;
    bool lists_alone = false;     // without rows that read a layout: how many keys there are, each call says
    size_t ample_scratch = size_t(256) << 20;  // bytes of a CPU pass; beyond, it goes over heads and queries by and by
    Machine machine;
};

struct CompiledPlan {
    Problem problem;
    PlanOptions options;
    std::string pattern_text;
    Counts counts;               // exact, from the forward layouts
    size_t layout_bytes = 0;
    PassPlan forward, backward;  // backward has no pieces unless planned
};

// Chooses among `kernels` (all_kernels() in production). Fails with SPATTN_E_NO_KERNEL and the reasons where none fits.
CompiledPlan compile_plan(const Pattern& pattern, const Problem& problem, const PlanOptions& options,
                          const std::vector<Kernel>& kernels);

// What spattn_plan_explain prints: of the rows that could not serve, how many are out for each reason, or each one.
enum class Considered { grouped, each };
std::string explain(const CompiledPlan& plan, Considered considered = Considered::grouped);

double flops(const Problem& problem, double pairs, Pass pass);
double operand_bytes(const Problem& problem, Pass pass);
// What it takes to copy what a call sees of a float8 cache as elements: seq_k keys of each sequence.
double widening_us(const Problem& problem, const Machine& machine, int32_t device);
// What it takes to make lists of so many bytes of the keys that a call on a cache sees.
double listing_us(double bytes, const Machine& machine, int32_t device);
// What it takes to copy operands of float8 as elements: all of them, or v alone.
double float8_us(const Problem& problem, bool keeps_q_and_k, const Machine& machine, int32_t device);
// Written by one piece of a pass and read by the next.
double handed_on_bytes(const Problem& problem, Pass pass);

}  // namespace spattn
