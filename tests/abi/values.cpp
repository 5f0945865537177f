// SPDX-License-Identifier: MIT
// Versions, names of statuses, the list of kernels, and the last error of a thread.
#include <algorithm>
#include <set>
#include <thread>

#include "abi/abi.h"

using namespace abi;

TEST(versions) {
    CHECK_EQ(spattn_version(),
             uint32_t(SPATTN_VERSION_MAJOR * 10000 + SPATTN_VERSION_MINOR * 100 + SPATTN_VERSION_PATCH));
    CHECK_EQ(spattn_abi(), uint32_t(SPATTN_ABI));
}

TEST(status_names) {
#define NAMED(status) CHECK_EQ(std::string(spattn_status_name(status)), #status)
    NAMED(SPATTN_OK);
    NAMED(SPATTN_E_ARGUMENT);
    NAMED(SPATTN_E_NULL);
    NAMED(SPATTN_E_STRUCT_SIZE);
    NAMED(SPATTN_E_SHAPE);
    NAMED(SPATTN_E_DTYPE);
    NAMED(SPATTN_E_DEVICE);
    NAMED(SPATTN_E_LAYOUT);
    NAMED(SPATTN_E_RANGE);
    NAMED(SPATTN_E_WORKSPACE);
    NAMED(SPATTN_E_STATE);
    NAMED(SPATTN_E_UNSUPPORTED);
    NAMED(SPATTN_E_NO_KERNEL);
    NAMED(SPATTN_E_NO_GPU);
    NAMED(SPATTN_E_DRIVER_TOO_OLD);
    NAMED(SPATTN_E_UNKNOWN_FIELD);
    NAMED(SPATTN_E_RESOURCE);
    NAMED(SPATTN_E_HOST_MEMORY);
    NAMED(SPATTN_E_DEVICE_MEMORY);
    NAMED(SPATTN_E_CUDA);
    NAMED(SPATTN_E_CAPTURE);
    NAMED(SPATTN_E_FORMAT);
    NAMED(SPATTN_E_CALLBACK);
    NAMED(SPATTN_E_CANCELLED);
    NAMED(SPATTN_E_INTERNAL);
#undef NAMED
    for (int32_t unknown : {-1, 1, 999, 1010, 7000, 0x7fffffff})
        CHECK_EQ(std::string(spattn_status_name(unknown)), "SPATTN_E_UNKNOWN");
}

TEST(kernels) {
    const int32_t count = spattn_kernel_count();
    CHECK(count > 0);
    std::set<std::string> names;
    int runnable = 0;
    for (int32_t row = 0; row < count; ++row) {
        CHECK(spattn_kernel_name(row) != nullptr);
        names.insert(spattn_kernel_name(row));
        const int32_t runs = spattn_kernel_runs_here(row);
        CHECK(runs == 0 || runs == 1);
        runnable += runs;
    }
    CHECK_EQ(names.size(), size_t(count));
    CHECK(runnable > 0);
    for (int32_t row : {-1, count, 0x7fffffff, std::numeric_limits<int32_t>::min()}) {
        CHECK(spattn_kernel_name(row) == nullptr);
        CHECK_EQ(spattn_kernel_runs_here(row), 0);
    }
}

TEST(a_success_leaves_the_last_error) {
    spattn_pattern* result = nullptr;
    CHECK_EQ(spattn_pattern_sink(-1, &result), SPATTN_E_RANGE);
    const std::string text = spattn_last_error_text();
    CHECK(text.find("tokens") != std::string::npos);
    CHECK(text.find("-1") != std::string::npos);
    CHECK(text.find("accepted") != std::string::npos);
    const Pattern pattern = parse("causal");
    CHECK_EQ(text, std::string(spattn_last_error_text()));
}

TEST(errors_do_not_cross_threads) {
    spattn_pattern* result = nullptr;
    CHECK_EQ(spattn_pattern_sink(-1, &result), SPATTN_E_RANGE);
    const std::string mine = spattn_last_error_text();
    std::string fresh = "?", theirs = "?";
    std::thread([&] {
        fresh = spattn_last_error_text();
        spattn_pattern* other = nullptr;
        spattn_pattern_strided(0, &other);
        theirs = spattn_last_error_text();
    }).join();
    CHECK_EQ(fresh, std::string());
    CHECK(theirs.find("stride") != std::string::npos);
    CHECK_EQ(mine, std::string(spattn_last_error_text()));
}

TEST(kernels_of_plans) {
    std::set<std::string> names;
    for (int32_t row = 0; row < spattn_kernel_count(); ++row) names.insert(spattn_kernel_name(row));
    const Context context = make_context();
    const auto kernel_of = [&](const char* text, uint32_t flags, spattn_enum op, int64_t seq) {
        const Pattern pattern = parse(text);
        auto problem = make_problem();
        problem.flags = flags;
        problem.seq_q = problem.seq_k = seq;
        const Plan plan = make_plan(context.get(), pattern.get(), problem);
        const char* name = spattn_plan_kernel(plan.get(), op);
        return std::string(name ? name : "");
    };
    CHECK_EQ(kernel_of("causal", 0, SPATTN_OP_BACKWARD, 40), "");
    CHECK_EQ(kernel_of("causal", SPATTN_PLAN_REFERENCE, SPATTN_OP_FORWARD, 40), "reference_forward_f32");
    for (spattn_enum op : {SPATTN_OP_FORWARD, SPATTN_OP_BACKWARD})
        CHECK(names.count(kernel_of("causal", SPATTN_PLAN_BACKWARD, op, 40)));
    // In two pieces: a name for each, as the variable that pins rows reads them.
    const std::string strided = "causal & (window(64,0) | strided(64))";
    const std::string both = kernel_of(strided.c_str(), 0, SPATTN_OP_FORWARD, 4096);
    const size_t comma = both.find(',');
    CHECK(comma != std::string::npos);
    CHECK(names.count(both.substr(0, comma)) && names.count(both.substr(comma + 1)));
    setenv("SPATTN_FORCE_KERNEL", both.c_str(), 1);
    CHECK_EQ(kernel_of(strided.c_str(), 0, SPATTN_OP_FORWARD, 4096), both);
    unsetenv("SPATTN_FORCE_KERNEL");
}

// Rows that could never serve are told by their number, or one by one.
TEST(explanations_short_and_whole) {
    const Context context = make_context();
    const Pattern pattern = parse("causal");
    const Plan plan = make_plan(context.get(), pattern.get(), make_problem());
    size_t needed = 0;
    succeed(spattn_plan_explain_all(plan.get(), nullptr, 0, &needed), "explain_all");
    std::string whole(needed, ' ');
    succeed(spattn_plan_explain_all(plan.get(), whole.data(), needed, nullptr), "explain_all");
    const std::string brief = explain(plan.get());
    const std::string other = "scalar_block_forward_f64_16x16";
    CHECK(whole.find(other + ": for dtype f64") != std::string::npos);
    CHECK(brief.find(other) == std::string::npos);
    CHECK(brief.find(" more: for dtype f64") != std::string::npos);
    CHECK(std::count(brief.begin(), brief.end(), '\n') < std::count(whole.begin(), whole.end(), '\n'));
    const std::string chosen = spattn_plan_kernel(plan.get(), SPATTN_OP_FORWARD);
    CHECK(brief.find("* " + chosen) != std::string::npos);
    CHECK(whole.find("* " + chosen) != std::string::npos);
}
