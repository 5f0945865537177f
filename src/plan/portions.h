// SPDX-License-Identifier: MIT
// A pass that would take much scratch on a CPU goes over its heads in portions, one after the other in the same
// scratch: so many batch entries at a time, or so many key heads of one entry with the query heads of their groups, or
// a part of one group. All portions are equal, and rows see each as a problem of its own.
#pragma once

#include <algorithm>

#include "plan/call.h"

namespace spattn {

// Where a portion begins, and whether no other is of the same group before or after it.
struct FirstHead {
    int64_t batch, head_kv, head_q;
    bool begins_group, ends_group;
};

struct Portions {
    Problem each;             // the problem of one
    int64_t of_entry, count;  // portions of a batch entry, and of all
    int64_t group;            // of the whole problem

    // As few as there can be, but no fewer than said, unless each would be less than a head. Groups are split where sums
    // may go on from one portion to the next.
    Portions(const Problem& problem, int64_t fewest, bool splits_groups) : each(problem), group(problem.group()) {
        const int64_t parts = std::max<int64_t>((fewest + problem.batch - 1) / problem.batch, 1);
        each.heads_kv = divisor(problem.heads_kv, problem.heads_kv / parts);
        each.heads_q = each.heads_kv * group;
        if (splits_groups && parts > problem.heads_kv) each.heads_q = divisor(group, problem.heads_q / parts);
        of_entry = problem.heads_q / each.heads_q;
        each.batch = of_entry > 1 ? 1 : divisor(problem.batch, problem.batch / std::max<int64_t>(fewest, 1));
        count = of_entry * (problem.batch / each.batch);
    }

    FirstHead first(int64_t portion) const {
        const int64_t head_q = portion % of_entry * each.heads_q;
        return {portion / of_entry * each.batch, head_q / group, head_q, head_q % group == 0,
                (head_q + each.heads_q) % group == 0};
    }

private:
    // The largest divisor that is at most so large, or 1.
    static int64_t divisor(int64_t number, int64_t most) {
        most = std::max<int64_t>(most, 1);
        while (number % most) --most;
        return most;
    }
};

}  // namespace spattn
