// SPDX-License-Identifier: MIT
// Handles come and go: nothing leaks, any order of release is fine, threads may share.
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "abi/abi.h"
#include "fault/operands.h"

using namespace abi;
using fault::Operands;

namespace {

// Bytes in use by malloc. 0 under AddressSanitizer, whose own leak check speaks at exit.
size_t bytes_in_use() { return mallinfo2().uordblks; }

void compose_and_ask() {
    const Pattern a = parse("causal & (sink(4) | window(63,0))"), b = parse("documents(0,10,40) - global_keys(3,5)");
    const spattn_pattern* parts[] = {a.get(), b.get()};
    spattn_pattern* made = nullptr;
    succeed(spattn_pattern_union(parts, 2, &made), "union");
    const Pattern both(made);
    uint64_t hash = 0;
    succeed(spattn_pattern_hash(both.get(), &hash), "hash");
    const auto extent = make_extent(33, 65);
    auto stats = sized<spattn_stats>();
    succeed(spattn_pattern_stats(both.get(), &extent, &stats), "stats");
    spattn_pattern* refused = nullptr;
    CHECK_EQ(spattn_pattern_parse("causal & (sink(4) | window(63,", &refused), SPATTN_E_FORMAT);
}

// What leaks grows in every window of rounds; what a cache or malloc itself takes once does not.
template <class Body>
void demand_no_growth(int rounds, Body body) {
    constexpr int windows = 10;
    auto least = std::numeric_limits<int64_t>::max();
    for (int window = 0; window < windows; ++window) {
        const auto before = int64_t(bytes_in_use());
        for (int i = 0; i < rounds / windows; ++i) body();
        least = std::min(least, int64_t(bytes_in_use()) - before);
    }
    CHECK(least < rounds / windows);  // less than a byte a round
}

}  // namespace

TEST(patterns_leak_nothing) { demand_no_growth(10000, compose_and_ask); }

namespace {

// Each kind once, from arrays that are copied or borrowed; the handles own all there is.
void make_index_patterns(Numbers& row_ptr, Numbers& col_idx, Tensor& mask, Pairs& ranges) {
    const spattn_keep_fn is_near = [](void*, int64_t, int64_t q, int64_t k) { return int32_t(q - k < 2); };
    for (uint32_t flags : {0u, uint32_t(SPATTN_BORROW), uint32_t(SPATTN_BORROW | SPATTN_TRUST)}) {
        spattn_pattern* made[9] = {};
        succeed(spattn_pattern_csr(&row_ptr.view, &col_idx.view, 5, flags, &made[0]), "csr");
        succeed(spattn_pattern_bsr(&row_ptr.view, &col_idx.view, 2, 3, 6, 15, flags, &made[1]), "bsr");
        succeed(spattn_pattern_mask(&mask.view, flags & SPATTN_BORROW, &made[2]), "mask");
        succeed(spattn_pattern_predicate(is_near, nullptr, 1, 3, 5, &made[3]), "predicate");
        succeed(spattn_pattern_runtime_tokens(8, &made[4]), "runtime_tokens");
        succeed(spattn_pattern_runtime_blocks(4, 8, 2, &made[5]), "runtime_blocks");
        const Pattern inner = parse("causal & window(2,0)");
        succeed(spattn_pattern_per_document(inner.get(), &row_ptr.view, &row_ptr.view, &made[6]), "per_document");
        succeed(spattn_pattern_rows(inner.get(), &ranges.view, 9, &made[7]), "rows");
        succeed(spattn_pattern_columns(inner.get(), &ranges.view, 9, &made[8]), "columns");
        for (spattn_pattern* pattern : made) spattn_pattern_release(pattern);
    }
}

}  // namespace

TEST(index_patterns_of_every_kind_leak_nothing) {
    Numbers row_ptr({0, 2, 2, 3}), col_idx({0, 4, 2});
    Pairs ranges({6, 9, 0, 2});
    Tensor mask({3, 5}, u8);
    demand_no_growth(10000, [&] { make_index_patterns(row_ptr, col_idx, mask, ranges); });
}

TEST(saved_patterns_leak_nothing) {
    Numbers row_ptr({0, 2, 2, 3}), col_idx({0, 4, 2});
    std::vector<char> bytes(4096);
    demand_no_growth(10000, [&] {
        spattn_pattern *made = nullptr, *again = nullptr;
        succeed(spattn_pattern_csr(&row_ptr.view, &col_idx.view, 5, 0, &made), "csr");
        const Pattern csr(made);
        size_t size = 0;
        succeed(spattn_pattern_save(csr.get(), bytes.data(), bytes.size(), &size), "save");
        succeed(spattn_pattern_load(bytes.data(), size, &again), "load");
        const Pattern loaded(again);
        CHECK_EQ(spattn_pattern_load(bytes.data(), size - 1, &again), SPATTN_E_FORMAT);
        CHECK_EQ(spattn_pattern_equal(csr.get(), loaded.get()), 1);
    });
}

TEST(plans_leak_nothing) {
    auto options = cpu_options();
    options.plan_cache = 2;
    options.cpu_threads = 1;
    const Context context = make_context(options);
    const std::vector<const char*> texts = {
        "causal", "bigbird(8,3,1,1,0)", "causal & dilated(30,0,5)", "window(2,2) | global_tokens(3,30)",
        "global_keys(3)", "runtime_tokens(6) & causal", "runtime_blocks(1,8,2)",
        "per_document([0,9,40],[0,9,40],causal)", "rows([0,20,60,80],80,causal)", "columns([0,40],80,causal)"};
    size_t turn = 0;
    demand_no_growth(10000, [&] {
        const Pattern pattern = parse(texts[turn++ % texts.size()]);
        auto problem = make_problem();
        problem.batch = 1, problem.heads_q = 2, problem.heads_kv = 1;
        make_plan(context.get(), pattern.get(), problem);
    });
}

TEST(contexts_leak_nothing) {
    const Pattern pattern = parse("causal");
    auto problem = make_problem();
    problem.seq_q = problem.seq_k = 3;
    demand_no_growth(10000, [&] {
        auto options = cpu_options();
        options.cpu_threads = 2;
        const Context context = make_context(options);
        make_plan(context.get(), pattern.get(), problem);
    });
}

// The first call of each context starts its threads; its end joins them.
TEST(runs_of_every_kind_leak_nothing) {
    const std::vector<std::pair<const char*, int64_t>> kinds = {
        {"causal & dilated(30,0,5)", 0}, {"window(2,2) | global_tokens(3,30)", 0}, {"global_keys(3)", 0},
        {"runtime_tokens(6) & causal", 6}};
    size_t turn = 0;
    demand_no_growth(400, [&] {
        const auto [text, listed] = kinds[turn++ % kinds.size()];
        auto options = cpu_options();
        options.cpu_threads = 3;
        const Context context = make_context(options);
        auto problem = make_problem();
        problem.flags |= SPATTN_PLAN_SINK_LOGITS;
        const Plan plan = make_plan(context.get(), parse(text).get(), problem);
        Operands operands(plan.get(), problem, listed);
        succeed(operands.forward(), text);
        succeed(operands.backward(), text);
    });
}

TEST(any_order_of_release) {
    spattn_pattern* inner = parse("causal").release();
    const spattn_pattern* parts[] = {inner, inner};
    spattn_pattern* outer = nullptr;
    succeed(spattn_pattern_union(parts, 2, &outer), "union");
    spattn_pattern_release(inner);
    spattn_pattern_retain(outer);
    spattn_pattern_release(outer);
    spattn_context* context = make_context().release();
    spattn_plan* plan = make_plan(context, outer, make_problem()).release();
    spattn_context_release(context);
    spattn_pattern_release(outer);
    auto stats = sized<spattn_stats>();
    succeed(spattn_plan_stats(plan, &stats), "stats");
    CHECK(stats.pairs > 0);
    spattn_plan_release(plan);
}

// A chain as deep as a program may build it by mistake is refused or works; it never runs out of stack.
TEST(deep_composition) {
    Pattern pattern = parse("causal");
    spattn_status status = SPATTN_OK;
    for (int i = 0; i < 200000 && status == SPATTN_OK; ++i) {
        spattn_pattern* next = nullptr;
        status = spattn_pattern_transpose(pattern.get(), &next);
        if (status == SPATTN_OK) pattern.reset(next);
    }
    CHECK(status == SPATTN_OK || status == SPATTN_E_RANGE);
    const auto extent = make_extent(3, 3);
    int32_t keeps = -1;
    succeed(spattn_pattern_keeps(pattern.get(), &extent, 0, 0, 1, 1, &keeps), "keeps");
    CHECK_EQ(keeps, 1);
}

TEST(threads_share_everything) {
    const Context context = make_context();
    const Pattern pattern = parse("causal & (window(7,0) | sink(2))");
    auto problem = make_problem();
    problem.heads_kv = problem.heads_q;
    problem.head_dim_v = problem.head_dim;
    const Plan plan = make_plan(context.get(), pattern.get(), problem);
    const std::vector<int64_t> shape{problem.batch, problem.heads_q, problem.seq_q, problem.head_dim};
    Tensor q(shape, f32), k(shape, f32), v(shape, f32);
    uint32_t seed = 1;
    for (Tensor* t : {&q, &k, &v}) t->fill(seed++);
    const auto forward = [&](Tensor& out) {
        size_t bytes = 0, align = 1;
        if (spattn_plan_workspace(plan.get(), SPATTN_OP_FORWARD, &bytes, &align)) return false;
        Tensor workspace({int64_t(bytes)}, u8);
        auto args = sized<spattn_forward_args>();
        args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view;
        args.workspace = workspace.data, args.workspace_bytes = bytes;
        return spattn_forward(plan.get(), &args) == SPATTN_OK;
    };
    Tensor expected(shape, f32);
    CHECK(forward(expected));
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 6; ++t)
        threads.emplace_back([&] {
            for (int i = 0; i < 20; ++i) {
                Tensor out(shape, f32);
                wrong += !forward(out) || out.content() != expected.content();
                spattn_plan* again = nullptr;
                wrong += spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, &again) != SPATTN_OK;
                wrong += again != plan.get();
                spattn_plan_release(again);
            }
        });
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
}

namespace {

// What runs on a thread whose objects are going.
struct Last {
    std::string* text;
    double* pairs;
    ~Last() { ask(text, pairs); }

    static void ask(std::string* text, double* pairs) {
        spattn_pattern* made = nullptr;
        spattn_pattern_parse("a text that is no pattern, and too long for a string without memory of its own", &made);
        *text = spattn_last_error_text();
        const Pattern pattern = parse("transpose(bigbird(4,3,1,2,7))");
        const auto extent = make_extent(300, 300);
        auto stats = sized<spattn_stats>();
        if (spattn_pattern_stats(pattern.get(), &extent, &stats) == SPATTN_OK) *pairs = stats.pairs;
    }
};

}  // namespace

TEST(a_thread_may_call_until_it_has_ended) {
    std::string text, last_text;
    double pairs = 0, last_pairs = 0;
    std::thread([&] {
        thread_local Last last{&last_text, &last_pairs};  // it is older than what the library keeps of the thread
        Last::ask(&text, &pairs);
    }).join();
    CHECK(pairs > 0 && text.find("column 1") != std::string::npos);
    CHECK_EQ(last_text, text);
    CHECK_EQ(last_pairs, pairs);
}

namespace {

// It is made before the first call of the library, so that its destructor runs after those of whatever calls make. A
// child process that sets `operands` ends in it, and says whether a pass and a text are still served.
struct Leaving {
    Operands* operands = nullptr;
    ~Leaving() {
        if (!operands) return;
        const std::string build = spattn_build_json();
        _exit(operands->forward() == SPATTN_OK && build.front() == '{' && build.back() == '}' ? 0 : 1);
    }
} leaving;

}  // namespace

TEST(static_objects_may_call_until_the_process_has_ended) {
    const Context context = make_context();
    auto problem = make_problem();
    problem.flags |= SPATTN_PLAN_SINK_LOGITS;
    const Plan plan = make_plan(context.get(), parse("causal").get(), problem);
    Operands operands(plan.get(), problem);
    spattn_build_json();
    const pid_t child = fork();
    if (child == 0) {
        mallopt(M_PERTURB, 0x5a);  // what is freed is overwritten
        leaving.operands = &operands;
        std::exit(1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

// Locks that another thread holds in the moment of a fork() are held for ever in the child, which alarm() ends then.
TEST(a_forked_child_goes_on_while_threads_call) {
    if (bytes_in_use() == 0) return check::skip("the sanitizer's own locks stop a child of a process with threads");
    const Context context = make_context(2, 0);
    auto problem = make_problem();
    problem.flags |= SPATTN_PLAN_SINK_LOGITS;
    const Plan plan = make_plan(context.get(), parse("causal").get(), problem);
    Operands operands(plan.get(), problem);
    succeed(operands.forward(), "forward");
    const Pattern shared = parse("causal & global_tokens(3,30)");
    const auto work = [&] {
        const Pattern pattern = parse("causal");
        size_t length = 0;
        for (int i = 0; i < 20; ++i) {
            make_plan(context.get(), pattern.get(), problem);
            succeed(spattn_pattern_print(shared.get(), nullptr, 0, &length), "print");
        }
        make_plan(context.get(), shared.get(), problem);
    };
    work();
    std::atomic<bool> stop = false;
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
        threads.emplace_back([&] {
            while (!stop) work();
        });
    int ended = 0, status = 0;
    for (; ended < 100 && status == 0; ++ended) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(60);
            work();
            _exit(operands.forward() == SPATTN_OK ? 0 : 1);
        }
        if (child < 0 || waitpid(child, &status, 0) != child) break;
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(status, 0);
    CHECK_EQ(ended, 100);
}
