// SPDX-License-Identifier: MIT
// The size games of every sized struct: 0, short, of the first release, exact, longer with a zero tail, longer with
// something in it.
#include "abi/abi.h"

using namespace abi;

namespace {

// A struct as a newer header would have it: 64 bytes more.
template <class S>
struct Newer {
    S known;
    unsigned char tail[64];
};

using Call = std::function<spattn_status(void*)>;

// An input struct: zero tails pass, others are fields of the future.
template <class S>
void check_input(const char* function, const char* argument, const S& good, const Call& call) {
    Newer<S> given{good, {}};
    const auto with_size = [&](size_t size) {
        given.known.struct_size = uint32_t(size);
        return call(&given);
    };
    demand("size 0", function, with_size(0), SPATTN_E_STRUCT_SIZE, argument);
    demand("size 4", function, with_size(4), SPATTN_E_STRUCT_SIZE, argument);
    demand("one byte short", function, with_size(first_size<S> - 1), SPATTN_E_STRUCT_SIZE, argument);
    succeed(with_size(first_size<S>), "as in the first release");
    succeed(with_size(sizeof(S)), "exact");
    succeed(with_size(sizeof(S) + 1), "one zero byte more");
    succeed(with_size(sizeof given), "64 zero bytes more");
    for (size_t at : {0, 31, 63}) {
        given.tail[at] = 1;
        demand("a field of the future", function, with_size(sizeof given), SPATTN_E_UNKNOWN_FIELD, argument);
        const std::string offset = std::to_string(sizeof(S) + at);
        CHECK(std::string(spattn_last_error_text()).find(offset) != std::string::npos);
        succeed(with_size(sizeof(S)), "what lies beyond struct_size is not read");
        given.tail[at] = 0;
    }
}

// A result struct: the library writes what both know and leaves the rest.
template <class S>
void check_result(const char* function, const Call& call) {
    Newer<S> result;
    const auto with_size = [&](size_t size) {
        std::memset(&result, 0x5a, sizeof result);
        result.known.struct_size = uint32_t(size);
        return call(&result);
    };
    const auto untouched_from = [&](size_t begin) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(&result);
        bool ok = true;
        for (size_t i = begin; i < sizeof result; ++i) ok &= bytes[i] == 0x5a;
        return ok;
    };
    demand("size 0", function, with_size(0), SPATTN_E_STRUCT_SIZE, "result");
    CHECK(untouched_from(4));
    demand("one byte short", function, with_size(first_size<S> - 1), SPATTN_E_STRUCT_SIZE, "result");
    CHECK(untouched_from(4));
    for (size_t size : {first_size<S>, sizeof(S), sizeof(S) + 8, sizeof result}) {
        succeed(with_size(size), "a result");
        CHECK(untouched_from(std::min(size, sizeof(S))));
        CHECK(!untouched_from(4));
        CHECK_EQ(result.known.struct_size, uint32_t(size));
    }
}

}  // namespace

TEST(context_options) {
    check_input("spattn_context_create", "options", cpu_options(), [](void* given) {
        spattn_context* result = nullptr;
        const auto status = spattn_context_create(static_cast<spattn_context_options*>(given), &result);
        spattn_context_release(result);
        return status;
    });
}

TEST(bigbird) {
    auto params = sized<spattn_bigbird>();
    params.block = 4;
    check_input("spattn_pattern_bigbird", "params", params, [](void* given) {
        spattn_pattern* result = nullptr;
        const auto status = spattn_pattern_bigbird(static_cast<spattn_bigbird*>(given), &result);
        spattn_pattern_release(result);
        return status;
    });
}

TEST(xref) {
    const Numbers ids({5, 6, 5});
    check_input("spattn_pattern_xref", "params", sized<spattn_xref>(), [&](void* given) {
        spattn_pattern* result = nullptr;
        const auto status = spattn_pattern_xref(&ids.view, nullptr, static_cast<spattn_xref*>(given), &result);
        spattn_pattern_release(result);
        return status;
    });
}

TEST(extent) {
    const Pattern pattern = parse("causal");
    check_input("spattn_pattern_stats", "extent", make_extent(4, 4), [&](void* given) {
        auto stats = sized<spattn_stats>();
        return spattn_pattern_stats(pattern.get(), static_cast<spattn_extent*>(given), &stats);
    });
}

TEST(problem) {
    const Pattern pattern = parse("causal");
    const Context context = make_context();
    check_input("spattn_plan_create", "problem", make_problem(), [&](void* given) {
        spattn_plan* result = nullptr;
        const auto status =
            spattn_plan_create(context.get(), pattern.get(), static_cast<spattn_problem*>(given), nullptr, &result);
        spattn_plan_release(result);
        return status;
    });
}

// What lies beyond an older struct is not read: no softcap, whatever the memory holds.
TEST(an_older_problem_has_no_softcap) {
    const Pattern pattern = parse("causal");
    const Context context = make_context();
    auto problem = make_problem();
    problem.softcap = 5;
    const auto explained = [&] {
        const Plan plan = make_plan(context.get(), pattern.get(), problem);
        size_t needed = 0;
        succeed(spattn_plan_explain(plan.get(), nullptr, 0, &needed), "needed");
        std::string text(needed, ' ');
        succeed(spattn_plan_explain(plan.get(), text.data(), needed, &needed), "explain");
        return text;
    };
    CHECK(explained().find("softcap 5,") != std::string::npos);
    problem.struct_size = uint32_t(first_size<spattn_problem>);
    CHECK(explained().find("softcap") == std::string::npos);
}

TEST(call_args) {
    const Pattern pattern = parse("causal");
    const Context context = make_context();
    auto problem = make_problem();
    problem.head_dim_v = problem.head_dim;
    problem.heads_kv = problem.heads_q;
    const Plan plan = make_plan(context.get(), pattern.get(), problem);
    const std::vector<int64_t> shape{problem.batch, problem.heads_q, problem.seq_q, problem.head_dim};
    Tensor q(shape, f32), k(shape, f32), v(shape, f32), out(shape, f32), dout(shape, f32), dq(shape, f32),
        dk(shape, f32), dv(shape, f32), lse({problem.batch, problem.heads_q, problem.seq_q}, f32);
    for (Tensor* t : {&q, &k, &v, &dout}) t->fill(7);
    size_t forward = 0, backward = 0, align = 1;
    succeed(spattn_plan_workspace(plan.get(), SPATTN_OP_FORWARD, &forward, &align), "workspace");
    succeed(spattn_plan_workspace(plan.get(), SPATTN_OP_BACKWARD, &backward, &align), "workspace");
    Tensor workspace({int64_t(std::max({forward, backward, size_t(1)}))}, u8);
    auto args = sized<spattn_forward_args>();
    args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view, args.lse = &lse.view;
    args.workspace = workspace.data, args.workspace_bytes = workspace.bytes;
    check_input("spattn_forward", "args", args,
                [&](void* given) { return spattn_forward(plan.get(), static_cast<spattn_forward_args*>(given)); });
    auto gradients = sized<spattn_backward_args>();
    gradients.q = &q.view, gradients.k = &k.view, gradients.v = &v.view, gradients.out = &out.view,
    gradients.lse = &lse.view;
    gradients.dout = &dout.view, gradients.dq = &dq.view, gradients.dk = &dk.view, gradients.dv = &dv.view;
    gradients.workspace = workspace.data, gradients.workspace_bytes = workspace.bytes;
    check_input("spattn_backward", "args", gradients,
                [&](void* given) { return spattn_backward(plan.get(), static_cast<spattn_backward_args*>(given)); });
    auto cache = problem;
    cache.flags = SPATTN_PLAN_STARTS, cache.axes = SPATTN_BHSD;
    Tensor starts({problem.batch}, i32);
    std::fill_n(starts.as<int32_t>(), problem.batch, 0);
    auto append = sized<spattn_cache_append_args>();
    append.k_new = &q.view, append.v_new = &v.view, append.k = &dk.view, append.v = &dv.view;
    append.starts = &starts.view;
    check_input("spattn_cache_append", "args", append, [&](void* given) {
        return spattn_cache_append(context.get(), &cache, static_cast<spattn_cache_append_args*>(given));
    });
}

TEST(shardings) {
    const Pattern pattern = parse("causal");
    const Context context = make_context();
    const auto problem = make_problem();
    auto options = sized<spattn_sharding_options>();
    options.ranks = 2;
    const auto create = [&](void* given, spattn_sharding** made) {
        return spattn_sharding_create(context.get(), pattern.get(), &problem,
                                      static_cast<spattn_sharding_options*>(given), nullptr, made);
    };
    check_input("spattn_sharding_create", "options", options, [&](void* given) {
        spattn_sharding* made = nullptr;
        const spattn_status status = create(given, &made);
        spattn_sharding_release(made);
        return status;
    });
    spattn_sharding* made = nullptr;
    succeed(create(&options, &made), "sharding");
    const Sharding sharding(made);
    check_result<spattn_peer>("spattn_sharding_peer", [&](void* result) {
        return spattn_sharding_peer(made, 1, static_cast<spattn_peer*>(result));
    });
    size_t bytes[2] = {};
    succeed(spattn_sharding_buffers(made, &bytes[0], &bytes[1]), "buffers");
    Tensor k({2, 2, 20, 16}, f32), v({2, 2, 20, 8}, f32), buffer({int64_t(bytes[0])}, u8);
    auto args = sized<spattn_exchange_args>();
    args.k = &k.view, args.v = &v.view, args.buffer = buffer.data, args.buffer_bytes = bytes[0];
    check_input("spattn_exchange", "args", args, [&](void* given) {
        return spattn_exchange(made, SPATTN_EXCHANGE_PACK, static_cast<spattn_exchange_args*>(given));
    });
}

TEST(stats) {
    const Pattern pattern = parse("causal");
    const Context context = make_context();
    const Plan plan = make_plan(context.get(), pattern.get(), make_problem());
    const auto extent = make_extent(4, 4);
    check_result<spattn_stats>("spattn_pattern_stats", [&](void* result) {
        return spattn_pattern_stats(pattern.get(), &extent, static_cast<spattn_stats*>(result));
    });
    check_result<spattn_stats>("spattn_plan_stats", [&](void* result) {
        return spattn_plan_stats(plan.get(), static_cast<spattn_stats*>(result));
    });
}

TEST(error) {
    demand("NULL", "spattn_last_error", spattn_last_error(nullptr), SPATTN_E_NULL, "result");
    check_result<spattn_error>("spattn_last_error",
                               [](void* result) { return spattn_last_error(static_cast<spattn_error*>(result)); });
}
