// SPDX-License-Identifier: MIT
#include "plan/admission.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "core/error.h"

namespace spattn {
namespace {

constexpr const char* force_variable = "SPATTN_FORCE_KERNEL";

const char* name_of(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }
const char* name_of_device(int32_t device) { return device == SPATTN_CPU ? "cpu" : "cuda"; }

// Names in the variable. A name that is no kernel's is an error: a pin that does nothing would go unnoticed.
std::vector<std::string> read_forced(const std::vector<Kernel>& kernels) {
    std::vector<std::string> forced;
    const char* given = std::getenv(force_variable);
    if (!given) return forced;  // before a stream is made, which asks for the host's locale
    std::istringstream names(given);
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

}  // namespace

Admission::Admission(const Problem& problem, const PlanOptions& options, const std::vector<Kernel>& kernels)
    : problem(problem), options(options), kernels(kernels), forced_(read_forced(kernels)) {}

std::string Admission::refuse(const Kernel& kernel) const {
    const auto is_forced = [&](const Kernel& k) {
        return std::find(forced_.begin(), forced_.end(), k.name) != forced_.end();
    };
    const auto pins_pass = [&](const Kernel& k) { return k.pass == kernel.pass && is_forced(k); };
    const bool is_reference = kernel.family == Family::reference;
    if (kernel.device != options.device) return text("for device ", name_of_device(kernel.device));
    if (kernel.dtype != problem.dtype) return text("for dtype ", dtype_row(kernel.dtype).name);
    if (is_reference && !options.reference) return "reference row, only with SPATTN_PLAN_REFERENCE";
    if (!is_reference && options.reference) return "SPATTN_PLAN_REFERENCE asks for reference rows";
    if (!forced_.empty() && !is_forced(kernel) && std::any_of(kernels.begin(), kernels.end(), pins_pass))
        return text(force_variable, " pins another row");
    if (!kernel.runs_here(options.device_index))
        return kernel.device == SPATTN_CPU ? "not on this machine" : "not on this device";
    if (options.lists_alone && kernel.family == Family::block) return "reads a layout, and a cache may have any pages";
    if (problem.float8_cache && !kernel.float8_cache && kernel.family != Family::block) return "reads no float8";
    if (kernel.multiplies_float8 && !problem.float8_operands) return "multiplies operands of float8";
    if (problem.has_starts)
        if (const char* why_not = refuse_cache(kernel, problem)) return why_not;
    const char* why_not = kernel.fits(problem);
    return why_not ? why_not : "";
}

std::vector<Refusals> group_refusals(const std::vector<const Candidate*>& refused) {
    std::vector<Refusals> groups;
    for (const Candidate* c : refused) {
        const auto is_its = [&](const Refusals& group) { return group.why == c->refused; };
        const auto known = std::find_if(groups.begin(), groups.end(), is_its);
        if (known == groups.end()) groups.push_back({c->refused, c->kernel, 1});
        else ++known->count;
    }
    return groups;
}

// There are hundreds of rows, and few reasons.
void Admission::fail_without_kernel(Pass pass, const std::vector<Candidate>& considered) const {
    std::vector<const Candidate*> refused;
    for (const Candidate& c : considered) refused.push_back(&c);
    std::string reasons;
    for (const Refusals& group : group_refusals(refused))
        reasons += text(reasons.empty() ? "" : "; ", group.first->name,
                        group.count > 1 ? text(" and ", group.count - 1, " more") : "", ": ", group.why);
    fail(SPATTN_E_NO_KERNEL, "problem",
         text("no kernel for the ", name_of(pass), " pass with dtype ", dtype_row(problem.dtype).name,
              ", head_dim ", problem.head_dim, ", head_dim_v ", problem.head_dim_v, " on device ",
              name_of_device(options.device), "; considered: ", reasons.empty() ? "no row" : reasons));
}

}  // namespace spattn
