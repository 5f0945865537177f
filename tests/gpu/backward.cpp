// SPDX-License-Identifier: MIT
// The backward rows for tensor cores against the double-precision rows. The plain ones stand in options.cpp.
#include <algorithm>
#include <regex>

#include "gpu/cases.h"

using namespace gpu;

namespace {

std::vector<std::string> backward_rows() { return tensor_core_rows("_block_backward_"); }

// A forward row of the same products whose tiles are wide enough.
std::string pair_with(const std::string& row) {
    const auto is_of = [&](const char* products) { return row.find(products) != std::string::npos; };
    const char* const products = is_of("_f16_") ? "f16" : is_of("_tf32_") ? "tf32" : is_of("_f32_") ? "f32" : "bf16";
    const char* const tile = dim_of(row) > 256   ? "_d512_v512_64x64,"
                             : dim_of(row) > 128 ? "_d256_v256_64x64,"
                                                 : "_d128_v128_64x64,";
    return std::string("sm80_block_forward_") + products + tile + row;
}

// A row of lists and that of the other pass.
std::string with_its_forward(const std::string& row) {
    std::string forward = row;
    const auto replace = [&](const std::string& from, const char* to) {
        if (const size_t at = forward.find(from); at != std::string::npos) forward.replace(at, from.size(), to);
    };
    const bool is_pair = row.find("_pair_") != std::string::npos;
    replace("backward", "forward");
    if (is_pair) replace("_pair", ""), replace("_128x64", "_64x64");  // two CTAs share a tile in the backward alone
    return forward + "," + row;
}

Case backward_case(const std::string& row, Case c) {
    set_dtype(c, row);
    c.backward = true, c.head_dim = dim_of(row), c.head_dim_v = dim_v_of(row);
    return c;
}

}  // namespace

TEST(tensor_core_rows_backward) {
    NEEDS_GPU();
    const Context context = make_context();
    size_t met = 0;
    int n = 0;
    for (const std::string& row : backward_rows()) {
        std::vector<Case> cases;
        for (Case c : shapes_of(row)) {
            if (++n % 4) continue;  // the truth takes long; other rows get other cases
            c = backward_case(row, c);
            // All columns of the row's tile, or some of them.
            if (n % 3 == 0) c.head_dim -= 24;
            if (n % 5 == 0) c.head_dim_v -= 8 * (n % 7);
            if (dim_of(row) > 256) {
                if (n % 3) continue;
                // Columns of a sum are parts of 256: one of them, few columns in the second, or rows of odd addresses.
                constexpr int64_t dims[][2] = {{512, 512}, {296, 296}, {320, 264}, {512, 200}, {300, 511}, {250, 300}};
                c.head_dim = dims[n / 12 % 6][0], c.head_dim_v = dims[n / 12 % 6][1];
                if (row.rfind("sm90_", 0) == 0) c.head_dim &= ~7, c.head_dim_v &= ~7;  // rows of 16 bytes
            }
            c.softcap = n % 7 == 1 ? 1.5 : 0, c.sinks = n % 5 == 2, c.dlse = n % 11 < 6;
            // Where queries see one key, dp less delta is all rounding, of each query, and the key's gradient their sum.
            if (c.tf32) c.bound = 2e-2;
            cases.push_back(c);
        }
        met += run_cases(context, row, pair_with(row), cases);
    }
    if (met == 0) check::skip(no_such_cases);
}

// Lists that the plan makes, of groups that fill a tile of rows, part of one, or several; what a call lists is drawn in
// tests/random.
TEST(tensor_core_rows_of_lists_backward) {
    NEEDS_GPU();
    const Context context = make_context();
    const std::vector<std::string> rows = tensor_core_rows("_gather_backward_");
    constexpr int64_t groups[] = {1, 5, 64, 70, 130};
    size_t met = 0;
    int n = 0;
    for (const std::string& row : rows) {
        std::vector<Case> cases;
        for (Case c : shapes_of(row)) {
            if (++n % 8 || c.pattern.find("per_head") != std::string::npos) continue;  // groups share their lists
            c = backward_case(row, c);
            c.value_in_key = c.head_dim > 256;
            if (n % 3 == 0) c.head_dim -= 24, c.head_dim_v -= 24;
            // Hopper's rows read 16 bytes at a time.
            if (n % 3 == 1 && row.rfind("sm80_", 0) == 0) c.head_dim -= 5, c.head_dim_v -= 3;
            const int64_t group = groups[n / 8 % 5];
            if (group >= 64) c.seq_q = std::min<int64_t>(c.seq_q, 4900 / group);
            c.heads_q = c.heads_kv * group;
            if (row.find("_pair_") == std::string::npos) c.softcap = n % 5 == 1 ? 1.5 : 0;  // which pairs know not
            c.sinks = n % 7 < 3, c.dlse = n % 11 < 6;
            c.deterministic = n % 16 == 0;
            c.shift = n % 24 == 16 ? 3 : 0, c.column = n % 40 == 32 ? 2 : 1;
            cases.push_back(c);
        }
        met += run_cases(context, row, with_its_forward(row), cases);
    }
    if (met == 0) check::skip(no_such_cases);
}

// Rows are given copies of what operands stand for, whatever these are, and make gradients of that.
TEST(operands_of_float8_backward) {
    NEEDS_GPU();
    const Context context = make_context();
    int n = 0, shape = 0;
    for (const std::string& row : rows_here("", "_backward_bf16_")) {
        if (row.rfind("sm", 0) != 0 && row.rfind("any", 0) != 0) continue;
        const bool has_dims = row.find("_v") != std::string::npos, lists = row.find("_gather_") != std::string::npos;
        std::vector<Case> cases;
        for (Case c : shapes_of(row)) {
            const bool see_alike = c.pattern.find("per_head") == std::string::npos;
            if (++shape % 53 || (!see_alike && row.find("any_block") != 0)) continue;
            c.float8 = Float8(1 + ++n % 3), c.backward = true;
            c.head_dim = has_dims ? dim_of(row) : 72, c.head_dim_v = has_dims ? dim_v_of(row) : 40;
            c.value_in_key = lists && c.head_dim > 256;
            if (n % 4 == 0) c.head_dim -= 24, c.head_dim_v -= 24;
            if (lists) c.heads_q = c.heads_kv * 5;
            c.column = n % 8 == 5 ? 2 : 1, c.shift = n % 8 == 6 ? 1 : 0, c.padding = n % 8 == 7 ? 3 : c.padding;
            c.sinks = n % 7 < 3, c.dlse = n % 5 < 3, c.deterministic = lists && n % 6 == 0;
            cases.push_back(c);
        }
        const std::string rows = !has_dims ? row : lists ? with_its_forward(row) : pair_with(row);
        run_cases(context, row, rows, cases);
    }
    // Rows that the library chooses, of one piece or two.
    for (const char* pattern : {"full", "causal & (window(40,0) | strided(32))"}) {
        Case whole;
        whole.pattern = pattern, whole.seq_q = whole.seq_k = 700, whole.heads_q = 4, whole.heads_kv = 2;
        whole.float8 = Float8::of_rows, whole.bound = 2.4e-2, whole.row_bound = 1e-2, whole.backward = true;
        run_case(context, "", whole);
    }
}

// Every processor has several tasks of many blocks, and L2 all that it can take: warps run far apart.
TEST(lists_of_many_heads_at_full_load) {
    NEEDS_GPU();
    const Context context = make_context();
    std::vector<std::string> rows;
    std::vector<Case> cases;
    for (const std::string& row : tensor_core_rows("_gather_backward_")) {
        if (row.find("_bf16_") == std::string::npos) continue;
        Case c;
        c.pattern = "causal & window(127,0)", c.dtype = abi::bf16;
        c.seq_q = 200, c.seq_k = 327, c.heads_q = 128, c.heads_kv = 1;
        c = backward_case(row, c);
        c.value_in_key = c.head_dim > 256;
        rows.push_back(row), cases.push_back(c);
    }
    prepare_truths(cases);
    for (size_t i = 0; i < rows.size(); ++i) run_case(context, with_its_forward(rows[i]), cases[i]);
    if (rows.empty()) check::skip(no_such_rows);
}

// More tasks than the chip has processors, with and without work; keys that all queries see are split.
TEST(many_tasks_backward) {
    NEEDS_GPU();
    const Context context = make_context();
    const auto cases_of = [](const std::string& row) {
        Case packed;
        packed.pattern = "documents(573,694,731,1132,1219,1500,1554)", packed.seq_q = packed.seq_k = 2048;
        packed.heads_q = 15, packed.heads_kv = 3;
        Case split;  // Parts of the sinks' column begin in the midst of turns that the group's heads take at it.
        split.pattern = "causal & (sink(64) | window(40,0))", split.seq_q = split.seq_k = 6000;
        split.heads_q = 3, split.heads_kv = 1;
        return std::vector{backward_case(row, packed), backward_case(row, split)};
    };
    std::vector<Case> all;
    for (const std::string& row : backward_rows())
        for (const Case& c : cases_of(row)) all.push_back(c);
    prepare_truths(all);
    for (const std::string& row : backward_rows())
        for (const Case& c : cases_of(row)) run_case(context, pair_with(row), c);
    if (all.empty()) check::skip(no_such_rows);
}

TEST(misaligned_views_backward) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const std::string& row : backward_rows()) {
        Case c;
        c.pattern = "causal & (sink(5) | window(64,0))", c.seq_q = c.seq_k = 300, c.shift = 4, c.padding = 4;
        run_case(context, pair_with(row), backward_case(row, c));
        // After an odd number of rows, parts of the keys that all queries see must still lie where four floats are
        // written at once.
        c.pattern = "causal & (sink(3) | window(1,0))", c.seq_q = 9047, c.seq_k = 5365, c.heads_q = c.heads_kv;
        run_case(context, pair_with(row), backward_case(row, c));
    }
    if (backward_rows().empty()) check::skip(no_such_rows);
}

// Whatever else the chip does.
TEST(deterministic_gradients_have_the_same_bits) {
    NEEDS_GPU();
    const Context context = make_context();
    cudaStream_t beside;
    cuda(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), "stream");
    const auto run = [&](const std::string& rows, const Case& c) {
        check::context = rows + " " + c.name();
        const Truth inputs = make_inputs(c, 11);
        const Force force(rows);
        const Plan plan = make_plan(context, c);
        Run first(plan, c, inputs), second(plan, c, inputs), noise(plan, c, inputs);
        first.both_passes(), second.both_passes();
        for (int i = 0; i < 5; ++i) {
            succeed(noise.forward(beside), "forward");
            succeed(second.backward(), "backward");
            cuda(cudaDeviceSynchronize(), "backward");
            for (auto part : {&Run::dq, &Run::dk, &Run::dv}) CHECK((first.*part).read() == (second.*part).read());
        }
    };
    // What a plan of such rows says that it adds in the order of arrival.
    const auto added_by = [&](const std::string& rows, const Case& c) {
        const Force force(rows);
        const Plan plan = make_plan(context, c);
        std::smatch line;
        const std::string text = abi::explain(plan.get());
        return std::regex_search(text, line, std::regex("\n  bits +last ones of (.*) differ")) ? line.str(1) : "";
    };
    for (const std::string& row : backward_rows()) {
        Case c;
        c.pattern = "causal & (sink(64) | window(300,0))", c.seq_q = c.seq_k = 2000, c.heads_q = 12, c.heads_kv = 3;
        c = backward_case(row, c);
        const std::string added = added_by(pair_with(row), c);
        c.deterministic = true;
        if (added.empty()) {
            run(pair_with(row), c);
        } else {
            CHECK_EQ(added, std::string("dq"));
            const Force force(pair_with(row));
            const auto problem = c.problem();
            spattn_plan* none = nullptr;
            CHECK_EQ(spattn_plan_create(context.get(), abi::parse(c.pattern.c_str()).get(), &problem, nullptr, &none),
                     SPATTN_E_NO_KERNEL);
        }
    }
    for (const std::string& row : tensor_core_rows("_gather_backward_")) {
        Case c;
        c.pattern = "causal & (sink(64) | window(300,0))", c.seq_q = 300, c.seq_k = 700, c.heads_q = 70;
        c.value_in_key = dim_of(row) > 256;
        c = backward_case(row, c);
        CHECK_EQ(added_by(with_its_forward(row), c), std::string(c.value_in_key ? "dk" : "dk and dv"));
        c.deterministic = true;
        CHECK_EQ(added_by(with_its_forward(row), c), std::string());
        run(with_its_forward(row), c);
    }
    cuda(cudaStreamDestroy(beside), "stream");
}
