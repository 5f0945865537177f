// SPDX-License-Identifier: MIT
// Is a layout that is cut from one of larger blocks the one that the pattern itself gives?
#include "layout/dense.h"
#include "layout/finer.h"
#include "layout/random_patterns.h"

using namespace spattn;

namespace {

// Masks of either layout are numbered as they were met: told apart by their bits.
std::vector<std::vector<int64_t>> spell(const Layout& layout, const Lists& lists) {
    std::vector<std::vector<int64_t>> rows;
    for (int32_t i = 0; i < layout.head_kinds * lists.rows; ++i) {
        rows.emplace_back();
        for (const Run& run : runs_of(lists, 0, i)) {
            rows.back().insert(rows.back().end(), {run.first, run.count, run.mask == full_block});
            if (run.mask == full_block) continue;
            const auto bits = layout.masks.begin() + int64_t(run.mask) * layout.mask_words;
            rows.back().insert(rows.back().end(), bits, bits + layout.mask_words);
        }
    }
    return rows;
}

}  // namespace

TEST(cut_layouts_are_built_ones) {
    int cut_masks = 0, shared = 0;
    for (int seed = 0; seed < 1500; ++seed) {
        Random random(uint64_t(seed) + 1);
        const Extent extent = random_extent(random);
        const PatternRef pattern = random_pattern(random, extent);
        const int32_t sizes[] = {1, 8, 16, 24, 40, 64};
        const int32_t block_q = sizes[random.in(0, 5)], block_k = sizes[random.in(0, 5)];
        const int32_t parts_q = int32_t(random.in(1, 5)), parts_k = int32_t(random.in(1, 5));
        const Layout coarse = build_layout(*pattern, extent, block_q * parts_q, block_k * parts_k);
        const Case want{extent, pattern, build_layout(*pattern, extent, block_q, block_k)};
        const Case got{extent, pattern, cut_layout(coarse, block_q, block_k)};
        check::context = "seed " + std::to_string(seed) + ": " + describe(got);
        CHECK(spell(got.layout, got.layout.by_query) == spell(want.layout, want.layout.by_query));
        CHECK(spell(got.layout, got.layout.by_key) == spell(want.layout, want.layout.by_key));
        CHECK_EQ(got.layout.num_masks, want.layout.num_masks);
        CHECK_EQ(got.layout.bytes(), want.layout.bytes());
        CHECK(got.layout.kind_of_head == want.layout.kind_of_head);
        check_masks(got.layout);
        check_runs(got.layout);
        check_live(got);
        cut_masks += got.layout.num_masks > 0;
        shared += coarse.by_query.runs.size() < coarse.by_query.slices.size();
    }
    check::context.clear();
    CHECK(cut_masks > 500);
    CHECK(shared > 100);
}
