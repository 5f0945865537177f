// SPDX-License-Identifier: MIT
// Is the same choice made again? spattn_plan_explain's text for a table of problems, compared with golden/*.txt.
#include "golden.h"

#include "dots.h"
#include "pattern/pattern.h"
#include "plan/imaginary.h"

using namespace spattn;

namespace {

struct Golden {
    const char* name;
    const char* pattern;
    int64_t batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v;
    bool backward;
    Dtype dtype = Dtype::f32;
    bool reference = false;
    double softcap = 0;
    bool has_sink_logits = false;
};

const char* const grid_of_32 = "bigbird(32,3,1,2,7)";

const Golden goldens[] = {
    {"full_1k", "full", 1, 1, 1, 1024, 1024, 64, 64, false},
    {"full_4k_backward", "full", 1, 8, 8, 4096, 4096, 64, 64, true},
    {"full_one_token", "full", 1, 1, 1, 1, 1, 64, 64, true},
    {"full_odd", "full", 2, 3, 3, 1000, 77, 40, 24, true},
    {"full_bf16", "full", 1, 8, 8, 2048, 2048, 128, 128, true, Dtype::bf16},
    {"full_reference", "full", 1, 2, 2, 256, 256, 64, 64, true, Dtype::f32, true},
    {"full_softcap", "full", 1, 2, 2, 1024, 1024, 64, 64, true, Dtype::f32, false, 30, true},
    {"full_wide_head", "full", 1, 1, 1, 512, 512, 512, 512, false},
    {"full_wide_values", "full", 1, 2, 2, 512, 512, 192, 128, true},
    {"causal_1k", "causal", 1, 1, 1, 1024, 1024, 64, 64, false},
    {"causal_4k_gqa", "causal", 1, 8, 2, 4096, 4096, 128, 128, true},
    {"causal_16k", "causal", 1, 16, 16, 16384, 16384, 128, 128, true},
    {"causal_128k", "causal", 1, 4, 4, 131072, 131072, 128, 128, true},
    {"causal_chunk", "causal", 1, 8, 8, 512, 8192, 64, 64, true},
    {"causal_more_queries", "causal", 1, 2, 2, 512, 200, 64, 64, true},
    {"decode_one_query", "full", 1, 8, 2, 1, 32768, 128, 128, false},
    {"decode_window", "causal & window(1023,0)", 16, 8, 2, 1, 32768, 128, 128, false},
    {"window1k_16k", "causal & window(1023,0)", 1, 16, 16, 16384, 16384, 128, 128, true},
    {"window_both_sides", "window(256,256)", 1, 4, 4, 4096, 4096, 64, 64, true},
    {"window_tiny", "causal & window(7,0)", 1, 4, 4, 2048, 2048, 64, 64, true},
    {"streaming_16k", "causal & (sink(64) | window(1023,0))", 1, 16, 16, 16384, 16384, 128, 128, true},
    {"streaming_128k", "causal & (sink(64) | window(1023,0))", 1, 4, 4, 131072, 131072, 128, 128, true},
    {"streaming_tiny", "causal & (sink(16) | window(63,0))", 1, 6, 6, 4096, 4096, 64, 64, true},
    {"block_diagonal_16", "block_diagonal(16)", 1, 1, 1, 4096, 4096, 64, 64, true},
    {"block_diagonal_512", "block_diagonal(512)", 1, 16, 16, 16384, 16384, 128, 128, true},
    {"block_diagonal_100", "block_diagonal(100)", 1, 4, 4, 4096, 4096, 64, 64, true},
    {"local_32", grid_of_32, 4, 4, 4, 2048, 2048, 32, 32, true},
    {"bigbird_64", "bigbird(64,3,2,3,1)", 1, 12, 12, 4096, 4096, 64, 64, true},
    {"dilated_16k", "causal & dilated(1008,0,16)", 1, 16, 16, 16384, 16384, 128, 128, true},
    {"strided_2k", "causal & (window(64,0) | strided(64))", 1, 4, 4, 2048, 2048, 64, 64, true},
    {"fixed_2k", "causal & fixed(128,8)", 1, 4, 4, 2048, 2048, 64, 64, true},
    {"landmark_2k", "causal & (window(127,0) | landmark(64,1))", 1, 4, 4, 2048, 2048, 64, 64, true},
    {"hot_parts_2k", "causal & (fixed(64,1) | global_tokens(5,700,1500))", 1, 4, 4, 2048, 2048, 64, 64, true},
    {"logsparse_4k", "logsparse", 1, 4, 4, 4096, 4096, 64, 64, true},
    {"longnet_4k", "block_diagonal(1024) | block_diagonal(4096) & residue(4,0)", 1, 4, 4, 4096, 4096, 64, 64, true},
    {"global_tokens", "window(128,128) | global_tokens(0,1,2,3)", 1, 12, 12, 4096, 4096, 64, 64, true},
    {"global_keys", "causal & (window(128,0) | global_keys(5,700,1900))", 1, 2, 2, 2048, 2048, 64, 64, true},
    {"documents", "causal & documents(0,300,301,1000,1777,2048)", 1, 2, 2, 2048, 2048, 64, 64, true},
    {"tree", "tree(-1,0,0,1,1,2,2,3)", 1, 4, 4, 8, 1032, 64, 64, false},
    {"per_head", "per_head([0,1,1,0], causal, causal & window(255,0))", 1, 4, 2, 2048, 2048, 64, 64, true},
    {"per_batch", "per_batch([0,1], full & sink(500), full & sink(1024))", 2, 4, 4, 1024, 1024, 64, 64, true},
    {"empty_rows", "causal & window(-1,-1) & block_diagonal(64) - sink(128)", 1, 2, 2, 1024, 1024, 64, 64, true},
    {"nothing", "sink(0)", 1, 2, 2, 1024, 1024, 64, 64, true},
    {"transposed", "transpose(causal & window(100,0))", 1, 2, 2, 1024, 1024, 64, 64, true},
};

std::string explain_golden(const Golden& g) {
    Problem p = imaginary::problem(g.seq_q, g.seq_k, g.head_dim);
    p.batch = g.batch, p.heads_q = g.heads_q, p.heads_kv = g.heads_kv;
    p.head_dim_v = g.head_dim_v;
    p.dtype = g.dtype;
    p.softcap = g.softcap, p.has_sink_logits = g.has_sink_logits;
    PlanOptions options;
    options.backward = g.backward;
    options.reference = g.reference;
    options.machine = imaginary::machine();
    static const std::vector<Kernel> kernels = imaginary::kernels();
    return explain(compile_plan(*parse_pattern(g.pattern), p, options, kernels));
}

}  // namespace

TEST(plans_are_the_golden_ones) {
    for (const Golden& g : goldens) golden::demand("plan", std::string(g.name) + ".txt", explain_golden(g));
}

TEST(text_is_the_same_in_every_locale) {
    const std::string plain = explain_golden(goldens[1]);
    const InDots dots;
    CHECK_EQ(explain_golden(goldens[1]), plain);
}
