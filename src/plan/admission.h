// SPDX-License-Identifier: MIT
// Which rows may work on a problem at all, before anything is priced.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace spattn {

// Rows that are out for the same reason: the first of them, and how many there are.
struct Refusals {
    std::string why;
    const Kernel* first;
    int count;
};
// In the order in which reasons are met first.
std::vector<Refusals> group_refusals(const std::vector<const Candidate*>& refused);

class Admission {
public:
    Admission(const Problem& problem, const PlanOptions& options, const std::vector<Kernel>& kernels);

    // Why the row is out; empty where it is not.
    std::string refuse(const Kernel& kernel) const;
    [[noreturn]] void fail_without_kernel(Pass pass, const std::vector<Candidate>& considered) const;

    const Problem& problem;
    const PlanOptions& options;
    const std::vector<Kernel>& kernels;

private:
    std::vector<std::string> forced_;
};

}  // namespace spattn
