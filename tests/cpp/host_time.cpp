// SPDX-License-Identifier: MIT
// What a call costs beside its kernel: the smallest pass that there is, through sparseattn.hpp and through the C ABI
// alone.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <sparseattn/sparseattn.hpp>

#include "check.h"

namespace sa = sparseattn;

namespace {

constexpr double goal = 1200;  // ns

#ifdef __SANITIZE_ADDRESS__
constexpr bool is_sanitized = true;
#else
constexpr bool is_sanitized = false;
#endif

// The best of many batches, in ns a call.
template <class Call>
double best(Call call) {
    constexpr int calls = 500, batches = 100;
    double least = 1e30;
    for (int batch = 0; batch < batches; ++batch) {
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < calls; ++i) call();
        const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
        least = std::min(least, spent.count() / calls);
    }
    return least;
}

}  // namespace

TEST(a_call_costs_little_beside_the_c_abi) {
    if (is_sanitized) return check::skip("with sanitizers the time of a call means nothing");
    sa::ContextOptions options;
    options.device = sa::cpu, options.cpu_threads = 1;  // to wake others is the kernel's time
    const sa::Context context(options);
    const sa::Pattern pattern = sa::causal();
    const sa::Problem problem;
    const sa::Plan plan = context.plan(pattern, problem);
    float x = 1, out = 0;
    sa::Forward args;
    args.q = args.k = args.v = sa::view(&x, {1, 1, 1, 1}), args.out = sa::view(&out, {1, 1, 1, 1});

    const spattn_tensor q = args.q.c(), result = args.out.c();
    const sa::Buffer scratch(plan.workspace(sa::Pass::forward));
    const sa::Workspace workspace = scratch;
    spattn_forward_args c{};
    c.struct_size = sizeof c, c.q = c.k = c.v = &q, c.out = &result;
    c.workspace = workspace.memory, c.workspace_bytes = workspace.bytes;

    const double alone = best([&] { spattn_forward(plan.c(), &c); });
    const double held = best([&] { plan.forward(args); });
    const double looked_up = best([&] { context.plan(pattern, problem).forward(args); });
    std::printf("forward of one token: C ABI %.0f ns, C++ %.0f ns, with its plan looked up %.0f ns\n", alone, held,
                looked_up);
    // Under emulation all is slower alike.
    CHECK(looked_up - alone <= std::max(goal, 2 * alone));
    CHECK_EQ(out, 1.0f);
}
