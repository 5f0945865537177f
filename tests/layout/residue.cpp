// SPDX-License-Identifier: MIT
// Layouts over residue classes say the same pairs as the pattern, and stay small, with one class in a tile or several.
#include "layout/orders/residue.h"

#include "layout/dense.h"
#include "layout/orders/short_residue.h"
#include "layout/random_patterns.h"

using namespace spattn;

namespace {

constexpr int cases = 1500;

// A pattern whose residue classes of this modulus keep to themselves.
PatternRef random_keeper(Random& random, const Extent& extent, int64_t modulus, int depth) {
    const auto part = [&] { return random_keeper(random, extent, modulus, depth - 1); };
    const int64_t multiple = modulus * random.in(1, 3);
    switch (random.in(0, depth == 0 ? 3 : 6)) {
        case 0: return make_strided(multiple);
        case 1: return make_dilated(random.in(-1, 90), random.in(-1, 40), multiple);
        case 2: return make_residue(multiple, random.in(0, multiple - 1));
        case 3: return make_intersection({make_strided(multiple), random_leaf(random, extent)});
        case 4: return make_difference(part(), random_leaf(random, extent));
        case 5: return make_transpose(part());
    }
    return make_union({part(), part()});
}

PatternRef random_keeper(Random& random, const Extent& extent, int64_t modulus) {
    const auto part = [&] { return random_keeper(random, extent, modulus, int(random.in(0, 2))); };
    if (extent.heads == 1 && extent.batch == 1) return part();
    std::vector<int32_t> of_head, of_batch;
    for (int64_t head = 0; head < extent.heads; ++head) of_head.push_back(int32_t(random.in(0, 1)));
    for (int64_t batch = 0; batch < extent.batch; ++batch) of_batch.push_back(int32_t(random.in(0, 1)));
    const PatternRef by_head = make_per_head({part(), part()}, of_head);
    return random.one_in(2) ? by_head : make_per_batch({by_head, part()}, of_batch);
}

// Classes that are short mostly get the layout of several a tile.
std::optional<Layout> build(const Case& c, Random& random, int32_t modulus, int32_t block_q, int32_t block_k,
                            int& shared) {
    const auto classes = find_classes_of_tile(c.extent, modulus, block_q, block_k);
    if (!classes || modulus == 1 || random.one_in(4))
        return build_residue_layout(*c.pattern, c.extent, modulus, block_q, block_k);
    ++shared;
    return build_short_residue_layout(*c.pattern, c.extent, modulus, *classes, block_q, block_k);
}

// The layout, or none: then no residue class may have a closed form that was not used.
bool make_case(int seed, Case& c, int& shared) {
    Random random(uint64_t(seed) + 1);
    c.extent = random_extent(random);
    const int64_t modulus = random.in(1, std::min<int64_t>(17, std::max(c.extent.seq_q, c.extent.seq_k)));
    c.pattern = random_keeper(random, c.extent, modulus);
    const int32_t sizes[] = {4, 8, 16, 24, 32, 64, 100, 128};
    const int32_t block_q = sizes[random.in(0, 7)], block_k = sizes[random.in(0, 7)];
    auto layout = build(c, random, int32_t(modulus), block_q, block_k, shared);
    if (layout) c.layout = std::move(*layout);
    check::context = "seed " + std::to_string(seed) + ": " + describe(c);
    if (layout) CHECK_EQ(c.layout.is_ordered(), modulus > 1);
    if (!layout) CHECK(!c.pattern->in_residue(modulus, 0) || !c.pattern->in_residue(modulus, modulus - 1));
    return layout.has_value();
}

template <class Check>
void for_cases(Check check) {
    int built = 0, shared = 0;
    for (int seed = 0; seed < cases; ++seed) {
        Case c;
        if (!make_case(seed, c, shared)) continue;
        ++built;
        check(c);
    }
    check::context.clear();
    CHECK(built > cases / 2);
    CHECK(shared > cases / 5);
}

}  // namespace

TEST(lists_mean_the_pattern) { for_cases(check_meaning); }

TEST(masks_are_stored_once) {
    for_cases([](const Case& c) { check_masks(c.layout); });
}

TEST(runs_are_sorted_maximal_and_shared) {
    for_cases([](const Case& c) { check_runs(c.layout); });
}

TEST(live_sets_are_exact) { for_cases(check_live); }

TEST(counts_are_those_of_plain_blocks) {
    for_cases([](const Case& c) {
        const Counts got = count(c.layout), plain = count(build_layout(*c.pattern, c.extent, 64, 64));
        CHECK_EQ(got.pairs, plain.pairs);
        CHECK_EQ(got.row_min, plain.row_min);
        CHECK_EQ(got.row_max, plain.row_max);
        CHECK_EQ(got.rows_empty, plain.rows_empty);
        int64_t blocks = 0;
        for (int32_t id : c.layout.kind_of_head)
            for (int32_t row = 0; row < c.layout.by_query.rows; ++row)
                for (const Run& run : runs_of(c.layout.by_query, id, row)) blocks += run.count;
        CHECK_EQ(got.blocks_full + got.blocks_partial, blocks);
        CHECK_EQ(got.visited, double(blocks) * c.layout.block_q * c.layout.block_k);
        const int64_t grid = int64_t(c.layout.by_query.rows) * c.layout.by_key.rows;
        CHECK_EQ(blocks + got.blocks_empty, grid * c.extent.batch * c.extent.heads);
    });
}

TEST(every_token_is_written_once) {
    for_cases([](const Case& c) {
        const LayoutView v = view(c.layout);
        const std::vector<int> of_queries = count_writers(v.queries, v.block_q, v.seq_q, v.by_query.rows);
        const std::vector<int> of_keys = count_writers(v.keys, v.block_k, v.seq_k, v.by_key.rows);
        CHECK(of_queries == std::vector<int>(size_t(v.seq_q), 1));
        CHECK(of_keys == std::vector<int>(size_t(v.seq_k), 1));
    });
}

// 100 classes of 20 or 21 queries and keys: six a tile of 128, three a tile of 64.
TEST(short_classes_share_tiles) {
    const Extent extent{1, 1, 2048, 2048, 0};
    const auto classes = find_classes_of_tile(extent, 100, 128, 64);
    CHECK_EQ(classes->queries, 6);
    CHECK_EQ(classes->keys, 3);
    const auto pattern = parse_pattern("causal & strided(100)");
    const Counts shared = count(*build_short_residue_layout(*pattern, extent, 100, *classes, 128, 64));
    const Counts alone = count(*build_residue_layout(*pattern, extent, 100, 128, 64));
    CHECK_EQ(shared.pairs, alone.pairs);
    CHECK_EQ(shared.blocks_partial, 34);
    CHECK_EQ(alone.blocks_partial, 100);
    CHECK(!find_classes_of_tile(extent, 31, 128, 128));  // of 67 tokens
    CHECK(!find_classes_of_tile({1, 1, 100, 4096, 0}, 32, 64, 64));
}

TEST(other_patterns_have_none) {
    const Extent extent{1, 1, 40, 40, 0};
    for (const char* text : {"causal", "strided(6)", "strided(4) | sink(1)", "strided(4) & logsparse"}) {
        check::context = text;
        CHECK(!build_residue_layout(*parse_pattern(text), extent, 4, 16, 16));
    }
}

TEST(classes_that_are_alike_share_their_masks) {
    const Extent long_extent{1, 4, 1 << 17, 1 << 17, 0};
    for (const auto& [text, modulus] : {std::pair{"causal & dilated(1008,0,16)", 16}, {"causal & strided(128)", 128},
                                        {"causal & strided(100)", 100}}) {
        check::context = text;
        const auto layout = build_residue_layout(*parse_pattern(text), long_extent, modulus, 64, 64);
        CHECK(layout->num_masks <= 6);  // diagonals, and where two lengths of residue classes end
        CHECK(layout->bytes() <= size_t(1) << 18);
    }
}
