// SPDX-License-Identifier: MIT
// Patterns of the most levels in a thread whose stack is as small as musl makes it.
#include <malloc.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "abi/abi.h"
#include "fault/operands.h"

using namespace abi;

namespace {

constexpr size_t stack_bytes = 128 << 10;

// Runs the body on such a thread of a child process, which ends with 0 unless the stack was too small or a call failed.
template <class Body>
int run_on_small_stack(Body body) {
    const pid_t child = fork();
    if (child == 0) {
        const auto run = [](void* body) -> void* { return (*static_cast<Body*>(body))() ? body : nullptr; };
        pthread_attr_t attributes;
        pthread_t thread;
        void* answer = nullptr;
        const bool ran = pthread_attr_init(&attributes) == 0 &&
                         pthread_attr_setstacksize(&attributes, stack_bytes) == 0 &&
                         pthread_create(&thread, &attributes, run, &body) == 0 && pthread_join(thread, &answer) == 0;
        _exit(ran && answer ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

// Whether every call that reads a pattern level by level serves this text.
bool serves(const std::string& text) {
    spattn_pattern *made = nullptr, *again = nullptr;
    if (spattn_pattern_parse(text.c_str(), &made)) return false;
    const Pattern pattern(made);
    size_t length = 0;
    uint64_t hash = 0;
    bool is_served = !spattn_pattern_print(made, nullptr, 0, &length) && !spattn_pattern_hash(made, &hash) &&
                     !spattn_pattern_save(made, nullptr, 0, &length);
    std::vector<char> bytes(length);
    is_served &= !spattn_pattern_save(made, bytes.data(), length, &length) &&
                 !spattn_pattern_load(bytes.data(), length, &again);
    const Pattern loaded(again);
    is_served &= spattn_pattern_equal(made, again) == 1;
    auto extent = make_extent(256, 256);
    auto stats = sized<spattn_stats>();
    extent.heads = 2;
    is_served &= !spattn_pattern_stats(made, &extent, &stats);
    auto problem = make_problem();
    problem.batch = 1, problem.heads_q = problem.heads_kv = 2, problem.seq_q = problem.seq_k = 256;
    const Context context = make_context(1, 0);
    spattn_plan* plan = nullptr;
    is_served &= !spattn_plan_create(context.get(), made, &problem, nullptr, &plan);
    const Plan owned(plan);
    return is_served && fault::Operands(plan, problem).forward() == SPATTN_OK;
}

std::string nested(const std::string& open, const std::string& close) {
    std::string text = "causal";
    for (int level = 1; level < 198; ++level) text = open + text + close;
    return text;
}

}  // namespace

TEST(patterns_of_the_most_levels_are_served_on_a_small_stack) {
#ifndef NDEBUG
    return check::skip("without optimisation every name has its place in a frame");
#endif
    if (mallinfo2().uordblks == 0) return check::skip("sanitizers' frames are larger");
    std::string operators = "causal";
    for (int level = 1; level < 99; ++level)
        operators = "sink(1) | (window(" + std::to_string(level) + ",0) & (" + operators + "))";
    for (const std::string& text :
         {nested("(", ")"), nested("transpose(", ")"), nested("full - (", ")"), operators,
          nested("per_head([0,0],", ")"), nested("per_batch([0],", ")"), nested("rows([0,256],256,", ")"),
          nested("columns([0,256],256,", ")"), nested("per_document([0,256],[0,256],", ")")}) {
        check::context = text.substr(0, 40);
        CHECK_EQ(run_on_small_stack([&] { return serves(text); }), 0);
    }
}

TEST(a_mistake_at_the_most_levels_is_told_on_a_small_stack) {
#ifndef NDEBUG
    return check::skip("without optimisation every name has its place in a frame");
#endif
    if (mallinfo2().uordblks == 0) return check::skip("sanitizers' frames are larger");
    for (const std::string& text : {nested("per_document([0,256],[0,256],", ""), nested("transpose(", "]"),
                                    nested("per_head([0,1],", ")"), nested("((", "))")}) {
        check::context = text.substr(0, 40);
        CHECK_EQ(run_on_small_stack([&] {
                     spattn_pattern* made = nullptr;
                     return spattn_pattern_parse(text.c_str(), &made) == SPATTN_E_FORMAT;
                 }), 0);
    }
}
