// SPDX-License-Identifier: MIT
// Counts without lists are the counts of the lists, and take no time for lengths that no list could hold.
#include <cmath>
#include <ctime>

#include "check.h"
#include "layout/quadrants.h"
#include "layout/random_patterns.h"

using namespace spattn;

namespace {

void check_same(const Counts& got, const Counts& wanted) {
    CHECK_EQ(got.pairs, wanted.pairs);
    CHECK_EQ(got.visited, wanted.visited);
    CHECK_EQ(got.blocks_full, wanted.blocks_full);
    CHECK_EQ(got.blocks_partial, wanted.blocks_partial);
    CHECK_EQ(got.blocks_empty, wanted.blocks_empty);
    CHECK_EQ(got.row_min, wanted.row_min);
    CHECK_EQ(got.row_max, wanted.row_max);
    CHECK_EQ(got.rows_empty, wanted.rows_empty);
}

constexpr int64_t longest = (int64_t(1) << 31) - 1;

// A pattern of the longest sequence, and what arithmetic says that it keeps.
struct Long {
    const char* text;
    double pairs;
    int64_t row_min, row_max;
};
const Long longs[] = {
    {"full", double(longest) * longest, longest, longest},
    {"causal", double(longest) * (longest + 1) / 2, 1, longest},
    {"causal & window(1023,0)", 1024. * longest - 1023. * 1024 / 2, 1, 1024},
    {"sink(100)", 100. * longest, 100, 100},
    {"causal & sink(100)", 100. * longest - 99. * 100 / 2, 1, 100},
    {"causal & (sink(64) | window(1023,0))", 1024. * longest - 1023. * 1024 / 2 + 64. * (longest - 1024) - 63. * 64 / 2,
     1, 1024 + 64},
    {"block_diagonal(1048576)", 2047. * 1048576 * 1048576 + 1048575. * 1048575, 1048575, 1048576},
    {"causal & landmark(64,1)", 36028795945222144., 0, 33554431},
    {"causal & (window(64,0) | strided(64))", 36028933350619105., 1, 33554495},
    {"causal & strided(127)", 18156245223869467., 1, 16909321},
    {"causal & (window(127,0) | strided(127))", 18156515806800988., 1, 16909447},
    {"residue(127,3)", 285925136681041., 0, 16909321},
    {"causal - window(0,0)", double(longest) * (longest - 1) / 2, 0, longest - 1},
    {"transpose(causal)", double(longest) * (longest + 1) / 2, 1, longest},
};

}  // namespace

TEST(counts_are_those_of_the_lists) {
    int counted = 0;
    for (int seed = 0; seed < 3000; ++seed) {
        Random random(uint64_t(seed) + 1);
        const Extent extent = random_extent(random);
        const PatternRef pattern = random_pattern(random, extent);
        const int32_t sizes[] = {1, 2, 3, 7, 8, 16, 24, 64};
        const int32_t block_q = sizes[random.in(0, 7)], block_k = sizes[random.in(0, 7)];
        check::context = "seed " + std::to_string(seed) + ": " + pattern->print() + " in blocks of " +
                         std::to_string(block_q) + " x " + std::to_string(block_k);
        const auto counts = count_quadrants(*pattern, extent, block_q, block_k);
        if (!counts) continue;
        ++counted;
        check_same(*counts, count(build_layout(*pattern, extent, block_q, block_k)));
    }
    CHECK(counted > 1500);
}

TEST(the_longest_sequence_takes_no_time) {
    for (const Long& l : longs) {
        check::context = l.text;
        const PatternRef pattern = parse_pattern(l.text);
        const std::clock_t start = std::clock();
        const auto counts = count_quadrants(*pattern, {1, 1, longest, longest, 0}, 64, 64);
        const double seconds = double(std::clock() - start) / CLOCKS_PER_SEC;  // of this process: others may be busy
        CHECK(counts.has_value());
        if (!counts) continue;
        CHECK(std::abs(counts->pairs - l.pairs) <= 1e-12 * l.pairs);
        CHECK_EQ(counts->row_min, l.row_min);
        CHECK_EQ(counts->row_max, l.row_max);
        CHECK(seconds < 2);
    }
}

TEST(what_has_no_closed_form_is_left_to_lists) {
    const PatternRef lists = parse_pattern("csr([0,1,2],[0,1],2)");
    CHECK(!count_quadrants(*lists, {1, 1, 2, 2, 0}, 64, 64));
}
