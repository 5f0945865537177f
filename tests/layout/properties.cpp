// SPDX-License-Identifier: MIT
// Do the lists cover each allowed pair exactly once, and say nothing else? Random algebra against keys().
#include "layout/dense.h"
#include "layout/random_patterns.h"

using namespace spattn;

namespace {

constexpr int cases = 1500;

Case make_case(int seed) {
    Random random(uint64_t(seed) + 1);
    Case c;
    c.extent = random_extent(random);
    c.pattern = random_pattern(random, c.extent);
    const int32_t sizes[] = {8, 16, 24, 32, 40, 64, 100, 128};
    c.layout = build_layout(*c.pattern, c.extent, sizes[random.in(0, 7)], sizes[random.in(0, 7)]);
    check::context = "seed " + std::to_string(seed) + ": " + describe(c);
    return c;
}

}  // namespace

TEST(lists_mean_the_pattern) {
    for (int seed = 0; seed < cases; ++seed) check_meaning(make_case(seed));
}

TEST(blocks_are_exact_and_masks_are_stored_once) {
    for (int seed = 0; seed < cases; ++seed) check_masks(make_case(seed).layout);
}

TEST(runs_are_sorted_maximal_and_shared) {
    for (int seed = 0; seed < cases; ++seed) check_runs(make_case(seed).layout);
}

TEST(transpose_twice_is_identity) {
    for (int seed = 0; seed < cases; ++seed) {
        const Case c = make_case(seed);
        const Lists back = transpose_lists(c.layout.by_key, c.layout.head_kinds, c.layout.by_query.rows);
        CHECK_EQ(back.rows, c.layout.by_query.rows);
        CHECK_EQ(back.runs.size(), c.layout.by_query.runs.size());
        bool is_same = true;
        for (int32_t i = 0; i < c.layout.head_kinds * back.rows; ++i) {
            const std::vector<Run> a = runs_of(back, 0, i), b = runs_of(c.layout.by_query, 0, i);
            is_same &= a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](Run x, Run y) {
                           return x.first == y.first && x.count == y.count && x.mask == y.mask;
                       });
        }
        CHECK(is_same);
    }
}

TEST(live_sets_are_exact) {
    for (int seed = 0; seed < cases; ++seed) check_live(make_case(seed));
}

TEST(counts_are_brute_force_counts) {
    for (int seed = 0; seed < cases; ++seed) {
        const Case c = make_case(seed);
        const Layout& layout = c.layout;
        Counts wanted;
        wanted.row_min = c.extent.seq_k;
        for (int64_t plane = 0; plane < c.extent.batch * c.extent.heads; ++plane) {
            const Dense dense = dense_of_pattern(c, plane / c.extent.heads, plane % c.extent.heads);
            std::map<std::pair<int64_t, int64_t>, int64_t> blocks;
            for (size_t row = 0; row < dense.size(); ++row) {
                int64_t kept = 0;
                for (size_t key = 0; key < dense[row].size(); ++key) {
                    if (!dense[row][key]) continue;
                    ++kept;
                    ++blocks[{int64_t(row) / layout.block_q, int64_t(key) / layout.block_k}];
                }
                wanted.pairs += double(kept);
                wanted.row_min = std::min(wanted.row_min, kept);
                wanted.row_max = std::max(wanted.row_max, kept);
                wanted.rows_empty += kept == 0;
            }
            for (const auto& [place, kept] : blocks)
                ++(kept == int64_t(layout.block_q) * layout.block_k ? wanted.blocks_full : wanted.blocks_partial);
            wanted.blocks_empty += int64_t(layout.by_query.rows) * layout.by_key.rows - int64_t(blocks.size());
        }
        wanted.visited = double(wanted.blocks_full + wanted.blocks_partial) * layout.block_q * layout.block_k;
        check_counts(count(layout), wanted);
    }
}

TEST(layouts_grow_with_runs_not_with_blocks) {
    const Extent million{1, 2, 1 << 20, 1 << 20, 0};
    const PatternRef causal = make_causal();
    const PatternRef streaming = make_intersection({causal, make_union({make_sink(64), make_window(1023, 0)})});
    for (const PatternRef& pattern : {make_full(), causal, streaming, make_block_diagonal(128)}) {
        const Layout layout = build_layout(*pattern, million, 64, 64);
        check::context = pattern->print();
        CHECK(layout.by_query.runs.size() <= size_t(4 * layout.by_query.rows));
        CHECK(layout.by_key.runs.size() <= size_t(4 * layout.by_key.rows));
        CHECK(layout.num_masks <= 4);
        CHECK(layout.bytes() <= size_t(8) << 20);
    }
    CHECK(build_layout(*causal, million, 64, 64).by_query.runs.size() <= size_t(2) << 14);
}
