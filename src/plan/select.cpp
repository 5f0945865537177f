// SPDX-License-Identifier: MIT
// Choosing for a problem: one row for the whole pattern or one for each piece that it falls into, whichever costs less.
#include <algorithm>
#include <deque>
#include <set>

#include "core/math.h"
#include "plan/chooser.h"
#include "plan/float8.h"
#include "plan/placed.h"

namespace spattn {

LayoutView PiecePlan::layout_view() const { return place_piece(*this, PointAtHost()).layout; }

namespace {

constexpr int64_t carried_alignment = 256;  // of what follows what pieces hand on
// A portion takes at least one of so many shares of ample scratch: of 1009 batch entries only single ones are equal
// portions, and perhaps too small for many threads.
constexpr size_t smallest_portion = 16;
// An SM takes so long for a row of which a piece sees nothing: forward, and backward as a query and as a key. Heads of
// which some have windows and others dilated ones took 325 us forward at 16K tokens, 178 of them for the pairs (H200).
constexpr double empty_query_us = 0.15, empty_token_us = 0.2;

// Rows of blocks do. Calls that bring lists, or are on a cache, make one layout for all heads; and rows of tokens read
// lists of all heads.
bool takes_portions(const Problem& p, const PiecePlan& piece) {
    const bool has_plans_layout = !p.call_lists.at_run_time() && !p.has_starts;
    return has_plans_layout && piece.kernel->device == SPATTN_CPU && piece.kernel->family == Family::block;
}

class Planner {
public:
    Planner(const Pattern& pattern, const Admission& admission)
        : admission_(admission), whole_(pattern, admission, false) {
        if (!admission.problem.call_lists.at_run_time() && !admission.problem.has_starts) cut(pattern);
    }

    PassPlan plan(Pass pass) {
        const std::vector<Choice> cut = choose_pieces(pass);
        Rival rival;
        if (!cut.empty()) rival = make_rival(cut, pass);
        std::vector<Candidate> considered = whole_.consider(pass, cut.empty() ? nullptr : &rival);
        const Candidate* best = whole_.find_best(considered);
        if (!cut.empty() && (!best || rival.mark.us <= whole_.choice_us(*best)))
            return plan_pieces(cut, std::move(considered), pass);
        if (!best) admission_.fail_without_kernel(pass, considered);
        PassPlan plan;
        plan.pieces.push_back(whole_.complete(std::move(considered)));
        plan.cost = plan.pieces[0].cost;
        plan.workspace = plan.pieces[0].workspace;
        go_in_portions(plan, {&whole_});
        return plan;
    }

    const std::string& pattern_text() const { return whole_.pattern_text(); }

    Counts counts(const PassPlan& pass) {
        if (pass.pieces.size() == 1) return whole_.counts(pass.pieces[0]);
        std::vector<const Layout*> layouts;
        for (const PiecePlan& piece : pass.pieces) layouts.push_back(piece.layout.get());
        return count(layouts);
    }

private:
    struct Choice {
        Chooser* chooser;
        std::vector<Candidate> considered;
    };

    // Into pieces that residue classes serve better than they serve the whole.
    void cut(const Pattern& pattern) {
        bool gains = false;
        for (const PatternRef& piece : pattern.pieces()) {
            pieces_.emplace_back(*piece, admission_, true);
            gains |= pieces_.back().modulus() > whole_.modulus();
        }
        if (pieces_.size() < 2 || !gains) pieces_.clear();
    }

    // Pieces that keep a pair. None where a piece has no row, or there are no two of them.
    std::vector<Choice> choose_pieces(Pass pass) {
        std::vector<Choice> choices;
        for (Chooser& piece : pieces_) {
            std::vector<Candidate> considered = piece.consider(pass);
            if (!piece.find_best(considered)) return {};
            if (piece.summary().counts.pairs > 0) choices.push_back({&piece, std::move(considered)});
        }
        return choices.size() < 2 ? std::vector<Choice>() : choices;
    }

    Rival make_rival(const std::vector<Choice>& cut, Pass pass) const {
        Rival rival{{}, {join_us(cut, pass, whole_.choice_machine()), "the pieces"}};
        for (const Choice& piece : cut) {
            rival.summaries.push_back(piece.chooser->summary());
            rival.mark.us += piece.chooser->choice_us(*piece.chooser->find_best(piece.considered));
        }
        return rival;
    }

    // What one piece writes the next one reads; and copies that all of them read. Few of a GPU's warps hand on rows of
    // which a piece sees nothing.
    double join_us(const std::vector<Choice>& cut, Pass pass, const Machine& machine) const {
        const Problem& p = admission_.problem;
        const bool is_gpu = admission_.options.device != SPATTN_CPU;
        double empty = 0;
        for (const Choice& piece : cut) empty += double(piece.chooser->summary().counts.rows_empty);
        const double of_row = !is_gpu ? 0 : pass == Pass::forward ? empty_query_us : empty_token_us;
        const double copies = p.float8_operands ? float8_us(p, false, machine, admission_.options.device) : 0;
        const double handed_on = 2 * double(cut.size() - 1) * handed_on_bytes(p, pass) / (1e3 * machine.bandwidth);
        return handed_on + empty * of_row / machine.lanes + copies;
    }

    PassPlan plan_pieces(const std::vector<Choice>& cut, std::vector<Candidate> whole, Pass pass) const {
        PassPlan plan;
        plan.whole = std::move(whole);
        plan.cost = {join_us(cut, pass, admission_.options.machine), "memory"};
        double most = 0;
        for (const Choice& piece : cut) {
            plan.pieces.push_back(piece.chooser->complete(piece.considered));
            const PiecePlan& made = plan.pieces.back();
            plan.cost.us += made.cost.us;
            if (made.cost.us > most) plan.cost.binds = made.cost.binds;
            most = std::max(most, made.cost.us);
            plan.workspace = std::max(plan.workspace, made.workspace);
        }
        plan.carried = carried_by(plan, admission_.problem);
        plan.workspace += plan.carried;
        std::vector<const Chooser*> choosers;
        for (const Choice& piece : cut) choosers.push_back(piece.chooser);
        go_in_portions(plan, choosers);
        return plan;
    }

    static size_t carried_by(const PassPlan& plan, const Problem& problem) {
        if (plan.pieces.size() < 2) return 0;
        return size_t(round_up(int64_t(plan.pieces[0].kernel->carries(problem)), carried_alignment));
    }

    // So many portions that one takes no more than ample, were scratch in proportion to heads. A backward pass has as
    // many queues for few heads as for many, and may gain little: then it has all heads at once. Counted for one lane,
    // for bits not to depend on lanes.
    void go_in_portions(PassPlan& plan, const std::vector<const Chooser*>& choosers) const {
        const Problem& p = admission_.problem;
        const size_t ample = std::max<size_t>(admission_.options.ample_scratch, 1);
        if (plan.workspace <= ample) return;
        for (const PiecePlan& piece : plan.pieces)
            if (!takes_portions(p, piece)) return;
        size_t all = 0, each = 0;
        for (size_t i = 0; i < choosers.size(); ++i) all = std::max(all, choosers[i]->scratch_of(plan.pieces[i]));
        all += plan.carried;
        const Portions portions(p, int64_t((all + ample - 1) / ample), plan.carried > 0);
        if (portions.count < 2 || all / size_t(portions.count) < ample / smallest_portion) return;
        std::vector<PortionTasks> tasks;
        for (size_t i = 0; i < choosers.size(); ++i) {
            tasks.push_back(choosers[i]->cut_heads(plan.pieces[i], portions));
            each = std::max(each, tasks.back().one_lane_workspace);
        }
        const size_t carried = carried_by(plan, portions.each);
        if (each + carried >= all / 8 * 7) return;
        plan.portions = portions, plan.carried = carried, plan.workspace = 0;
        for (size_t i = 0; i < tasks.size(); ++i) {
            plan.workspace = std::max(plan.workspace, carried + tasks[i].workspace);
            plan.pieces[i].schedule = {}, plan.pieces[i].portions = std::move(tasks[i]);
        }
    }

    const Admission& admission_;
    Chooser whole_;
    std::deque<Chooser> pieces_;
};

// Passes share layouts, masks and lists.
size_t count_layout_bytes(const CompiledPlan& plan) {
    size_t bytes = 0;
    std::set<const void*> seen;
    for (const PassPlan* pass : {&plan.forward, &plan.backward})
        for (const PiecePlan& piece : pass->pieces) {
            if (piece.layout && seen.insert(piece.layout.get()).second) bytes += piece.layout->bytes();
            if (piece.layout && piece.masks.get() != &piece.layout->masks && seen.insert(piece.masks.get()).second)
                bytes += piece.masks->size() * sizeof(uint64_t);
            if (piece.tokens && seen.insert(piece.tokens.get()).second) bytes += piece.tokens->bytes();
            bytes += piece.bit_places.size() * sizeof(uint16_t);
        }
    return bytes;
}

CompiledPlan compile(const Pattern& pattern, const Problem& problem, const PlanOptions& options,
                     const std::vector<Kernel>& kernels) {
    CompiledPlan plan;
    plan.problem = problem;
    plan.options = options;
    const Admission admission(problem, options, kernels);
    Planner planner(pattern, admission);
    plan.pattern_text = planner.pattern_text();
    const auto plan_pass = [&](Pass which) {
        PassPlan pass = planner.plan(which);
        if (problem.float8_operands) pass.workspace += Float8Copies::most_bytes(problem, which);
        return pass;
    };
    plan.forward = plan_pass(Pass::forward);
    plan.counts = planner.counts(plan.forward);
    if (options.backward) plan.backward = plan_pass(Pass::backward);
    plan.layout_bytes = count_layout_bytes(plan);
    return plan;
}

// Rows of kernels get lists of keys that each call makes of its own.
CompiledPlan compile_cache_lists(const Pattern& pattern, const Problem& problem, const PlanOptions& options,
                                 const std::vector<Kernel>& kernels) {
    const CacheLists lists(problem);
    PlanOptions of_lists = options;
    of_lists.lists_alone = true;
    CompiledPlan plan = compile(*make_runtime_tokens(lists.most), lists.inner({}, problem.seq_q), of_lists, kernels);
    plan.problem = problem, plan.pattern_text = pattern.print();
    plan.forward.pieces[0].cache_lists = lists;
    plan.forward.workspace += ListedKeys(lists, 0, nullptr).bytes;
    return plan;
}

}  // namespace

CompiledPlan compile_plan(const Pattern& pattern, const Problem& problem, const PlanOptions& options,
                          const std::vector<Kernel>& kernels) {
    const bool has_lists = problem.has_starts && problem.call_lists.at_run_time();
    return (has_lists ? compile_cache_lists : compile)(pattern, problem, options, kernels);
}

}  // namespace spattn
