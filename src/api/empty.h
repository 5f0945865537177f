// SPDX-License-Identifier: MIT
// Empty batches: no entry, no query or no key. Frameworks make them, so they are legal: queries without keys get out 0
// and lse -infinity, and gradients are 0.
//
// Kernels need not know. Where a size is 0, the plan is one for size 1 and a pattern that keeps no pair: nobody reads
// the query or key that stands in, and what is written of it lies in the workspace, behind what the kernels ask for.
// A sink's gradient alone sums over all queries, also over those that see no key: without queries it is cleared here.
#pragma once

#include "api/plan.h"

namespace spattn {

inline bool has_queries(const Problem& p) { return p.batch != 0 && p.seq_q != 0; }
inline bool has_keys(const Problem& p) { return p.batch != 0 && p.seq_k != 0; }
inline bool is_empty(const Problem& p) { return !has_queries(p) || !has_keys(p); }

// The problem that kernels work on instead.
Problem stand_in_problem(Problem given);

// What one call needs of the workspace: the kernels' part, then what stands in for operands without elements.
size_t kernel_workspace(const spattn_plan& plan, spattn_enum op);  // rounded up to where the rest begins
size_t run_workspace(const spattn_plan& plan, spattn_enum op);

// The counts of an empty problem.
Counts count_empty(const Problem& given);

// Hands out the stand-ins of one call, each on its own cache lines.
class StandIns {
public:
    StandIns(const spattn_plan& plan, spattn_enum op, void* workspace);

    // [batch, heads, seq, dim] of the problem's dtype; seq is 1.
    TensorView matrix(int64_t heads, int64_t dim);
    // lse [batch, heads_q, 1].
    TensorView rows();

private:
    void* take(size_t bytes);

    const Problem& p_;
    char* next_;
};

// The gradient of sinks that no query has: a float for each head.
void clear_sinks(const spattn_plan& plan, const TensorView& dsink_logits, void* stream);

}  // namespace spattn
