// SPDX-License-Identifier: MIT
// Plans of the imaginary rows, and what the tests ask of them.
#pragma once

#include "check.h"
#include "pattern/pattern.h"
#include "plan/imaginary.h"

namespace spattn::imaginary {

inline const std::vector<Kernel>& rows() {
    static const std::vector<Kernel> all = kernels();
    return all;
}

inline PlanOptions options_of(bool backward, int lanes = 8) {
    PlanOptions options;
    options.backward = backward;
    options.machine = machine(lanes);
    return options;
}

inline CompiledPlan plan_of(const char* pattern, const Problem& problem, PlanOptions options = options_of(true)) {
    return compile_plan(*parse_pattern(pattern), problem, options, rows());
}

// The one piece of a pass that works on the whole pattern at once.
inline const PiecePlan& whole(const PassPlan& pass) {
    CHECK_EQ(pass.pieces.size(), size_t(1));
    return pass.pieces.at(0);
}

inline std::string name(const PassPlan& pass) { return whole(pass).kernel->name; }

inline std::string refusal(const PassPlan& pass, const std::string& kernel, Order order = Order::plain) {
    for (const Candidate& c : whole(pass).considered)
        if (c.kernel->name == kernel && c.order == order) return c.refused;
    return "not considered";
}

inline bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace spattn::imaginary
