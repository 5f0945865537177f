// SPDX-License-Identifier: MIT
// Memory that runs out while contexts and plans are made and run; runs that allocate nothing.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "fault/operands.h"
#include "fault/sweep.h"

using namespace abi;
using fault::Operands;
using fault::sweep;

namespace {

constexpr const char* block_text = "causal & (window(9,0) | sink(3)) | bigbird(8,3,1,1,4)";

// In a child, which uses the library for the first time: 0 where all is right and there was no fault, 1 with one.
int introspect_without_memory(long n) {
    memory::arm(n, memory::Fault::from_then_on);
    const bool is_sane = spattn_kernel_count() >= 0 && *spattn_build_json() == '{';
    const bool had_fault = memory::disarm();
    const bool is_right =
        spattn_kernel_count() > 0 && spattn_kernel_name(0) && std::strstr(spattn_build_json(), "\"abi\"");
    return is_sane && is_right ? had_fault : 2;
}

}  // namespace

TEST(introspection_at_its_first_use) {  // the first test: nothing has used the library yet
    for (long n = 1, code = 1; code == 1; ++n) {
        const pid_t child = fork();
        if (child == 0) _exit(introspect_without_memory(n));
        int status = 0;
        CHECK_EQ(waitpid(child, &status, 0), child);
        code = WIFEXITED(status) ? WEXITSTATUS(status) : 3;
        CHECK(code == 1 || (code == 0 && n > 2));
    }
}

TEST(contexts) {
    auto options = cpu_options();
    options.cpu_threads = 2;
    spattn_context* result = nullptr;
    const long faults = sweep("context", {"spattn_context_create", [&] {
                                  result = reinterpret_cast<spattn_context*>(&result);
                                  return spattn_context_create(&options, &result);
                              },
                              [&](spattn_status status) {
                                  CHECK_EQ(status == SPATTN_OK, result != nullptr);
                                  spattn_context_release(result);
                              }});
    CHECK(faults > 4);
}

TEST(plans) {
    const Pattern pattern = parse(block_text);
    for (uint32_t flags : {uint32_t(SPATTN_PLAN_BACKWARD), uint32_t(SPATTN_PLAN_BACKWARD | SPATTN_PLAN_REFERENCE)}) {
        const Context context = make_context(2, -1);
        auto problem = make_problem();
        problem.flags = flags;
        const std::string expected = explain(make_plan(context.get(), pattern.get(), problem).get());
        spattn_plan* result = nullptr;
        const long faults = sweep("plan", {"spattn_plan_create", [&] {
                                      result = reinterpret_cast<spattn_plan*>(&result);
                                      return spattn_plan_create(context.get(), pattern.get(), &problem, nullptr,
                                                                &result);
                                  },
                                  [&](spattn_status status) {
                                      CHECK_EQ(status == SPATTN_OK, result != nullptr);
                                      if (result) CHECK(explain(result) == expected);
                                      spattn_plan_release(result);
                                  }});
        CHECK(faults > 20);
    }
}

// A cache never keeps a plan under a wrong or half a key, nor one that its caller did not get.
TEST(plans_in_a_cache) {
    const Context context = make_context(1, 2);
    const auto problem = make_problem();
    const Pattern texts[] = {parse("window(3,0)"), parse("window(33,0)"), parse("window(333,0)")};
    const std::string expected = explain(make_plan(context.get(), texts[2].get(), problem).get());
    spattn_plan* result = nullptr;
    const auto fill = [&] {
        for (const Pattern& other : {std::cref(texts[0]), std::cref(texts[1])})
            make_plan(context.get(), other.get(), problem);
    };
    const auto create = [&] { return spattn_plan_create(context.get(), texts[2].get(), &problem, nullptr, &result); };
    const auto verify = [&](spattn_status status) {
        CHECK_EQ(status == SPATTN_OK, result != nullptr);
        if (result) CHECK(explain(result) == expected);
        spattn_plan_release(result);
        fill();
    };
    const long faults = sweep("cached plan", {"spattn_plan_create", create, verify, SPATTN_OK, fill});
    CHECK(faults > 20);
}

// And an exchange allocates nothing, once threads have started.
TEST(shardings) {
    const Context context = make_context(3, -1);
    const Pattern pattern = parse(block_text);
    const auto problem = make_problem();
    auto options = sized<spattn_sharding_options>();
    options.ranks = 2, options.rank = 1, options.split = SPATTN_SPLIT_ZIGZAG;
    spattn_sharding* result = nullptr;
    const auto create = [&] {
        return spattn_sharding_create(context.get(), pattern.get(), &problem, &options, nullptr, &result);
    };
    const auto verify = [&](spattn_status status) {
        CHECK_EQ(status == SPATTN_OK, result != nullptr);
        spattn_sharding_release(result);
    };
    CHECK(sweep("sharding", {"spattn_sharding_create", create, verify}) > 40);

    succeed(create(), "sharding");
    const Sharding sharding(result);
    size_t bytes[2] = {};
    succeed(spattn_sharding_buffers(result, &bytes[0], &bytes[1]), "buffers");
    Tensor k({2, 2, 20, 16}, f32), v({2, 2, 20, 8}, f32), seen_k({2, 2, 40, 16}, f32), seen_v({2, 2, 40, 8}, f32);
    Tensor buffer({int64_t(std::max(bytes[0], bytes[1]))}, u8);
    for (const spattn_enum step : {SPATTN_EXCHANGE_PACK, SPATTN_EXCHANGE_UNPACK, SPATTN_EXCHANGE_PACK_GRADIENTS,
                                   SPATTN_EXCHANGE_ADD_GRADIENTS}) {
        auto args = sized<spattn_exchange_args>();
        if (step != SPATTN_EXCHANGE_PACK_GRADIENTS) args.k = &k.view, args.v = &v.view;
        if (step != SPATTN_EXCHANGE_PACK) args.seen_k = &seen_k.view, args.seen_v = &seen_v.view;
        args.buffer = buffer.data, args.buffer_bytes = buffer.bytes;
        succeed(spattn_exchange(result, step, &args), "exchange");
        memory::arm(1, memory::Fault::once);
        const spattn_status status = spattn_exchange(result, step, &args);
        CHECK(!memory::disarm());
        CHECK_EQ(status, SPATTN_OK);
    }
}

TEST(explanations) {
    const Context context = make_context(1, -1);
    const Pattern pattern = parse(block_text);
    const Plan plan = make_plan(context.get(), pattern.get(), make_problem());
    const std::string expected = explain(plan.get());
    std::string text(expected.size(), ' ');
    const long faults = sweep("explain", {"spattn_plan_explain", [&] {
                                  return spattn_plan_explain(plan.get(), text.data(), text.size(), nullptr);
                              },
                              [&](spattn_status status) {
                                  CHECK(text == (status == SPATTN_OK ? expected : std::string(expected.size(), ' ')));
                                  text.assign(expected.size(), ' ');
                              }});
    CHECK(faults > 4);
}

// New tokens of a cache of every dtype are written without memory, once threads have started.
TEST(appends_allocate_nothing) {
    const Context context = make_context(3, -1);
    for (const spattn_dtype dtype : {f32, spattn_dtype{SPATTN_FLOAT, 16, 1}, bf16, f64})
        for (const spattn_dtype cache_dtype : {dtype, float8}) {
            check::context = std::to_string(dtype.code) + ", " + std::to_string(dtype.bits) + " bits";
            auto problem = sized<spattn_problem>();
            problem.flags = SPATTN_PLAN_STARTS;
            problem.batch = problem.heads_q = problem.heads_kv = 2, problem.seq_q = 3, problem.seq_k = 20;
            problem.head_dim = 16, problem.dtype = dtype, problem.cache_dtype = cache_dtype;
            Tensor rows({2, 3, 2, 16}, dtype), k({2, 20, 2, 16}, cache_dtype), v({2, 20, 2, 16}, cache_dtype);
            fault::fill(rows, 1);
            Numbers starts({0, 5});
            auto args = sized<spattn_cache_append_args>();
            args.k_new = args.v_new = &rows.view, args.k = &k.view, args.v = &v.view, args.starts = &starts.view;
            succeed(spattn_cache_append(context.get(), &problem, &args), "append");
            memory::arm(1, memory::Fault::from_then_on);
            const spattn_status status = spattn_cache_append(context.get(), &problem, &args);
            CHECK(!memory::disarm());
            CHECK_EQ(status, SPATTN_OK);
        }
}

// The reference rows may allocate while they run; what fails there reaches the caller, from any thread.
TEST(reference_runs) {
    const Pattern pattern = parse("causal & window(3,0)");
    auto problem = make_problem();
    problem.flags |= SPATTN_PLAN_REFERENCE;
    problem.batch = problem.heads_q = problem.heads_kv = 1;
    problem.seq_q = problem.seq_k = 5;
    for (int32_t threads : {1, 3}) {
        const Context context = make_context(threads, -1);
        const Plan plan = make_plan(context.get(), pattern.get(), problem);
        Operands operands(plan.get(), problem);
        succeed(operands.forward(), "forward");
        succeed(operands.backward(), "backward");
        const auto expected = operands.results();
        const auto verify = [&](spattn_status status) { CHECK(status != SPATTN_OK || operands.results() == expected); };
        long faults = sweep("reference forward", {"spattn_forward", [&] { return operands.forward(); }, verify});
        faults += sweep("reference backward", {"spattn_backward", [&] { return operands.backward(); }, verify});
        CHECK(faults > 10);
    }
}

// The first call of a context starts its threads; if that fails, it tells, and the next call starts them.
TEST(the_first_run_of_a_context) {
    const Pattern pattern = parse(block_text);
    const auto problem = make_problem();
    for (auto fault : {memory::Fault::once, memory::Fault::from_then_on}) {
        for (long n = 1;; ++n) {
            const Context context = make_context(3, -1);
            const Plan plan = make_plan(context.get(), pattern.get(), problem);
            Operands operands(plan.get(), problem);
            memory::arm(n, fault);
            const spattn_status status = operands.forward();
            const bool had_fault = memory::disarm();
            CHECK(status == SPATTN_OK || (had_fault && status == SPATTN_E_HOST_MEMORY));
            succeed(operands.forward(), "the next call");
            if (had_fault) continue;
            CHECK(n > 2);
            break;
        }
    }
}

namespace {

// Allocations of a call of one pinned row, after the first call has started the threads; -1 if it fails.
long allocations(const std::string& row, const spattn_pattern* pattern, const spattn_problem& problem, int32_t threads,
                 int64_t listed) {
    const bool is_forward = row.find("_forward_") != std::string::npos;
    const Context context = make_context(threads, -1);
    const Plan plan = make_plan(context.get(), pattern, problem);
    if (!plan) return -1;
    CHECK(explain(plan.get()).find(row) != std::string::npos);
    Operands operands(plan.get(), problem, listed);
    if (threads > 1 || !is_forward) succeed(operands.forward(), "the first call starts threads");
    memory::arm(0, memory::Fault::once);
    const spattn_status status = is_forward ? operands.forward() : operands.backward();
    const long calls = memory::calls;
    memory::disarm();
    return status == SPATTN_OK ? calls : -1;
}

}  // namespace

// [launch] allocates nothing: every row that can be pinned, with every option that a call may bring.
TEST(runs_allocate_nothing) {
    const std::pair<std::string, spattn_dtype> dtypes[] = {
        {"_f32", f32}, {"_f16", {SPATTN_FLOAT, 16, 1}}, {"_bf16", bf16}, {"_f64", f64}, {"_bf16", float8}};
    const std::pair<const char*, int64_t> kinds[] = {{block_text, 0}, {"runtime_tokens(6) & causal", 6}};
    long runs = 0;
    for (int32_t n = 0; n < spattn_kernel_count(); ++n) {
        const std::string row = spattn_kernel_name(n);
        if (row.rfind("reference", 0) == 0 || !spattn_kernel_runs_here(n)) continue;
        setenv("SPATTN_FORCE_KERNEL", row.c_str(), 1);
        for (const auto& [name, dtype] : dtypes)
            for (const auto& [text, listed] : kinds) {
                if (row.find(name) == std::string::npos) continue;
                if (listed > 0 && row.find("_gather_") == std::string::npos) continue;
                for (const uint32_t flags : {0u, uint32_t(SPATTN_PLAN_SINK_LOGITS | SPATTN_PLAN_VALUE_IN_KEY)}) {
                    auto problem = make_problem();
                    problem.dtype = dtype, problem.flags |= flags;
                    const size_t shared = row.find("_heads");  // and how many of a group share its tiles
                    if (shared != std::string::npos && std::isdigit(row[shared + 6]))
                        problem.heads_q = problem.heads_kv * std::stoll(row.substr(shared + 6));
                    if (flags) problem.softcap = 10;
                    for (const int32_t threads : {1, 3}) {
                        check::context = row + " on " + text;
                        CHECK_EQ(allocations(row, parse(text).get(), problem, threads, listed), 0);
                        ++runs;
                    }
                }
            }
    }
    unsetenv("SPATTN_FORCE_KERNEL");
    CHECK(runs >= 4 * 2 * 8 * 2);
}
