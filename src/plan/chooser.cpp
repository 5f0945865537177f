// SPDX-License-Identifier: MIT
#include "plan/chooser.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/error.h"
#include "plan/bounds.h"
#include "plan/call_lists.h"
#include "plan/dispatched.h"
#include "plan/stats.h"

namespace spattn {
namespace {

constexpr double wasteful = 1.5;        // visited for each kept pair: from here on listed tiles are priced
constexpr double clearly_less = 0.9;    // of the best cost: what a layout must promise to be made, which costs time too
constexpr size_t small_layout = 65536;  // bytes: smaller blocks than its are made for any gain that they promise
// What lists on a cache must promise on a GPU, of what blocks are expected to take there: with few queries in a tile
// these take less than that (H200).
constexpr double lists_promise = 0.8;
constexpr double streamed = 0.85;  // of a GPU's memory's rate, where keys come once
constexpr double lane_bandwidth = 12;  // GB/s, nominal: what one core can ask for

Form form(const Kernel& kernel, Order order) {
    if (order == Order::dispatched) return {known_block, known_block, Order::plain, Owner::queries};
    return {kernel.block_q, kernel.block_k, order, kernel.owner()};
}

// Room in a plan's schedule for calls some of whose sequences are far longer than others: these cut a few rows by their
// lengths, and have the others whole. Kernels deal out two tasks a worker without counting, and joins that are not there
// take time as well.
void make_room(Schedule& schedule, CacheShape& shape, int64_t workers) {
    constexpr int64_t most_tiles = 8192;  // to add up more lengths would take too long
    constexpr int64_t most_cut = 32;
    const int64_t tiles = shape.batch * shape.heads / schedule.tile_heads * shape.rows, cut = std::min(tiles, most_cut);
    if (shape.sequences == 1 || tiles > most_tiles) return;
    const auto grow = [](auto& to, int64_t size, const auto& filler) {
        if (int64_t(to.size()) < size) to.resize(size_t(size), filler);
    };
    grow(schedule.tasks, tiles <= 2 * workers ? 2 * workers : tiles + workers, Task{});
    grow(schedule.joins, cut, Join{0, 0, 0, no_join});
    schedule.num_parts = std::max(schedule.num_parts, int32_t(workers + cut));
    shape.cuts_rows_for = int32_t(workers);
}

}  // namespace

Chooser::Chooser(const Pattern& pattern, const Admission& admission, bool in_pieces)
    : admission_(admission), problem_(admission.problem), options_(admission.options), in_pieces_(in_pieces),
      pattern_(PatternRef::share(&pattern)), text_(pattern.print()),
      known_(calls_bring_lists() ? pattern.known_part() : pattern_), lowered_(known_ ? known_ : make_full()),
      lowering_(*lowered_, problem_) {}

std::vector<Candidate> Chooser::consider(Pass pass, const Rival* rival) {
    std::vector<Candidate> candidates;
    candidates.reserve(admission_.kernels.size());
    for (const Kernel& kernel : admission_.kernels)
        if (kernel.pass == pass) consider(kernel, candidates);
    price(candidates, rival);
    price_listed(candidates, rival);
    return candidates;
}

const Candidate* Chooser::find_best(const std::vector<Candidate>& candidates) const {
    const Candidate* best = nullptr;
    for (const Candidate& candidate : candidates)
        if (candidate.refused.empty() && (!best || choice_us(candidate) < choice_us(*best))) best = &candidate;
    return best;
}

// A row in residue classes too, where the pattern keeps to them, and with hot tokens packed, where it has such. Blocks
// of a call's lists are of consecutive tokens; queries are dispatched where those of a tile have several lists.
void Chooser::consider(const Kernel& kernel, std::vector<Candidate>& candidates) const {
    std::string refused = admission_.refuse(kernel);
    if (refused.empty() && has_call_layout(kernel, problem_))
        if (const char* why = refuse_call_lists(kernel, problem_)) {
            if (!refuse_dispatch(kernel, problem_, options_.machine.memory))
                candidates.push_back({&kernel, Order::dispatched, ""});
            refused = why;
        }
    if (refused.empty() && in_pieces_ && !kernel.carries) refused = "runs whole patterns only";
    const bool has_orders = refused.empty() && kernel.orders && calls_have_layout();
    if (has_orders && lowering_.modulus() > 1)
        candidates.push_back({&kernel, Order::residue, ""});
    if (has_orders && lowering_.has_packed())
        candidates.push_back({&kernel, Order::packed, ""});
    const bool could_serve = refused.empty();
    candidates.emplace_back(&kernel, Order::plain, std::move(refused)).could_serve = could_serve;
}

// Large blocks first: their lists are the shorter ones, and what they cost may settle the matter for small ones.
// Other orders before plain blocks for the same reason. Rows that read no layout count on nominal blocks, and come
// where these do.
void Chooser::price(std::vector<Candidate>& candidates, const Rival* rival) {
    std::vector<Candidate*> order;
    for (Candidate& candidate : candidates)
        if (candidate.refused.empty()) order.push_back(&candidate);
    std::stable_sort(order.begin(), order.end(), [](const Candidate* a, const Candidate* b) {
        const auto area = [](const Candidate* c) {
            return c->kernel->block_q ? c->kernel->block_q * c->kernel->block_k : nominal_block * nominal_block;
        };
        if ((a->order == Order::plain) != (b->order == Order::plain)) return b->order == Order::plain;
        return area(a) > area(b);
    });
    Mark best;
    const Mark* mark = rival ? &rival->mark : nullptr;
    for (Candidate* candidate : order) {
        price(*candidate, rival, mark);
        if (!candidate->refused.empty() || (mark && choice_us(*candidate) >= mark->us)) continue;
        best = {choice_us(*candidate), candidate->kernel->name};
        mark = &best;
    }
}

// Listed tiles, where plain blocks are mostly waste.
void Chooser::price_listed(std::vector<Candidate>& candidates, const Rival* rival) {
    if (!calls_have_layout()) return;
    std::vector<Candidate> listed;
    for (const Candidate& plain : candidates) {
        if (!is_wasteful(plain)) continue;
        const Kernel& kernel = *plain.kernel;
        const Candidate* best = find_best(candidates);  // null only where the rival has beaten all
        const Mark own = best ? Mark{choice_us(*best), best->kernel->name} : rival->mark;
        const Mark* mark = rival && rival->mark.us < own.us ? &rival->mark : &own;
        listed.push_back({&kernel, Order::listed, ""});
        if (loses(kernel, make_least_stats(problem_, summary().counts, kernel, 1), clearly_less * mark->us) ||
            loses_listed(plain_or_coarser(plain), kernel, mark->us))
            listed.back().refused = text("could not beat ", mark->name, " with what it would list");
        else
            price(listed.back(), rival, mark);
    }
    candidates.insert(candidates.end(), listed.begin(), listed.end());
}

// Where larger blocks were lowered and have won already, what these would visit is known from them.
bool Chooser::is_wasteful(const Candidate& plain) {
    const Kernel& kernel = *plain.kernel;
    if (plain.order != Order::plain || !plain.could_serve || !kernel.orders) return false;
    const double filled = std::min(1.0, double(problem_.seq_q) / kernel.block_q);  // what queries cannot fill is no waste
    const auto is_mostly_waste = [&](const LayoutStats& stats) { return filled * stats.visited >= wasteful * stats.pairs; };
    if (plain.refused.empty()) return is_mostly_waste(plain.stats);
    const Form finer = form(kernel, plain.order);
    const Lowered* coarse = lowering_.refuse(finer).empty() ? lowering_.coarser(finer) : nullptr;
    return coarse && is_mostly_waste(measured_.at(make_finer_stats, *coarse, kernel));
}

void Chooser::price(Candidate& candidate, const Rival* rival, const Mark* mark) {
    const Kernel& kernel = *candidate.kernel;
    if (kernel.block_q > 0) candidate.refused = lowering_.refuse(form(kernel, candidate.order));
    if (candidate.refused.empty() && mark && calls_have_layout())
        candidate.refused = find_beaten(candidate, rival, *mark);
    if (!candidate.refused.empty()) return;
    candidate.stats = stats_of(candidate);
    candidate.stats.is_piece = in_pieces_;
    candidate.refused = refuse_sharing(kernel);
    if (candidate.refused.empty() && kernel.family == Family::gather)
        candidate.refused = lists_cache(kernel) ? refuse_cache_lists(kernel) : refuse_lists(candidate.stats);
    if (!candidate.refused.empty()) return;
    candidate.cost = cost_of(candidate, options_.machine);
}

Cost Chooser::cost_of(const Candidate& candidate, const Machine& machine) const {
    const Kernel& kernel = *candidate.kernel;
    if (problem_.has_starts) return cost_on_cache(candidate, machine);
    Cost cost = cost_of_row(candidate, machine);
    cost.us += copies_us(kernel, machine);
    return cost;
}

// Pieces share copies.
double Chooser::copies_us(const Kernel& kernel, const Machine& machine) const {
    if (!problem_.float8_operands || in_pieces_) return 0;
    return float8_us(problem_, kernel.multiplies_float8, machine, options_.device);
}

Cost Chooser::cost_of_row(const Candidate& candidate, const Machine& machine) const {
    const Kernel& kernel = *candidate.kernel;
    if (candidate.order != Order::dispatched) return kernel.cost(problem_, candidate.stats, machine);
    return dispatch_cost(DispatchShape(problem_, kernel, machine.memory), kernel, candidate.stats, machine);
}

Cost Chooser::cost_on_cache(const Candidate& candidate, const Machine& machine) const {
    const Kernel& kernel = *candidate.kernel;
    if (lists_cache(kernel)) return cost_of_cache_lists(candidate, machine);
    Problem seen = seen_of_cache(problem_, candidate.stats);
    if (cache_keys(kernel, problem_) != CacheKeys::widened) return kernel.cost(seen, candidate.stats, machine);
    const double widening = widening_us(seen, machine, options_.device);
    seen.float8_cache = false;
    Cost cost = kernel.cost(seen, candidate.stats, machine);
    cost.us += widening;
    return cost;
}

// Keys come from memory, not from caches of the machine; no sooner than that gives them, on a GPU.
Cost Chooser::cost_of_cache_lists(const Candidate& candidate, const Machine& machine) const {
    const Problem seen = seen_of_cache(problem_, candidate.stats);
    const CacheLists lists(seen, seen.seq_k, true);
    Problem inner = lists.inner({}, seen.seq_q);
    inner.seq_k = problem_.seq_k * problem_.sequences();
    Cost cost = candidate.kernel->cost(inner, candidate.stats, machine);
    const double columns = double(seen.head_dim + (seen.value_in_key ? 0 : seen.head_dim_v));
    const double bytes = candidate.stats.gathered * columns * seen.key_bytes();
    if (options_.device != SPATTN_CPU) cost.us = std::max(cost.us, bytes / (streamed * machine.bandwidth * 1e3));
    cost.us += listing_us(lists.bytes() * double(lists.rounds()), machine, options_.device);
    return cost;
}

LayoutStats Chooser::stats_of(const Candidate& candidate) {
    const Kernel& kernel = *candidate.kernel;
    if (calls_bring_lists() && kernel.block_q == 0) return make_call_stats(problem_);
    if (candidate.order == Order::dispatched)
        return make_dispatch_stats(DispatchShape(problem_, kernel, options_.machine.memory), kernel);
    if (kernel.family != Family::gather) {
        const LayoutStats& stats = block_stats(kernel, candidate.order);
        if (problem_.has_starts) return make_cache_stats(problem_, kernel, stats);
        return calls_bring_lists() ? make_call_layout_stats(problem_, kernel, stats) : stats;
    }
    const double share = problem_.has_starts ? call_share(problem_) : 1;
    const Lowered& seen = already_counted(kernel);
    LayoutStats stats = make_gather_stats(problem_, share * seen.counts.pairs, groups_share(problem_, *seen.layout));
    if (problem_.has_starts) return stats;
    stats.longest.row = double(seen.counts.row_max);
    if (kernel.pass == Pass::backward) stats.longest.across = double(longest_column(seen));
    return stats;
}

// All forms of a pattern have the same columns.
int64_t Chooser::longest_column(const Lowered& seen) {
    if (!longest_column_) longest_column_ = count_longest_column(seen);
    return *longest_column_;
}

// Larger blocks tell all of smaller ones but the gaps, which forward passes do not ask for: so of a cache's layouts,
// which are long, only those of the largest blocks and of the row that wins are made.
const LayoutStats& Chooser::block_stats(const Kernel& kernel, Order order) {
    const Lowered* coarse =
        problem_.has_starts && kernel.block_q > 0 ? lowering_.coarser(form(kernel, order)) : nullptr;
    return coarse ? measured_.at(make_finer_stats, *coarse, kernel)
                  : measured_.at(counted(kernel, order), kernel.owner() == Owner::keys);
}

// What a row that reads no blocks counts on. All forms of a pattern keep the same pairs: one that is there will do.
const Lowered& Chooser::already_counted(const Kernel& kernel) {
    const Lowered* const known = lowering_.any();
    return known ? *known : counted(kernel, Order::plain);
}

std::string Chooser::refuse_sharing(const Kernel& kernel) {
    const bool must_share = kernel.shares_lists || lists_cache(kernel);
    if (!must_share || !known_ || groups_share(problem_, *already_counted(kernel).layout)) return "";
    return "heads of a group see different keys";
}

// Lists of tokens that the plan makes stay within what a plan should hold; a call's own lie elsewhere.
std::string Chooser::refuse_lists(const LayoutStats& stats) const {
    const double bytes = stats.gathered * sizeof(int32_t);  // at most: groups that see the same share their lists
    if (calls_bring_lists() || bytes <= most_list_bytes) return "";
    return text("token lists of up to ", int64_t(bytes / (1024 * 1024)), " MiB");
}

// A call lists what heads of a group see in common, in its workspace.
std::string Chooser::refuse_cache_lists(const Kernel& kernel) {
    const Form blocks{list_block, list_block, Order::plain, Owner::queries};
    if (std::string why = lowering_.refuse(blocks); !why.empty()) return why;
    const Lowered& seen = already_counted(kernel);
    const CacheLists lists(problem_, seen.counts.row_max, seen.layout->head_kinds <= 1);
    if (lists.bytes() <= CacheLists::most_bytes) return "";
    return text("lists of up to ", int64_t(lists.bytes() / (1024 * 1024)), " MiB of one query a sequence");
}

// Saves lowering for what cannot win: costs never fall when more is visited, and of a whole each part is visited. Empty
// where it may.
std::string Chooser::find_beaten(const Candidate& candidate, const Rival* rival, const Mark& mark) {
    const Kernel& kernel = *candidate.kernel;
    const auto beaten = [&](const char* with) { return text("could not beat ", mark.name, " ", with); };
    if (kernel.block_q == 0) {
        if (!rival) return "";
        double pairs = 0;
        for (const Summary& piece : rival->summaries) pairs += piece.counts.pairs;
        const LayoutStats least = make_gather_stats(problem_, pairs, true);
        if (loses(kernel, least, mark.us)) return beaten("with its lists");
        return kernel.family == Family::gather ? refuse_lists(least) : "";
    }
    for (const Summary& p : rival ? rival->summaries : std::vector<Summary>{summary()}) {
        const int32_t modulus = candidate.order == Order::plain     ? p.modulus
                                : candidate.order == Order::residue ? p.modulus / lowering_.modulus()
                                                                    : 1;
        if (loses(kernel, make_least_stats(problem_, p.counts, kernel, std::max(modulus, 1)), mark.us))
            return beaten("even without waste");
    }
    const Lowered* packed = candidate.order == Order::plain ? lowering_.packed(form(kernel, candidate.order)) : nullptr;
    if (packed && loses(kernel, measured_.at(make_least_plain_stats, *packed, kernel), clearly_less * mark.us))
        return beaten("with the blocks that hot tokens lie in");
    const Lowered* coarse = lowering_.coarser(form(kernel, candidate.order));
    return coarse && loses_finer(*coarse, kernel, mark.us) ? beaten("with the blocks it would visit") : "";
}

// What it would visit must promise less; with what more rows cost, clearly less, for lists take time and memory, unless
// they are short.
bool Chooser::loses_finer(const Lowered& coarse, const Kernel& kernel, double us) {
    LayoutStats finer = measured_.at(make_finer_stats, coarse, kernel);
    if (loses(kernel, finer, us)) return true;
    finer.rows = measured_.at(coarse, kernel.owner() == Owner::keys).rows;
    return loses(kernel, finer, coarse.bytes() <= small_layout ? us : clearly_less * us);
}

// What listed tiles would visit must promise clearly less, too. Where all of their tokens stood at home as well, as most do,
// they must still promise less.
bool Chooser::loses_listed(const Lowered& plain, const Kernel& kernel, double us) {
    LayoutStats listed = measured_.at(make_least_listed_stats, plain, kernel);
    if (loses(kernel, listed, clearly_less * us)) return true;
    listed.repeated = listed.gathered;
    return loses(kernel, listed, us);
}

bool Chooser::loses(const Kernel& kernel, const LayoutStats& stats, double us) const {
    const Machine machine = choice_machine();
    return kernel.cost(problem_, stats, machine).us + copies_us(kernel, machine) >= us;
}

Machine Chooser::choice_machine() const {
    Machine machine = options_.machine;
    if (options_.device != SPATTN_CPU) return machine;
    machine.lanes = 1;
    machine.bandwidth = lane_bandwidth;
    return machine;
}

double Chooser::choice_us(const Candidate& candidate) const {
    const double us = cost_of(candidate, choice_machine()).us;
    if (!lists_cache(*candidate.kernel)) return us;
    return us / (options_.device == SPATTN_CPU ? clearly_less : lists_promise);
}

Counts Chooser::counts(const Kernel& kernel, Order order) {
    return calls_bring_lists() ? count_call_lists(problem_) : counted(kernel, order).counts;
}

// Rows that read no layout count in whatever order is the cheapest to lower.
const Lowered& Chooser::counted(const Kernel& kernel, Order order) {
    if (kernel.block_q > 0) return lowering_.counted(form(kernel, order));
    const Order cheapest = lowering_.modulus() > 1    ? Order::residue
                           : lowering_.has_packed() ? Order::packed
                                                    : Order::plain;
    return lowering_.counted({nominal_block, nominal_block, cheapest, Owner::queries});
}

// The plain layout of a candidate. Where this one lost unmade, the larger blocks that told so: the lists of smaller ones
// may be far longer.
const Lowered& Chooser::plain_or_coarser(const Candidate& plain) {
    const Lowered* coarse = plain.refused.empty() ? nullptr : lowering_.coarser(form(*plain.kernel, Order::plain));
    return coarse && !coarse->outline ? *coarse : counted(*plain.kernel, Order::plain);
}

PiecePlan Chooser::complete(std::vector<Candidate> candidates) {
    const Candidate& best = *find_best(candidates);
    const Kernel& kernel = *best.kernel;
    PiecePlan plan;
    plan.pattern_text = text_;
    plan.kernel = best.kernel, plan.order = best.order, plan.cost = best.cost, plan.stats = best.stats;
    plan.considered = std::move(candidates);
    if (lists_cache(kernel)) {
        complete_cache_lists(plan);
        return plan;
    }
    if (kernel.family == Family::gather) complete_gather(plan);
    if (plan.order == Order::dispatched) {
        complete_dispatched(plan);
        return plan;
    }
    if (kernel.block_q > 0) {
        const Lowered& chosen = lowering_.at(form(kernel, plan.order));
        plan.layout = chosen.layout;
        plan.masks = lowering_.masks(chosen, kernel, join_blocks(kernel, problem_));
        if (problem_.has_starts) {
            complete_cached(plan);
            return plan;
        }
        const Heads all{problem_, plan.layout_view()};
        plan.schedule = schedule_first(plan, all), plan.second_schedule = schedule(plan, all, 1);
    }
    plan.workspace = workspace_of(plan, {problem_, plan.layout_view()}, plan.schedule, options_.machine.lanes);
    if (has_call_layout(kernel, problem_))
        plan.workspace += CallLayout(problem_, plan.layout_view(), view(plan.schedule), view(plan.second_schedule),
                                     kernel, nullptr).bytes;
    return plan;
}

size_t Chooser::workspace_of(const PiecePlan& plan, const Heads& heads, const Schedule& schedule, int lanes) const {
    return plan.kernel->workspace({heads.problem, heads.layout, view(schedule), view(plan.second_schedule),
                                   plan.tokens ? view(*plan.tokens) : TokenListsView{}, lanes});
}

size_t Chooser::scratch_of(const PiecePlan& plan) const {
    return workspace_of(plan, {problem_, plan.layout_view()}, plan.schedule, 1);
}

PortionTasks Chooser::cut_heads(const PiecePlan& plan, const Portions& portions) const {
    const int64_t heads = portions.each.batch * portions.each.heads_q;
    Heads seen{portions.each, plan.layout_view()};
    const int32_t*& kinds = seen.layout.kind_of_head;
    PortionTasks made;
    for (int64_t portion = 0; portion < portions.count; ++portion, kinds += heads) {
        if (portion == 0 || !std::equal(kinds, kinds + heads, kinds - heads)) {
            const Schedule& schedule = made.schedules.emplace_back(schedule_first(plan, seen));
            made.workspace = std::max(made.workspace, workspace_of(plan, seen, schedule, options_.machine.lanes));
            made.one_lane_workspace = std::max(made.one_lane_workspace, workspace_of(plan, seen, schedule, 1));
        }
        made.schedule_of.push_back(int32_t(made.schedules.size()) - 1);
    }
    return made;
}

// Tasks of the row's first walk.
Schedule Chooser::schedule_first(const PiecePlan& plan, const Heads& heads) const {
    Schedule made = schedule(plan, heads, 0);
    if (plan.kernel->goes_in_rounds && !calls_bring_lists() && !in_pieces_) go_in_rounds(plan, heads, made);
    return made;
}

// So many rounds that what is kept of one is no more than ample, or a thirty-second of all: queues are 32 (equal_shares
// of the CPU), so that they keep one copy of dq at most. Sums of keys that go from round to round may take more than
// rounds spare. Counted for one lane, for bits not to depend on lanes.
void Chooser::go_in_rounds(const PiecePlan& plan, const Heads& heads, Schedule& made) const {
    const AxisView& queries = heads.layout.queries;
    if (queries.listed > 0 && !queries.away) return;  // its first tiles add to queries of any round
    const size_t bytes = workspace_of(plan, heads, made, 1), ample = std::max<size_t>(options_.ample_scratch, 1);
    const size_t wanted = std::bit_ceil((bytes + ample - 1) / ample), rows = size_t(plan.layout->by_query.rows);
    const size_t rounds = std::min<size_t>({wanted, 32, rows});
    Schedule without_queries;
    without_queries.rounds.emplace_back();
    if (rounds < 2 || workspace_of(plan, heads, without_queries, 1) > bytes / 8 * 7) return;
    Schedule in_rounds = schedule(plan, heads, 0, int32_t(rounds));
    if (workspace_of(plan, heads, in_rounds, 1) < bytes / 8 * 7) made = std::move(in_rounds);
}

// How long rows are that a call's lists make, nobody knows yet: they stay whole.
Schedule Chooser::schedule(const PiecePlan& plan, const Heads& heads, int32_t number, int32_t rounds) const {
    if (number >= plan.kernel->num_walks) return {};
    Walk walk = plan.kernel->walks[number];
    if (calls_bring_lists()) walk.policy.whole_rows = std::numeric_limits<int64_t>::max();
    return make_schedule(heads.problem, heads.layout, walk, options_.machine.lanes, rounds);
}

// Each call makes masks of its own from those of the known part.
void Chooser::complete_dispatched(PiecePlan& plan) {
    const Kernel& kernel = *plan.kernel;
    const DispatchShape& shape = plan.dispatch.emplace(problem_, kernel, options_.machine.memory);
    const int lanes = options_.machine.lanes;
    plan.layout = lowering_.at(form(kernel, plan.order)).layout;
    plan.masks = {plan.layout, &plan.layout->masks};
    plan.bit_places = make_bit_places(kernel);
    plan.schedule = schedule_dispatch(shape, kernel.walks[0], lanes);
    if (kernel.num_walks > 1) plan.second_schedule = schedule_dispatch(shape, kernel.walks[1], lanes);
    plan.workspace = dispatch_workspace(shape, kernel, plan.schedule, plan.second_schedule, lanes);
}

// How long a call's rows are depends on where its queries begin: tasks are those of rows that are all as long as the
// longest, and parts of them share whatever there is.
void Chooser::complete_cached(PiecePlan& plan) {
    const Kernel& kernel = *plan.kernel;
    const LayoutView known = plan.layout_view();
    const std::vector<Slice>& stems = plan.layout->by_query.stems;
    CacheShape& shape = plan.cache.emplace(problem_, kernel, known, stems.empty() ? nullptr : stems.data());
    const Problem inner = shape.inner({});
    const double lists = double(shape.kinds) * double(shape.rows) * double(shape.room);
    if (std::max(lists, double(known.num_masks) + double(shape.tree_masks())) >= double(int64_t(1) << 31))
        fail(SPATTN_E_UNSUPPORTED, "problem.batch", "makes longer lists of a call than kernels count");
    std::vector<Run> runs;
    std::vector<Slice> slices;
    const std::vector<int32_t> kind_of_head = shape.schedule_kinds(known);
    for (const int32_t blocks : shape.longest) {
        const int32_t at = int32_t(runs.size());
        runs.push_back({0, blocks, full_block});
        slices.insert(slices.end(), size_t(shape.rows), {at, at + (blocks > 0)});
    }
    LayoutView longest{};
    longest.by_query = {slices.data(), runs.data(), shape.rows, int32_t(runs.size())};
    longest.queries.modulus = longest.keys.modulus = 1;
    longest.kind_of_head = kind_of_head.data(), longest.head_kinds = known.head_kinds;
    plan.schedule = make_schedule(inner, longest, kernel.walks[0], options_.machine.lanes);
    shape.note_joins(view(plan.schedule));
    const int32_t lanes = options_.machine.lanes;
    if (kernel.device == SPATTN_CUDA) make_room(plan.schedule, shape, lanes * kernel.walks[0].policy.workers_of_lane);
    const TasksView tasks = view(plan.schedule);
    const CacheLayout made(shape, known, tasks, {}, {}, nullptr);
    plan.workspace = made.bytes + kernel.workspace({inner, made.layout(inner), tasks, {}, {}, options_.machine.lanes});
}

void Chooser::complete_cache_lists(PiecePlan& plan) {
    const Lowered& seen = lowering_.at({list_block, list_block, Order::plain, Owner::queries});
    plan.layout = seen.layout;
    plan.masks = {plan.layout, &plan.layout->masks};
    const CacheLists& lists = plan.cache_lists.emplace(problem_, seen.counts.row_max, plan.layout->head_kinds <= 1);
    const auto workspace_of = [&](int64_t round) {  // fewer lists may have more parts
        const ListedKeys made(lists, round, nullptr);
        const Problem inner = lists.inner({}, made.count);
        return made.bytes + plan.kernel->workspace({inner, {}, {}, {}, {}, options_.machine.lanes});
    };
    plan.workspace = std::max(workspace_of(0), workspace_of(lists.rounds() - 1));
}

// A call's lists are cut to the known part of the pattern by the bits of its layout.
void Chooser::complete_gather(PiecePlan& plan) {
    if (!calls_bring_lists()) {
        plan.tokens = lowering_.tokens();
    } else if (known_) {
        const Lowered& plain = lowering_.at({nominal_block, nominal_block, Order::plain, Owner::queries});
        plan.layout = plain.layout;
        plan.masks = lowering_.masks(plain, *plan.kernel, 1);
    }
}

}  // namespace spattn
