// SPDX-License-Identifier: MIT
#include "gpu/cases.h"

#include <cstdlib>

namespace gpu {

namespace {

const char* const patterns[] = {"full",
                                "causal",
                                "causal & window(100,0)",
                                "causal & (sink(5) | window(64,0))",
                                "window(3,200)",
                                "block_diagonal(48)",
                                "residue(3,1)",
                                "bigbird(64,1,0,1,3)",
                                "global_tokens(0,77) | window(10,10)",
                                "dilated(90,90,7)",
                                "causal - causal",
                                "sink(1)",
                                "documents(0,1,130,131,200)",
                                "per_head([0,1], causal & window(30,0), strided(5))"};

struct Lengths {
    int64_t q, k;
};
constexpr Lengths lengths[] = {{1, 1},     {1, 129},   {63, 65},   {127, 128}, {128, 127}, {129, 191}, {191, 192},
                               {193, 193}, {255, 257}, {256, 383}, {385, 385}, {200, 640}, {300, 60}};

constexpr Float8 float8_forms[] = {Float8::of_rows, Float8::of_heads, Float8::unscaled};

}  // namespace

std::vector<std::string> rows_here(const char* prefix, const char* pass) {
    const char* const wanted = std::getenv("SPATTN_TEST_ROWS");
    std::vector<std::string> rows;
    for (int32_t i = 0; i < spattn_kernel_count(); ++i) {
        const std::string name = spattn_kernel_name(i);
        if (spattn_kernel_runs_here(i) && name.rfind(prefix, 0) == 0 && name.find(pass) != std::string::npos &&
            (!wanted || name.rfind(wanted, 0) == 0))
            rows.push_back(name);
    }
    return rows;
}

std::vector<std::string> tensor_core_rows(const char* pass) {
    std::vector<std::string> rows = rows_here("sm90_", pass);
    for (std::string& row : rows_here("sm80_", pass)) rows.push_back(std::move(row));
    return rows;
}

spattn_dtype dtype_of(const std::string& row) {
    if (row.find("_bf16_") != std::string::npos) return abi::bf16;
    return row.find("_f16_") != std::string::npos ? f16 : abi::f32;
}
int64_t dim_of(const std::string& row) { return std::stoll(row.substr(row.find("_d") + 2)); }
int64_t dim_v_of(const std::string& row) { return std::stoll(row.substr(row.find("_v") + 2)); }
int64_t tile_heads_of(const std::string& row) {
    const size_t at = row.find("_heads");
    return at == std::string::npos ? 1 : std::stoll(row.substr(at + 6));
}

bool is_float8(const std::string& row) { return row.find("_float8_") != std::string::npos; }

bool is_tf32(const std::string& row) { return row.find("_tf32_") != std::string::npos; }

void set_dtype(Case& c, const std::string& row) {
    c.dtype = dtype_of(row), c.tf32 = is_tf32(row);
    if (is_float8(row)) c.float8 = Float8::of_rows, c.bound = 2.4e-2, c.row_bound = 1e-2;
}

std::vector<Case> shapes_of(const std::string& row) {
    std::vector<Case> cases;
    int n = 0;
    for (const Lengths& l : lengths)
        for (const char* pattern : patterns) {
            Case c;
            c.pattern = pattern, c.seq_q = l.q, c.seq_k = l.k;
            set_dtype(c, row);
            if (is_float8(row)) c.float8 = float8_forms[n / 2 % 3];
            c.heads_kv = n % 2 ? 2 : 1, c.batch = 1 + n % 2;
            c.axes = n % 3 == 0 ? SPATTN_BHSD : n % 3 == 1 && c.batch == 1 ? SPATTN_THD : SPATTN_BSHD;
            c.padding = n % 4 == 1 ? 8 : 0;
            if (is_wanted(++n)) cases.push_back(c);
        }
    return cases;
}

void run_case(const Context& context, const std::string& rows, const Case& c) {
    check::context = rows + ": " + c.name();
    const Truth& truth = make_truth(c, seed_of(c));
    const Force force(rows);
    const Plan plan = make_plan(context, c);
    if (!plan) return;
    Run run(plan, c, truth);
    run.both_passes();
    run.demand_truth(truth);
}

size_t run_cases(const Context& context, const std::string& row, const std::string& rows,
                 const std::vector<Case>& cases) {
    prepare_truths(cases);
    for (const Case& c : cases) run_case(context, rows, c);
    std::printf("%s: %zu cases\n", row.c_str(), cases.size());
    check::context = row;
    if (check::every() == 1) CHECK(!cases.empty());
    return cases.size();
}

}  // namespace gpu
