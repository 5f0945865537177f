// SPDX-License-Identifier: MIT
// Plans of caches: what they come to is what the whole sequence's would, in memory that grows with the capacity alone.
#include "layout/build.h"
#include "layout/random_patterns.h"
#include "plan/backends.h"
#include "plan/blocks.h"
#include "plan/bounds.h"
#include "plan/plans.h"
#include "plan/stats.h"
#include "plan/token_rows.h"

using namespace spattn;
using namespace spattn::imaginary;

namespace {

Problem cache(int64_t capacity) {
    Problem p = problem(1, capacity);
    p.has_starts = true, p.page_size = 64, p.q_offset = 0;
    return p;
}

}  // namespace

TEST(stats_of_stems_are_those_of_whole_rows) {
    int with_stems = 0;
    for (int seed = 0; seed < 1000; ++seed) {
        Random random(uint64_t(seed) + 1);
        const Extent extent = random_extent(random);
        const PatternRef pattern = make_intersection({make_causal(), random_pattern(random, extent)});
        check::context = "seed " + std::to_string(seed) + ": " + pattern->print();
        const Form form{16, 8, Order::plain, Owner::queries};
        const auto lowered = [&](Layout layout) {
            const Counts counts = count(layout);
            return Lowered{form, std::make_shared<const Layout>(std::move(layout)), counts};
        };
        const Lowered whole = lowered(build_layout(*pattern, extent, 16, 8));
        const Lowered on_stems = lowered(build_stem_lists(*pattern, extent, 16, 8));
        const LayoutStats got = make_layout_stats(on_stems, false), want = make_layout_stats(whole, false);
        check_equal(got, want);
        CHECK_EQ(got.gaps, want.gaps);
        with_stems += !on_stems.layout->by_query.stems.empty();
    }
    check::context.clear();
    CHECK(with_stems > 100);
}

// So the layouts of small blocks are not made to price them.
TEST(smaller_blocks_are_known_exactly) {
    int masked = 0;
    for (int seed = 0; seed < 1000; ++seed) {
        Random random(uint64_t(seed) + 1);
        Problem p = cache(64 * random.in(1, 4));
        const PatternRef drawn = random_pattern(random, pattern_extent(p));
        const PatternRef pattern = make_intersection({make_causal(), drawn});
        check::context = "seed " + std::to_string(seed) + ": " + pattern->print();
        Lowering lowering(*pattern, p);
        const Lowered& coarse = lowering.at({64, 64, Order::plain, Owner::queries});
        const Kernel small = blocks_of(16, false);
        const LayoutStats known = make_finer_stats(coarse, make_layout_stats(coarse, false), small);
        const Lowered& fine = lowering.at({16, 16, Order::plain, Owner::queries});
        check_equal(make_cache_stats(p, small, known), make_cache_stats(p, small, make_layout_stats(fine, false)));
        masked += known.masked > 0;
    }
    check::context.clear();
    CHECK(masked > 500);
}

// Whether rows share stems differs from row to row: those of a window do from where it no longer reaches all keys.
TEST(finer_lists_keep_the_same_pairs) {
    const auto compare = [](const Pattern& pattern, const Problem& p) {
        check::context = std::to_string(p.seq_k) + " keys: " + pattern.print();
        Lowering lowering(pattern, p);
        const bool has_stems = !lowering.at({64, 64, Order::plain, Owner::queries}).layout->by_query.stems.empty();
        const Counts want = count(build_layout(pattern, pattern_extent(p), 16, 16));
        const Lowered& fine = lowering.at({16, 16, Order::plain, Owner::queries});
        CHECK_EQ(fine.counts.pairs, want.pairs);
        CHECK_EQ(fine.counts.row_max, want.row_max);
        return has_stems;
    };
    for (const int64_t window : {100, 500, 511, 600, 900, 1100})
        compare(*parse_pattern("causal & (sink(3) | window(" + std::to_string(window) + ",0))"), cache(1024));
    int with_stems = 0;
    for (int seed = 0; seed < 500; ++seed) {
        Random random(uint64_t(seed) + 1);
        Problem p = cache(64 * random.in(1, 6));
        const PatternRef drawn = random_pattern(random, pattern_extent(p));
        with_stems += compare(*make_intersection({make_causal(), drawn}), p);
    }
    check::context.clear();
    CHECK(with_stems > 20);
}

TEST(layouts_grow_with_the_capacity) {
    for (const char* pattern : {"causal & landmark(256,8)", "causal & residue(64,3)", "causal & fixed(256,8)",
                                "causal & strided(4)", "causal & window(4095,0)", "causal & dilated(1008,0,16)"}) {
        check::context = pattern;
        const CompiledPlan small = plan_of(pattern, cache(1 << 17), options_of(false));
        const CompiledPlan large = plan_of(pattern, cache(1 << 20), options_of(false));
        CHECK_EQ(name(small.forward), name(large.forward));
        CHECK(large.layout_bytes < 9 * small.layout_bytes);
        CHECK(large.layout_bytes < (size_t(4) << 20));
        CHECK(whole(large.forward).layout->by_key.runs.empty());
    }
    check::context.clear();
}

// Where many heads share a key, lists of keys serve a CPU best; where several queries see the same keys, blocks do.
TEST(a_cpu_lists_what_many_heads_share) {
    const auto family_of = [](int64_t heads_q, int64_t heads_kv, int64_t head_dim, int64_t queries) {
        Problem p = cache(8192);
        p.batch = 2, p.heads_q = heads_q, p.heads_kv = heads_kv, p.seq_q = queries, p.head_dim = head_dim;
        p.value_in_key = head_dim == 576, p.head_dim_v = p.value_in_key ? 512 : head_dim;
        const PatternRef pattern = parse_pattern("causal & (sink(4) | window(1023,0))");
        const CompiledPlan plan = compile_plan(*pattern, p, options_of(false), all_kernels());
        return whole(plan.forward).kernel->family;
    };
    CHECK(family_of(128, 1, 576, 1) == Family::gather);
    CHECK(family_of(128, 1, 576, 4) == Family::gather);
    CHECK(family_of(32, 8, 128, 4) == Family::block);
}
