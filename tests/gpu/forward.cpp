// SPDX-License-Identifier: MIT
// Every CUDA forward row of this machine against the double-precision rows, on cases made to hurt.
#include <algorithm>
#include <cstdlib>

#include "gpu/gpu.h"

using namespace gpu;

namespace {

// SPATTN_FORCE_KERNEL for as long as it lives.
class Force {
public:
    explicit Force(const std::string& kernel) { setenv("SPATTN_FORCE_KERNEL", kernel.c_str(), 1); }
    ~Force() { unsetenv("SPATTN_FORCE_KERNEL"); }
};

std::vector<std::string> forward_rows(const char* prefix) {
    std::vector<std::string> rows;
    for (int32_t i = 0; i < spattn_kernel_count(); ++i) {
        const std::string name = spattn_kernel_name(i);
        if (spattn_kernel_runs_here(i) && name.rfind(prefix, 0) == 0 && name.find("_forward_") != std::string::npos)
            rows.push_back(name);
    }
    return rows;
}

void run_row(const Context& context, const std::string& row, const Case& c) {
    check::context = row + " " + c.name();
    const Truth truth = make_truth(c, unsigned(c.seq_q * 131 + c.seq_k));
    const Force force(row);
    const Plan plan = make_plan(context, c);
    if (!plan) return;
    Run run(plan, c, truth);
    succeed(run.forward(), "forward");
    cuda(cudaDeviceSynchronize(), "forward");
    run.demand_truth(c, truth);
}

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

// SPATTN_TEST_EVERY=n runs one case of n: under tools that slow every access down.
int every() {
    const char* given = std::getenv("SPATTN_TEST_EVERY");
    return given ? std::max(1, std::atoi(given)) : 1;
}

struct Lengths {
    int64_t q, k;
};
constexpr Lengths lengths[] = {{1, 1},     {1, 129},   {63, 65},   {127, 128}, {128, 127}, {129, 191}, {191, 192},
                               {193, 193}, {255, 257}, {256, 383}, {385, 385}, {200, 640}, {300, 60}};

std::vector<Case> shapes_of(spattn_dtype dtype) {
    std::vector<Case> cases;
    int n = 0;
    for (const Lengths& l : lengths)
        for (const char* pattern : patterns) {
            Case c;
            c.pattern = pattern, c.seq_q = l.q, c.seq_k = l.k, c.dtype = dtype;
            c.heads_kv = n % 2 ? 2 : 1, c.batch = 1 + n % 2;
            c.axes = n % 3 == 0 ? SPATTN_BHSD : n % 3 == 1 && c.batch == 1 ? SPATTN_THD : SPATTN_BSHD;
            c.padding = n % 4 == 1 ? 8 : 0;
            ++n;
            if (n % every() == 0) cases.push_back(c);
        }
    return cases;
}

}  // namespace

TEST(tensor_core_rows) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const std::string& row : forward_rows("sm90_")) {
        const std::vector<Case> cases = shapes_of(abi::bf16);
        for (const Case& c : cases) run_row(context, row, c);
        std::printf("%s: %zu cases\n", row.c_str(), cases.size());
    }
    if (forward_rows("sm90_").empty()) check::skip("no sm90 GPU");
}

TEST(plain_rows) {
    NEEDS_GPU();
    const Context context = make_context();
    const int64_t dims[][2] = {{1, 1}, {7, 3}, {32, 32}, {64, 80}, {130, 128}, {1024, 1024}};
    int n = 0;
    for (const std::string& row : forward_rows("any_")) {
        int cases = 0;
        for (Case c : shapes_of(row.find("_f32_") == std::string::npos ? abi::bf16 : abi::f32)) {
            if (++n % 4) continue;
            const auto& dim = dims[n / 4 % 6];
            c.head_dim = dim[0], c.head_dim_v = dim[1];
            c.column = n % 8 ? 1 : 2, c.shift = n % 16 ? 0 : 1, c.padding = n % 12 ? 0 : 3;
            run_row(context, row, c);
            ++cases;
        }
        std::printf("%s: %d cases\n", row.c_str(), cases);
    }
}

TEST(misaligned_views) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const std::string& row : forward_rows("sm90_"))
        for (int64_t shift : {1, 4, 8}) {
            Case c;
            c.pattern = "causal & (sink(5) | window(64,0))", c.seq_q = c.seq_k = 300, c.shift = shift;
            c.padding = shift == 4 ? 4 : 0;
            run_row(context, row, c);
            c.column = 2;
            run_row(context, row, c);
        }
    CHECK(true);
}

TEST(scales) {
    NEEDS_GPU();
    const Context context = make_context();
    // Large scales make the maximum of a row grow from block to block.
    for (double scale : {-0.3, 1e-30, 0.01, 0.5, 3.0}) {
        Case c;
        c.pattern = "causal", c.seq_q = c.seq_k = 700, c.scale = scale;
        run_row(context, "", c);
        c.dtype = abi::f32;
        run_row(context, "", c);
    }
}

// Rows of 80 and more blocks beside short ones: the schedule splits them, and combine puts them together.
TEST(split_rows) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const std::string& row : {std::string(), std::string("any_block_forward_bf16_64x64")}) {
        Case c;
        c.pattern = "causal & (global_tokens(9990,9999) | window(40,0))", c.seq_q = c.seq_k = 10000, c.heads_q = 1;
        run_row(context, row, c);
    }
}

// Batch 4, 4 heads, 128 tokens, head_dim 32, blocks of 32.
TEST(small_heads_and_blocks) {
    NEEDS_GPU();
    const Context context = make_context();
    for (spattn_dtype dtype : {abi::f32, abi::bf16}) {
        Case c;
        c.pattern = "bigbird(32,1,1,1,5)", c.batch = 4, c.heads_q = c.heads_kv = 4, c.head_dim = c.head_dim_v = 32,
        c.dtype = dtype;
        run_row(context, std::string("any_block_forward_") + (dtype.code == SPATTN_BFLOAT ? "bf16" : "f32") + "_32x32",
                c);
    }
}
