// SPDX-License-Identifier: MIT
// What a host may plug into a context: its allocator, its log, its threads, its wish to stop; and the plan cache.
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "abi/abi.h"

using namespace abi;

namespace {

// An allocator that knows what is out and can run dry.
struct Ledger {
    std::mutex mutex;
    std::map<void*, size_t> out;
    int calls = 0, fail_from = -1, wrong = 0;

    static void* take(void* user, spattn_device device, size_t bytes, size_t align, spattn_stream) {
        auto& ledger = *static_cast<Ledger*>(user);
        const std::lock_guard lock(ledger.mutex);
        ledger.wrong += device.type != SPATTN_CPU || align == 0 || (align & (align - 1));
        if (ledger.calls++ == ledger.fail_from) return nullptr;
        void* memory = std::aligned_alloc(align, (bytes + align) / align * align);
        ledger.out[memory] = bytes;
        return memory;
    }
    static void give_back(void* user, spattn_device, void* memory, size_t bytes, spattn_stream) {
        auto& ledger = *static_cast<Ledger*>(user);
        const std::lock_guard lock(ledger.mutex);
        const auto found = ledger.out.find(memory);
        ledger.wrong += found == ledger.out.end() || found->second != bytes;
        if (found != ledger.out.end()) ledger.out.erase(found);
        std::free(memory);
    }
    spattn_context_options options() {
        auto options = cpu_options();
        options.alloc = take;
        options.free = give_back;
        options.alloc_user = this;
        return options;
    }
};

struct Lines {
    std::mutex mutex;
    std::vector<std::pair<spattn_enum, std::string>> all;
    static void add(void* user, spattn_enum level, const char* text) {
        auto& lines = *static_cast<Lines*>(user);
        const std::lock_guard lock(lines.mutex);
        lines.all.push_back({level, text});
    }
};

// A host's threads: backwards, or in threads of its own, or failing.
struct Host {
    enum Kind { backwards, threads, failing } kind = backwards;
    std::atomic<int64_t> tasks = 0;
    static int32_t run(void* user, int64_t tasks, void (*body)(void*, int64_t), void* argument) {
        auto& host = *static_cast<Host*>(user);
        if (host.kind == failing) return 5;
        host.tasks += tasks;
        std::vector<std::thread> pool;
        for (int64_t task = tasks; task-- > 0;) {
            if (host.kind == backwards)
                body(argument, task);
            else
                pool.emplace_back(body, argument, task);
        }
        for (std::thread& thread : pool) thread.join();
        return 0;
    }
};

// A host that lets a call go on a few times.
struct Stopper {
    std::thread::id caller = std::this_thread::get_id();
    int64_t patience = 0, asked = 0, elsewhere = 0;
    static int32_t ask(void* user) {
        auto& stopper = *static_cast<Stopper*>(user);
        stopper.elsewhere += std::this_thread::get_id() != stopper.caller;
        return ++stopper.asked > stopper.patience;
    }
};

spattn_context_options with_stopper(Stopper& stopper) {
    auto options = cpu_options();
    options.cancel = Stopper::ask;
    options.cancel_user = &stopper;
    return options;
}

// Answers of a patient host after which a call is long: the same call, again, is asked at least once whatever else the
// machine does.
constexpr int64_t many_answers = 5;

// Forward on fixed inputs; what it returned and wrote.
struct Outcome {
    spattn_status status;
    std::vector<unsigned char> out, lse;
};
Outcome run_forward(const spattn_plan* plan, const spattn_problem& p) {
    Tensor q({p.batch, p.heads_q, p.seq_q, p.head_dim}, f32), k({p.batch, p.heads_kv, p.seq_k, p.head_dim}, f32),
        v({p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, f32), out({p.batch, p.heads_q, p.seq_q, p.head_dim_v}, f32),
        lse({p.batch, p.heads_q, p.seq_q}, f32);
    uint32_t seed = 1;
    for (Tensor* t : {&q, &k, &v}) t->fill(seed++);
    size_t bytes = 0, align = 1;
    succeed(spattn_plan_workspace(plan, SPATTN_OP_FORWARD, &bytes, &align), "workspace");
    Tensor workspace({int64_t(bytes)}, u8);
    auto args = sized<spattn_forward_args>();
    args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view, args.lse = &lse.view;
    args.workspace = workspace.data, args.workspace_bytes = bytes;
    const spattn_status status = spattn_forward(plan, &args);
    return {status, out.content(), lse.content()};
}

spattn_context_options with_host(Host& host) {
    auto options = cpu_options();
    options.cpu_threads = 3;
    options.parallel_for = Host::run;
    options.parallel_for_user = &host;
    return options;
}

}  // namespace

TEST(every_allocation_is_given_back_in_its_size) {
    Ledger ledger;
    {
        const Context context = make_context(ledger.options());
        const Pattern pattern = parse("bigbird(8,3,1,2,1) & causal");
        const Plan plan = make_plan(context.get(), pattern.get(), make_problem());
        CHECK(!ledger.out.empty());
        succeed(run_forward(plan.get(), make_problem()).status, "forward");
    }
    CHECK(ledger.out.empty());
    CHECK_EQ(ledger.wrong, 0);
}

TEST(an_allocator_that_runs_dry) {
    const Pattern pattern = parse("bigbird(8,3,1,2,1) & causal");
    const auto problem = make_problem();
    for (int n = 0;; ++n) {
        Ledger ledger;
        ledger.fail_from = n;
        spattn_plan* plan = nullptr;
        {
            spattn_context* created = nullptr;
            const auto options = ledger.options();
            const spattn_status status = spattn_context_create(&options, &created);
            const Context context(created);
            if (status == SPATTN_OK) {
                const spattn_status planned =
                    spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, &plan);
                CHECK(planned == SPATTN_OK || planned == SPATTN_E_HOST_MEMORY);
                CHECK((planned == SPATTN_OK) == (plan != nullptr));
            } else {
                CHECK_EQ(status, SPATTN_E_HOST_MEMORY);
            }
            spattn_plan_release(plan);
        }
        CHECK(ledger.out.empty());
        CHECK_EQ(ledger.wrong, 0);
        if (ledger.calls <= n) {
            CHECK(plan != nullptr);
            CHECK(n > 0);
            break;
        }
        CHECK(plan == nullptr);
    }
}

TEST(a_plan_outlives_its_context) {
    Ledger ledger;
    Plan plan;
    {
        const Context context = make_context(ledger.options());
        const Pattern pattern = parse("causal");
        plan = make_plan(context.get(), pattern.get(), make_problem());
    }
    succeed(run_forward(plan.get(), make_problem()).status, "forward");
    plan.reset();
    CHECK(ledger.out.empty());
}

TEST(log_levels) {
    const Pattern pattern = parse("causal");
    for (spattn_enum level : {0, int(SPATTN_LOG_ERROR), int(SPATTN_LOG_INFO), int(SPATTN_LOG_DEBUG)}) {
        Lines lines;
        auto options = cpu_options();
        options.log = Lines::add;
        options.log_user = &lines;
        options.log_level = level;
        const Context context = make_context(options);
        const Plan first = make_plan(context.get(), pattern.get(), make_problem());
        const Plan again = make_plan(context.get(), pattern.get(), make_problem());
        const spattn_enum most_verbose = level ? level : spattn_enum(SPATTN_LOG_INFO);
        for (const auto& [at, text] : lines.all) {
            CHECK(at >= SPATTN_LOG_ERROR && at <= most_verbose);
            CHECK(!text.empty() && text.back() != '\n');
        }
        CHECK_EQ(lines.all.empty(), level == SPATTN_LOG_ERROR);
    }
}

TEST(parallel_for_is_used_and_changes_no_bit) {
    const Pattern pattern = parse("causal | sink(3)");
    const auto problem = make_problem();
    auto alone = cpu_options();
    alone.cpu_threads = 1;
    const Context own = make_context(alone);
    const Outcome expected = run_forward(make_plan(own.get(), pattern.get(), problem).get(), problem);
    succeed(expected.status, "one thread");
    for (Host::Kind kind : {Host::backwards, Host::threads}) {
        Host host{kind};
        const Context context = make_context(with_host(host));
        const Outcome got = run_forward(make_plan(context.get(), pattern.get(), problem).get(), problem);
        succeed(got.status, "the host's threads");
        CHECK(host.tasks > 0);
        CHECK(got.out == expected.out);
        CHECK(got.lse == expected.lse);
    }
}

TEST(parallel_for_that_fails) {
    const Pattern pattern = parse("causal | sink(3)");
    Host host{Host::failing};
    const Context context = make_context(with_host(host));
    const Plan plan = make_plan(context.get(), pattern.get(), make_problem());
    CHECK_EQ(run_forward(plan.get(), make_problem()).status, SPATTN_E_CALLBACK);
    CHECK(std::string(spattn_last_error_text()).find("5") != std::string::npos);
    host.kind = Host::backwards;
    succeed(run_forward(plan.get(), make_problem()).status, "the plan works once the host does");
}

// Runs of every family long enough to be asked about end soon after the host wants them to, and the context lives on.
// How many tokens are enough depends on the machine and on the build: lengths are doubled until they are.
TEST(a_run_can_be_cancelled) {
    const struct {
        const char* pattern;
        uint32_t flags;
        int64_t seq;  // the shortest length
    } cases[] = {{"causal", 0, 1024}, {"causal & strided(257)", 0, 8192}, {"full", SPATTN_PLAN_REFERENCE, 128}};
    for (const auto& c : cases) {
        check::context = c.pattern;
        Stopper stopper;
        auto options = with_stopper(stopper);
        options.cpu_threads = 2;
        const Context context = make_context(options);
        const Pattern pattern = parse(c.pattern);
        auto problem = make_problem();
        problem.flags = c.flags;
        Plan plan;
        Outcome patient{};
        for (int64_t seq = c.seq; seq <= 1 << 20 && stopper.asked < many_answers; seq *= 2) {
            stopper = {stopper.caller, std::numeric_limits<int64_t>::max()};
            problem.seq_q = problem.seq_k = seq;
            plan = make_plan(context.get(), pattern.get(), problem);
            patient = run_forward(plan.get(), problem);
            succeed(patient.status, "a patient host");
        }
        CHECK(stopper.asked >= many_answers);
        stopper = {stopper.caller};
        CHECK_EQ(run_forward(plan.get(), problem).status, SPATTN_E_CANCELLED);
        CHECK_EQ(std::string(spattn_status_name(SPATTN_E_CANCELLED)), "SPATTN_E_CANCELLED");
        auto error = sized<spattn_error>();
        spattn_last_error(&error);
        CHECK_EQ(std::string(error.argument), "options.cancel");
        CHECK_EQ(stopper.asked, 1);  // a call that is to end asks no more
        CHECK_EQ(stopper.elsewhere, 0);
        const Context other = make_context();
        const Outcome expected = run_forward(make_plan(other.get(), pattern.get(), problem).get(), problem);
        CHECK(patient.out == expected.out);
        CHECK(patient.lse == expected.lse);
    }
}

TEST(a_backward_run_can_be_cancelled) {
    const struct {
        const char* pattern;
        int64_t seq;  // enough for some 0.1 s
    } cases[] = {{"causal", 16384}, {"causal & strided(129)", 65536}};
    for (const auto& c : cases) {
        check::context = c.pattern;
        Stopper stopper{.patience = std::numeric_limits<int64_t>::max()};  // while the plan is made, which may take long
        const Context context = make_context(with_stopper(stopper));
        const Pattern pattern = parse(c.pattern);
        auto p = make_problem();
        p.head_dim_v = p.head_dim, p.heads_kv = p.heads_q;
        p.seq_q = p.seq_k = c.seq;
        const Plan plan = make_plan(context.get(), pattern.get(), p);
        const std::vector<int64_t> shape{p.batch, p.heads_q, p.seq_q, p.head_dim};
        Tensor q(shape, f32), k(shape, f32), v(shape, f32), out(shape, f32), dout(shape, f32), dq(shape, f32),
            dk(shape, f32), dv(shape, f32), lse({p.batch, p.heads_q, p.seq_q}, f32);
        for (Tensor* t : {&q, &k, &v, &out, &dout, &lse}) t->fill(7);
        size_t bytes = 0, align = 1;
        succeed(spattn_plan_workspace(plan.get(), SPATTN_OP_BACKWARD, &bytes, &align), "workspace");
        Tensor workspace({int64_t(bytes)}, u8);
        auto args = sized<spattn_backward_args>();
        args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view, args.lse = &lse.view;
        args.dout = &dout.view, args.dq = &dq.view, args.dk = &dk.view, args.dv = &dv.view;
        args.workspace = workspace.data, args.workspace_bytes = bytes;
        stopper = {stopper.caller};
        CHECK_EQ(spattn_backward(plan.get(), &args), SPATTN_E_CANCELLED);
        CHECK_EQ(stopper.asked, 1);
        CHECK_EQ(stopper.elsewhere, 0);
    }
}

// A plan that takes a tenth of a second, for its length is doubled until it does: its makers are asked at any of its
// steps, and nothing unfinished is kept.
TEST(a_plan_can_be_cancelled) {
    const Pattern pattern = parse("logsparse");
    auto problem = make_problem();
    problem.flags = SPATTN_PLAN_BACKWARD;
    Stopper stopper;
    auto options = with_stopper(stopper);
    options.plan_cache = -1;
    const Context forgetful = make_context(options);
    for (int64_t seq = 1 << 14; seq <= 1 << 24 && stopper.asked < many_answers; seq *= 2) {
        stopper = {stopper.caller, std::numeric_limits<int64_t>::max()};
        problem.seq_q = problem.seq_k = seq;
        make_plan(forgetful.get(), pattern.get(), problem);
    }
    CHECK(stopper.asked >= many_answers);
    options.plan_cache = 0;
    const Context context = make_context(options);
    for (int64_t patience = 0; patience < 3; ++patience) {
        stopper = {stopper.caller, patience};
        spattn_plan* made = nullptr;
        CHECK_EQ(spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, &made), SPATTN_E_CANCELLED);
        CHECK(made == nullptr);
        auto error = sized<spattn_error>();
        spattn_last_error(&error);
        CHECK_EQ(std::string(error.argument), "options.cancel");
        CHECK_EQ(stopper.asked, patience + 1);
        CHECK_EQ(stopper.elsewhere, 0);
    }
    stopper = {stopper.caller, std::numeric_limits<int64_t>::max()};
    const Plan plan = make_plan(context.get(), pattern.get(), problem);
    CHECK(stopper.asked > 2);
    const Context other = make_context();
    const Plan same = make_plan(other.get(), pattern.get(), problem);
    const auto explained = [](const Plan& of) {
        size_t needed = 0;
        succeed(spattn_plan_explain(of.get(), nullptr, 0, &needed), "explain");
        std::string text(needed, ' ');
        succeed(spattn_plan_explain(of.get(), text.data(), text.size(), &needed), "explain");
        return text;
    };
    CHECK_EQ(explained(plan), explained(same));
}

// Each question that goes through rows or blocks, on an extent whose length is doubled until that takes a while.
TEST(a_question_can_be_cancelled) {
    const Pattern pattern = parse("bigbird(1,1,0,64,0)");  // no two rows are alike
    const struct {
        const char* name;
        int64_t most_keys;  // a mask has a byte for each pair
        std::function<spattn_status(const spattn_extent&)> ask;
    } questions[] = {
        {"stats", 1 << 20,
         [&](const spattn_extent& extent) {
             auto stats = sized<spattn_stats>();
             return spattn_pattern_stats(pattern.get(), &extent, &stats);
         }},
        {"to_mask", 1024,
         [&](const spattn_extent& extent) {
             Tensor mask({1, 1, extent.seq_q, extent.seq_k}, u8);
             return spattn_pattern_to_mask(pattern.get(), &extent, &mask.view);
         }},
        {"to_image", 1 << 20,
         [&](const spattn_extent& extent) {
             Tensor image({64, 64}, f32);
             return spattn_pattern_to_image(pattern.get(), &extent, 0, &image.view);
         }},
        {"to_csr", 1 << 20,
         [&](const spattn_extent& extent) {
             int64_t nnz = 0;
             return spattn_pattern_to_csr(pattern.get(), &extent, 0, nullptr, nullptr, &nnz);
         }},
    };
    for (const auto& question : questions) {
        check::context = question.name;
        Stopper stopper;
        spattn_extent extent{};
        for (int64_t seq = 1 << 8; seq <= 1 << 20 && stopper.asked < many_answers; seq *= 2) {
            stopper = {stopper.caller, std::numeric_limits<int64_t>::max()};
            extent = make_extent(seq, std::min(seq, question.most_keys));
            extent.flags = SPATTN_EXTENT_Q_OFFSET;  // from 0 on: a query below sees nothing
            extent.cancel = Stopper::ask;
            extent.cancel_user = &stopper;
            succeed(question.ask(extent), "a patient host");
        }
        CHECK(stopper.asked >= many_answers);
        stopper = {stopper.caller};
        CHECK_EQ(question.ask(extent), SPATTN_E_CANCELLED);
        auto error = sized<spattn_error>();
        spattn_last_error(&error);
        CHECK_EQ(std::string(error.argument), "extent.cancel");
        CHECK_EQ(stopper.asked, 1);
        CHECK_EQ(stopper.elsewhere, 0);
    }
}

// Calls ask(extent, size) with sizes that double up to `most`, until one takes a while; that one then ends with the first
// answer that wants it to, and not if the host is patient again.
static void demand_question_ends(int64_t size, int64_t most,
                                 const std::function<spattn_status(spattn_extent& extent, int64_t size)>& ask) {
    Stopper stopper{.patience = std::numeric_limits<int64_t>::max()};
    const auto ask_of = [&](int64_t n) {
        spattn_extent extent = make_extent(1, n);
        extent.cancel = Stopper::ask, extent.cancel_user = &stopper;
        return ask(extent, n);
    };
    for (; size <= most && stopper.asked < many_answers; size *= 2) {
        stopper.asked = 0;
        succeed(ask_of(size), "a patient host");
    }
    size /= 2;
    CHECK(stopper.asked >= many_answers);
    stopper = {stopper.caller};
    CHECK_EQ(ask_of(size), SPATTN_E_CANCELLED);
    CHECK_EQ(stopper.asked, 1);
    stopper = {stopper.caller, std::numeric_limits<int64_t>::max()};
    succeed(ask_of(size), "the same question again");
}

// A pattern of which every row draws half of the blocks. Threads keep rows that they have drawn, so that each one has
// another seed.
static std::string draw_half(int64_t blocks) {
    static int64_t seed = 0;
    return "bigbird(1,1,0," + std::to_string(blocks / 2) + "," + std::to_string(++seed) + ")";
}

// A single row may draw those of all blocks, be as many rows of another pattern as it has keys, or list a key in two.
TEST(a_question_about_one_row_can_be_cancelled) {
    const std::function<std::string(int64_t)> patterns[] = {
        [](int64_t) { return "transpose(bigbird(1,1,0,64,0))"; },
        draw_half,
        [](int64_t seq) {
            const std::string n = std::to_string(seq);
            return "rows([0,1]," + n + ",transpose(per_document([0," + n + "],[0," + n + "],causal)))";
        },
        [](int64_t) { return "strided(2)"; },
        [](int64_t seq) { return "grid([" + std::to_string(seq) + "],strided(2))"; },
    };
    for (const auto& text : patterns) {
        check::context = text(64);
        demand_question_ends(1 << 14, 1 << 28, [&](spattn_extent& extent, int64_t seq) {
            int64_t nnz = 0;
            return spattn_pattern_to_csr(parse(text(seq).c_str()).get(), &extent, 0, nullptr, nullptr, &nnz);
        });
    }
}

TEST(a_question_about_one_pair_can_be_cancelled) {
    demand_question_ends(1 << 14, 1 << 24, [](spattn_extent& extent, int64_t seq) {
        const Pattern pattern = parse(draw_half(seq).c_str());
        int32_t kept = 0;
        return spattn_pattern_keeps(pattern.get(), &extent, 0, 0, 0, seq / 2, &kept);
    });
}

// One plane takes no time, but each may see something else.
TEST(a_question_about_many_planes_can_be_cancelled) {
    const Pattern pattern = parse("causal");
    demand_question_ends(1, 1 << 16, [&](spattn_extent& extent, int64_t heads) {
        extent.batch = 1 << 14, extent.heads = heads, extent.seq_q = extent.seq_k = 1 << 24;
        auto stats = sized<spattn_stats>();
        return spattn_pattern_stats(pattern.get(), &extent, &stats);
    });
}

TEST(a_plan_of_many_heads_can_be_cancelled) {
    const Pattern pattern = parse("causal");
    auto problem = make_problem();
    problem.heads_q = problem.heads_kv = 16;
    Stopper stopper;
    auto options = with_stopper(stopper);
    options.plan_cache = -1;
    const Context context = make_context(options);
    for (int64_t batch = 1 << 10; batch <= 1 << 19 && stopper.asked < many_answers; batch *= 2) {
        stopper = {stopper.caller, std::numeric_limits<int64_t>::max()};
        problem.batch = batch;
        make_plan(context.get(), pattern.get(), problem);
    }
    CHECK(stopper.asked >= many_answers);
    stopper = {stopper.caller};
    spattn_plan* made = nullptr;
    CHECK_EQ(spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, &made), SPATTN_E_CANCELLED);
    CHECK_EQ(stopper.asked, 1);
}

TEST(a_sharding_of_many_tokens_can_be_cancelled) {
    const Pattern pattern = parse("causal");
    auto problem = make_problem();
    problem.batch = 1;
    auto sharding_options = sized<spattn_sharding_options>();
    sharding_options.ranks = 2;
    Stopper stopper;
    const Context context = make_context(with_stopper(stopper));
    const auto make = [&](spattn_sharding** made) {
        return spattn_sharding_create(context.get(), pattern.get(), &problem, &sharding_options, nullptr, made);
    };
    for (int64_t seq = 1 << 18; seq <= 1 << 27 && stopper.asked < many_answers; seq *= 2) {
        stopper = {stopper.caller, std::numeric_limits<int64_t>::max()};
        problem.seq_q = problem.seq_k = seq;
        spattn_sharding* made = nullptr;
        succeed(make(&made), "a patient host");
        spattn_sharding_release(made);
    }
    CHECK(stopper.asked >= many_answers);
    stopper = {stopper.caller};
    spattn_sharding* made = nullptr;
    CHECK_EQ(make(&made), SPATTN_E_CANCELLED);
    CHECK_EQ(stopper.asked, 1);
}

// Calls of microseconds do not wait for a host's answers.
TEST(short_runs_do_not_ask) {
    Stopper stopper;
    const Context context = make_context(with_stopper(stopper));
    const Pattern pattern = parse("window(1,0)");
    auto problem = make_problem();
    problem.seq_q = problem.seq_k = 1;
    const Plan plan = make_plan(context.get(), pattern.get(), problem);
    const auto start = std::chrono::steady_clock::now();
    const spattn_status status = run_forward(plan.get(), problem).status;
    if (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(20)) {
        CHECK_EQ(status, SPATTN_OK);
        CHECK_EQ(stopper.asked, 0);
    } else {
        check::skip("the machine took 20 ms for a call of microseconds");
    }
}

TEST(equal_patterns_share_a_plan) {
    const Context context = make_context();
    const Pattern pattern = parse("causal & (window(3,0) | sink(1))"), same = parse("(sink(1) | window(3,0)) & causal");
    CHECK(make_plan(context.get(), pattern.get(), make_problem()).get() ==
          make_plan(context.get(), same.get(), make_problem()).get());
}

// A plan for another problem would compute something else: each field and each flag tells plans apart.
TEST(a_plan_is_kept_for_all_that_decides_it) {
    const std::function<void(spattn_problem&)> changes[] = {
        [](auto&) {},
        [](auto& p) { p.batch = 3; },
        [](auto& p) { p.heads_q = 6; },
        [](auto& p) { p.heads_kv = 4; },
        [](auto& p) { p.seq_q = 39; },
        [](auto& p) { p.seq_k = 41; },
        [](auto& p) { p.head_dim = 17; },
        [](auto& p) { p.head_dim_v = 9; },
        [](auto& p) { p.dtype = bf16; },
        [](auto& p) { p.axes = SPATTN_BSHD; },
        [](auto& p) { p.softcap = 30; },
        [](auto& p) { p.flags |= SPATTN_PLAN_SCALE, p.scale = 0.125; },
        [](auto& p) { p.flags |= SPATTN_PLAN_SCALE, p.scale = std::nextafter(0.125, 1.); },
        [](auto& p) { p.flags |= SPATTN_PLAN_Q_OFFSET, p.q_offset = 1; },
        [](auto& p) { p.flags |= SPATTN_PLAN_Q_OFFSET, p.q_offset = 2; },
        [](auto& p) { p.flags = 0; },
        [](auto& p) { p.flags |= SPATTN_PLAN_DETERMINISTIC; },
        [](auto& p) { p.flags |= SPATTN_PLAN_REFERENCE; },
        [](auto& p) { p.flags |= SPATTN_PLAN_VALUE_IN_KEY; },
        [](auto& p) { p.flags |= SPATTN_PLAN_SINK_LOGITS; },
        [](auto& p) { p.flags |= SPATTN_PLAN_TF32; },
    };
    const Context context = make_context();
    const Pattern pattern = parse("causal");
    std::set<const spattn_plan*> met;
    std::vector<Plan> plans;
    const auto is_another = [&](const spattn_problem& problem) {
        plans.push_back(make_plan(context.get(), pattern.get(), problem));
        CHECK(make_plan(context.get(), pattern.get(), problem).get() == plans.back().get());
        return met.insert(plans.back().get()).second;
    };
    for (const auto& change : changes) {
        auto problem = make_problem();
        change(problem);
        check::context = "change " + std::to_string(&change - changes);
        CHECK(is_another(problem));
    }
    setenv("SPATTN_FORCE_KERNEL", "scalar_block_forward_f32_16x16", 1);
    CHECK(is_another(make_problem()));
    unsetenv("SPATTN_FORCE_KERNEL");
}

TEST(the_least_recently_used_plan_falls_out) {
    auto options = cpu_options();
    options.plan_cache = 2;
    const Context context = make_context(options);
    const auto problem = make_problem();
    const Pattern a = parse("causal"), b = parse("full"), c = parse("window(3,0)");
    const Plan first_a = make_plan(context.get(), a.get(), problem),
               first_b = make_plan(context.get(), b.get(), problem);
    CHECK(make_plan(context.get(), a.get(), problem).get() == first_a.get());  // a is now the more recent
    const Plan first_c = make_plan(context.get(), c.get(), problem);           // b falls out
    CHECK(make_plan(context.get(), a.get(), problem).get() == first_a.get());
    CHECK(make_plan(context.get(), b.get(), problem).get() != first_b.get());
    options.plan_cache = -1;
    const Context without = make_context(options);
    const Plan one = make_plan(without.get(), a.get(), problem), two = make_plan(without.get(), a.get(), problem);
    CHECK(one.get() != two.get());
}
