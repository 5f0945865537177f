// SPDX-License-Identifier: MIT
// Are lists with stems those without, and as long as what rows share says?
#include "layout/build.h"
#include "layout/dense.h"
#include "layout/random_patterns.h"

using namespace spattn;

namespace {

std::vector<Run> runs_with_stem(const Lists& lists, int32_t row) {
    std::vector<Run> runs;
    const auto add = [&](Slice slice) {
        runs.insert(runs.end(), lists.runs.begin() + slice.begin, lists.runs.begin() + slice.end);
    };
    if (!lists.stems.empty()) add(lists.stems[size_t(row)]);
    add(lists.slices[size_t(row)]);
    return runs;
}

// Either layout numbers its masks as it meets them: equal where one number always stands for the same other one.
bool is_same(const Layout& a, const Layout& b, std::map<int32_t, int32_t>& masks) {
    bool same = a.num_masks == b.num_masks && a.by_query.slices.size() == b.by_query.slices.size();
    for (int32_t row = 0; same && row < a.head_kinds * a.by_query.rows; ++row) {
        const std::vector<Run> of_a = runs_with_stem(a.by_query, row), of_b = runs_with_stem(b.by_query, row);
        same = std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(), [&](const Run& x, const Run& y) {
            return x.first == y.first && x.count == y.count && masks.emplace(x.mask, y.mask).first->second == y.mask;
        });
    }
    for (const auto& [of_a, of_b] : masks)
        same &= (of_a == full_block) == (of_b == full_block) &&
                (of_a == full_block || std::equal(&a.masks[size_t(of_a) * a.mask_words],
                                                  &a.masks[size_t(of_a) * a.mask_words] + a.mask_words,
                                                  &b.masks[size_t(of_b) * b.mask_words]));
    return same;
}

size_t runs_of_a_million(const char* pattern, int32_t block) {
    const Extent million{1, 1, 1 << 20, 1 << 20, 0};
    return build_stem_lists(*parse_pattern(pattern), million, block, block).by_query.runs.size();
}

}  // namespace

TEST(stems_and_own_runs_are_the_rows) {
    int with_stems = 0, shorter = 0;
    for (int seed = 0; seed < 2000; ++seed) {
        Random random(uint64_t(seed) + 1);
        const Extent extent = random_extent(random);
        PatternRef pattern = random_pattern(random, extent);
        if (random.one_in(2)) pattern = make_intersection({make_causal(), pattern});
        const int32_t sizes[] = {1, 2, 8, 16, 24, 40};
        const int32_t block_q = sizes[random.in(0, 5)], block_k = sizes[random.in(0, 5)];
        const Case want{extent, pattern, build_layout(*pattern, extent, block_q, block_k)};
        const Layout got = build_stem_lists(*pattern, extent, block_q, block_k);
        check::context = "seed " + std::to_string(seed) + ": " + describe(want);
        std::map<int32_t, int32_t> masks;
        CHECK(is_same(got, want.layout, masks));
        CHECK(got.kind_of_head == want.layout.kind_of_head);
        check_counts(count(got), count(want.layout));
        with_stems += !got.by_query.stems.empty();
        shorter += got.by_query.runs.size() < want.layout.by_query.runs.size();
    }
    check::context.clear();
    CHECK(with_stems > 300);
    CHECK(shorter > 30);
}

// Without them these have from 8 million to 500 million runs.
TEST(rows_of_a_million_tokens_share_stems) {
    for (const char* pattern :
         {"causal & landmark(256,8)", "causal & residue(64,3)", "causal & fixed(256,8)", "causal & strided(4)",
          "causal & (window(255,0) | landmark(128,1))", "causal & global_keys(0,77,4000)",
          "causal & per_head([0], landmark(256,8))", "causal & (documents(0,5000,1048576) | landmark(256,8))",
          "causal & strided(256) & (sink(64) | landmark(512,300))"})
        for (int32_t block : {16, 64}) {
            check::context = pattern;
            CHECK(runs_of_a_million(pattern, block) <= size_t(5) * (1 << 20) / size_t(block));
        }
    check::context.clear();
}
