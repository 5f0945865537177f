// SPDX-License-Identifier: MIT
// Choosing for one pattern, a whole or a piece: rows are refused for a reason or priced; the cheapest wins, the
// better-placed one where two cost the same.
#pragma once

#include <string>
#include <vector>

#include "plan/admission.h"
#include "plan/lower.h"
#include "plan/measured.h"

namespace spattn {

// What is known of a pattern, or of a part of it, without a layout of the order at hand.
struct Summary {
    Counts counts;
    int32_t modulus;
};

// The cost to beat, and whose it is.
struct Mark {
    double us;
    const char* name;
};

// Plans that work on a pattern piece after piece: what a plan for the whole has to beat.
struct Rival {
    std::vector<Summary> summaries;
    Mark mark;
};

class Chooser {
public:
    // In pieces: only rows that hand on to others of their kind.
    Chooser(const Pattern& pattern, const Admission& admission, bool in_pieces);

    // Every row in every order that it may run in, priced or refused. For what cannot beat the rival nothing
    // is lowered.
    std::vector<Candidate> consider(Pass pass, const Rival* rival = nullptr);
    // Null where all were refused.
    const Candidate* find_best(const std::vector<Candidate>& candidates) const;
    // Layout, masks, tasks and scratch of the best.
    PiecePlan complete(std::vector<Candidate> candidates);
    // Bytes of a completed piece's scratch on one lane.
    size_t scratch_of(const PiecePlan& plan) const;
    PortionTasks cut_heads(const PiecePlan& plan, const Portions& portions) const;

    // Results may not depend on the number of threads, so neither may the choice: on a CPU, costs are compared on one.
    Machine choice_machine() const;
    double choice_us(const Candidate& candidate) const;

    // The exact counts, from the layout that the piece reads or from one of nominal blocks.
    Counts counts(const PiecePlan& plan) { return counts(*plan.kernel, plan.order); }
    // Valid once consider() has found a row: something is lowered then.
    Summary summary() const { return {lowering_.any()->counts, lowering_.modulus()}; }
    int32_t modulus() const { return lowering_.modulus(); }
    const std::string& pattern_text() const { return text_; }

private:
    void consider(const Kernel& kernel, std::vector<Candidate>& candidates) const;
    void price(std::vector<Candidate>& candidates, const Rival* rival);
    void price_listed(std::vector<Candidate>& candidates, const Rival* rival);
    void price(Candidate& candidate, const Rival* rival, const Mark* mark);
    bool is_wasteful(const Candidate& plain);
    bool calls_bring_lists() const { return problem_.call_lists.at_run_time(); }
    // Whether a row reads lists that each call makes of the pattern.
    bool lists_cache(const Kernel& kernel) const {
        return problem_.is_of_sequences() && kernel.family == Family::gather;
    }
    // Whether a call's lists are those of the layout that is lowered, so that this bounds what they cost, and other
    // orders of tokens may serve.
    bool calls_have_layout() const { return !calls_bring_lists() && !problem_.has_starts; }
    LayoutStats stats_of(const Candidate& candidate);
    int64_t longest_column(const Lowered& seen);
    const LayoutStats& block_stats(const Kernel& kernel, Order order);
    const Lowered& already_counted(const Kernel& kernel);
    std::string refuse_sharing(const Kernel& kernel);
    std::string refuse_lists(const LayoutStats& stats) const;
    std::string refuse_cache_lists(const Kernel& kernel);
    std::string find_beaten(const Candidate& candidate, const Rival* rival, const Mark& mark);
    bool loses_finer(const Lowered& coarse, const Kernel& kernel, double us);
    bool loses_listed(const Lowered& plain, const Kernel& kernel, double us);
    bool loses(const Kernel& kernel, const LayoutStats& stats, double us) const;
    Counts counts(const Kernel& kernel, Order order);
    const Lowered& counted(const Kernel& kernel, Order order);
    const Lowered& plain_or_coarser(const Candidate& plain);
    // Heads that rows work on at once, all or a portion, with the layout that they see.
    struct Heads {
        const Problem& problem;
        LayoutView layout;
    };
    // The tasks of a walk.
    Schedule schedule(const PiecePlan& plan, const Heads& heads, int32_t number, int32_t rounds = 1) const;
    Schedule schedule_first(const PiecePlan& plan, const Heads& heads) const;
    size_t workspace_of(const PiecePlan& plan, const Heads& heads, const Schedule& schedule, int lanes) const;
    void go_in_rounds(const PiecePlan& plan, const Heads& heads, Schedule& schedule) const;
    void complete_gather(PiecePlan& plan);
    void complete_dispatched(PiecePlan& plan);
    void complete_cached(PiecePlan& plan);
    void complete_cache_lists(PiecePlan& plan);
    Cost cost_of(const Candidate& candidate, const Machine& machine) const;
    Cost cost_of_row(const Candidate& candidate, const Machine& machine) const;
    double copies_us(const Kernel& kernel, const Machine& machine) const;  // of operands of float8
    Cost cost_on_cache(const Candidate& candidate, const Machine& machine) const;
    Cost cost_of_cache_lists(const Candidate& candidate, const Machine& machine) const;

    const Admission& admission_;
    const Problem& problem_;
    const PlanOptions& options_;
    bool in_pieces_;
    PatternRef pattern_;
    std::string text_;  // made once: of long lists it takes a while
    PatternRef known_;    // what is known before a call: all, or of lists at run time the rest, or null
    PatternRef lowered_;  // the same, or where that is null, all pairs: a call's lists choose among them
    Lowering lowering_;
    Measured measured_;
    std::optional<int64_t> longest_column_;
};

}  // namespace spattn
