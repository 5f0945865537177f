// SPDX-License-Identifier: MIT
// Is the right row chosen, and is each refusal told?
#include <cstdlib>

#include "core/error.h"
#include "plan/backends.h"
#include "plan/plans.h"

using namespace spattn;
using imaginary::has, imaginary::name, imaginary::options_of, imaginary::plan_of, imaginary::refusal, imaginary::whole;

namespace {

// Sets SPATTN_FORCE_KERNEL for a scope.
struct Forced {
    explicit Forced(const char* names) { setenv("SPATTN_FORCE_KERNEL", names, 1); }
    ~Forced() { unsetenv("SPATTN_FORCE_KERNEL"); }
};

spattn_status status_of(const char* pattern, const Problem& problem, const PlanOptions& options, std::string* message) {
    try {
        plan_of(pattern, problem, options);
    } catch (const Error& e) {
        *message = e.message;
        return e.status;
    }
    return SPATTN_OK;
}

}  // namespace

TEST(blocks_fit_the_pattern) {
    const Problem p = imaginary::problem(4096, 4096);
    CHECK_EQ(name(plan_of("full", p).forward), "near_block_forward_f32_64x64");
    CHECK_EQ(name(plan_of("causal", p).forward), "near_block_forward_f32_64x64");
    CHECK_EQ(name(plan_of("block_diagonal(16)", p).forward), "near_block_forward_f32_16x16");
    CHECK_EQ(name(plan_of("block_diagonal(16)", p).backward), "near_block_backward_f32_16x16");
    CHECK_EQ(name(plan_of("causal", p).backward), "near_block_backward_f32_64x64");
}

TEST(refusals_say_why) {
    const CompiledPlan plan = plan_of("full", imaginary::problem(1024, 1024, 300));
    CHECK_EQ(name(plan.forward), "near_block_forward_f32_16x16");
    CHECK_EQ(refusal(plan.forward, "gpu_block_forward_f32_128x128"), "for device cuda");
    CHECK_EQ(refusal(plan.forward, "far_block_forward_f32_128x128"), "not on this machine");
    CHECK_EQ(refusal(plan.forward, "near_block_forward_f32_64x64"), "head_dim or head_dim_v above 256");
    CHECK_EQ(refusal(plan.forward, "near_block_forward_bf16_64x64"), "for dtype bf16");
    CHECK_EQ(refusal(plan.forward, "reference_forward_f32"), "reference row, only with SPATTN_PLAN_REFERENCE");
    CHECK_EQ(refusal(plan.forward, "near_block_forward_f32_16x16"), "");
}

TEST(rows_without_softcap_or_sinks_are_refused) {
    Problem p = imaginary::problem(1024, 1024);
    p.softcap = 30;
    CHECK_EQ(refusal(plan_of("full", p).forward, "near_block_forward_f32_64x64"), "no softcap");
    p.softcap = 0, p.has_sink_logits = true;
    const CompiledPlan plan = plan_of("full", p);
    CHECK_EQ(refusal(plan.backward, "near_block_backward_f32_64x64"), "no sink logits");
    CHECK_EQ(name(plan.backward), "near_block_backward_f32_16x16");
}

TEST(dilated_patterns_run_in_residue_classes) {
    const Problem p = imaginary::problem(4096, 4096);
    for (const char* pattern : {"causal & dilated(1008,0,16)", "strided(16)", "block_diagonal(512) & residue(4,1)"}) {
        const CompiledPlan plan = plan_of(pattern, p);
        check::context = pattern;
        CHECK(whole(plan.forward).order == Order::residue);
        CHECK(whole(plan.backward).order == Order::residue);
        CHECK(whole(plan.forward).layout->queries.modulus > 1);
        CHECK_EQ(plan.counts.pairs, count(build_layout(*parse_pattern(pattern), {1, 1, 4096, 4096, 0}, 64, 64)).pairs);
    }
    check::context.clear();
    // A query keeps at most one key in 16 of a plain block: that is known without lowering.
    const CompiledPlan plan = plan_of("strided(16)", p);
    CHECK_EQ(refusal(plan.forward, "near_block_forward_f32_64x64"),
             "could not beat near_block_forward_f32_64x64 even without waste");
}

TEST(patterns_without_classes_stay_plain) {
    const Problem p = imaginary::problem(4096, 4096);
    for (const char* pattern :
         {"causal", "window(63,0)", "causal & (window(127,0) | strided(3000))", "strided(3000)"}) {
        check::context = pattern;
        const CompiledPlan plan = plan_of(pattern, p);
        CHECK(whole(plan.forward).order != Order::residue);
        CHECK_EQ(refusal(plan.forward, "near_block_forward_f32_64x64", Order::residue), "not considered");
    }
}

TEST(scattered_keys_are_listed) {
    const Problem p = imaginary::problem(8192, 8192);
    const CompiledPlan plan = plan_of("window(64,64) | global_tokens(100,900,1700,2500,3300,4100,4900,5700)", p);
    CHECK(whole(plan.forward).order == Order::listed);
    CHECK(whole(plan.backward).order == Order::listed);
    CHECK(whole(plan.forward).layout->keys.tokens.size() > 0);
    // The global tokens, in a tile of their own.
    CHECK_EQ(whole(plan.forward).layout->queries.tokens.size(), size_t(64));
    CHECK_EQ(whole(plan.backward).layout->keys.tokens.size(), size_t(64));
    CHECK(whole(plan_of("full", p).forward).order == Order::plain);
    CHECK_EQ(refusal(plan_of("full", p).forward, "near_block_forward_f32_64x64", Order::listed), "not considered");
}

TEST(rows_that_read_no_order_get_plain_blocks) {
    std::vector<Kernel> plain_rows = imaginary::kernels();
    for (Kernel& kernel : plain_rows) kernel.orders = false;
    const CompiledPlan plan = compile_plan(*parse_pattern("causal & dilated(1008,0,16)"),
                                           imaginary::problem(4096, 4096), options_of(true), plain_rows);
    CHECK(whole(plan.forward).order == Order::plain);
    CHECK(whole(plan.backward).order == Order::plain);
    for (const Candidate& c : whole(plan.forward).considered) CHECK(c.order == Order::plain);
}

TEST(small_blocks_are_not_lowered_where_they_cannot_win) {
    const CompiledPlan plan = plan_of("full", imaginary::problem(4096, 4096), options_of(false));
    CHECK_EQ(refusal(plan.forward, "near_block_forward_f32_16x16"),
             "could not beat near_block_forward_f32_64x64 even without waste");
}

namespace {

// Costs what it gathers and nothing for what it leaves out.
Cost gather_cost(const Problem&, const LayoutStats& stats, const Machine& machine) {
    return {(stats.gathered + stats.pairs) * 0.01 / machine.lanes, "memory"};
}

std::vector<Kernel> with_gather_rows() {
    std::vector<Kernel> all = imaginary::kernels();
    Kernel forward = imaginary::forward_row("near_gather_forward_f32_dims", 0);
    Kernel backward = imaginary::backward_row("near_gather_backward_f32_dims", 0);
    for (Kernel* kernel : {&forward, &backward}) kernel->family = Family::gather, kernel->cost = gather_cost;
    Kernel shared = forward;
    shared.name = "near_gather_forward_f32_heads";
    shared.shares_lists = true;
    all.insert(all.end(), {forward, backward, shared});
    return all;
}

CompiledPlan gather_plan_of(const char* text, Problem problem) {
    static const std::vector<Kernel> all = with_gather_rows();
    const PatternRef pattern = parse_pattern(text);
    if (const RuntimeShape* s = pattern->runtime()) problem.call_lists = {s->block_q, s->block_k, s->most};
    return compile_plan(*pattern, problem, options_of(true), all);
}

}  // namespace

TEST(token_lists_win_where_blocks_are_waste) {
    Problem p = imaginary::problem(4096, 4096);
    p.heads_q = 4, p.heads_kv = 2;
    CHECK_EQ(name(gather_plan_of("causal", p).forward), "near_block_forward_f32_64x64");
    const CompiledPlan plan = gather_plan_of("logsparse", p);
    CHECK_EQ(name(plan.forward), "near_gather_forward_f32_dims");
    CHECK_EQ(name(plan.backward), "near_gather_backward_f32_dims");
    const std::shared_ptr<const TokenLists> tokens = whole(plan.forward).tokens;
    CHECK(tokens && tokens == whole(plan.backward).tokens && !whole(plan.forward).layout);
    CHECK_EQ(double(tokens->keys.size()) * 4, plan.counts.pairs);  // all heads share them
    CHECK_EQ(plan.layout_bytes, tokens->bytes());
    CHECK(has(explain(plan), "key rows gathered for"));
    CHECK(has(explain(plan), "  instead   of "));
}

TEST(lists_differ_within_a_group) {
    Problem p = imaginary::problem(512, 512);
    p.heads_q = 4, p.heads_kv = 2;
    const CompiledPlan plan = gather_plan_of("per_head([0,1,0,0], logsparse, sink(2))", p);
    CHECK_EQ(name(plan.forward), "near_gather_forward_f32_dims");
    CHECK_EQ(refusal(plan.forward, "near_gather_forward_f32_heads"), "heads of a group see different keys");
    const TokenLists& lists = *whole(plan.forward).tokens;
    CHECK(lists.kind_of_head == std::vector<int32_t>({0, 1, 0, 0}));
    const TokenListsView v = view(lists);
    const int64_t* second = v.begin + v.rows + 100;  // row 100 of the head that sees two keys
    CHECK_EQ(second[1] - second[0], int64_t(2));
    CHECK_EQ(v.keys[second[0] + 1], 1);
}

TEST(lists_of_a_call_are_gathered) {
    Problem p = imaginary::problem(100, 200);
    p.heads_q = 4, p.heads_kv = 1;
    const CompiledPlan alone = gather_plan_of("runtime_tokens(16)", p),
                       cut = gather_plan_of("causal & runtime_tokens(16)", p);
    for (const CompiledPlan* plan : {&alone, &cut}) {
        CHECK_EQ(name(plan->forward), "near_gather_forward_f32_dims");
        CHECK_EQ(refusal(plan->forward, "near_block_forward_f32_64x64"),
                 "reads blocks, and each call brings its lists");
        CHECK(!whole(plan->forward).tokens);
        CHECK_EQ(plan->counts.pairs, 4 * 100 * 16.0);
        CHECK(has(explain(*plan), "given at run time, up to 16 times a key"));
    }
    CHECK(!whole(alone.forward).layout);
    CHECK(whole(cut.forward).layout && !whole(cut.forward).layout->is_ordered());
    CHECK_EQ(whole(cut.forward).layout_view().masks, whole(cut.forward).layout->masks.data());
}

TEST(no_kernel_lists_the_reasons) {
    std::string message;
    Problem p = imaginary::problem(128, 128, 300);
    p.dtype = Dtype::bf16;
    PlanOptions options = options_of(false);
    options.device = SPATTN_CUDA;
    CHECK_EQ(status_of("full", p, options, &message), SPATTN_E_NO_KERNEL);
    CHECK(has(message, "dtype bf16, head_dim 300"));
    CHECK(has(message, "gpu_block_forward_f32_128x128: for dtype f32"));
    CHECK(has(message, "far_block_forward_f32_128x128 and 4 more: for device cpu"));
}

TEST(forced_rows_are_pinned_per_pass) {
    const Problem p = imaginary::problem(4096, 4096);
    const Forced forced("near_block_forward_f32_16x16, ");
    const CompiledPlan plan = plan_of("full", p);
    CHECK_EQ(name(plan.forward), "near_block_forward_f32_16x16");
    CHECK_EQ(refusal(plan.forward, "near_block_forward_f32_64x64"), "SPATTN_FORCE_KERNEL pins another row");
    CHECK_EQ(name(plan.backward), "near_block_backward_f32_64x64");
}

TEST(both_passes_can_be_forced) {
    const Forced forced("near_block_forward_f32_16x16,near_block_backward_f32_16x16");
    const CompiledPlan plan = plan_of("full", imaginary::problem(512, 512));
    CHECK_EQ(name(plan.forward), "near_block_forward_f32_16x16");
    CHECK_EQ(name(plan.backward), "near_block_backward_f32_16x16");
}

TEST(unknown_forced_names_fail) {
    const Forced forced("near_block_forward_f32_16x16,no_such_row");
    std::string message;
    CHECK_EQ(status_of("full", imaginary::problem(64, 64), options_of(false), &message), SPATTN_E_ARGUMENT);
    CHECK(has(message, "\"no_such_row\""));
    CHECK(has(message, "near_block_forward_f32_64x64"));
}

TEST(forced_rows_that_do_not_fit_fail) {
    const Forced forced("near_block_forward_f32_64x64");
    std::string message;
    CHECK_EQ(status_of("full", imaginary::problem(64, 64, 512), options_of(false), &message), SPATTN_E_NO_KERNEL);
    CHECK(has(message, "near_block_forward_f32_64x64: head_dim or head_dim_v above 256"));
}

TEST(reference_reads_no_layout) {
    PlanOptions options = options_of(true);
    options.reference = true;
    const CompiledPlan plan = plan_of("causal", imaginary::problem(100, 100), options);
    CHECK_EQ(name(plan.forward), "reference_forward_f32");
    CHECK_EQ(name(plan.backward), "reference_backward_f32");
    CHECK(!whole(plan.forward).layout);
    CHECK_EQ(view(whole(plan.forward).schedule).queues, 0);
    CHECK_EQ(plan.counts.pairs, 5050.0);
    CHECK_EQ(plan.layout_bytes, size_t(0));
}

TEST(passes_share_layouts) {
    const CompiledPlan plan = plan_of("causal", imaginary::problem(1024, 1024));
    CHECK_EQ(whole(plan.forward).layout.get(), whole(plan.backward).layout.get());
    CHECK_EQ(whole(plan.backward).masks->data(), whole(plan.backward).layout->masks.data());
    const size_t mask_bytes = whole(plan.forward).masks->size() * sizeof(uint64_t);
    CHECK_EQ(plan.layout_bytes, whole(plan.forward).layout->bytes() + mask_bytes);
}

TEST(masks_come_in_the_order_of_the_row) {
    const CompiledPlan plan = plan_of("causal", imaginary::problem(1024, 1024));
    const LayoutView forward = whole(plan.forward).layout_view(), backward = whole(plan.backward).layout_view();
    CHECK_EQ(forward.num_masks, 1);
    CHECK_EQ(forward.mask_words, 64);
    bool is_transposed = true;
    for (int row = 0; row < 64; ++row)
        for (int key = 0; key < 64; ++key) {
            is_transposed &= (backward.masks[row] >> key & 1) == uint64_t(key <= row);
            is_transposed &= (forward.masks[key] >> row & 1) == uint64_t(key <= row);
        }
    CHECK(is_transposed);
}

TEST(threads_change_no_choice_and_no_task) {
    for (const char* pattern : {"full", "causal & window(64,0)", "block_diagonal(16)", "bigbird(32,3,1,2,7)",
                                "causal & (window(64,0) | strided(64))"}) {
        const Problem p = imaginary::problem(2048, 2048);
        const CompiledPlan one = plan_of(pattern, p, options_of(true, 1));
        const CompiledPlan many = plan_of(pattern, p, options_of(true, 64));
        for (auto [a, b] : {std::pair{&one.forward, &many.forward}, std::pair{&one.backward, &many.backward}}) {
            CHECK_EQ(a->pieces.size(), b->pieces.size());
            for (size_t i = 0; i < a->pieces.size(); ++i) {
                const PiecePlan &x = a->pieces[i], &y = b->pieces[i];
                CHECK_EQ(std::string(x.kernel->name), y.kernel->name);
                CHECK(x.schedule.begin == y.schedule.begin);
                CHECK_EQ(x.schedule.num_parts, y.schedule.num_parts);
            }
        }
    }
}

TEST(work_is_counted_as_people_do) {
    Problem p = imaginary::problem(10, 20, 8);
    p.head_dim_v = 4;
    p.heads_q = 6;
    p.heads_kv = 2;
    CHECK_EQ(flops(p, 100, Pass::forward), 2.0 * 12 * 100);
    CHECK_EQ(flops(p, 100, Pass::backward), 5.0 * 12 * 100);
    // q 10x8, out 10x4 for 6 heads; k 20x8, v 20x4 for 2; lse 10 for 6.
    CHECK_EQ(operand_bytes(p, Pass::forward), 4.0 * (6 * 10 * 12 + 2 * 20 * 12 + 6 * 10));
    CHECK_EQ(operand_bytes(p, Pass::backward), 4.0 * (2 * (6 * 10 * 12 + 2 * 20 * 12) + 6 * 10));
    // Operands of float8: q, k and v of bytes, out of bfloat16, and a scale for each row.
    p.dtype = Dtype::bf16, p.float8_operands = true;
    CHECK_EQ(operand_bytes(p, Pass::forward), 6.0 * 10 * (8 + 2 * 4 + 4) + 2.0 * 20 * (12 + 8) + 4.0 * 6 * 10);
    p.value_in_key = true;
    CHECK_EQ(operand_bytes(p, Pass::forward), 6.0 * 10 * (8 + 2 * 4 + 4) + 2.0 * 20 * (8 + 4) + 4.0 * 6 * 10);
}

TEST(this_machine_has_the_lanes_it_is_given) {
    const Machine machine = this_machine(3);
    CHECK_EQ(machine.lanes, 3);
    CHECK(machine.clock > 0 && machine.bandwidth > 0);
    CHECK(!machine.name.empty());
}

TEST(devices_of_different_kinds_are_served_by_their_own_rows) {
    Kernel tuned = imaginary::forward_row("new_block_forward_f32_64x64", 64);
    tuned.device = SPATTN_CUDA;
    tuned.runs_here = [](int32_t device) { return device == 1; };
    Kernel floor = imaginary::forward_row("any_block_forward_f32_16x16", 16);
    floor.device = SPATTN_CUDA;
    const std::vector<Kernel> kernels = {tuned, floor};
    PlanOptions options = options_of(false);
    options.device = SPATTN_CUDA;
    const PatternRef pattern = parse_pattern("causal");
    const auto plan_on = [&](int32_t device) {
        options.device_index = device;
        return compile_plan(*pattern, imaginary::problem(1024, 1024), options, kernels);
    };
    CHECK_EQ(name(plan_on(1).forward), "new_block_forward_f32_64x64");
    const CompiledPlan old = plan_on(0);
    CHECK_EQ(name(old.forward), "any_block_forward_f32_16x16");
    CHECK_EQ(refusal(old.forward, "new_block_forward_f32_64x64"), "not on this device");
}
