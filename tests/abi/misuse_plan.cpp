// SPDX-License-Identifier: MIT
// Wrong contexts, problems and plans: a typed error that names the field, and no handle.
#include "abi/abi.h"

using namespace abi;

namespace {

constexpr auto nan = std::numeric_limits<double>::quiet_NaN();
constexpr auto infinity = std::numeric_limits<double>::infinity();

void* take(void*, spattn_device, size_t, size_t, spattn_stream) { return nullptr; }
void give_back(void*, spattn_device, void*, size_t, spattn_stream) {}

template <class S>
struct BadField {
    const char* what;
    std::function<void(S&)> spoil;
    spattn_status status;
    const char* argument;
};

template <class S>
void out_of_range(std::vector<BadField<S>>& table, const char* argument, int64_t S::* field,
                  std::vector<int64_t> values) {
    for (int64_t value : values)
        table.push_back({"out of range", [=](S& s) { s.*field = value; }, SPATTN_E_RANGE, argument});
}

using BadOptions = BadField<spattn_context_options>;
using BadProblem = BadField<spattn_problem>;

std::vector<BadOptions> bad_options() {
    std::vector<BadOptions> table = {
        {"struct_size 0", [](auto& o) { o.struct_size = 0; }, SPATTN_E_STRUCT_SIZE, "options"},
        {"struct_size short", [](auto& o) { o.struct_size = uint32_t(first_size<spattn_context_options> - 8); },
         SPATTN_E_STRUCT_SIZE, "options"},
        {"a flag of the future", [](auto& o) { o.flags = 1; }, SPATTN_E_UNKNOWN_FIELD, "options.flags"},
        {"device type 99", [](auto& o) { o.device = {99, 0}; }, SPATTN_E_DEVICE, "options.device"},
        {"device type -1", [](auto& o) { o.device = {-1, 0}; }, SPATTN_E_DEVICE, "options.device"},
        {"cpu:1", [](auto& o) { o.device = {SPATTN_CPU, 1}; }, SPATTN_E_DEVICE, "options.device"},
        {"cpu:-1", [](auto& o) { o.device = {SPATTN_CPU, -1}; }, SPATTN_E_DEVICE, "options.device"},
        {"alloc alone", [](auto& o) { o.alloc = take; }, SPATTN_E_NULL, "options.free"},
        {"free alone", [](auto& o) { o.free = give_back; }, SPATTN_E_NULL, "options.alloc"},
    };
    for (int32_t value : {-1, 1 << 30, std::numeric_limits<int32_t>::min()}) {
        table.push_back({"threads", [=](auto& o) { o.cpu_threads = value; }, SPATTN_E_RANGE, "options.cpu_threads"});
        table.push_back({"log level", [=](auto& o) { o.log_level = value; }, SPATTN_E_RANGE, "options.log_level"});
    }
    out_of_range(table, "options.plan_cache", &spattn_context_options::plan_cache, {-2, huge, least});
    return table;
}

std::vector<BadProblem> bad_problems() {
    std::vector<BadProblem> table = {
        {"struct_size 0", [](auto& p) { p.struct_size = 0; }, SPATTN_E_STRUCT_SIZE, "problem"},
        {"struct_size short", [](auto& p) { p.struct_size = uint32_t(first_size<spattn_problem> - 8); },
         SPATTN_E_STRUCT_SIZE, "problem"},
        {"a flag of the future", [](auto& p) { p.flags |= 1u << 31; }, SPATTN_E_UNKNOWN_FIELD, "problem.flags"},
        {"heads_q no multiple", [](auto& p) { p.heads_kv = 3; }, SPATTN_E_RANGE, "problem.heads_kv"},
        {"more heads_kv", [](auto& p) { p.heads_kv = 8; }, SPATTN_E_RANGE, "problem.heads_kv"},
        {"float8", [](auto& p) { p.dtype = {SPATTN_FLOAT, 8, 1}; }, SPATTN_E_DTYPE, "problem.dtype"},
        {"no dtype", [](auto& p) { p.dtype = {}; }, SPATTN_E_DTYPE, "problem.dtype"},
        {"2 lanes", [](auto& p) { p.dtype.lanes = 2; }, SPATTN_E_DTYPE, "problem.dtype"},
        {"int32", [](auto& p) { p.dtype = i32; }, SPATTN_E_DTYPE, "problem.dtype"},
    };
    for (auto [field, name] : {std::pair{&spattn_problem::batch, "problem.batch"},
                               {&spattn_problem::heads_q, "problem.heads_q"},
                               {&spattn_problem::heads_kv, "problem.heads_kv"},
                               {&spattn_problem::seq_q, "problem.seq_q"},
                               {&spattn_problem::seq_k, "problem.seq_k"},
                               {&spattn_problem::head_dim, "problem.head_dim"}})
        out_of_range(table, name, field, {-1, huge, most, least});
    out_of_range(table, "problem.heads_q", &spattn_problem::heads_q, {0});
    out_of_range(table, "problem.heads_kv", &spattn_problem::heads_kv, {0});
    out_of_range(table, "problem.head_dim", &spattn_problem::head_dim, {0});
    out_of_range(table, "problem.head_dim", &spattn_problem::head_dim, {1025});
    out_of_range(table, "problem.head_dim_v", &spattn_problem::head_dim_v, {-1, 1025, huge, least});
    out_of_range(table, "problem.seq_q", &spattn_problem::seq_q, {int64_t(1) << 31});
    out_of_range(table, "problem.seq_k", &spattn_problem::seq_k, {int64_t(1) << 31});
    for (int32_t axes : {-1, 3, 1 << 30})
        table.push_back({"axes", [=](auto& p) { p.axes = axes; }, SPATTN_E_RANGE, "problem.axes"});
    for (double scale : {nan, infinity, -infinity})
        table.push_back({"scale not finite",
                         [=](auto& p) {
                             p.flags |= SPATTN_PLAN_SCALE;
                             p.scale = scale;
                         },
                         SPATTN_E_RANGE, "problem.scale"});
    for (double scale : {nan, infinity, 0.5})
        table.push_back({"scale without its flag", [=](auto& p) { p.scale = scale; }, SPATTN_E_RANGE, "problem.scale"});
    for (double softcap : {nan, infinity, -1., 1e-7, 1e31})
        table.push_back({"softcap", [=](auto& p) { p.softcap = softcap; }, SPATTN_E_RANGE, "problem.softcap"});
    for (int64_t offset : {huge, -huge, most, least})
        table.push_back({"q_offset",
                         [=](auto& p) {
                             p.flags |= SPATTN_PLAN_Q_OFFSET;
                             p.q_offset = offset;
                         },
                         SPATTN_E_RANGE, "problem.q_offset"});
    return table;
}

}  // namespace

TEST(contexts) {
    for (const BadOptions& bad : bad_options()) {
        auto options = cpu_options();
        bad.spoil(options);
        const auto call = [&](auto r) { return spattn_context_create(&options, r); };
        demand_no_handle<spattn_context>("spattn_context_create", {{bad.what, call, bad.status, bad.argument}});
    }
}

TEST(a_gpu_where_there_is_none) {
    int32_t gpus = -7;
    CHECK_EQ(spattn_device_count(&gpus), SPATTN_OK);
    CHECK(gpus >= 0);
    demand("NULL", "spattn_device_count", spattn_device_count(nullptr), SPATTN_E_NULL, "result");
    auto options = cpu_options();
    options.device = {SPATTN_CUDA, gpus};
    const auto call = [&](auto r) { return spattn_context_create(&options, r); };
    demand_no_handle<spattn_context>(
        "spattn_context_create",
        {{"one GPU too many", call, gpus ? SPATTN_E_DEVICE : SPATTN_E_NO_GPU, "options.device"}});
}

TEST(problems) {
    const Context context = make_context();
    const Pattern pattern = parse("causal");
    for (const BadProblem& bad : bad_problems()) {
        auto problem = make_problem();
        bad.spoil(problem);
        const auto call = [&](auto r) {
            return spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, r);
        };
        demand_no_handle<spattn_plan>("spattn_plan_create", {{bad.what, call, bad.status, bad.argument}});
    }
}

TEST(plan_handles) {
    const Context context = make_context();
    const Pattern pattern = parse("causal"), other = parse("per_head([0,0,0],causal)"), tree = parse("tree(-1,0)");
    const auto problem = make_problem();
    demand_no_handle<spattn_plan>(
        "spattn_plan_create",
        {
            {"context NULL", [&](auto r) { return spattn_plan_create(nullptr, pattern.get(), &problem, nullptr, r); },
             SPATTN_E_NULL, "context"},
            {"pattern NULL", [&](auto r) { return spattn_plan_create(context.get(), nullptr, &problem, nullptr, r); },
             SPATTN_E_NULL, "pattern"},
            {"problem NULL",
             [&](auto r) { return spattn_plan_create(context.get(), pattern.get(), nullptr, nullptr, r); },
             SPATTN_E_NULL, "problem"},
            {"3 heads", [&](auto r) { return spattn_plan_create(context.get(), other.get(), &problem, nullptr, r); },
             SPATTN_E_SHAPE, "pattern"},
            {"a small tree",
             [&](auto r) { return spattn_plan_create(context.get(), tree.get(), &problem, nullptr, r); },
             SPATTN_E_SHAPE, "pattern"},
        });
}

TEST(questions_of_a_plan) {
    const Context context = make_context();
    const Pattern pattern = parse("causal");
    auto problem = make_problem();
    const Plan plan = make_plan(context.get(), pattern.get(), problem);
    problem.flags &= ~SPATTN_PLAN_BACKWARD;
    const Plan forward_only = make_plan(context.get(), pattern.get(), problem);
    size_t bytes = 77, align = 77;
    const char* function = "spattn_plan_workspace";
    demand("plan NULL", function, spattn_plan_workspace(nullptr, 0, &bytes, &align), SPATTN_E_NULL, "plan");
    demand("bytes NULL", function, spattn_plan_workspace(plan.get(), 0, nullptr, &align), SPATTN_E_NULL, "bytes");
    for (int32_t op : {-1, 2, 1 << 30})
        demand("op", function, spattn_plan_workspace(plan.get(), op, &bytes, &align), SPATTN_E_RANGE, "op");
    demand("no backward", function, spattn_plan_workspace(forward_only.get(), SPATTN_OP_BACKWARD, &bytes, &align),
           SPATTN_E_STATE, "op");
    CHECK_EQ(bytes, size_t(77));
    CHECK_EQ(align, size_t(77));
    auto stats = sized<spattn_stats>();
    demand("plan NULL", "spattn_plan_stats", spattn_plan_stats(nullptr, &stats), SPATTN_E_NULL, "plan");
    demand("NULL", "spattn_plan_stats", spattn_plan_stats(plan.get(), nullptr), SPATTN_E_NULL, "result");
}

TEST(releasing_null_does_nothing) {
    spattn_pattern_retain(nullptr);
    spattn_pattern_release(nullptr);
    spattn_context_retain(nullptr);
    spattn_context_release(nullptr);
    spattn_plan_retain(nullptr);
    spattn_plan_release(nullptr);
    CHECK(true);
}
