// SPDX-License-Identifier: MIT
// Operands of forward and backward that do not go together, or not with the plan: a typed error that names the operand,
// and outputs that stay as they were. What is wrong with an operand alone, test_misuse.py says.
#include <algorithm>

#include "abi/abi.h"

using namespace abi;

namespace {

// Operands of one pass by name, as good as they can be, and the args that name them.
template <class Args>
struct Run {
    explicit Run(const spattn_problem& p) {
        const std::vector<int64_t> q{p.batch, p.heads_q, p.seq_q, p.head_dim},
            k{p.batch, p.heads_kv, p.seq_k, p.head_dim}, v{p.batch, p.heads_kv, p.seq_k, p.head_dim_v},
            out{p.batch, p.heads_q, p.seq_q, p.head_dim_v}, lse{p.batch, p.heads_q, p.seq_q};
        add("q", &Args::q, q, false);
        add("k", &Args::k, k, false);
        add("v", &Args::v, v, false);
        if constexpr (std::is_same_v<Args, spattn_forward_args>) {
            add("out", &Args::out, out, true);
            add("lse", &Args::lse, lse, true);
        } else {
            add("out", &Args::out, out, false);
            add("lse", &Args::lse, lse, false);
            add("dout", &Args::dout, out, false);
            add("dlse", &Args::dlse, lse, false);
            add("dq", &Args::dq, q, true);
            add("dk", &Args::dk, k, true);
            add("dv", &Args::dv, v, true);
        }
        if (!(p.flags & SPATTN_PLAN_SINK_LOGITS)) return;
        add("sink_logits", &Args::sink_logits, {p.heads_q}, false);
        if constexpr (std::is_same_v<Args, spattn_backward_args>)
            add("dsink_logits", &Args::dsink_logits, {p.heads_q}, true);
    }

    void add(const char* name, const spattn_tensor* Args::* field, const std::vector<int64_t>& shape, bool is_output) {
        // Spare bytes beyond the largest operand: what is laid over one operand must not reach a second one.
        auto tensor = std::make_unique<Tensor>(shape, f32, size_t(1) << 16);
        if (!is_output) tensor->fill(uint32_t(operands.size() + 1));
        args.*field = &tensor->view;
        operands.push_back({name, field, is_output, std::move(tensor)});
    }
    Tensor& operand(const std::string& name) {
        for (auto& operand : operands)
            if (name == operand.name) return *operand.tensor;
        throw std::out_of_range(name);
    }
    void bring_workspace(const spattn_plan* plan, int32_t op) {
        size_t bytes = 0, align = 1;
        succeed(spattn_plan_workspace(plan, op, &bytes, &align), "workspace");
        scratch.assign(bytes + align, 0);
        args.workspace = scratch.data() + (align - reinterpret_cast<uintptr_t>(scratch.data()) % align) % align;
        args.workspace_bytes = bytes;
    }
    bool outputs_are_untouched() const {
        return std::all_of(operands.begin(), operands.end(),
                           [](const Operand& o) { return !o.is_output || o.tensor->is_poison(); });
    }

    struct Operand {
        std::string name;
        const spattn_tensor* Args::* field;
        bool is_output;
        std::unique_ptr<Tensor> tensor;
    };
    Args args = sized<Args>();
    std::vector<Operand> operands;
    std::vector<unsigned char> scratch;
};

struct Forward : Run<spattn_forward_args> {
    static constexpr const char* function = "spattn_forward";
    Forward(const spattn_plan* plan, const spattn_problem& p) : Run(p) { bring_workspace(plan, SPATTN_OP_FORWARD); }
    spattn_status run(const spattn_plan* plan) const { return spattn_forward(plan, &args); }
};
struct Backward : Run<spattn_backward_args> {
    static constexpr const char* function = "spattn_backward";
    Backward(const spattn_plan* plan, const spattn_problem& p) : Run(p) { bring_workspace(plan, SPATTN_OP_BACKWARD); }
    spattn_status run(const spattn_plan* plan) const { return spattn_backward(plan, &args); }
};

const Pattern& long_rows() {
    static const Pattern pattern = parse("causal | sink(3)");
    return pattern;
}

spattn_problem problem_with_sinks() {
    auto problem = make_problem();
    problem.flags |= SPATTN_PLAN_SINK_LOGITS;
    return problem;
}

// A plan that needs workspace in both passes is made large enough to split rows; small ones may need none.
template <class Pass>
struct Scene {
    Context context = make_context();
    spattn_problem problem = problem_with_sinks();
    Plan plan = make_plan(context.get(), long_rows().get(), problem);

    // Spoils one thing, demands the failure and that no output was written.
    void demand_failure(const std::string& what, const std::function<void(Pass&)>& spoil, spattn_status status,
                        const char* argument) {
        Pass pass(plan.get(), problem);
        spoil(pass);
        demand(what, Pass::function, pass.run(plan.get()), status, argument);
        CHECK(pass.outputs_are_untouched());
    }
};

// An output laid over any other operand, whole or by its last element, or over itself.
template <class Pass>
void check_overlaps() {
    Scene<Pass> scene;
    const Pass good(scene.plan.get(), scene.problem);
    for (const auto& output : good.operands) {
        if (!output.is_output) continue;
        for (const auto& other : good.operands) {
            if (other.name == output.name) continue;
            for (bool whole : {true, false}) {
                Pass pass(scene.plan.get(), scene.problem);
                Tensor &from = pass.operand(output.name), &to = pass.operand(other.name);
                from.view.data = whole ? to.data : to.data + to.bytes - 4;
                demand(output.name + " over " + other.name, Pass::function, pass.run(scene.plan.get()), SPATTN_E_LAYOUT,
                       first_of(good, output.name, other));
            }
        }
        scene.demand_failure(
            output.name + " over itself",
            [&](Pass& p) {
                auto& strides = p.operand(output.name).strides;
                strides.size() > 1 ? strides[1] = 1 : strides[0] = 0;
            },
            SPATTN_E_LAYOUT, output.name.c_str());
    }
}

// Where two outputs overlap, the first of them is named.
template <class Pass, class Operand>
std::string first_of(const Pass& pass, const std::string& name, const Operand& other) {
    if (!other.is_output) return name;
    for (const auto& operand : pass.operands)
        if (operand.name == name || operand.name == other.name) return operand.name;
    return name;
}

template <class Pass>
void check_older_args() {
    Scene<Pass> scene;
    scene.demand_failure(
        "an older struct, without sinks",
        [](Pass& p) { p.args.struct_size = uint32_t(first_size<decltype(p.args)>); }, SPATTN_E_NULL, "sink_logits");
}

template <class Pass>
void check_workspace() {
    Scene<Pass> scene;
    Pass good(scene.plan.get(), scene.problem);
    CHECK(good.args.workspace_bytes > 0);
    scene.demand_failure(
        "one byte short", [](Pass& p) { --p.args.workspace_bytes; }, SPATTN_E_WORKSPACE, "workspace_bytes");
    scene.demand_failure(
        "misaligned", [](Pass& p) { p.args.workspace = static_cast<char*>(p.args.workspace) + 4; }, SPATTN_E_LAYOUT,
        "workspace");
    for (const auto& operand : good.operands) {
        Pass pass(scene.plan.get(), scene.problem);
        pass.args.workspace = pass.operand(operand.name).data;
        demand("over " + operand.name, Pass::function, pass.run(scene.plan.get()), SPATTN_E_LAYOUT, "workspace");
    }
}

}  // namespace

TEST(older_forward_args) { check_older_args<Forward>(); }
TEST(forward_overlaps) { check_overlaps<Forward>(); }
TEST(forward_workspace) { check_workspace<Forward>(); }
TEST(older_backward_args) { check_older_args<Backward>(); }
TEST(backward_overlaps) { check_overlaps<Backward>(); }
TEST(backward_workspace) { check_workspace<Backward>(); }

TEST(backward_of_a_forward_plan) {
    Scene<Backward> scene;
    scene.problem.flags &= ~SPATTN_PLAN_BACKWARD;
    const Plan forward_only = make_plan(scene.context.get(), long_rows().get(), scene.problem);
    const Backward pass(scene.plan.get(), scene.problem);
    demand("no backward", "spattn_backward", pass.run(forward_only.get()), SPATTN_E_STATE, "plan");
    CHECK(pass.outputs_are_untouched());
}

TEST(sinks_that_were_not_planned) {
    Scene<Backward> scene;
    const Plan plain = make_plan(scene.context.get(), long_rows().get(), make_problem());
    Forward forward(scene.plan.get(), scene.problem);
    demand("sinks", "spattn_forward", forward.run(plain.get()), SPATTN_E_STATE, "sink_logits");
    Backward backward(scene.plan.get(), scene.problem);
    demand("sinks", "spattn_backward", backward.run(plain.get()), SPATTN_E_STATE, "sink_logits");
    backward.args.sink_logits = nullptr;
    demand("their gradient", "spattn_backward", backward.run(plain.get()), SPATTN_E_STATE, "dsink_logits");
    CHECK(forward.outputs_are_untouched() && backward.outputs_are_untouched());
    backward.args.dsink_logits = nullptr;
    succeed(backward.run(plain.get()), "neither");
}

TEST(the_gradient_of_sinks_is_optional) {
    Scene<Backward> scene;
    Backward with(scene.plan.get(), scene.problem), without(scene.plan.get(), scene.problem);
    without.args.dsink_logits = nullptr;
    succeed(with.run(scene.plan.get()), "with");
    succeed(without.run(scene.plan.get()), "without");
    for (const char* name : {"dq", "dk", "dv"}) CHECK(with.operand(name).content() == without.operand(name).content());
    CHECK(!with.operand("dsink_logits").is_poison() && without.operand("dsink_logits").is_poison());
}

// Inputs may be one memory: q, k and v of equal shape in one tensor give what three copies give.
TEST(inputs_may_overlap) {
    auto problem = make_problem();
    problem.heads_kv = problem.heads_q;
    problem.head_dim_v = problem.head_dim;
    const Context context = make_context();
    const Plan plan = make_plan(context.get(), long_rows().get(), problem);
    Forward shared(plan.get(), problem), apart(plan.get(), problem);
    for (const char* name : {"k", "v"}) {
        shared.operand(name).view.data = shared.operand("q").data;
        std::copy_n(apart.operand("q").data, apart.operand("q").bytes, apart.operand(name).data);
    }
    succeed(shared.run(plan.get()), "one memory");
    succeed(apart.run(plan.get()), "three copies");
    CHECK(shared.operand("out").content() == apart.operand("out").content());
    CHECK(shared.operand("lse").content() == apart.operand("lse").content());
}
