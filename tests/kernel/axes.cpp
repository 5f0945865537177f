// SPDX-License-Identifier: MIT
// A kernel reads any axis: the same results, whichever tiles the tokens of a pattern stand in.
#include "axes.h"

#include "isolation.h"

using namespace attention;

static const Case cases[] = {
    // pattern, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v
    {"full", 1, 1, 1, 1, 1, 1, 1},
    {"full", 1, 2, 1, 130, 140, 16, 16},
    {"causal", 2, 2, 2, 127, 127, 20, 65, Axes::bshd},
    {"causal", 1, 4, 2, 100, 150, 64, 64},
    {"causal", 1, 2, 1, 90, 140, 32, 16, Axes::lines},
    {"causal", 1, 2, 1, 100, 40, 16, 16},  // the first 60 queries see nothing
    {"causal & dilated(60,0,5)", 1, 2, 1, 190, 190, 16, 16},
    {"window(10,3)", 1, 2, 1, 191, 191, 3, 5, Axes::gaps},
    {"window(5,0)", 1, 1, 1, 64, 192, 64, 32, Axes::bhsd, own_scale, 90},  // keys at both ends unseen
    {"global_tokens(0,70) & causal", 1, 2, 1, 80, 120, 16, 16},
    {"documents(0,10,31,32,90)", 1, 2, 2, 100, 100, 16, 16},  // the last 10 see nothing
    {"logsparse", 1, 4, 1, 150, 150, 12, 12, Axes::bshd},
    {"full - full", 1, 1, 1, 40, 70, 16, 16},
    {"per_head([0,1,1,2], causal, window(9,0), sink(0))", 1, 4, 2, 80, 80, 16, 16},
    {"per_batch([1,0], window(70,3) & sink(50), full)", 2, 2, 1, 70, 90, 16, 16, Axes::bshd},
    {"full", 2, 4, 2, 17, 47, 20, 65, Axes::shared},
    // 40 see the sink alone
    {"causal", 1, 4, 2, 100, 60, 16, 16, Axes::bhsd, own_scale, aligned_end, true, false, 2., true},
    {"documents(0,10,31,32,90)", 2, 2, 2, 100, 100, 16, 16, Axes::bshd, own_scale, aligned_end, true, false, 0., true},
    {"window(40,0)", 1, 2, 1, 70, 70, 16, 16, Axes::bshd, own_scale, aligned_end, false},
};
constexpr unsigned seed = 31415;

// What the two passes are given: the residue classes of each axis, and the tiles that it lists.
struct Kind {
    const char* name;
    int modulus_q, modulus_k;
    int written, read;  // listed tiles of the axis that a pass writes by tiles, and of the other one
    bool once = false;  // the other one, too, lists a token once and leaves its home away
};
static const Kind kinds[] = {
    {"plain", 1, 1, 0, 0},
    {"residue 2", 2, 2, 0, 0},
    {"residue 7", 7, 7, 0, 0},
    {"residue 200", 200, 200, 0, 0},  // most residue classes are short or empty
    {"listed", 1, 1, 0, 6},
    {"listed, and hot ones away", 1, 1, 2, 4},
    {"away on both axes", 1, 1, 3, 2, true},
    {"all at once", 3, 5, 1, 4},
};

static Layouts draw_layouts(const Case& c, const Kind& kind, const Rows& rows, bool orderly, unsigned seed_of_draw) {
    const Problem p = problem_of(c, rows.forward.dtype);
    const PatternRef pattern = parse_pattern(c.pattern);
    const PatternRows token_rows(*pattern, p);
    std::mt19937 random(seed_of_draw);
    const auto draw = [&](const Kernel& kernel) {
        const bool by_key = kernel.owner() == Owner::keys;
        const DrawnAxis queries = draw_axis({p.seq_q, kernel.block_q, kind.modulus_q,
                                             by_key ? kind.read : kind.written, !by_key || kind.once}, random);
        const DrawnAxis keys = draw_axis({p.seq_k, kernel.block_k, kind.modulus_k,
                                          by_key ? kind.written : kind.read, by_key || kind.once}, random);
        return DrawnLayout(kernel, queries, keys, orderly, seed_of_draw).build(p, token_rows);
    };
    return {draw(rows.forward), draw(rows.backward)};
}

static std::vector<Rows> rows_here() {
    std::vector<Rows> rows;
    for (const Rows& pair : cpu_rows(false))
        if (pair.forward.family == Family::block && is_tested(pair)) rows.push_back(pair);
    return rows;
}

// Every two of case, kind and row meet; of all three, one in three.
TEST(rows_read_any_axis) {
    const std::vector<Rows> all = rows_here();
    for (const Rows& rows : all) CHECK(rows.forward.orders && rows.backward.orders);
    unsigned draw = seed;
    Told told;
    for (size_t n = 0; n < std::size(cases); ++n)
        for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::f64, Dtype::bf16}) {
            const Case& c = cases[n];
            const Inputs in = make_inputs(c, dtype, seed);
            const Results want = run_rows(c, reference_rows(Dtype::f64), in, 2);
            for (size_t k = 0; k < std::size(kinds); ++k)
                for (size_t r = 0; r < all.size(); ++r) {
                    const Kind& kind = kinds[k];
                    const Rows& rows = all[r];
                    if (rows.forward.dtype != dtype || (n + k + r) % (3 * check::every())) continue;
                    const bool orderly = ++draw % 2;
                    check::context = text(rows.forward.name, " ", kind.name, orderly ? " orderly" : "", " ",
                                          describe(c), " draw ", draw);
                    const Layouts layouts = draw_layouts(c, kind, rows, orderly, draw);
                    const Results got = run_rows(c, rows, in, 2, layouts);
                    check_results(c, rows, got, want);
                    const bool is_isolated = c.axes != Axes::shared && c.optional_operands && draw % 3 == 0;
                    if (is_isolated) check_isolation(c, rows, in, got, draw_soiling(draw / 3), told, layouts);
                }
        }
    CHECK(told.queries > 0 && told.keys > 0);
}

// Rows long enough to be split and columns to be cut, with equal bits on any number of threads.
TEST(threads_do_not_change_bits_on_any_axis) {
    const Case splits[] = {{"full", 1, 2, 1, 20, 1100, 8, 8}, {"sink(1) | window(3,0)", 1, 2, 1, 1100, 1100, 8, 8}};
    for (const Case& c : splits)
        for (const Rows& rows : rows_here()) {
            if (rows.forward.dtype != Dtype::f32 || rows.forward.block_q > 16) continue;
            const Inputs in = make_inputs(c, Dtype::f32, seed);
            const Results want = run_rows(c, reference_rows(Dtype::f64), in, 2);
            for (const Kind& kind : kinds) {
                check::context = text(rows.forward.name, " ", kind.name, " ", describe(c));
                const Layouts layouts = draw_layouts(c, kind, rows, false, seed);
                const Results one = run_rows(c, rows, in, 1, layouts),
                              three = run_rows(c, rows, in, 3, layouts);
                check_results(c, rows, one, want);
                for (const auto member : {&Results::out, &Results::lse, &Results::dq, &Results::dk, &Results::dv})
                    CHECK(same_bits(one.*member, three.*member));
            }
        }
}
