// SPDX-License-Identifier: MIT
// How work is cut changes no result: equal bits for any number of threads, on rows that are split and joined.
#include <algorithm>
#include <map>

#include "bounds.h"

using namespace attention;

constexpr unsigned seed = 77;

static bool same(const Results& a, const Results& b) {
    const auto bits = [](const Values& x, const Values& y) { return same_bits(x, y); };
    return bits(a.out, b.out) && bits(a.lse, b.lse) && bits(a.max_logits, b.max_logits) && bits(a.dq, b.dq) &&
           bits(a.dk, b.dk) && bits(a.dv, b.dv) && bits(a.dsinks, b.dsinks);
}

TEST(threads_do_not_change_bits) {
    const Case cases[] = {
        {"causal", 1, 2, 1, 200, 200, 20, 20},
        {"full", 1, 1, 1, 10, 3100, 8, 8},
        {"sink(1) | window(3,0)", 1, 2, 1, 1100, 1100, 8, 8},
        {"per_head([0,1,0,1], causal, bigbird(16,3,1,2,7))", 2, 4, 2, 130, 130, 16, 16},
        {"causal", 2, 4, 2, 300, 300, 8, 8, Axes::bhsd, own_scale, aligned_end, true, false, 10., true},
        {"causal & (window(3,0) | strided(8))", 1, 2, 1, 1000, 1000, 8, 8, Axes::bhsd, own_scale, aligned_end, true,
         false, 0., true},  // in pieces
        {"causal - window(3,0)", 1, 1, 1, 60, 300, 1024, 20},  // keys of a gather row in several ranges
        {"runtime_tokens(60) & causal", 2, 6, 2, 90, 130, 24, 16},
        {"runtime_tokens(3000)", 1, 4, 1, 400, 500, 4, 4},
        {"runtime_blocks(8,16,5)", 1, 70, 1, 40, 130, 32, 32, Axes::bhsd, own_scale, aligned_end, true, true},
    };
    size_t n = 0;
    for (const Case& c : cases) {
        const Inputs clean = make_inputs(c, Dtype::bf16, seed);
        Inputs dirty = clean;
        for (Values* x : {&dirty.q, &dirty.k, &dirty.v, &dirty.dout}) (*x)[x->size() / 3] = not_a_number;
        for (const Rows& rows : cpu_rows(false, FewQueries::included)) {
            if (!is_tested(rows) || !takes(rows, c)) continue;
            if (++n % check::every()) continue;
            // Numbers on 7 threads, or NaN in their midst on 2, by turns, against the same on one.
            const bool has_nan = n / check::every() % 2;
            check::context = text(rows.forward.name, " ", describe(c), has_nan ? " with NaN" : "");
            const Inputs& in = has_nan ? dirty : clean;
            CHECK(same(run_rows(c, rows, in, 1), run_rows(c, rows, in, has_nan ? 2 : 7)));
        }
    }
}

// Rows on panels, where tasks whose lists differ take turns on one thread; on seven they are too few for that.
TEST(turns_do_not_change_bits) {
    const Case c{"causal", 1, 2, 1, 450, 450, 1024, 1024};
    const Inputs in = make_inputs(c, Dtype::bf16, seed);
    bool is_met = false;
    for (const Rows& rows : cpu_rows(false)) {
        if (!is_tested(rows) || !takes(rows, c) || rows.forward.walks[0].policy.alike == 1) continue;
        is_met = true;
        check::context = rows.forward.name;
        CHECK(same(run_rows(c, rows, in, 1), run_rows(c, rows, in, 7)));
    }
    if (!is_met) check::skip("no row whose tasks take turns");
}

// So that the cases above really met what they are there for.
TEST(splits_and_cuts_happen) {
    for (const Rows& rows : cpu_rows(false)) {
        if (!is_tested(rows) || rows.forward.block_q != 16 || rows.forward.dtype != Dtype::f32) continue;
        const Attention<float> wide({"full", 1, 1, 1, 10, 3100, 8, 8}, rows, 2);
        CHECK(!wide.plan().forward.pieces.at(0).schedule.joins.empty());
        const Attention<float> tall({"sink(1) | window(0,0)", 1, 1, 1, 1100, 1100, 4, 4}, rows, 2);
        CHECK(!tall.plan().backward.pieces.at(0).schedule.joins.empty());
    }
}

// Where scratch is dear, passes go over the heads in portions, and backward over the queries of each in rounds, where
// columns hand their sums from one to the next. With 300 KiB portions have several heads.
TEST(portions_and_rounds_keep_to_the_truth_and_to_their_bits) {
    const Case cases[] = {
        {"causal", 1, 4, 2, 300, 300, 20, 20},
        {"window(40,0)", 2, 2, 1, 400, 400, 8, 8},
        {"sink(1) | window(3,0)", 1, 2, 1, 500, 500, 8, 8},
        {"causal & dilated(40,0,4)", 1, 2, 1, 400, 400, 8, 8},
        {"per_head([0,1,0,1], causal, window(9,9))", 2, 4, 2, 230, 230, 16, 16},
        {"causal", 2, 4, 2, 300, 300, 8, 8, Axes::bhsd, own_scale, aligned_end, true, false, 10., true},
        {"causal", 1, 4, 1, 300, 300, 24, 16, Axes::bshd, own_scale, aligned_end, true, true},
        {"per_head([0,1,1,0], strided(16), dilated(480,0,16)) | window(20,3)", 2, 4, 4, 500, 500, 16, 16},  // in pieces
        {"causal & (window(3,0) | strided(8))", 2, 4, 2, 600, 600, 16, 16, Axes::bshd, own_scale, aligned_end, true,
         false, 0., true},  // as is this one, and all that follow
        {"causal & (window(3,0) | strided(8))", 2, 6, 2, 500, 500, 16, 24},  // with single heads of a group
        {"causal & (window(3,0) | strided(8))", 1, 4, 1, 600, 600, 8, 8, Axes::bhsd, own_scale, aligned_end, true, true,
         10., true},
        {"per_head([0,1,1,0], strided(16), dilated(480,0,16)) | window(20,3)", 2, 4, 1, 500, 500, 16, 16, Axes::bshd,
         own_scale, aligned_end, true, false, 0., true},
    };
    int in_rounds = 0, of_heads = 0, in_portions = 0, of_several = 0, of_others = 0, of_pieces = 0, of_groups = 0;
    const auto meet = [&](const CompiledPlan& plan) {
        for (const PassPlan* pass : {&plan.forward, &plan.backward}) {
            const PiecePlan& piece = pass->pieces.at(0);
            const Schedule& first = pass->portions ? piece.portions.schedules.at(0) : piece.schedule;
            const Problem& each = pass->portions ? pass->portions->each : plan.problem;
            in_rounds += first.rounds.size() > 1;
            of_heads += first.rounds.size() > 1 && each.batch * each.heads_kv > 1;
            in_portions += pass->portions.has_value();
            of_several += pass->portions && each.batch * each.heads_kv > 1;
            of_others += std::any_of(pass->pieces.begin(), pass->pieces.end(),
                                     [](const PiecePlan& any) { return any.portions.schedules.size() > 1; });
            of_pieces += pass->portions && pass->pieces.size() > 1;
            of_groups += pass == &plan.backward && each.group() < plan.problem.group();
        }
    };
    size_t n = 0;
    for (const Case& c : cases) {
        PlanOptions thrifty;
        thrifty.ample_scratch = n++ % 2 ? 0 : 300 * 1024;
        std::map<Dtype, Results> truth;
        for (const Rows& rows : cpu_rows(false)) {
            const Dtype dtype = rows.forward.dtype;
            if (!is_tested(rows) || !takes(rows, c) || rows.backward.family != Family::block) continue;
            check::context = text(rows.backward.name, " ", describe(c));
            Inputs in = make_inputs(c, dtype, seed);
            const Results got = run_rows(c, rows, in, 1, {}, thrifty);
            CHECK(same(got, run_rows(c, rows, in, 7, {}, thrifty)));
            if (!truth.count(dtype)) truth[dtype] = run_rows(c, reference_rows(Dtype::f64), in, 2);
            check_results(c, rows, got, truth[dtype]);
            if (dtype == Dtype::f32) meet(Attention<float>(c, rows, 1, {}, thrifty).plan());
            if (dtype == Dtype::bf16) meet(Attention<Bf16>(c, rows, 1, {}, thrifty).plan());

            for (Values* x : {&in.q, &in.k, &in.v, &in.dout}) (*x)[x->size() / 3] = not_a_number;
            const Results spoiled = run_rows(c, rows, in, 2, {}, thrifty), whole = run_rows(c, rows, in, 2);
            CHECK(same_specials(spoiled.dq, whole.dq) && same_specials(spoiled.dk, whole.dk) &&
                  same_specials(spoiled.dv, whole.dv));
        }
    }
    check::context.clear();
    // Scalar rows alone, which every CPU has, make some 20 plans in rounds and 30 in portions.
    CHECK(in_rounds > 10 && of_heads > 0);
    CHECK(in_portions > 20 && of_several > 0 && of_others > 0 && of_pieces > 10 && of_groups > 5);
}

// However many heads there are, scratch is that of a few: in backward dq of a group, and in pieces that of one head.
TEST(long_contexts_take_little_for_many_heads) {
    constexpr int64_t seq = 131072, dim = 128, row_bytes = dim * int64_t(sizeof(float));
    for (const char* pattern : {"causal", "causal & (window(127,0) | strided(128))"})
        for (const int64_t heads_kv : {32, 8, 1}) {
            const Case c{pattern, 1, 32, heads_kv, seq, seq, dim, dim};
            const bool is_whole = pattern == std::string("causal");
            const auto check = [&](const CompiledPlan& plan) {
                CHECK(int64_t(plan.forward.workspace) < 5 * seq * row_bytes);
                CHECK(int64_t(plan.backward.workspace) < (is_whole ? 8 + c.heads_q / heads_kv : 7) * seq * row_bytes);
            };
            for (const Rows& rows : cpu_rows(false)) {
                if (!is_tested(rows) || !takes(rows, c) || rows.backward.family != Family::block) continue;
                check::context = text(rows.backward.name, ' ', describe(c));
                if (rows.forward.dtype == Dtype::f32) check(Attention<float>(c, rows, 2).plan());
                if (rows.forward.dtype == Dtype::bf16) check(Attention<Bf16>(c, rows, 2).plan());
            }
        }
}

// Queues that meet everywhere in dq, in few tiles each: scattered queries that see all, and blocks drawn at random.
TEST(dq_takes_room_where_queues_reach) {
    std::string hot;
    for (int token = 7; token < 4096; token += 127) hot += text(hot.empty() ? "" : ",", token);
    const int64_t dq_bytes = 4096 * 64 * sizeof(float);
    for (const Rows& rows : cpu_rows(false)) {
        if (!is_tested(rows) || rows.forward.block_q != 16 || rows.forward.dtype != Dtype::f32) continue;
        for (const std::string& pattern : {text("window(8,8) | global_tokens(", hot, ')'),
                                           std::string("bigbird(16,3,0,1,5)")}) {
            check::context = text(rows.backward.name, " ", pattern);
            const Attention<float> attention({pattern.c_str(), 1, 1, 1, 4096, 4096, 64, 64}, rows, 2);
            CHECK(int64_t(attention.plan().backward.workspace) < 5 * dq_bytes);
            CHECK(attention.plan().backward.pieces.at(0).schedule.begin.size() > 16);
        }
    }
}
