// SPDX-License-Identifier: MIT
// Every CUDA forward row of this machine against the double-precision rows, on cases made to hurt.
#include <algorithm>
#include <tuple>

#include "gpu/cases.h"

using namespace gpu;

namespace {

std::vector<std::string> forward_rows(const char* prefix) { return rows_here(prefix, "_forward_"); }

std::vector<std::string> tensor_rows() { return tensor_core_rows("_block_forward_"); }

}  // namespace

TEST(tensor_core_rows) {
    NEEDS_GPU();
    const Context context = make_context();
    size_t met = 0;
    int n = 0;
    for (const std::string& row : tensor_rows()) {
        const int64_t most = dim_of(row), most_v = dim_v_of(row), tile_heads = tile_heads_of(row);
        std::vector<Case> cases;
        for (Case c : shapes_of(row)) {
            // All columns of the row's tile, or some of them.
            c.head_dim = ++n % 3 ? most : most - 24, c.head_dim_v = n % 5 ? most_v : most_v - 8 * (n % 7);
            if (most > 256) {
                if (tile_heads == 1 && n % 4) continue;  // the truth takes long
                // Columns of out are parts of 256: one of them, few columns in the second, or rows of odd addresses.
                constexpr int64_t dims[][2] = {{512, 512}, {296, 296}, {320, 264}, {512, 200}, {300, 511}};
                c.head_dim = dims[n / 4 % 5][0], c.head_dim_v = dims[n / 4 % 5][1];
                if (row.rfind("sm90_", 0) == 0) c.head_dim &= ~7, c.head_dim_v &= ~7;  // rows of 16 bytes
            }
            if (tile_heads > 1) {
                // Groups of one tile and of three. They see the same keys.
                if (n % 7 || c.pattern.find("per_head") != std::string::npos) continue;
                c.heads_q = c.heads_kv * tile_heads * (n % 2 ? 1 : 3);
                c.softcap = n % 3 == 1 ? 1.5 : 0, c.sinks = n % 5 < 2;
            }
            cases.push_back(c);
        }
        met += run_cases(context, row, row, cases);
    }
    if (met == 0) check::skip(no_such_cases);
}

// Lists that the plan makes, of groups that fill a tile of rows, part of one, or several; what a call lists is drawn in
// tests/random.
TEST(tensor_core_rows_of_lists) {
    NEEDS_GPU();
    const Context context = make_context();
    constexpr int64_t groups[] = {1, 5, 64, 70};
    size_t met = 0;
    int n = 0;
    for (const std::string& row : tensor_core_rows("_gather_forward_")) {
        std::vector<Case> cases;
        for (Case c : shapes_of(row)) {
            if (++n % 4 || c.pattern.find("per_head") != std::string::npos) continue;  // groups share their lists
            c.head_dim = dim_of(row), c.head_dim_v = dim_v_of(row), c.value_in_key = c.head_dim > 256;
            if (n % 3 == 0) c.head_dim -= 24, c.head_dim_v -= 24;
            const int64_t group = groups[n / 4 % 4];
            if (group >= 64) c.seq_q = std::min<int64_t>(c.seq_q, 70);  // the truth takes long
            c.heads_q = c.heads_kv * group, c.backward = false;
            c.softcap = n % 5 == 1 ? 1.5 : 0, c.sinks = n % 7 < 3;
            c.shift = n % 16 == 4 ? 3 : 0, c.column = n % 32 == 8 ? 2 : 1;
            cases.push_back(c);
        }
        met += run_cases(context, row, row, cases);
    }
    if (met == 0) check::skip(no_such_cases);
}

// Lists that are split among processors, and among them such as have fewer keys than parts, or none.
TEST(lists_of_few_queries) {
    NEEDS_GPU();
    const Context context = make_context();
    constexpr const char* patterns[] = {"full", "causal & window(900,0)", "residue(2,1) | sink(3)", "residue(2,1)"};
    size_t met = 0;
    int n = 0;
    for (const std::string& row : tensor_core_rows("_gather_forward_")) {
        std::vector<Case> cases;
        for (const char* pattern : patterns) {
            Case c;
            c.pattern = pattern, c.seq_q = 1 + ++n % 5, c.seq_k = 1201, c.dtype = dtype_of(row);
            c.head_dim = dim_of(row), c.head_dim_v = dim_v_of(row), c.value_in_key = c.head_dim > 256;
            if (n % 2) c.head_dim -= 24, c.head_dim_v -= 24;
            c.batch = 1 + n % 2, c.heads_q = c.heads_kv * (n % 3 ? 5 : 70);
            c.softcap = n % 4 == 1 ? 1.5 : 0, c.sinks = n % 3 == 0;
            cases.push_back(c);
        }
        met += run_cases(context, row, row, cases);
    }
    if (met == 0) check::skip(no_such_cases);
}

// A row of blocks with a mask each, hundreds of runs, is split among processors: each finds its own among them. Most
// keys of a block are seen by nobody.
TEST(few_queries_on_keys_in_many_runs) {
    NEEDS_GPU();
    const Context context = make_context();
    size_t met = 0;
    for (const std::string& row : tensor_rows()) {
        if (is_tf32(row)) continue;
        Case c;
        c.pattern = "dilated(19000,0,3)", c.seq_q = 2, c.seq_k = 20000;
        set_dtype(c, row);
        c.head_dim = dim_of(row), c.head_dim_v = dim_v_of(row), c.heads_q = tile_heads_of(row);
        met += run_cases(context, row, row, {c});
    }
    if (met == 0) check::skip(no_such_cases);
}

TEST(plain_rows) {
    NEEDS_GPU();
    const Context context = make_context();
    const int64_t dims[][2] = {{1, 1}, {7, 3}, {32, 32}, {64, 80}, {130, 128}, {1024, 1024}};
    size_t met = 0;
    int n = 0;
    for (const std::string& row : forward_rows("any_block_")) {
        if (row.find("_f64_") != std::string::npos) continue;  // options.cpp has doubles
        std::vector<Case> cases;
        for (Case c : shapes_of(row)) {
            if (++n % 4) continue;
            const auto& dim = dims[n / 4 % 6];
            c.head_dim = dim[0], c.head_dim_v = dim[1];
            c.column = n % 8 ? 1 : 2, c.shift = n % 16 ? 0 : 1, c.padding = n % 12 ? 0 : 3;
            cases.push_back(c);
        }
        met += run_cases(context, row, row, cases);
    }
    if (met == 0) check::skip(no_such_cases);
}

// Queries of zeros take the mean of equal values: all roundings of such a sum go one way. Rows add up 16 to 64 terms before
// these meet the others, and lose half a unit for each step of either sum at most.
TEST(long_sums_of_equal_values_lose_little) {
    NEEDS_GPU();
    const Context context = make_context();
    size_t met = 0;
    for (const std::string& row : forward_rows("any_")) {
        if (row.find("_f32") == std::string::npos) continue;
        Case c;
        c.dtype = abi::f32, c.heads_q = 1, c.seq_q = 16, c.seq_k = 16384, c.head_dim = c.head_dim_v = 16;
        Truth inputs = make_inputs(c, 5);
        std::fill(inputs.q.begin(), inputs.q.end(), 0.);
        std::fill(inputs.v.begin(), inputs.v.end(), double(0.1F));
        check::context = row;
        const Force force(row);
        const Plan plan = make_plan(context, c);
        if (!plan) continue;
        Run run(plan, c, inputs);
        succeed(run.forward(), "forward");
        cuda(cudaDeviceSynchronize(), "forward");
        double worst = 0;
        for (const double x : run.out.read()) worst = std::fmax(worst, std::fabs(x / double(0.1F) - 1));
        CHECK(worst < 160 * 0x1p-24);
        ++met;
    }
    if (met == 0) check::skip(no_such_cases);
}

// What they stand for is made for each row, whatever the operands' axes, strides and scales. Of rows that multiply
// bytes, the tests above have all shapes.
TEST(operands_of_float8) {
    NEEDS_GPU();
    const Context context = make_context();
    int n = 0, shape = 0;
    for (const std::string& row : rows_here("", "_forward_bf16_")) {
        if (row.rfind("sm", 0) != 0 && row.rfind("any", 0) != 0) continue;
        const bool has_dims = row.find("_v") != std::string::npos, lists = row.find("_gather_") != std::string::npos;
        std::vector<Case> cases;
        for (Case c : shapes_of(row)) {
            const bool see_alike = c.pattern.find("per_head") == std::string::npos;
            if (++shape % 61 || (!see_alike && row.find("any_block") != 0)) continue;
            c.float8 = Float8(1 + ++n % 3);
            c.head_dim = has_dims ? dim_of(row) : 72, c.head_dim_v = has_dims ? dim_v_of(row) : 40;
            c.value_in_key = (lists && c.head_dim > 256) || (n % 5 == 0 && c.head_dim_v <= c.head_dim);
            if (n % 4 == 0) c.head_dim -= 24, c.head_dim_v -= 24;
            c.heads_q = c.heads_kv * (lists ? 5 : tile_heads_of(row));
            c.column = n % 8 == 5 ? 2 : 1, c.shift = n % 8 == 6 ? 1 : 0, c.padding = n % 8 == 7 ? 3 : c.padding;
            c.softcap = n % 5 == 1 ? 1.5 : 0, c.sinks = n % 7 < 3;
            cases.push_back(c);
        }
        run_cases(context, row, row, cases);
    }
    // Rows that the library chooses, of one piece or two.
    for (const char* pattern : {"full", "causal & (window(40,0) | strided(32))"}) {
        Case whole;
        whole.pattern = pattern, whole.seq_q = whole.seq_k = 700, whole.heads_q = 4, whole.heads_kv = 2;
        whole.float8 = Float8::of_rows, whole.bound = 2.4e-2, whole.row_bound = 1e-2;
        run_case(context, "", whole);
    }
}

// A row's least score must not be taken for its largest: where all are large, exponentials would be beyond floats.
TEST(scales_of_float8_may_be_negative) {
    NEEDS_GPU();
    const Context context = make_context();
    std::vector<std::string> rows = rows_here("sm90_block_forward_float8", "_forward_");
    rows.push_back("");
    for (const std::string& row : rows)
        for (const Float8 form : {Float8::of_rows, Float8::of_heads}) {
            Case c;
            c.seq_q = c.seq_k = 300, c.heads_q = 4, c.heads_kv = 2, c.float8 = form;
            c.bound = 0.1, c.row_bound = 1e-2;
            if (!row.empty()) c.head_dim = dim_of(row), c.head_dim_v = dim_v_of(row);
            for (const double scale : {0.1, 1.5}) {
                c.scale = scale;
                run_case(context, row, c);
            }
        }
}

TEST(misaligned_views) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const std::string& row : tensor_rows())
        for (int64_t shift : {1, 4, 8}) {
            Case c;
            c.pattern = "causal & (sink(5) | window(64,0))", c.seq_q = c.seq_k = 300, c.shift = shift;
            set_dtype(c, row);
            c.head_dim = dim_of(row), c.head_dim_v = dim_v_of(row);
            if (const int64_t heads = tile_heads_of(row); heads > 1) c.heads_q = c.heads_kv * heads;
            c.padding = shift == 4 ? 4 : 0;
            run_case(context, row, c);
            c.column = 2;
            run_case(context, row, c);
        }
    if (tensor_rows().empty()) check::skip(no_such_rows);
}

TEST(scales) {
    NEEDS_GPU();
    const Context context = make_context();
    // Large scales make the maximum of a row grow from block to block.
    for (double scale : {-0.3, 1e-30, 0.01, 0.5, 3.0}) {
        Case c;
        c.pattern = "causal", c.seq_q = c.seq_k = 700, c.scale = scale;
        run_case(context, "", c);
        c.dtype = abi::f32;
        run_case(context, "", c);
    }
}

// Rows of 80 and more blocks beside short ones: the schedule splits them, and combine puts them together.
TEST(split_rows) {
    NEEDS_GPU();
    const Context context = make_context();
    const std::string tf32 = "sm80_block_forward_tf32_d128_v128_64x64";
    const std::string wide = "sm80_block_forward_bf16_d512_v512_64x64";
    for (const std::string& row : {std::string(), std::string("any_block_forward_bf16_64x64"), tf32, wide}) {
        if ((row == tf32 || row == wide) && rows_here(row.c_str(), "_forward_").empty()) continue;
        Case c;
        if (row == tf32) c.dtype = abi::f32, c.tf32 = true;
        c.pattern = "causal & (global_tokens(9990,9999) | window(40,0))", c.seq_q = c.seq_k = 10000, c.heads_q = 1;
        if (row == wide) c.pattern = "full", c.seq_q = 70, c.seq_k = 5300, c.head_dim = c.head_dim_v = 320;
        run_case(context, row, c);
    }
}

// Few queries of groups, whose heads share tiles.
TEST(split_rows_of_few_queries) {
    NEEDS_GPU();
    const Context context = make_context();
    Case decoding;
    decoding.heads_q = 32, decoding.heads_kv = 2, decoding.seq_q = 3, decoding.seq_k = 30011, decoding.sinks = true;
    run_case(context, "", decoding);
    decoding.heads_q = 6, decoding.pattern = "sink(64) | window(9000,0)", decoding.seq_q = 70;
    run_case(context, "", decoding);
    decoding.heads_q = 16, decoding.seq_q = 3, decoding.seq_k = 9000, decoding.head_dim = decoding.head_dim_v = 512;
    run_case(context, "", decoding);
}

// Batch 4, 4 heads, 128 tokens, head_dim 32, blocks of 32.
TEST(small_heads_and_blocks) {
    NEEDS_GPU();
    const Context context = make_context();
    for (spattn_dtype dtype : {abi::f32, abi::bf16}) {
        Case c;
        c.pattern = "bigbird(32,1,1,1,5)", c.batch = 4, c.heads_q = c.heads_kv = 4, c.head_dim = c.head_dim_v = 32,
        c.dtype = dtype;
        run_case(context, std::string("any_block_forward_") + (dtype.code == SPATTN_BFLOAT ? "bf16" : "f32") + "_32x32",
                c);
    }
}

// Blocks of rows without a key, behind others with work and between them, in more tasks than the chip has processors.
TEST(tasks_without_keys) {
    NEEDS_GPU();
    const Context context = make_context();
    Case packed;
    packed.pattern = "documents(573,694,731,1132,1219,1500,1554)", packed.seq_q = packed.seq_k = 2048;
    packed.heads_q = 15, packed.heads_kv = 3;
    Case scattered;
    scattered.pattern = "dilated(481,662,6) & block_diagonal(660)", scattered.batch = 2, scattered.heads_q = 10;
    scattered.heads_kv = 2, scattered.seq_q = 803, scattered.seq_k = 640;
    Case few;
    few.pattern = "documents(0,100) | documents(3000,3100)", few.seq_q = few.seq_k = 4096, few.heads_q = 8;
    for (const Case& c : {packed, scattered, few}) run_case(context, "", c);
}

// One document holds NaN and infinity in all that it has; the other's results are as if it did not.
TEST(what_a_query_does_not_see_changes_nothing) {
    NEEDS_GPU();
    const Context context = make_context();
    std::vector<std::string> rows = tensor_rows();
    for (const std::string& row : forward_rows("any_block_"))
        if (row.find("_f64_") == std::string::npos) rows.push_back(row);  // options.cpp has doubles
    for (const std::string& row : rows)
        for (const float hostile : {std::nanf(""), INFINITY, -INFINITY}) {
            Case c;
            constexpr int64_t first = 200, seq = 520;
            c.pattern = "documents(0,200,520) & (sink(7) | window(90,40))", c.seq_q = c.seq_k = seq;
            set_dtype(c, row);
            if (row.find("_v") != std::string::npos) c.head_dim = dim_of(row), c.head_dim_v = dim_v_of(row);
            if (const int64_t heads = tile_heads_of(row); heads > 1) c.heads_q = c.heads_kv * heads;
            check::context = row + " " + c.name();
            const Truth& clean = make_truth(c, 7);
            Truth dirty = clean;
            for (auto [values, heads, columns] : {std::tuple{&dirty.q, c.heads_q, c.head_dim},
                                                  {&dirty.k, c.heads_kv, c.head_dim},
                                                  {&dirty.v, c.heads_kv, c.head_dim_v}})
                for (int64_t head = 0; head < c.batch * heads; ++head)
                    std::fill(values->begin() + (head * seq + first) * columns,
                              values->begin() + (head + 1) * seq * columns, hostile);
            const Force force(row);
            const Plan plan = make_plan(context, c);
            Run run(plan, c, dirty);
            run.both_passes();
            const Values out = run.out.read(), lse = run.lse.read();
            double worst = 0;
            bool shows = true;
            const auto off = [](double got, double want) { return std::isnan(got) ? INFINITY : std::fabs(got - want); };
            for (size_t row = 0; row < lse.size(); ++row) {
                const bool is_clean = int64_t(row) % seq < first;
                if (is_clean) worst = std::fmax(worst, off(lse[row], clean.lse[row]));
                for (size_t i = row * size_t(c.head_dim_v); i < (row + 1) * size_t(c.head_dim_v); ++i)
                    if (is_clean)
                        worst = std::fmax(worst, off(out[i], clean.out[i]));
                    else
                        shows &= std::isnan(out[i]);
            }
            check::context += ", off by " + std::to_string(worst);
            CHECK(worst <= 3e-2);
            CHECK(shows);
        }
}
