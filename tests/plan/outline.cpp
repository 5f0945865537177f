// SPDX-License-Identifier: MIT
// Does an outline say what the layout would have come to? Is a layout made once one is asked for?
#include "layout/dense.h"
#include "layout/orders/listed.h"
#include "layout/random_patterns.h"
#include "plan/blocks.h"
#include "plan/bounds.h"
#include "plan/plans.h"
#include "plan/stats.h"

using namespace spattn;

namespace {

// Up to three keys a row; every third time a whole block as well.
PatternRef random_few(Random& random, const Extent& e) {
    std::vector<int64_t> row_ptr{0}, col_idx;
    for (int64_t row = 0; row < e.seq_q; ++row) {
        for (int64_t key = random.in(0, e.seq_k); key < e.seq_k; key += random.in(1 + e.seq_k / 3, e.seq_k))
            col_idx.push_back(key);
        row_ptr.push_back(int64_t(col_idx.size()));
    }
    const PatternRef few = make_csr(row_ptr, col_idx, e.seq_k, false);
    if (!random.one_in(3)) return few;
    std::vector<int64_t> block_ptr(size_t(ceil_div(e.seq_q, outlined_block)) + 1, 1);
    block_ptr[0] = 0;
    const std::vector<int64_t> first{0};
    return make_union({few, make_bsr(block_ptr, first, outlined_block, outlined_block, e.seq_q, e.seq_k, false)});
}

void check_side(const Outline& outline, const Lowered& lowered, bool by_key) {
    const LayoutStats plain = make_layout_stats(lowered, by_key);
    const Outline::Stats& got = outline.stats(by_key);
    check_equal(got.plain, plain);
    CHECK_EQ(got.plain.longest.row, plain.longest.row);
    CHECK_EQ(got.plain.longest.across, plain.longest.across);
    CHECK_EQ(got.plain.longest.rows_across, plain.longest.rows_across);
    const LayoutStats least = make_least_listed_stats(lowered, plain, blocks_of(outlined_block, by_key));
    auto listed = std::make_shared<const Layout>(list_tiles(*lowered.layout, by_key ? Owner::keys : Owner::queries));
    const LayoutStats real = make_layout_stats({lowered.form, listed, count(*listed)}, by_key);
    CHECK(least.visited <= got.least_listed.visited && got.least_listed.visited <= real.visited);
    CHECK(least.blocks <= got.least_listed.blocks && got.least_listed.blocks <= real.blocks);
    CHECK(least.gathered <= got.least_listed.gathered);
    check_equal(got.finer, make_finer_stats(lowered, plain, blocks_of(outlined_part, by_key)));
}

}  // namespace

TEST(outlines_are_exact) {
    int outlined = 0, refused = 0, full = 0, head_kinds = 0;
    for (int seed = 0; seed < 600; ++seed) {
        Random random(uint64_t(seed) + 1);
        const Extent extent{random.in(1, 2), random.in(1, 2), random.in(1, 900), random.in(1, 900),
                            random.one_in(2) ? 0 : random.in(1, 40)};
        PatternRef pattern = random.one_in(2) ? random_few(random, extent) : random_lists(random, extent);
        if (random.one_in(3)) pattern = make_intersection({pattern, random_leaf(random, extent)});
        check::context = "seed " + std::to_string(seed) + ": " + pattern->print();
        Layout planes;
        planes.extent = extent;
        const auto outline = build_outline(*pattern, planes);
        ++(outline ? outlined : refused);
        if (!outline) continue;
        auto layout = std::make_shared<const Layout>(build_layout(*pattern, extent, outlined_block, outlined_block));
        const Form form{outlined_block, outlined_block, Order::plain, Owner::queries};
        const Lowered lowered{form, layout, count(*layout)};
        check_counts(outline->counts, lowered.counts);
        check_side(*outline, lowered, false);
        check_side(*outline, lowered, true);
        CHECK(outline->bytes >= layout->masks.size() * sizeof(uint64_t));
        full += lowered.counts.blocks_full > 0;
        head_kinds += layout->head_kinds > 1;
    }
    check::context.clear();
    CHECK(outlined > 100);
    CHECK(refused > 100);
    CHECK(full > 5);
    CHECK(head_kinds > 5);
}

TEST(nothing_is_outlined_with_closed_forms) {
    for (const char* text : {"full", "causal", "window(5,5)", "logsparse", "residue(90,3)", "bigbird(64,3,1,3,1)"}) {
        Layout planes;
        planes.extent = {1, 1, 1000, 1000, 0};
        const PatternRef pattern = parse_pattern(text);
        CHECK(build_outline(*pattern, planes) == nullptr);
    }
}

TEST(layouts_take_the_place_of_outlines) {
    const Problem problem = imaginary::problem(1000, 900);
    const Extent extent{problem.batch, problem.heads_q, problem.seq_q, problem.seq_k, problem.q_offset};
    Random random(1);
    const PatternRef pattern = random_few(random, extent);
    Lowering lowering(*pattern, problem);
    const Form coarse{outlined_block, outlined_block, Order::plain, Owner::queries};
    const Form fine{outlined_part, outlined_part, Order::plain, Owner::queries};
    const Lowered& outlined = lowering.counted(coarse);
    CHECK(outlined.outline != nullptr);
    CHECK(lowering.counted(coarse).outline == outlined.outline);
    CHECK(lowering.tokens() == outlined.outline->tokens);
    CHECK(lowering.coarser(fine) == &outlined);
    CHECK_EQ(lowering.at(fine).layout->bytes(), build_layout(*pattern, extent, outlined_part, outlined_part).bytes());
    CHECK(lowering.counted(coarse).outline == nullptr);
    CHECK(lowering.coarser(fine) == &lowering.at(coarse));
}
