// SPDX-License-Identifier: MIT
// Choosing: rows are refused for a reason or priced; the cheapest wins, the better-placed one where two cost the same.
#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "core/error.h"
#include "plan/bounds.h"
#include "plan/lower.h"
#include "plan/measured.h"
#include "plan/plan.h"
#include "plan/stats.h"

namespace spattn {

LayoutView PassPlan::layout_view() const {
    if (!layout) return {};
    LayoutView v = view(*layout);
    v.masks = masks->data();
    if (kernel->permute) v.mask_words = kernel->mask_words;
    return v;
}

namespace {

constexpr const char* force_variable = "SPATTN_FORCE_KERNEL";
constexpr int32_t nominal_block = 64;  // for counts, where the chosen row reads no layout
constexpr double most_list_bytes = 512.0 * 1024 * 1024;
constexpr double wasteful = 1.5;        // visited for each kept pair: from here on listed tiles are priced
constexpr double clearly_less = 0.9;    // of the best cost: what a layout must promise to be made, which costs time too
constexpr double lane_bandwidth = 12;  // GB/s, nominal: what one core can ask for

const char* name_of(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }
const char* name_of_device(int32_t device) { return device == SPATTN_CPU ? "cpu" : "cuda"; }

// Names in the variable. A name that is no kernel's is an error: a pin that does nothing would go unnoticed.
std::vector<std::string> read_forced(const std::vector<Kernel>& kernels) {
    std::vector<std::string> forced;
    const char* given = std::getenv(force_variable);
    std::istringstream names(given ? given : "");
    for (std::string name; std::getline(names, name, ',');) {
        name.erase(0, name.find_first_not_of(' '));
        name.erase(name.find_last_not_of(' ') + 1);
        if (name.empty()) continue;
        const auto is_named = [&](const Kernel& kernel) { return kernel.name == name; };
        if (std::none_of(kernels.begin(), kernels.end(), is_named)) {
            std::string all;
            for (const Kernel& kernel : kernels) all += text(all.empty() ? "" : ", ", kernel.name);
            fail(SPATTN_E_ARGUMENT, force_variable, text("names \"", name, "\"; accepted, with commas between: ", all));
        }
        forced.push_back(name);
    }
    return forced;
}

class Chooser {
public:
    Chooser(const Pattern& pattern, const Problem& problem, const PlanOptions& options,
            const std::vector<Kernel>& kernels)
        : problem_(problem), options_(options), kernels_(kernels), forced_(read_forced(kernels)),
          known_(problem.run_lists.at_run_time() ? pattern.known_part() : PatternRef::share(&pattern)),
          lowering_(known_ ? *known_ : pattern, problem) {}

    PassPlan choose(Pass pass) {
        PassPlan plan;
        for (const Kernel& kernel : kernels_)
            if (kernel.pass == pass) consider(kernel, plan.considered);
        price(plan.considered);
        price_listed(plan.considered);
        const Candidate* best = find_best(plan.considered);
        if (!best) fail_without_kernel(pass, plan.considered);
        plan.kernel = best->kernel;
        plan.order = best->order;
        plan.cost = best->cost;
        complete(plan);
        return plan;
    }

    // Of the layout the pass reads, or of nominal blocks.
    Counts counts(const PassPlan& plan) {
        return problem_.run_lists.at_run_time() ? count_run_lists(problem_) : lowered(*plan.kernel, plan.order).counts;
    }

private:
    // A row in residue classes too, where the pattern keeps to them, and with hot tokens packed, where it has such.
    void consider(const Kernel& kernel, std::vector<Candidate>& candidates) const {
        std::string refused = refuse(kernel);
        if (refused.empty() && kernel.orders && lowering_.modulus() > 1)
            candidates.push_back({&kernel, Order::residue, ""});
        if (refused.empty() && kernel.orders && lowering_.has_packed())
            candidates.push_back({&kernel, Order::packed, ""});
        candidates.push_back({&kernel, Order::plain, std::move(refused)});
    }

    std::string refuse(const Kernel& kernel) const {
        const auto is_forced = [&](const Kernel& k) {
            return std::find(forced_.begin(), forced_.end(), k.name) != forced_.end();
        };
        const auto pins_pass = [&](const Kernel& k) { return k.pass == kernel.pass && is_forced(k); };
        const bool is_reference = kernel.family == Family::reference;
        if (kernel.device != options_.device) return text("for device ", name_of_device(kernel.device));
        if (kernel.dtype != problem_.dtype) return text("for dtype ", dtype_row(kernel.dtype).name);
        if (is_reference && !options_.reference) return "reference row, only with SPATTN_PLAN_REFERENCE";
        if (!is_reference && options_.reference) return "SPATTN_PLAN_REFERENCE asks for reference rows";
        if (!is_forced(kernel) && std::any_of(kernels_.begin(), kernels_.end(), pins_pass))
            return text(force_variable, " pins another row");
        if (problem_.softcap != 0 && !kernel.softcap) return "no softcap";
        if (problem_.has_sink_logits && !kernel.sink_logits) return "no sink logits";
        if (!kernel.runs_here()) return "not on this machine";
        if (problem_.run_lists.at_run_time() && kernel.family == Family::block)
            return "block row, and runs bring the lists";
        if (problem_.value_in_key && kernel.pass == Pass::backward && kernel.device != SPATTN_CPU)
            return "writes dv, which SPATTN_PLAN_VALUE_IN_KEY leaves out";
        const char* why_not = kernel.fits(problem_);
        return why_not ? why_not : "";
    }

    // Large blocks first: their lists are the shorter ones, and what they cost may settle the matter for small ones.
    // Other orders before plain blocks for the same reason.
    void price(std::vector<Candidate>& candidates) {
        std::vector<Candidate*> order;
        for (Candidate& candidate : candidates)
            if (candidate.refused.empty()) order.push_back(&candidate);
        std::stable_sort(order.begin(), order.end(), [](const Candidate* a, const Candidate* b) {
            const auto area = [](const Candidate* c) { return c->kernel->block_q * c->kernel->block_k; };
            if ((a->order == Order::plain) != (b->order == Order::plain)) return b->order == Order::plain;
            return area(a) > area(b);
        });
        const Candidate* best = nullptr;
        for (Candidate* candidate : order) {
            price(*candidate, best);
            if (candidate->refused.empty() && (!best || choice_us(*candidate) < choice_us(*best))) best = candidate;
        }
    }

    // Listed tiles, where plain blocks were lowered and are mostly waste.
    void price_listed(std::vector<Candidate>& candidates) {
        std::vector<Candidate> listed;
        for (const Candidate& plain : candidates) {
            if (!plain.refused.empty() || plain.order != Order::plain || !plain.kernel->orders) continue;
            if (plain.stats.visited < wasteful * plain.stats.pairs) continue;
            const Kernel& kernel = *plain.kernel;
            const Candidate* best = find_best(candidates);
            listed.push_back({&kernel, Order::listed, ""});
            const LayoutStats& least = measured_.at(make_least_listed_stats, lowered(kernel, Order::plain), kernel);
            if (loses(kernel, least, clearly_less * choice_us(*best)))
                listed.back().refused = text("could not beat ", best->kernel->name, " with what it would list");
            else
                price(listed.back(), best);
        }
        candidates.insert(candidates.end(), listed.begin(), listed.end());
    }

    const Candidate* find_best(const std::vector<Candidate>& candidates) const {
        const Candidate* best = nullptr;
        for (const Candidate& candidate : candidates)
            if (candidate.refused.empty() && (!best || choice_us(candidate) < choice_us(*best))) best = &candidate;
        return best;
    }

    void price(Candidate& candidate, const Candidate* best) {
        const Kernel& kernel = *candidate.kernel;
        if (kernel.block_q > 0) {
            candidate.refused = lowering_.refuse(form(kernel, candidate.order));
            if (candidate.refused.empty() && best) candidate.refused = find_beaten(candidate, *best);
            if (!candidate.refused.empty()) return;
        }
        candidate.stats = stats_of(candidate);
        if (kernel.family == Family::gather) candidate.refused = refuse_lists(kernel, candidate.stats);
        if (!candidate.refused.empty()) return;
        candidate.cost = kernel.cost(problem_, candidate.stats, options_.machine);
    }

    LayoutStats stats_of(const Candidate& candidate) {
        const Kernel& kernel = *candidate.kernel;
        if (problem_.run_lists.at_run_time()) return make_run_stats(problem_);
        const Lowered& chosen = lowered(kernel, candidate.order);
        return kernel.family == Family::gather ? make_gather_stats(problem_, chosen)
                                               : measured_.at(make_layout_stats, chosen, kernel);
    }

    // Lists that the plan makes stay within what a plan should hold; a run's own lie elsewhere.
    std::string refuse_lists(const Kernel& kernel, const LayoutStats& stats) {
        if (kernel.shares_lists && known_ && !groups_share(problem_, *lowered(kernel, Order::plain).layout))
            return "heads of a group see different keys";
        const double bytes = stats.gathered * sizeof(int32_t);  // at most: groups that see the same share their lists
        if (problem_.run_lists.at_run_time() || bytes <= most_list_bytes) return "";
        return text("token lists of up to ", int64_t(bytes / (1024 * 1024)), " MiB");
    }

    // Saves lowering for blocks that cannot win: costs never fall when more is visited. Empty where they may.
    std::string find_beaten(const Candidate& candidate, const Candidate& best) {
        const Kernel& kernel = *candidate.kernel;
        const int32_t modulus = candidate.order == Order::plain ? lowering_.modulus() : 1;
        if (loses(kernel, make_least_stats(problem_, lowering_.any()->counts, kernel, modulus), choice_us(best)))
            return text("could not beat ", best.kernel->name, " even without waste");
        const Lowered* packed = lowering_.packed(form(kernel, candidate.order));
        if (packed && candidate.order == Order::plain &&
            loses(kernel, measured_.at(make_least_plain_stats, *packed, kernel), clearly_less * choice_us(best)))
            return text("could not beat ", best.kernel->name, " with the blocks that hot tokens lie in");
        const Lowered* coarse = lowering_.coarser(form(kernel, candidate.order));
        if (coarse && loses(kernel, measured_.at(make_finer_stats, *coarse, kernel), clearly_less * choice_us(best)))
            return text("could not beat ", best.kernel->name, " with the blocks it would visit");
        return "";
    }

    bool loses(const Kernel& kernel, const LayoutStats& stats, double us) const {
        return kernel.cost(problem_, stats, choice_machine()).us >= us;
    }

    // Results may not depend on the number of threads, so neither may the choice: on a CPU, rows are compared on one.
    Machine choice_machine() const {
        Machine machine = options_.machine;
        if (options_.device != SPATTN_CPU) return machine;
        machine.lanes = 1;
        machine.bandwidth = lane_bandwidth;
        return machine;
    }
    double choice_us(const Candidate& candidate) const {
        return candidate.kernel->cost(problem_, candidate.stats, choice_machine()).us;
    }

    static Form form(const Kernel& kernel, Order order) {
        return {kernel.block_q, kernel.block_k, order, kernel.by_key ? Owner::keys : Owner::queries};
    }

    // Rows that read no layout count in whatever order is the cheapest to lower.
    const Lowered& lowered(const Kernel& kernel, Order order) {
        if (kernel.block_q > 0) return lowering_.at(form(kernel, order));
        const Order cheapest = lowering_.modulus() > 1    ? Order::residue
                               : lowering_.has_packed() ? Order::packed
                                                        : Order::plain;
        return lowering_.at({nominal_block, nominal_block, cheapest, Owner::queries});
    }

    // Masks, tasks and scratch of the chosen row.
    void complete(PassPlan& plan) {
        const Kernel& kernel = *plan.kernel;
        if (kernel.family == Family::gather) complete_gather(plan);
        if (kernel.block_q > 0) {
            const Lowered& chosen = lowered(kernel, plan.order);
            plan.layout = chosen.layout;
            plan.masks = lowering_.masks(chosen, kernel);
            plan.schedule = make_schedule(problem_, plan.layout_view(), kernel.by_key ? Pass::backward : Pass::forward);
        }
        plan.workspace = kernel.workspace(problem_, plan.layout_view(), view(plan.schedule), options_.machine.lanes);
    }

    // A run's lists are cut to the known part of the pattern by the bits of its layout.
    void complete_gather(PassPlan& plan) {
        if (!problem_.run_lists.at_run_time()) {
            plan.tokens = lowering_.tokens();
        } else if (known_) {
            const Lowered& plain = lowering_.at({nominal_block, nominal_block, Order::plain, Owner::queries});
            plan.layout = plain.layout;
            plan.masks = lowering_.masks(plain, *plan.kernel);
        }
    }

    [[noreturn]] void fail_without_kernel(Pass pass, const std::vector<Candidate>& considered) const {
        std::string reasons;
        for (const Candidate& c : considered)
            reasons += text(reasons.empty() ? "" : "; ", c.kernel->name, ": ", c.refused);
        fail(SPATTN_E_NO_KERNEL, "problem",
             text("no kernel for the ", name_of(pass), " pass with dtype ", dtype_row(problem_.dtype).name,
                  ", head_dim ", problem_.head_dim, ", head_dim_v ", problem_.head_dim_v, " on device ",
                  name_of_device(options_.device), "; considered: ", reasons.empty() ? "no row" : reasons));
    }

    const Problem& problem_;
    const PlanOptions& options_;
    const std::vector<Kernel>& kernels_;
    std::vector<std::string> forced_;
    PatternRef known_;  // what can be lowered: all, or of lists at run time the rest, or null
    Lowering lowering_;
    Measured measured_;
};

size_t count_layout_bytes(const CompiledPlan& plan) {
    size_t bytes = 0;
    const PassPlan &f = plan.forward, &b = plan.backward;
    if (f.layout) bytes += f.layout->bytes();
    if (b.layout && b.layout != f.layout) bytes += b.layout->bytes();
    if (f.layout && f.kernel->permute) bytes += f.masks->size() * sizeof(uint64_t);
    if (b.layout && b.kernel->permute && b.masks != f.masks) bytes += b.masks->size() * sizeof(uint64_t);
    if (f.tokens) bytes += f.tokens->bytes();
    if (b.tokens && b.tokens != f.tokens) bytes += b.tokens->bytes();
    return bytes;
}

}  // namespace

CompiledPlan compile_plan(const Pattern& pattern, const Problem& problem, const PlanOptions& options,
                          const std::vector<Kernel>& kernels) {
    CompiledPlan plan;
    plan.problem = problem;
    plan.options = options;
    plan.pattern_text = pattern.print();
    Chooser chooser(pattern, problem, options, kernels);
    plan.forward = chooser.choose(Pass::forward);
    plan.counts = chooser.counts(plan.forward);
    if (options.backward) plan.backward = chooser.choose(Pass::backward);
    plan.layout_bytes = count_layout_bytes(plan);
    return plan;
}

}  // namespace spattn
