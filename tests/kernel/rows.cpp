// SPDX-License-Identifier: MIT
// Every row computes attention: each CPU row that runs here, on each case, against the reference.
#include <algorithm>
#include <set>

#include "bounds.h"

using namespace attention;

static const Case cases[] = {
    // pattern, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v
    {"full", 1, 1, 1, 1, 1, 1, 1},
    {"full", 1, 2, 1, 1, 130, 64, 64},
    {"full", 2, 2, 2, 64, 64, 64, 64, Axes::bshd},
    {"full", 1, 2, 2, 65, 63, 3, 5, Axes::gaps},
    {"full", 2, 4, 2, 17, 47, 20, 65, Axes::shared},
    {"full", 1, 1, 1, 66, 130, 192, 128, Axes::bshd},
    {"full", 1, 1, 1, 33, 65, 256, 256},
    {"full", 1, 1, 1, 20, 40, 1024, 8},
    {"full", 1, 1, 1, 20, 40, 8, 1024, Axes::gaps},
    {"causal", 1, 2, 1, 63, 63, 8, 8},
    {"causal", 1, 2, 2, 127, 127, 16, 16, Axes::bshd},
    {"causal", 1, 3, 1, 128, 128, 65, 20},
    {"causal", 1, 2, 2, 129, 129, 64, 128},
    {"causal", 2, 2, 1, 15, 49, 128, 64, Axes::gaps},
    {"causal", 1, 2, 2, 100, 40, 16, 16},  // the first 60 queries see nothing
    {"causal", 1, 1, 1, 50, 90, 16, 16, Axes::bhsd, own_scale, 0},
    {"causal", 1, 1, 1, 70, 90, 16, 16, Axes::bhsd, own_scale, -37},
    {"causal", 1, 1, 1, 70, 90, 16, 16, Axes::bhsd, own_scale, 200},
    {"window(10,0)", 1, 2, 1, 191, 191, 32, 32, Axes::bshd},
    {"window(3,17)", 1, 2, 2, 192, 192, 96, 96},
    {"causal & (sink(4) | window(20,0))", 1, 4, 2, 193, 193, 16, 20},
    {"window(5,0)", 1, 1, 1, 64, 192, 64, 64, Axes::bhsd, own_scale, 90},  // keys at both ends unseen
    {"block_diagonal(16)", 1, 2, 1, 96, 96, 16, 16},
    {"block_diagonal(25)", 1, 2, 2, 110, 110, 20, 20, Axes::gaps},
    {"causal & dilated(60,0,5)", 1, 2, 1, 130, 130, 16, 16},
    {"causal & (window(13,0) | strided(13))", 1, 1, 1, 100, 100, 16, 16},
    {"fixed(16,2) & causal", 1, 1, 1, 100, 100, 16, 16},
    {"logsparse", 1, 2, 1, 90, 90, 12, 12, Axes::bshd},
    {"bigbird(16,3,1,2,7)", 1, 2, 2, 160, 160, 16, 16},
    {"bigbird(64,1,0,1,3)", 1, 1, 1, 300, 300, 16, 16},
    {"global_tokens(0,70)", 1, 2, 1, 80, 120, 16, 16},
    {"documents(0,10,31,32,90)", 1, 2, 2, 100, 100, 16, 16, Axes::bshd},  // the last 10 see nothing
    {"residue(7,3)", 1, 2, 1, 64, 64, 16, 16},
    {"global_keys(5)", 1, 2, 1, 70, 70, 16, 16},  // one key
    {"full - full", 1, 2, 1, 40, 70, 16, 16, Axes::gaps},
    {"tree(-1,0,0,1,1,2)", 1, 1, 1, 6, 40, 16, 16},
    {"per_head([0,1,1,2], causal, window(9,0), sink(0))", 1, 4, 2, 80, 80, 16, 16},
    // Heads of a group that read different rows of the same block, one after the other.
    {"per_head([0,1,2,3], sink(3), sink(9) - sink(4), sink(14) - sink(1), sink(6) - sink(5))", 1, 4, 1, 20, 30, 16, 16},
    {"per_batch([1,0], window(70,3) & sink(50), full)", 2, 2, 1, 70, 90, 16, 16, Axes::bshd},
    {"full", 1, 2, 1, 70, 70, 16, 16, Axes::bhsd, 0.},
    {"causal", 1, 2, 1, 70, 70, 16, 16, Axes::bhsd, -0.3},
    {"causal", 1, 2, 1, 70, 70, 64, 64, Axes::bhsd, 4.},
    {"window(40,0)", 1, 2, 1, 70, 70, 16, 16, Axes::bshd, own_scale, aligned_end, false},
    {"causal", 2, 4, 2, 70, 90, 20, 12, Axes::bhsd, own_scale, aligned_end, true, true},  // value in key
    {"window(40,3)", 1, 2, 1, 200, 200, 64, 64, Axes::bshd, own_scale, aligned_end, true, true},
    {"sink(1) | window(0,0)", 1, 1, 1, 1100, 1100, 16, 8, Axes::gaps, own_scale, aligned_end, true, true},
    {"causal", 1, 4, 2, 130, 150, 64, 64, Axes::bhsd, own_scale, aligned_end, true, false, 30.},
    {"full", 1, 2, 1, 70, 70, 16, 16, Axes::bshd, 4., aligned_end, true, false, 5.},  // most scores at the cap
    {"causal", 1, 2, 1, 70, 70, 16, 16, Axes::bhsd, -0.3, aligned_end, true, false, 0.5},
    {"full", 1, 2, 1, 40, 70, 16, 16, Axes::bhsd, 0., aligned_end, true, false, 1.},
    {"window(30,0)", 2, 2, 2, 100, 100, 20, 12, Axes::gaps, 1e-5, aligned_end, true, false, 1e-2},
    {"causal", 2, 4, 2, 100, 100, 32, 32, Axes::bshd, own_scale, aligned_end, true, false, 0., true},
    // 60 see the sink alone
    {"causal", 1, 2, 2, 100, 40, 16, 16, Axes::bhsd, own_scale, aligned_end, true, false, 0., true},
    {"full - full", 2, 2, 1, 40, 70, 16, 16, Axes::gaps, own_scale, aligned_end, true, false, 0., true},
    {"per_head([0,1,1,2], causal, window(9,0), sink(0))", 1, 4, 2, 80, 80, 16, 16, Axes::bhsd, own_scale, aligned_end,
     true, false, 20., true},
    {"full", 1, 2, 1, 70, 70, 16, 16, Axes::bhsd, own_scale, aligned_end, false, false, 0., true},
    {"full", 1, 2, 1, 10, 3100, 8, 8, Axes::bhsd, own_scale, aligned_end, true, false, 15., true},  // joined
    {"sink(1) | window(0,0)", 1, 1, 1, 1100, 1100, 4, 4, Axes::bhsd, own_scale, aligned_end, true, false, 15., true},
    // Boxes of a grid, and tokens that are none; the last ones are beyond it.
    {"grid([24,24], [8,8], window(5,5), window(4,6))", 1, 4, 2, 576, 590, 16, 12, Axes::gaps, own_scale, 0},
    {"grid([6,10,11], [3,5,11], causal, window(2,2), window(3,3))", 2, 2, 1, 660, 660, 20, 16},
    // In orders of their own: see the_orders_are_met.
    {"causal & dilated(300,0,5)", 1, 4, 2, 643, 643, 20, 20, Axes::bshd},
    {"causal & dilated(120,0,5)", 1, 4, 2, 323, 323, 16, 32, Axes::lines},
    {"strided(9) - window(3,3)", 2, 2, 1, 200, 310, 16, 20, Axes::gaps},
    {"causal & dilated(90,0,6)", 1, 2, 2, 300, 260, 16, 16, Axes::bhsd, own_scale, -77},
    {"block_diagonal(144) & residue(3,1)", 1, 2, 1, 500, 500, 16, 16},  // two residue classes of three see nothing
    {"per_head([0,1], dilated(96,96,12), strided(8))", 1, 2, 1, 400, 400, 16, 16},
    {"window(9,9) | global_tokens(3,200,201,450,777)", 1, 4, 2, 900, 900, 20, 12, Axes::bshd},
    {"causal & (window(9,0) | global_tokens(3,200,201,450))", 1, 1, 1, 700, 800, 16, 16, Axes::gaps},
    {"causal & (block_diagonal(64) | landmark(64,1))", 1, 4, 2, 900, 900, 16, 16, Axes::bshd},
    {"causal & fixed(100,3)", 2, 2, 1, 1000, 1100, 8, 12},
    {"window(9,9) | global_tokens(3,200,201,450)", 1, 2, 1, 600, 600, 32, 16, Axes::lines},
    {"window(9,0) | global_keys(5,333) | global_tokens(3,200,450) | landmark(90,1)", 1, 2, 1, 700, 700, 16, 16},
    {"transpose(landmark(90,1)) | window(0,3)", 1, 1, 1, 700, 650, 16, 16, Axes::gaps, own_scale, 20},
    {"logsparse", 2, 2, 1, 700, 700, 12, 12},
    {"per_head([0,1,0,0], global_keys(7,300,301,599) | window(0,0), transpose(logsparse))", 1, 4, 2, 600, 600, 8, 8},
    // In pieces: see the_pieces_are_met.
    {"causal & (window(13,0) | strided(12))", 1, 4, 2, 601, 601, 20, 12, Axes::bshd},
    {"window(7,7) | strided(16)", 2, 2, 1, 500, 610, 16, 20, Axes::gaps},
    {"window(9,0) | strided(16) | global_tokens(3,200,201,450)", 1, 2, 1, 900, 900, 16, 12, Axes::bshd, own_scale,
     aligned_end, true, false, 0., true},
    {"(window(5,0) | dilated(160,0,8)) - sink(40)", 1, 2, 2, 450, 400, 16, 16, Axes::bhsd, own_scale, -33},
    {"causal & documents(0,200,410) & (window(9,0) | strided(8))", 1, 4, 2, 500, 520, 16, 16, Axes::bshd, own_scale,
     aligned_end, true, false, 5., true},  // the last see the sink alone
    {"causal & (window(4,0) | strided(11)) - window(1,0)", 2, 2, 1, 400, 380, 24, 16, Axes::gaps, 4., aligned_end, true,
     true, 0., true},
    {"causal & (window(3,0) | strided(8))", 1, 2, 2, 300, 300, 12, 12, Axes::bhsd, own_scale, aligned_end, false, false,
     0., true},
    {"block_diagonal(32) | block_diagonal(128) & residue(4,1) | block_diagonal(640) & residue(16,1)", 1, 2, 1, 650, 650,
     16, 16},
    {"strided(30) | global_tokens(3,200,201,450,777)", 1, 2, 1, 900, 900, 16, 12, Axes::bshd},
    {"causal & (window(3,0) | strided(8))", 1, 1, 1, 2100, 2100, 8, 8},  // parts are joined in each piece
    {"grid([20,30], full, window(0,0)) | grid([20,30], window(0,0), full)", 1, 2, 1, 600, 600, 16, 16},
    // Some heads, or batch entries, see nothing in one piece or the other.
    {"per_head([0,1,1,0], window(9,9), dilated(160,160,8))", 1, 4, 2, 600, 620, 16, 12, Axes::gaps, own_scale,
     aligned_end, true, false, 0., true},
    {"per_batch([0,1], window(9,0) | strided(8), dilated(160,0,12)) & causal", 2, 2, 1, 500, 500, 16, 16},
    {"runtime_tokens(5)", 1, 1, 1, 4, 9, 3, 5},
    {"runtime_tokens(40)", 2, 4, 2, 17, 50, 20, 12, Axes::gaps},
    {"runtime_tokens(70)", 1, 2, 2, 9, 100, 64, 64, Axes::shared},
    {"runtime_tokens(90) & causal", 1, 6, 1, 40, 61, 64, 64, Axes::bshd},
    {"runtime_tokens(150)", 1, 130, 1, 3, 100, 72, 40, Axes::bhsd, own_scale, aligned_end, true, true},
    {"runtime_tokens(80) & documents(0,30,70)", 1, 16, 1, 20, 70, 33, 16, Axes::bshd, -0.3, aligned_end, true, true},
    {"runtime_tokens(12) & per_head([0,1,0,1], causal, full)", 1, 4, 2, 12, 12, 8, 8},
    {"runtime_blocks(16,8,6) & (window(30,0) | sink(3))", 2, 4, 4, 50, 70, 16, 16, Axes::bhsd, own_scale, 3, false},
    {"runtime_blocks(1,64,3)", 1, 8, 2, 30, 500, 128, 128, Axes::bshd},
    // Maxima that rise late: sums of the keys before shrink. Lists of the call and of the plan.
    {"runtime_tokens(200)", 1, 17, 1, 20, 300, 32, 20, Axes::bhsd, 3.},
    {"causal - window(0,0)", 1, 18, 2, 60, 300, 24, 16, Axes::bshd, 3.},
    {"runtime_tokens(40) & causal", 2, 18, 2, 25, 20, 16, 8, Axes::bshd, own_scale, aligned_end, true, false, 1.5,
     true},
    {"runtime_tokens(30)", 1, 3, 1, 25, 41, 20, 20, Axes::gaps, own_scale, aligned_end, true, true, 0., true},
    // Panels of several chunks of keys and tiles of heads; values that are whole steps of a key's columns, and not.
    {"runtime_tokens(300) & causal", 1, 40, 1, 6, 400, 96, 64, Axes::bshd, own_scale, aligned_end, true, true},
    {"runtime_tokens(390)", 1, 136, 1, 3, 500, 64, 48, Axes::bhsd, own_scale, aligned_end, true, true, 5., true},
    {"runtime_tokens(260)", 2, 70, 2, 3, 300, 40, 96, Axes::gaps, 3., aligned_end, true, false, 0., true},
    {"causal - window(3,0)", 1, 1, 1, 40, 300, 1024, 20},  // keys of a gather row in several ranges
    {"runtime_tokens(3000)", 1, 4, 1, 400, 500, 4, 4},     // several waves
    {"full", 1, 1, 1, 10, 3100, 8, 8},                     // one row of many blocks: split
    {"sink(1) | window(0,0)", 1, 1, 1, 1100, 1100, 4, 4},  // one long column: cut
    // Block sizes that tiles of block rows divide.
    {"runtime_blocks(64,64,3)", 2, 4, 2, 200, 300, 40, 24, Axes::bshd},
    {"runtime_blocks(128,64,5) & causal", 1, 4, 2, 260, 260, 64, 64, Axes::gaps, own_scale, aligned_end, true, false,
     1.5, true},
    {"runtime_blocks(64,192,3) & (window(90,5) | sink(70))", 1, 3, 1, 190, 500, 16, 16, Axes::bhsd, own_scale, -20},
    {"runtime_blocks(64,64,4) & per_head([0,1,0,1], causal, window(40,40))", 1, 4, 2, 150, 150, 20, 12},
    {"runtime_blocks(192,384,2) & documents(0,70,200)", 2, 2, 1, 150, 200, 32, 32, Axes::bshd, own_scale, aligned_end,
     true, true, 0., true},  // each list is of all queries, and of all keys
    // Blocks that tiles of keys join by two and by four; lists that name some of a tile's, and the same ones again.
    {"runtime_blocks(64,32,7)", 2, 4, 2, 200, 300, 40, 24, Axes::bshd},
    {"runtime_blocks(128,32,9) & causal", 1, 4, 2, 260, 260, 64, 64, Axes::gaps, own_scale, aligned_end, true, false,
     1.5, true},
    {"runtime_blocks(64,16,12) & (window(90,5) | sink(70))", 1, 3, 1, 190, 500, 16, 16, Axes::bhsd, own_scale, -20},
    {"runtime_blocks(192,32,6) & per_head([0,1,0,1], causal, window(40,40))", 1, 4, 2, 400, 150, 20, 12},
    {"runtime_blocks(128,64,5) & documents(0,70,200)", 2, 2, 1, 300, 300, 32, 32, Axes::bshd, own_scale, aligned_end,
     true, true, 0., true},
    // Heads of a group in one tile, of few queries and of several tiles, each with a sink of its own; in every order; of
    // groups that are no power of two.
    {"causal", 2, 16, 2, 5, 300, 64, 64, Axes::bshd, own_scale, aligned_end, true, false, 0., true},
    {"window(30,0) | sink(3)", 1, 16, 1, 33, 200, 40, 24, Axes::gaps, own_scale, -20, true, true, 2.},
    {"per_head([0,0,0,0,1,1,1,1], causal, window(9,3))", 2, 8, 2, 21, 21, 16, 12, Axes::bhsd, own_scale, aligned_end,
     true, false, 0., true},
    {"window(7,7) | strided(16)", 2, 4, 2, 100, 210, 16, 20, Axes::gaps},
    {"dilated(160,0,8)", 1, 8, 1, 130, 130, 33, 16, Axes::bshd, own_scale, aligned_end, true, false, 0., true},
    {"causal & (sink(4) | window(20,0))", 2, 7, 1, 30, 150, 40, 20, Axes::gaps, own_scale, aligned_end, true, true},
    {"block_diagonal(25)", 1, 10, 2, 60, 60, 20, 20, Axes::bshd},
    {"full", 1, 8, 1, 3, 3100, 8, 8},  // one row of many blocks: split
};
constexpr unsigned seed = 20240229;

TEST(every_row_is_paired) {
    size_t rows = 0;
    for (const Kernel& kernel : all_kernels()) rows += kernel.device == SPATTN_CPU;
    std::set<std::string> paired;
    for (const bool reference : {false, true})
        for (const Rows& pair : cpu_rows(reference, FewQueries::included))
            paired.insert({pair.forward.name, pair.backward.name});
    CHECK_EQ(paired.size(), rows);
    CHECK(cpu_rows(false).size() >= 4);
}

TEST(every_row_computes_attention) {
    const std::vector<Rows> all = cpu_rows(false, FewQueries::included);
    for (size_t n = 0; n < std::size(cases); ++n)
        for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::f64, Dtype::bf16}) {
            const Case& c = cases[n];
            const auto is_met = [&](const Rows& rows) {
                const size_t r = size_t(&rows - all.data());
                return rows.forward.dtype == dtype && is_tested(rows) && takes(rows, c) && (n + r) % check::every() == 0;
            };
            if (std::none_of(all.begin(), all.end(), is_met)) continue;  // where some rows only are asked for
            const Inputs in = make_inputs(c, dtype, seed + unsigned(n));
            const Results want = run_rows(c, reference_rows(Dtype::f64), in, 2);
            for (const Rows& rows : all) {
                if (!is_met(rows)) continue;
                check::context = text(rows.forward.name, " ", describe(c), " seed ", seed + n);
                check_results(c, rows, run_rows(c, rows, in, 2), want);
            }
        }
    for (const Rows& rows : all)
        if (!rows.forward.runs_here(0)) check::skip(text(rows.forward.name, ": not on this machine"));
}

TEST(the_orders_are_met) {
    for (const Rows& rows : cpu_rows(false)) {
        if (!rows.forward.orders || rows.forward.dtype != Dtype::f32 || !is_tested(rows)) continue;
        check::context = rows.forward.name;
        int residue = 0, packed = 0, listed = 0, away = 0;
        for (const Case& c : cases) {
            if (!takes(rows, c)) continue;
            const Attention<float> attention(c, rows, 2);
            for (const PassPlan* pass : {&attention.plan().forward, &attention.plan().backward})
                for (const PiecePlan& piece : pass->pieces) {
                    residue += piece.order == Order::residue;
                    packed += piece.order == Order::packed;
                    listed += piece.order == Order::listed;
                    away += !piece.layout->queries.away.empty() || !piece.layout->keys.away.empty();
                }
        }
        CHECK(residue >= 4);
        CHECK(packed >= 4);
        CHECK(listed >= 4);
        CHECK(away >= 2);
    }
}

// What the lists of the cases hold, over their planes and rows.
struct Hostile {
    int absent = 0, beyond = 0, repeated = 0, unsorted = 0, empty = 0, overfull = 0;

    void add(const Problem& p, const attention::Lists& lists) {
        const CallLists run = attention::view(lists, p);
        const int64_t blocks = (p.seq_k + p.call_lists.block_k - 1) / p.call_lists.block_k;
        for (int64_t b = 0; b < p.batch; ++b)
            for (int64_t list = 0; list * p.call_lists.block_q < p.seq_q; ++list)
                for (int64_t head = 0; head < p.heads_kv; ++head) {
                    std::vector<int64_t> kept;
                    for (int64_t i = 0; i < run.count(b, list, head, p.call_lists.most); ++i)
                        kept.push_back(run.indices.at(b, list, head, i));
                    add(kept, blocks);
                    if (run.counts.data) overfull += run.counts.at(b, list, head, 0) > p.call_lists.most;
                }
    }
    void add(std::vector<int64_t> entries, int64_t blocks) {
        empty += entries.empty();
        unsorted += !std::is_sorted(entries.begin(), entries.end());
        std::sort(entries.begin(), entries.end());
        absent += !entries.empty() && entries.front() < 0;
        beyond += !entries.empty() && entries.back() >= blocks;
        for (size_t i = 1; i < entries.size(); ++i) repeated += entries[i] >= 0 && entries[i] == entries[i - 1];
    }
};

// Tokens and blocks, on the rows with heads in vector lanes and on those with columns there.
TEST(lists_of_calls_are_hostile) {
    for (const char* const form : {"_heads", "_dims"})
        for (const char* const lists : {"runtime_tokens", "runtime_blocks"}) {
            Hostile met;
            for (size_t n = 0; n < std::size(cases); ++n)
                for (const Rows& rows : cpu_rows(false)) {
                    const std::string name = rows.forward.name, pattern = cases[n].pattern;
                    if (name.find("scalar_gather_forward_f32" + std::string(form)) || pattern.find(lists) ||
                        !takes(rows, cases[n]))
                        continue;
                    const Inputs in = make_inputs(cases[n], Dtype::f32, seed + unsigned(n));
                    met.add(problem_of(cases[n], Dtype::f32), in.lists);
                }
            check::context = text(lists, " on rows ", form);
            CHECK(met.absent > 9 && met.beyond > 9 && met.repeated > 9);
            CHECK(met.unsorted > 9 && met.empty > 1 && met.overfull > 1);
        }
}

template <class T>
static void meet_pieces(const Rows& rows) {
    check::context = rows.forward.name;
    size_t forward = 0, backward = 0, most = 0, away = 0;
    for (const Case& c : cases) {
        if (!takes(rows, c)) continue;
        const Attention<T> attention(c, rows, 2);
        const CompiledPlan& plan = attention.plan();
        forward += plan.forward.pieces.size() > 1;
        backward += plan.backward.pieces.size() > 1;
        most = std::max(most, plan.forward.pieces.size());
        for (const PiecePlan& piece : plan.backward.pieces)
            away += plan.backward.pieces.size() > 1 && !piece.layout->queries.away.empty();
    }
    // Where a processor has bf16 products cheaper than those of float32, more of these small cases stay whole.
    const bool is_cheap = std::is_same_v<T, Bf16>;
    CHECK(forward >= (is_cheap ? 4u : 6u));
    CHECK(backward >= (is_cheap ? 4u : 6u));
    CHECK(most >= (is_cheap ? 2u : 3u));
    CHECK(away >= 1 || rows.forward.block_q < 64);  // small blocks waste little on a few hot tokens
}

TEST(the_pieces_are_met) {
    for (const Rows& rows : cpu_rows(false)) {
        if (!rows.forward.carries || !is_tested(rows)) continue;
        if (rows.forward.dtype == Dtype::f32) meet_pieces<float>(rows);
        if (rows.forward.dtype == Dtype::f64) meet_pieces<double>(rows);
        // It stands for amx, too: the algorithm is one, and products are so cheap there that small cases stay whole.
        if (!std::strncmp(rows.forward.name, "avx512bf16_", 11)) meet_pieces<Bf16>(rows);
    }
}

// References of 16-bit elements are the f64 one, rounded once: half a unit of 8 or 11 bits.
TEST(narrow_references_are_rounded_truth) {
    const Case c{"causal & window(30,0)", 1, 2, 1, 60, 80, 20, 12};
    for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) {
        const Inputs in = make_inputs(c, dtype, seed);
        const double half_unit = dtype == Dtype::f16 ? 1. / 2048 : 1. / 256;
        const Results got = run_rows(c, reference_rows(dtype), in, 2),
                      want = run_rows(c, reference_rows(Dtype::f64), in, 2);
        for (const auto member : {&Results::out, &Results::dq, &Results::dk, &Results::dv}) {
            bool equal = true;
            for (size_t i = 0; i < (want.*member).size(); ++i) {
                const double w = (want.*member)[i], g = (got.*member)[i];
                equal &= std::abs(w - g) <= std::max(std::abs(w) * half_unit * 1.0001, 0x1p-25);
            }
            CHECK(equal);
        }
    }
}
