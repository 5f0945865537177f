// SPDX-License-Identifier: MIT
// Which patterns are worked on in pieces, and are their counts those of the whole?
#include "plan/plans.h"

using namespace spattn;
using imaginary::has, imaginary::options_of, imaginary::plan_of, imaginary::whole;

static const char* const strided_attention = "causal & (window(64,0) | strided(64))";

TEST(a_plain_and_a_residue_part_are_pieces) {
    const CompiledPlan plan = plan_of(strided_attention, imaginary::problem(4096, 4096));
    size_t most = 0;
    for (const PassPlan* pass : {&plan.forward, &plan.backward}) {
        CHECK_EQ(pass->pieces.size(), size_t(2));
        CHECK(pass->pieces[0].order == Order::plain && pass->pieces[1].order == Order::residue);
        for (const Candidate& c : pass->whole) CHECK(!c.refused.empty());  // known to lose without a layout
        most = std::max(pass->pieces[0].workspace, pass->pieces[1].workspace);
        CHECK(pass->carried >= imaginary::carries(plan.problem));
        CHECK_EQ(pass->workspace, pass->carried + most);
    }
    CHECK_EQ(plan.forward.pieces[0].layout.get(), plan.backward.pieces[0].layout.get());
    CHECK(has(explain(plan), "causal & (strided(64) - window(64,0))"));
}

// Heads differ in one piece and not in the other, and some queries are served by one piece alone.
TEST(counts_of_pieces_are_those_of_the_whole) {
    const struct {
        const char* pattern;
        int64_t seq_q, seq_k;
    } cases[] = {{strided_attention, 1000, 1300},
                 {"(window(9,0) | strided(16)) - sink(100)", 900, 900},
                 {"documents(0,500,900) & (window(9,0) | strided(16))", 1000, 1000},
                 {"block_diagonal(64) | block_diagonal(1024) & residue(16,3)", 1024, 1024},
                 {"per_head([0,1,1,0], strided(16), dilated(800,0,16)) | window(20,3)", 800, 800},
                 {"per_head([0,1,0,0], window(40,40), dilated(800,800,16))", 800, 800}};
    for (const auto& c : cases) {
        check::context = c.pattern;
        Problem p = imaginary::problem(c.seq_q, c.seq_k);
        p.batch = 2, p.heads_q = p.heads_kv = 4;
        const CompiledPlan plan = plan_of(c.pattern, p);
        CHECK(plan.forward.pieces.size() > 1);
        const Extent extent{2, 4, c.seq_q, c.seq_k, p.q_offset};
        const Counts want = count(build_layout(*parse_pattern(c.pattern), extent, 64, 64));
        CHECK_EQ(plan.counts.pairs, want.pairs);
        CHECK_EQ(plan.counts.row_min, want.row_min);
        CHECK_EQ(plan.counts.row_max, want.row_max);
        CHECK_EQ(plan.counts.rows_empty, want.rows_empty);
        double visited = 0;
        for (const PiecePlan& piece : plan.forward.pieces) visited += piece.stats.visited;
        CHECK_EQ(plan.counts.visited, visited);
    }
    check::context.clear();
}

// What the pieces keep tells how long lists of the whole would be: nothing is lowered to learn that, nor are its blocks
// looked at any further.
TEST(lists_that_are_too_long_are_known_from_the_pieces) {
    std::vector<Kernel> rows = imaginary::kernels();
    rows.push_back(imaginary::forward_row("near_block_forward_f32_32x32", 32));
    Kernel gather = imaginary::forward_row("near_gather_forward_f32", 0);
    gather.family = Family::gather;
    gather.cost = [](const Problem&, const LayoutStats&, const Machine&) { return Cost{1, "compute"}; };
    rows.push_back(gather);
    const PatternRef pattern = parse_pattern("causal & (window(128,0) | strided(128))");
    const PassPlan pass = compile_plan(*pattern, imaginary::problem(262144, 262144), options_of(false), rows).forward;
    CHECK_EQ(pass.pieces.size(), size_t(2));
    bool is_met = false;
    for (const Candidate& c : pass.whole) {
        CHECK(c.order != Order::listed);
        if (c.kernel->family != Family::gather) continue;
        is_met = true;
        CHECK(has(c.refused, "token lists of up to"));
    }
    CHECK(is_met);
}

// However heads are cut, each is in one portion, whole groups where they must be, and a portion's first head is the one
// behind those of the portion before.
TEST(portions_have_every_head_once) {
    for (const int64_t batch : {1, 3, 8})
        for (const int64_t heads_kv : {1, 2, 7, 12})
            for (const int64_t group : {1, 6})
                for (const int64_t fewest : {0, 1, 2, 5, 16, 1000})
                    for (const bool splits_groups : {false, true}) {
                        check::context = text(batch, ' ', heads_kv, ' ', group, ' ', fewest, ' ', splits_groups);
                        Problem p{};
                        p.batch = batch, p.heads_kv = heads_kv, p.heads_q = heads_kv * group;
                        const Portions portions(p, fewest, splits_groups);
                        const Problem& each = portions.each;
                        const int64_t most = splits_groups ? batch * p.heads_q : batch * heads_kv;
                        CHECK(portions.count >= std::min(fewest, most));
                        CHECK_EQ(portions.count * each.batch * each.heads_q, batch * p.heads_q);
                        CHECK(each.group() == group || (splits_groups && each.heads_kv == 1));
                        CHECK(each.batch == 1 || each.heads_q == p.heads_q);
                        for (int64_t i = 0; i < portions.count; ++i) {
                            const FirstHead first = portions.first(i);
                            CHECK_EQ(first.batch * p.heads_q + first.head_q, i * each.batch * each.heads_q);
                            CHECK_EQ(first.head_kv, first.head_q / group);
                            CHECK_EQ(first.begins_group, first.head_q % group == 0);
                            CHECK_EQ(first.ends_group, (first.head_q + each.heads_q) % group == 0);
                        }
                    }
    check::context.clear();
}

TEST(passes_with_much_scratch_go_in_portions) {
    Problem p = imaginary::problem(4096, 4096);
    p.batch = 2, p.heads_q = p.heads_kv = 4;
    PlanOptions options = options_of(true);
    const CompiledPlan all = plan_of(strided_attention, p, options);
    CHECK(!all.forward.portions && !has(explain(all), "portions"));
    options.ample_scratch = all.forward.workspace / 3;
    const CompiledPlan some = plan_of(strided_attention, p, options);
    CHECK(some.forward.portions && some.forward.portions->count == 4);
    CHECK_EQ(some.forward.carried, all.forward.carried / 4);
    CHECK(some.forward.workspace <= options.ample_scratch);
    CHECK_EQ(some.forward.pieces[0].portions.schedules.size(), size_t(1));
    CHECK(has(explain(some), "4 of 2 heads, one after the other"));
    p.batch = 61;
    options.ample_scratch = plan_of(strided_attention, p, options_of(true)).forward.workspace / 2;
    CHECK(!plan_of(strided_attention, p, options).forward.portions);
    options.ample_scratch /= 16;
    CHECK_EQ(plan_of(strided_attention, p, options).forward.portions->count, int64_t(61));
}

TEST(what_pieces_would_not_serve_stays_whole) {
    const Problem p = imaginary::problem(4096, 4096);
    std::vector<Kernel> alone = imaginary::kernels();
    for (Kernel& kernel : alone) kernel.carries = nullptr;
    CHECK_EQ(whole(compile_plan(*parse_pattern(strided_attention), p, options_of(true), alone).forward).pattern_text,
             strided_attention);
    // A piece that keeps nothing, and one that is hardly worth handing on to.
    for (const char* pattern : {"causal & (window(5000,0) | strided(64))", "full | strided(8)",
                                "causal & (window(4000,0) | strided(64))"}) {
        check::context = pattern;
        const CompiledPlan plan = plan_of(pattern, p);
        CHECK_EQ(whole(plan.forward).pattern_text, pattern);
        CHECK_EQ(whole(plan.backward).pattern_text, pattern);
    }
    check::context.clear();
}
