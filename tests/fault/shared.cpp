// SPDX-License-Identifier: MIT
// Threads that share a context, a pattern and a plan: they make, find, run, ask and release at once. Worth most in a
// build with -fsanitize=thread (preset tsan).
#include <atomic>
#include <thread>

#include "fault/operands.h"

using namespace abi;
using fault::Operands;

namespace {

constexpr int threads = 4, rounds = 25;

// Each thread counts what went wrong: CHECK is for one thread.
template <class Body>
void demand_together(Body body) {
    std::atomic<int> wrong = 0;
    std::vector<std::thread> all;
    for (int t = 0; t < threads; ++t) {
        all.emplace_back([&, t] {
            for (int round = 0; round < rounds; ++round) wrong += !body(t, round);
        });
    }
    for (std::thread& thread : all) thread.join();
    CHECK_EQ(wrong.load(), 0);
}

// A cache of fewer plans than there are: some fall out while others find them.
Context make_shared_context(int32_t cpu_threads) { return make_context(cpu_threads, 2); }

bool run(Operands& operands) { return operands.forward() == SPATTN_OK && operands.backward() == SPATTN_OK; }

}  // namespace

TEST(one_plan_run_by_all) {
    const Pattern pattern = parse("causal & (window(7,0) | bigbird(8,3,1,1,2))");
    const auto problem = make_problem();
    for (int32_t cpu_threads : {1, 3}) {
        const Context context = make_shared_context(cpu_threads);
        const Plan plan = make_plan(context.get(), pattern.get(), problem);
        const Context alone = make_shared_context(1);
        const Plan plan_alone = make_plan(alone.get(), pattern.get(), problem);
        Operands expected(plan_alone.get(), problem);
        CHECK(run(expected));
        demand_together([&](int, int) {
            Operands mine(plan.get(), problem);
            return run(mine) && mine.results() == expected.results();
        });
    }
}

// Orders of the tokens, options of the problem, and lists that each thread brings for itself.
TEST(plans_of_every_kind_run_by_all) {
    struct {
        const char* text;
        int64_t tokens, listed;
        uint32_t flags;
        spattn_dtype dtype = {SPATTN_FLOAT, 32, 1};
    } const kinds[] = {
        {"causal & dilated(60,0,5)", 130, 0, SPATTN_PLAN_SINK_LOGITS},
        {"causal & fixed(16,2)", 250, 0, 0},
        {"window(9,9) | global_tokens(3,200)", 250, 0, SPATTN_PLAN_VALUE_IN_KEY},
        {"causal & runtime_tokens(6)", 40, 6, SPATTN_PLAN_REFERENCE | SPATTN_PLAN_SINK_LOGITS},
        {"runtime_tokens(6)", 40, 6, SPATTN_PLAN_SINK_LOGITS},
        {"runtime_tokens(6) & causal", 40, 6, SPATTN_PLAN_SINK_LOGITS, {SPATTN_FLOAT, 64, 1}},
        {"causal & (window(20,0) | strided(16))", 400, 0, SPATTN_PLAN_SINK_LOGITS},
        {"causal & (window(60,0) | strided(16))", 400, 0, SPATTN_PLAN_SINK_LOGITS, {SPATTN_FLOAT, 64, 1}},
        {"window(9,0) | strided(16) | global_tokens(3,200,201)", 400, 0, SPATTN_PLAN_SINK_LOGITS},
        {"global_keys(3,60)", 70, 0, SPATTN_PLAN_SINK_LOGITS},
        {"per_document([0,30,70],[0,30,70],causal)", 70, 0, 0},
        {"rows([0,35,105,140],140,causal)", 70, 0, 0},
        {"rows([0,20,60,80],80,causal & runtime_tokens(6))", 40, 6, SPATTN_PLAN_SINK_LOGITS},
    };
    const Context context = make_shared_context(3);
    for (const auto& kind : kinds) {
        auto problem = make_problem();
        problem.batch = 1, problem.seq_q = problem.seq_k = kind.tokens;
        problem.flags |= kind.flags;
        problem.dtype = kind.dtype;
        problem.softcap = 9;
        const Plan plan = make_plan(context.get(), parse(kind.text).get(), problem);
        Operands expected(plan.get(), problem, kind.listed);
        CHECK(run(expected));
        demand_together([&](int, int) {
            Operands mine(plan.get(), problem, kind.listed);
            return run(mine) && mine.results() == expected.results();
        });
    }
}

TEST(plans_made_found_and_dropped_by_all) {
    const Context context = make_shared_context(2);
    const auto problem = make_problem();
    const Pattern patterns[] = {parse("causal"), parse("window(2,2) | global_tokens(3,30)"),
                                parse("strided(4) & causal"), parse("full")};
    demand_together([&](int t, int round) {
        const spattn_pattern* pattern = patterns[(t + round) % 4].get();
        spattn_plan* plan = nullptr;
        if (spattn_plan_create(context.get(), pattern, &problem, nullptr, &plan)) return false;
        const Plan owned(plan);
        spattn_plan_retain(plan);
        spattn_plan_release(plan);
        Operands mine(plan, problem);
        auto stats = sized<spattn_stats>();
        return run(mine) && spattn_plan_stats(plan, &stats) == SPATTN_OK && stats.pairs > 0;
    });
}

TEST(a_pattern_asked_composed_and_released_by_all) {
    const Pattern shared = parse("causal & (window(5,0) | bigbird(4,3,1,2,7)) - global_keys(3)");
    const auto extent = make_extent(40, 40);
    auto expected = sized<spattn_stats>();
    succeed(spattn_pattern_stats(shared.get(), &extent, &expected), "stats");
    demand_together([&](int, int) {
        const spattn_pattern* parts[] = {shared.get(), shared.get()};
        spattn_pattern* made = nullptr;
        if (spattn_pattern_union(parts, 2, &made)) return false;
        const Pattern both(made);
        auto stats = sized<spattn_stats>();
        uint64_t hash = 0;
        return spattn_pattern_stats(made, &extent, &stats) == SPATTN_OK && stats.pairs == expected.pairs &&
               spattn_pattern_hash(made, &hash) == SPATTN_OK && spattn_pattern_equal(made, shared.get()) == 1;
    });
}

TEST(errors_stay_on_their_thread) {
    demand_together([](int t, int) {
        spattn_pattern* result = nullptr;
        const std::string text = "window(" + std::to_string(-5 - t) + ",0)";
        const bool is_refused = spattn_pattern_parse(text.c_str(), &result) == SPATTN_E_FORMAT;
        std::this_thread::yield();
        return is_refused && std::string(spattn_last_error_text()).find(std::to_string(-5 - t)) != std::string::npos;
    });
}

TEST(contexts_of_their_own) {
    const Pattern pattern = parse("causal");
    const auto problem = make_problem();
    demand_together([&](int, int) {
        auto options = cpu_options();
        options.cpu_threads = 2;
        spattn_context* context = nullptr;
        if (spattn_context_create(&options, &context)) return false;
        spattn_plan* plan = nullptr;
        const spattn_status status = spattn_plan_create(context, pattern.get(), &problem, nullptr, &plan);
        spattn_context_release(context);  // the plan keeps what it needs
        if (status) return false;
        const Plan owned(plan);
        Operands mine(plan, problem);
        return run(mine);
    });
}
