// SPDX-License-Identifier: MIT
// The plain CUDA rows, forward and backward, against the double-precision rows of the CPU: every dtype, options of the
// header, orders of the layout, values that nobody may look at.
#include <algorithm>
#include <cstring>

#include "gpu/cases.h"

using namespace gpu;

namespace {

struct Kind {
    const char* name;
    spattn_dtype dtype;
    double bound;
};
constexpr Kind kinds[] = {
    {"f32", abi::f32, 2e-5}, {"f16", f16, 4e-3}, {"bf16", abi::bf16, 3e-2}, {"f64", abi::f64, 1e-11}};

Case case_of(const Kind& kind, const char* pattern = "causal") {
    Case c;
    c.pattern = pattern, c.dtype = kind.dtype, c.bound = kind.bound, c.row_bound = 1e-5;
    c.axes = SPATTN_BHSD, c.seq_q = c.seq_k = 100, c.head_dim = c.head_dim_v = 32, c.backward = true;
    return c;
}

// The pair of rows for a kind and a block.
std::string rows_of(const Kind& kind, int block) {
    const std::string tail = std::string(kind.name) + "_" + std::to_string(block) + "x" + std::to_string(block);
    return "any_block_forward_" + tail + ",any_block_backward_" + tail;
}

struct Wanted {
    std::string rows;
    Case c;
};

void run_case(const Context& context, const Kind& kind, int block, const Case& c) {
    run_case(context, rows_of(kind, block), c);
}
void run_all(const std::vector<Wanted>& all) {
    std::vector<Case> cases;
    for (const Wanted& wanted : all) cases.push_back(wanted.c);
    prepare_truths(cases);
    const Context context = make_context();
    for (const Wanted& wanted : all) run_case(context, wanted.rows, wanted.c);
}

// Whether a union runs in pieces follows from the work a processor has. Emulated GPUs have few of them.
int64_t heads_for_pieces() {
    int processors = 0;
    cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    return processors > 16 ? 8 : 2;
}

// Blocks, residue classes, tiles of packed and of listed tokens, unions in pieces.
const char* const patterns[] = {"full",
                                "causal",
                                "causal & (sink(5) | window(20,0))",
                                "window(3,40)",
                                "residue(3,1)",
                                "dilated(60,60,4)",
                                "dilated(40,0,3) | sink(3)",
                                "global_tokens(0,31,57,90) | window(8,8)",
                                "logsparse",
                                "strided(16) | window(4,4)",
                                "documents(0,1,30,31,90)",
                                "causal - causal",
                                "bigbird(16,1,1,1,3)",
                                "landmark(16,1) & causal",
                                "causal & strided(8) | block_diagonal(16)"};

}  // namespace

TEST(options_of_all_plain_rows) {
    NEEDS_GPU();
    std::vector<Wanted> all;
    const int64_t dims[][2] = {{32, 32}, {1, 1}, {7, 3}, {64, 80}, {130, 40}, {300, 129}};
    const int64_t lengths[][2] = {{100, 100}, {63, 130}, {129, 70}, {1, 1}};
    int n = 0;
    for (const Kind& kind : kinds)
        for (int block : {64, 32, 16})
            for (const char* pattern : patterns) {
                if (!is_wanted(++n)) continue;
                Case c = case_of(kind, pattern);
                c.head_dim = dims[n % 6][0], c.head_dim_v = dims[n % 6][1];
                c.seq_q = lengths[n % 4][0], c.seq_k = lengths[n % 4][1];
                c.batch = 1 + n % 2, c.heads_q = n % 3 ? 4 : 3, c.heads_kv = n % 3 ? 2 : 1;
                c.axes = c.batch == 1 && n % 5 == 0 ? SPATTN_THD : n % 5 < 3 ? SPATTN_BHSD : SPATTN_BSHD;
                c.padding = n % 7 == 0 ? 3 : 0, c.column = n % 4 == 1 ? 2 : 1;
                c.softcap = n % 3 == 1 ? 1.5 : 0, c.sinks = n % 4 == 2, c.dlse = n % 2;
                all.push_back({rows_of(kind, block), c});
            }
    run_all(all);
}

// Operands as wide as they may be: where a CTA has less shared memory, it has fewer rows, or warps, of them.
TEST(widest_heads) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const Kind& kind : kinds) {
        Case c = case_of(kind, "causal & window(50,0)");
        c.seq_q = c.seq_k = 70;
        for (const int64_t columns : {130, 1024}) {
            c.head_dim = columns, c.head_dim_v = columns == 130 ? 70 : columns;
            run_case(context, kind, 64, c);
            run_case(context, std::string("any_gather_forward_") + kind.name + ",any_gather_backward_" + kind.name, c);
        }
    }
}

// The first keys are seen by all queries, so that all warps of a CTA take turns at them; the others have a warp each,
// and the last CTA has fewer keys than warps.
TEST(keys_that_all_and_few_queries_list) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const Kind& kind : kinds) {
        Case c = case_of(kind, "causal & (sink(2) | window(3,0))");
        c.seq_q = c.seq_k = 701, c.heads_q = 2;
        run_case(context, std::string("any_gather_forward_") + kind.name + ",any_gather_backward_" + kind.name, c);
    }
}

TEST(values_in_keys) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const Kind& kind : kinds) {
        Case c = case_of(kind);
        c.value_in_key = true, c.head_dim = 72, c.head_dim_v = 40;
        run_case(context, kind, 64, c);
        c.head_dim_v = 72, c.pattern = "dilated(60,60,4)";
        run_case(context, kind, 64, c);
    }
}

// The rows for tensor cores that read tokens in any order: classes, hot and listed tokens, pieces; values in keys.
TEST(orders_by_tensor_cores) {
    NEEDS_GPU();
    if (tensor_core_rows("_block_").empty()) return check::skip(no_such_rows);
    std::vector<Wanted> all;
    const char* const wide[] = {"dilated(700,700,16)",
                                "causal & dilated(1008,0,16)",
                                "residue(5,2) | sink(3)",
                                "causal & (window(40,0) | strided(32))",
                                "global_tokens(0,131,357,790) | window(8,8)",
                                "landmark(64,1) & causal | window(30,0)",
                                "logsparse",
                                "fixed(64,4) - sink(9)"};
    int n = 0;
    for (const Kind& kind : kinds)
        for (const char* pattern : wide) {
            if (kind.dtype.bits != 16) continue;
            struct Row {
                std::string forward, backward;  // around the dtype
                std::string forward_tile, backward_tile;
                int64_t head_dim;  // all columns of its tiles, or some
            };
            const std::string older = "sm80_block_forward_", older_back = "sm80_block_backward_";
            const std::string hopper = "sm90_block_forward_", hopper_back = "sm90_block_backward_apart_";
            // Thirteen: options change by smaller numbers, so that no row always meets the same ones.
            for (const Row& row : {Row{older, older_back, "d64_v64_64x64", "d64_v64_64x64", 56},
                                   Row{older, older_back, "d64_v64_128x64", "d64_v64_64x64", 56},
                                   Row{older, older_back, "d128_v128_64x64", "d128_v128_64x64", 128},
                                   Row{older, older_back, "d256_v256_64x64", "d256_v256_64x64", 200},
                                   Row{older, older_back, "d512_v512_64x64", "d512_v512_64x64", 328},
                                   Row{hopper, hopper_back, "d64_v64_128x64", "d64_v64_128x128", 56},
                                   Row{hopper, hopper_back, "d128_v128_128x64", "d128_v128_128x128", 128},
                                   Row{hopper, hopper_back, "d128_v128_128x64", "d128_v128_128x128", 104},
                                   Row{hopper, hopper_back, "d64_v64_128x128", "d64_v64_128x128", 64},
                                   Row{hopper, hopper_back, "d128_v128_128x128", "d128_v128_128x128", 120},
                                   Row{hopper, hopper_back, "d64_v64_64x64", "d64_v64_128x128", 64},
                                   Row{hopper, hopper_back, "d128_v128_64x64", "d128_v128_128x128", 128},
                                   Row{hopper, hopper_back, "d256_v256_128x64", "d256_v256_128x128", 200}}) {
                if (!is_wanted(++n)) continue;
                Case c = case_of(kind, pattern);
                c.head_dim = c.head_dim_v = row.head_dim;
                c.seq_q = 700 + n % 3 * 37, c.seq_k = 700 + n % 2 * 90, c.column = n % 5 ? 1 : 2,
                c.shift = n % 7 ? 0 : 1;
                c.heads_q = n % 2 ? 4 : 2, c.heads_kv = 2, c.sinks = n % 3 == 0, c.dlse = n % 2;
                c.softcap = n % 4 == 1 ? 1.5 : 0, c.value_in_key = n % 6 == 5 && c.head_dim <= 128;
                const std::string dtype = std::string(kind.name) + "_";
                const std::string forward = row.forward + dtype + row.forward_tile;
                if (rows_here(forward.c_str(), "").empty()) continue;  // an older GPU, or one with less shared memory
                all.push_back({forward + "," + row.backward + dtype + row.backward_tile, c});
            }
        }
    // Behind a forward through TF32 an exact backward is one of an out and an lse that are not.
    for (const char* pattern : wide)
        for (const char* tile : {"d64_v64_64x64", "d64_v64_128x64", "d128_v128_64x64"}) {
            if (!is_wanted(++n)) continue;
            Case c = case_of(kinds[0], pattern);
            c.tf32 = true, c.bound = 6e-3, c.head_dim = c.head_dim_v = n % 2 ? 64 : 52;
            c.seq_q = 700 + n % 3 * 37, c.seq_k = 700 + n % 2 * 90, c.column = n % 5 ? 1 : 2, c.shift = n % 7 ? 0 : 1;
            c.heads_q = n % 2 ? 4 : 2, c.heads_kv = 2, c.sinks = n % 3 == 0, c.softcap = n % 4 == 1 ? 1.5 : 0;
            c.value_in_key = n % 6 == 5;
            const std::string forward = std::string("sm80_block_forward_tf32_") + tile;
            if (rows_here(forward.c_str(), "").empty()) continue;
            all.push_back({forward + ",any_block_backward_f32_64x64", c});
        }
    run_all(all);
}

// A plan may use TF32 only where it is told so, and for float32; for other dtypes it is told in vain.
TEST(tf32_is_a_permission) {
    NEEDS_GPU();
    if (tensor_core_rows("_block_forward_tf32_").empty()) return check::skip(no_such_rows);
    const Context context = make_context();
    for (const bool is_allowed : {false, true})
        for (const spattn_dtype dtype : {abi::f32, abi::f64, f16}) {
            Case c;
            c.seq_q = c.seq_k = 2048, c.dtype = dtype, c.tf32 = is_allowed, c.backward = true;
            const Plan plan = make_plan(context, c);
            for (const spattn_enum op : {SPATTN_OP_FORWARD, SPATTN_OP_BACKWARD}) {
                const bool rounds = std::strstr(spattn_plan_kernel(plan.get(), op), "tf32");
                CHECK_EQ(rounds, is_allowed && dtype.bits == 32);
            }
        }
    Case refused;
    refused.dtype = abi::f32;
    const Force force("sm80_block_forward_tf32_d128_v128_64x64");
    const auto problem = refused.problem();
    spattn_plan* none = nullptr;
    CHECK_EQ(spattn_plan_create(context.get(), abi::parse("full").get(), &problem, nullptr, &none), SPATTN_E_NO_KERNEL);
    CHECK(std::strstr(spattn_last_error_text(), "only with SPATTN_PLAN_TF32"));
}

// Who sees one key has its value, and its score is lse: both show how operands are rounded.
TEST(tf32_is_rounded_to_nearest) {
    NEEDS_GPU();
    const Context context = make_context();
    const auto nearest = [](double x) {
        constexpr int digits = 11;
        int exponent;
        const double mantissa = std::frexp(x, &exponent);
        return std::ldexp(std::round(std::ldexp(mantissa, digits)), exponent - digits);
    };
    for (const std::string& row : tensor_core_rows("_block_forward_tf32_")) {
        Case c;
        c.seq_q = 70, c.seq_k = 1, c.heads_q = c.heads_kv * tile_heads_of(row), c.axes = SPATTN_BHSD;
        c.dtype = abi::f32, c.tf32 = true, c.head_dim = dim_of(row), c.head_dim_v = dim_v_of(row);
        check::context = row;
        const Truth inputs = make_inputs(c, 3);
        const Force force(row);
        const Plan plan = make_plan(context, c);
        if (!plan) continue;
        Run run(plan, c, inputs);
        run.both_passes();
        const Values out = run.out.read(), lse = run.lse.read();
        double worst_out = 0, worst_lse = 0;
        for (size_t i = 0; i < lse.size(); ++i) {
            double s = 0;
            for (size_t at = 0; at < size_t(c.head_dim); ++at)
                s += nearest(inputs.q[i * size_t(c.head_dim) + at]) * nearest(inputs.k[at]);
            worst_lse = std::fmax(worst_lse, std::fabs(lse[i] - s / std::sqrt(double(c.head_dim))));
            for (size_t at = 0; at < size_t(c.head_dim_v); ++at)
                worst_out = std::fmax(worst_out, std::fabs(out[i * size_t(c.head_dim_v) + at] - nearest(inputs.v[at])));
        }
        CHECK(worst_out <= 1e-5);
        CHECK(worst_lse <= 2e-5);
    }
    if (tensor_core_rows("_block_forward_tf32_").empty()) check::skip(no_such_rows);
}

// Lengths that split rows and columns.
TEST(split_rows_and_columns) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const Kind& kind : kinds) {
        Case c = case_of(kind, "causal & (global_tokens(3,1190,1199) | window(20,0))");
        c.seq_q = c.seq_k = 1200, c.head_dim = c.head_dim_v = 8, c.sinks = true;
        run_case(context, kind, 16, c);
    }
}

namespace {

constexpr int64_t first = 40;  // tokens of the document that stays as it is

// Whether the results of the first document are the same in both runs, to the bit.
void demand_same(const Case& c, const Run& before, const Run& after) {
    const auto same = [&](const DeviceTensor& a, const DeviceTensor& b, int64_t heads, int64_t columns) {
        const Values x = a.read(), y = b.read();
        bool is_same = true;
        for (int64_t head = 0; head < heads; ++head) {
            const auto start = x.begin() + head * c.seq_q * columns;
            is_same &= std::equal(start, start + first * columns, y.begin() + head * c.seq_q * columns);
        }
        return is_same;
    };
    CHECK(same(before.out, after.out, c.heads_q, c.head_dim_v));
    CHECK(same(before.lse, after.lse, c.heads_q, 1));
    CHECK(same(before.dq, after.dq, c.heads_q, c.head_dim));
    CHECK(same(before.dk, after.dk, c.heads_kv, c.head_dim));
    CHECK(same(before.dv, after.dv, c.heads_kv, c.head_dim_v));
}

}  // namespace

// Unions that run in pieces: two and three of them, classes of both pieces, queries that stand in listed tiles and
// split rows, rows that a piece or all leave empty, documents, heads that are in one piece or the other. So many tokens
// and heads that pieces are chosen.
TEST(pieces_by_tensor_cores) {
    NEEDS_GPU();
    if (rows_here("sm90_", "_block_forward_").empty()) return check::skip("no Hopper");
    const std::string of_heads = heads_for_pieces() == 8 ? "[0,1,1,0,1,0,0,1]" : "[0,1]",
                      by_head = "per_head(" + of_heads + ", window(30,30), dilated(1500,1500,60))";
    const std::string unions[] = {"causal & (window(16,0) | strided(64) | strided(81))",
                                  "(window(30,9) | strided(80)) - sink(90)",
                                  "documents(0,1900) & (window(40,0) | strided(40))",
                                  "strided(48) | strided(65)",
                                  "dilated(1500,1500,64) | window(9,9) | global_tokens(0,131,357)",
                                  by_head};
    struct Row {
        const char* tile;
        int64_t head_dim, head_dim_v;  // all columns of its tiles, or some
    };
    constexpr Row rows[] = {{"d64_v64_64x64", 64, 56},      {"d64_v64_128x64", 40, 64},   {"d64_v64_128x128", 64, 64},
                            {"d128_v128_128x64", 128, 72}, {"d128_v128_64x64", 104, 128}, {"d128_v128_64x64", 128, 40}};
    std::vector<Wanted> all;
    int n = 96;  // the fifth is one of 101
    for (const std::string& pattern : unions)
        for (const Row& row : rows) {
            if (!is_wanted(++n)) continue;
            const Kind& kind = kinds[1 + n % 2];
            Case c = case_of(kind, pattern.c_str());
            c.seq_q = c.seq_k = 4001, c.head_dim = row.head_dim, c.head_dim_v = row.head_dim_v;
            c.heads_q = heads_for_pieces(), c.heads_kv = c.heads_q / (1 + n % 2);
            c.axes = n % 3 ? SPATTN_BSHD : SPATTN_BHSD, c.padding = n % 4 ? 0 : 8, c.shift = n % 7 ? 0 : 1;
            c.sinks = n % 3 == 1, c.softcap = n % 5 == 1 ? 1.5 : 0;
            c.backward = n % 4 == 1 || pattern == by_head;
            const std::string dtype = std::string(kind.name) + "_";
            const char* const backward = row.head_dim <= 64 && row.head_dim_v <= 64 ? "d64_v64" : "d128_v128";
            all.push_back({"sm90_block_forward_" + dtype + row.tile + ",sm90_block_backward_apart_" + dtype + backward +
                               "_128x128",
                           c});
        }
    run_all(all);
    const Context context = make_context();
    size_t in_pieces = 0;
    for (const Wanted& wanted : all) {
        const Force force(wanted.rows);
        const Plan plan = make_plan(context, wanted.c);
        in_pieces += std::strchr(spattn_plan_kernel(plan.get(), SPATTN_OP_FORWARD), ',') != nullptr;
    }
    std::printf("%zu of %zu in pieces\n", in_pieces, all.size());
    CHECK(2 * in_pieces >= all.size());
}

// A key that is not finite reaches those who see it, in whichever piece, and nobody else.
TEST(isolation_between_pieces) {
    NEEDS_GPU();
    if (rows_here("sm90_", "_block_forward_").empty()) return check::skip("no Hopper");
    const Context context = make_context();
    for (const char* tile : {"bf16_d64_v64_64x64", "f16_d64_v64_64x64", "bf16_d128_v128_64x64"}) {
        const std::string row = std::string("sm90_block_forward_") + tile;
        Case c = case_of(kinds[dtype_of(row).code == SPATTN_BFLOAT ? 2 : 1],
                         "causal & (window(16,0) | strided(64) | strided(81))");
        c.seq_q = c.seq_k = 4001, c.heads_q = heads_for_pieces(), c.heads_kv = 1, c.backward = false;
        c.head_dim = c.head_dim_v = dim_of(row);
        check::context = row + ": " + c.name();
        const Truth clean = make_inputs(c, 5);
        const Force force(row);
        const Plan plan = make_plan(context, c);
        Run before(plan, c, clean);
        before.both_passes();
        const Values want = before.out.read();
        Truth dirty = clean;
        constexpr int64_t keys[] = {0, 1000, 3990};
        for (const int64_t key : keys)
            dirty.v[size_t(key * c.head_dim_v + 3)] = NAN, dirty.v[size_t(key * c.head_dim_v + 9)] = INFINITY;
        Run after(plan, c, dirty);
        after.both_passes();
        const Values got = after.out.read();
        size_t wrong = 0;
        for (size_t i = 0; i < got.size(); ++i) {
            const int64_t column = int64_t(i) % c.head_dim_v, query = int64_t(i) / c.head_dim_v % c.seq_q;
            const bool sees = std::any_of(std::begin(keys), std::end(keys), [&](int64_t key) {
                const int64_t from = query - key;
                return from >= 0 && (from <= 16 || from % 64 == 0 || from % 81 == 0);
            });
            if (sees && column == 3) wrong += !std::isnan(got[i]);
            else if (sees && column == 9) wrong += !(got[i] == INFINITY);
            else wrong += !(std::fabs(got[i] - want[i]) <= c.bound);
        }
        CHECK_EQ(wrong, size_t(0));
    }
}

// What one document holds does not change a bit of another's results, and no call differs from another.
TEST(isolation) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const Kind& kind : kinds)
        for (const char* pattern : {"documents(0,40,100)", "documents(0,40,100) & causal"}) {
            Case c = case_of(kind, pattern);
            c.heads_q = 4, c.heads_kv = 2, c.dlse = true;
            check::context = c.name();
            const Truth clean = make_inputs(c, 5);
            const Force force(rows_of(kind, kind.dtype.bits == 16 ? 64 : 32));
            const Plan plan = make_plan(context, c);
            Run before(plan, c, clean), again(plan, c, clean);
            before.both_passes(), again.both_passes();
            for (auto part : {&Run::out, &Run::lse, &Run::dq, &Run::dk, &Run::dv})
                CHECK((before.*part).read() == (again.*part).read());
            Truth dirty = clean;
            const auto spoil = [&](Values& x, int64_t heads, int64_t columns) {
                for (int64_t head = 0; head < heads; ++head)
                    for (int64_t i = first * columns; i < c.seq_q * columns; ++i)
                        x[size_t(head * c.seq_q * columns + i)] = i % 3 == 0 ? NAN : (i % 3 - 1.5) * INFINITY;
            };
            spoil(dirty.q, c.heads_q, c.head_dim), spoil(dirty.k, c.heads_kv, c.head_dim);
            spoil(dirty.v, c.heads_kv, c.head_dim_v), spoil(dirty.dout, c.heads_q, c.head_dim_v);
            Run after(plan, c, dirty);
            after.both_passes();
            demand_same(c, before, after);
        }
}
