// SPDX-License-Identifier: MIT
// Contexts, problems and plans whose parts do not go together: a typed error that names the field, and no handle. What
// is wrong with a field alone, test_misuse.py says.
#include "abi/abi.h"

using namespace abi;

namespace {

void* take(void*, spattn_device, size_t, size_t, spattn_stream) { return nullptr; }
void give_back(void*, spattn_device, void*, size_t, spattn_stream) {}

}  // namespace

TEST(a_gpu_where_there_is_none) {
    int32_t gpus = -7;
    CHECK_EQ(spattn_device_count(&gpus), SPATTN_OK);
    CHECK(gpus >= 0);
    auto options = cpu_options();
    options.device = {SPATTN_CUDA, gpus};
    const auto call = [&](auto r) { return spattn_context_create(&options, r); };
    demand_no_handle<spattn_context>(
        "spattn_context_create",
        {{"one GPU too many", call, gpus ? SPATTN_E_DEVICE : SPATTN_E_NO_GPU, "options.device"}});
}

TEST(errors_about_devices_say_which_number) {
    auto options = cpu_options();
    options.device = {SPATTN_CPU, 5};
    spattn_context* made = nullptr;
    CHECK_EQ(spattn_context_create(&options, &made), SPATTN_E_DEVICE);
    CHECK(std::string(spattn_last_error_text()).find("is number 5 of cpu; accepted: 0 to 0") != std::string::npos);
}

TEST(allocators_come_in_pairs) {
    auto taker = cpu_options(), giver = cpu_options();
    taker.alloc = take, giver.free = give_back;
    demand_no_handle<spattn_context>(
        "spattn_context_create",
        {{"alloc alone", [&](auto r) { return spattn_context_create(&taker, r); }, SPATTN_E_NULL, "options.free"},
         {"free alone", [&](auto r) { return spattn_context_create(&giver, r); }, SPATTN_E_NULL, "options.alloc"}});
}

TEST(scales_come_with_their_flag) {
    const Context context = make_context();
    const Pattern pattern = parse("causal");
    for (const double scale : {std::nan(""), HUGE_VAL, 0.5}) {
        auto problem = make_problem();
        problem.scale = scale;
        const auto call = [&](auto r) {
            return spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, r);
        };
        demand_no_handle<spattn_plan>("spattn_plan_create", {{"no flag", call, SPATTN_E_RANGE, "problem.scale"}});
    }
}

// A number that nobody reads would move the queries to where their author did not mean them.
TEST(offsets_come_with_their_flag) {
    const Context context = make_context();
    const Pattern pattern = parse("causal");
    for (const int64_t offset : {int64_t(1), int64_t(-1), INT64_MIN}) {
        auto problem = make_problem();
        problem.q_offset = offset;
        const auto call = [&](auto r) {
            return spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, r);
        };
        demand_no_handle<spattn_plan>("spattn_plan_create", {{"no flag", call, SPATTN_E_RANGE, "problem.q_offset"}});
    }
}

TEST(patterns_that_do_not_fit_the_problem) {
    const Context context = make_context();
    const auto problem = make_problem();
    for (const char* text : {"per_head([0,0,0],causal)", "tree(-1,0)"}) {
        const Pattern pattern = parse(text);
        const auto call = [&](auto r) {
            return spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, r);
        };
        demand_no_handle<spattn_plan>("spattn_plan_create", {{text, call, SPATTN_E_SHAPE, "pattern"}});
    }
}

TEST(forward_plans_have_no_workspace_for_backward) {
    const Context context = make_context();
    auto problem = make_problem();
    problem.flags &= ~SPATTN_PLAN_BACKWARD;
    const Plan plan = make_plan(context.get(), parse("causal").get(), problem);
    size_t bytes = 77, align = 77;
    demand("no backward", "spattn_plan_workspace",
           spattn_plan_workspace(plan.get(), SPATTN_OP_BACKWARD, &bytes, &align), SPATTN_E_STATE, "op");
    CHECK_EQ(bytes, size_t(77));
    CHECK_EQ(align, size_t(77));
}
