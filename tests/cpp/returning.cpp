// SPDX-License-Identifier: MIT
// sparseattn.hpp where nothing may throw: empty handles, statuses and results.
#define SPARSEATTN_NO_EXCEPTIONS
#include <sparseattn/sparseattn.hpp>

#include "check.h"

namespace sa = sparseattn;

TEST(what_succeeds) {
    const sa::Context context(sa::cpu);
    const sa::Pattern pattern = sa::causal() & (sa::window(3, 0) | sa::sink(1));
    sa::Problem problem;
    problem.seq_q = problem.seq_k = 8, problem.head_dim = 4;
    const sa::Plan plan = context.plan(pattern, problem);
    CHECK(context && pattern && plan);
    CHECK(pattern.text() && *pattern.text() == "causal & (window(3,0) | sink(1))");
    CHECK_EQ(plan.stats()->pairs, 30.0);
    const std::vector<float> x(32, 1.0f);
    std::vector<float> out(32);
    sa::Forward args;
    args.q = args.k = args.v = sa::view(x.data(), {1, 8, 1, 4});
    args.out = sa::view(out.data(), {1, 8, 1, 4});
    CHECK(plan.forward(args).ok());
    CHECK(out == x);
}

// No process has so many bytes. The pass that gets this buffer says what it lacks.
TEST(buffers_beyond_memory_are_empty) {
    const sa::Buffer none(sa::WorkspaceSize{std::size_t(1) << 60, 64});
    CHECK(sa::Workspace(none).memory == nullptr);
    CHECK_EQ(sa::Workspace(none).bytes, std::size_t(0));
    CHECK(!none.holds({1, 64}));
}

TEST(what_fails) {
    const sa::Pattern wrong = sa::window(-2, 0);
    CHECK(!wrong);
    // What is made of it is empty too, and the reason stays the first one.
    const sa::Pattern rows = sa::rows(sa::transpose(sa::causal() & (wrong | sa::sink(1))), {{0, 1}}, 2);
    const sa::Pattern whole = sa::columns(rows, {{0, 1}}, 2) - sa::full();
    CHECK(!whole);
    CHECK(!sa::Context(sa::cpu).plan(whole, {}));
    CHECK_EQ(sa::last_failure().argument, "left");
    CHECK_EQ(std::string(sa::last_failure().name()), "SPATTN_E_RANGE");
    CHECK_EQ(sa::last_failure().family(), 1000);
    const auto text = whole.text();
    CHECK(!text && text.status.code() == SPATTN_E_NULL);
    const sa::Context nowhere(sa::Device{99, 0});
    CHECK(!nowhere && !nowhere.plan(sa::causal(), {}));
    CHECK_EQ(sa::last_failure().argument, "options.device");
    sa::Problem problem;
    const sa::Plan plan = sa::Context(sa::cpu).plan(sa::causal(), problem);
    const sa::Status status = plan.forward({});
    CHECK(!status.ok());
    CHECK_EQ(std::string(status.name()), "SPATTN_E_NULL");
    CHECK(!sa::Context(sa::cpu).shard(whole, problem, {}).seen());
    CHECK(!sa::predicate([](int64_t, int64_t, int64_t) { return true; }, 0, 1, 1));
}
