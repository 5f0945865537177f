// SPDX-License-Identifier: MIT
// Memory that runs out while plans choose among orders of the tokens and lists that come with a call, for problems with
// every option; and their runs, which allocate nothing.
#include "fault/operands.h"
#include "fault/sweep.h"

using namespace abi;
using fault::Operands;
using fault::sweep;

namespace {

struct Scene {
    const char* text;
    int64_t queries, keys;
    const char* explained;  // what shows that the plan is of this kind
    uint32_t flags = 0;
    int64_t listed = 0;
    double softcap = 0;
    spattn_dtype dtype = f32;

    spattn_problem problem() const {
        auto p = make_problem();
        p.batch = 1, p.heads_q = 2, p.heads_kv = 1;
        p.seq_q = queries, p.seq_k = keys;
        p.head_dim = p.head_dim_v = 8;
        p.flags |= flags;
        p.softcap = softcap;
        p.dtype = dtype;
        return p;
    }
};

constexpr spattn_dtype f16{SPATTN_FLOAT, 16, 1};
constexpr uint32_t in_key = SPATTN_PLAN_VALUE_IN_KEY, with_sinks = SPATTN_PLAN_SINK_LOGITS;
const Scene scenes[] = {
    {"causal & dilated(60,0,5)", 130, 130, "residue classes", with_sinks, 0, 20, f16},
    {"causal & dilated(60,0,5)", 130, 130, "residue classes", with_sinks, 0, 20, f64},
    {"causal & fixed(16,2)", 250, 250, "with packed tokens: ", with_sinks, 0, 9, f16},
    {"window(9,9) | global_tokens(3,200)", 250, 250, "listed", in_key, 0, 3},
    {"window(9,9) | global_tokens(3,200)", 250, 250, "listed", with_sinks, 0, 0, f64},
    {"csr([0,3,5,8],[0,64,130,1,100,5,70,131],140)", 3, 140, "key rows gathered for"},
    {"csr([0,3,5,8],[0,64,130,1,100,5,70,131],140)", 3, 140, "key rows gathered for", with_sinks, 0, 7, f16},
    {"csr([0,3,5,8],[0,64,130,1,100,5,70,131],140)", 3, 140, "key rows gathered for", in_key | with_sinks, 0, 7, f64},
    {"causal & (window(20,0) | strided(16))", 400, 420, "2 pieces", with_sinks, 0, 20},
    // In two pieces backward on a processor with AVX-512; others gather.
    {"causal & (window(60,0) | strided(16))", 400, 420, "strided(16)", with_sinks, 0, 20, f64},
    {"per_document([0,30,70],[0,30,70],causal)", 70, 70, "per_document", in_key, 0, 0, bf16},
    {"rows([0,35,105,140],140,causal)", 70, 140, "rows", in_key, 0, 0, bf16},
    {"columns([0,35,105,140],140,causal)", 140, 70, "columns", in_key, 0, 0, bf16},
    {"mask([1,0,0,1,1,0,1,1,1],1,3,3)", 3, 3, "mask", with_sinks},
    {"runtime_tokens(6)", 40, 40, "given at run time", 0, 6},
    {"causal & runtime_tokens(6)", 40, 40, "given at run time", with_sinks, 6, 20},
    {"rows([0,20,60,80],80,causal & runtime_tokens(6))", 40, 80, "given at run time", with_sinks, 6, 20},
    {"runtime_blocks(1,4,6) & causal", 40, 40, "given at run time", in_key | with_sinks, 6, 3, bf16},
    {"causal & runtime_tokens(6)", 40, 40, "given at run time", with_sinks, 6, 20, f64},
    {"runtime_blocks(1,4,6)", 40, 40, "given at run time", in_key, 6, 0, f64},
    {"causal & runtime_tokens(6)", 40, 40, "runtime_tokens", SPATTN_PLAN_REFERENCE | in_key | with_sinks, 6, 5},
    {"runtime_blocks(1,4,6)", 40, 40, "runtime_blocks", SPATTN_PLAN_REFERENCE | with_sinks, 6, 5, f64},
};

}  // namespace

TEST(plans) {
    const Context context = make_context(1, -1);
    for (const Scene& scene : scenes) {
        const Pattern pattern = parse(scene.text);
        const spattn_problem problem = scene.problem();
        const std::string expected = explain(make_plan(context.get(), pattern.get(), problem).get());
        check::context = expected;
        CHECK(expected.find(scene.explained) != std::string::npos);
        spattn_plan* plan = nullptr;
        const auto create = [&] {
            plan = reinterpret_cast<spattn_plan*>(&plan);  // must be overwritten
            return spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, &plan);
        };
        const auto verify = [&](spattn_status status) {
            CHECK_EQ(status == SPATTN_OK, plan != nullptr);
            if (plan) CHECK(explain(plan) == expected);
            spattn_plan_release(plan);
        };
        const long faults = sweep(scene.text, {"spattn_plan_create", create, verify});
        CHECK(faults > 20);
    }
}

// Rows allocate nothing, on any number of threads, once these have started; reference rows may, and tell.
TEST(runs) {
    for (const Scene& scene : scenes) {
        const Pattern pattern = parse(scene.text);
        const spattn_problem problem = scene.problem();
        std::vector<std::vector<unsigned char>> expected;
        for (int32_t threads : {1, 3}) {
            const Context context = make_context(threads, -1);
            const Plan plan = make_plan(context.get(), pattern.get(), problem);
            Operands operands(plan.get(), problem, scene.listed);
            succeed(operands.forward(), "forward");
            succeed(operands.backward(), "backward");
            if (expected.empty()) expected = operands.results();
            const auto verify = [&](spattn_status status) {
                CHECK(status != SPATTN_OK || operands.results() == expected);
            };
            const long faults = sweep(scene.text, {"spattn_forward", [&] { return operands.forward(); }, verify}) +
                                sweep(scene.text, {"spattn_backward", [&] { return operands.backward(); }, verify});
            if (!(scene.flags & SPATTN_PLAN_REFERENCE)) CHECK_EQ(faults, 0);
        }
    }
}
