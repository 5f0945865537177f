// SPDX-License-Identifier: MIT
// Are the longest rows of a plan, which costs count on, those of its pattern?
#include "plan/stats.h"

#include "layout/dense.h"
#include "layout/random_patterns.h"
#include "plan/plans.h"

using namespace spattn;

namespace {

constexpr int32_t block = 16;

// Rows of blocks with work, blocks of the longest, and tokens of the other axis that the most visited token meets.
struct Longest {
    int64_t rows = 0, blocks = 0, tokens = 0;

    void add(const Dense& dense, const Extent& e, bool by_key) {
        const int64_t own = by_key ? e.seq_k : e.seq_q, other = by_key ? e.seq_q : e.seq_k;
        const auto sees = [&](int64_t a, int64_t b) {
            return bool(by_key ? dense[size_t(b)][size_t(a)] : dense[size_t(a)][size_t(b)]);
        };
        for (int64_t first = 0; first < own; first += block) {
            std::vector<bool> has_pairs(size_t(ceil_div(other, block)));
            for (int64_t a = first; a < std::min(first + block, own); ++a) {
                int64_t met = 0;
                for (int64_t b = 0; b < other; ++b)
                    if (sees(a, b)) ++met, has_pairs[size_t(b / block)] = true;
                tokens = std::max(tokens, met);
            }
            const int64_t listed = std::count(has_pairs.begin(), has_pairs.end(), true);
            rows += listed > 0;
            blocks = std::max(blocks, listed);
        }
    }
};

}  // namespace

TEST(longest_rows_and_columns_are_those_of_the_pattern) {
    for (int seed = 0; seed < 200; ++seed) {
        Random random(uint64_t(seed) + 1);
        const Extent extent = random_extent(random);
        Case c{extent, random_pattern(random, extent), {}};
        c.layout = build_layout(*c.pattern, extent, block, block);
        check::context = "seed " + std::to_string(seed) + ": " + c.pattern->print();
        Longest by_query, by_key;
        for (int64_t batch = 0; batch < extent.batch; ++batch)
            for (int64_t head = 0; head < extent.heads; ++head) {
                const Dense dense = dense_of_pattern(c, batch, head);
                by_query.add(dense, extent, false), by_key.add(dense, extent, true);
            }
        const Form form{block, block, Order::plain, Owner::queries};
        const Lowered lowered{form, std::make_shared<const Layout>(c.layout), count(c.layout)};
        const auto check_rows = [&](bool is_by_key, const Longest& own, const Longest& across) {
            const LayoutStats stats = make_layout_stats(lowered, is_by_key);
            CHECK_EQ(stats.rows, own.rows);
            CHECK_EQ(stats.longest.row, double(own.blocks));
            CHECK_EQ(stats.longest.rows_across, across.rows);
            CHECK_EQ(stats.longest.across, double(across.blocks));
        };
        check_rows(false, by_query, by_key);
        check_rows(true, by_key, by_query);
    }
    check::context.clear();
}

// Layouts of other orders have the same columns, and so have outlines.
TEST(columns_are_counted_in_every_order) {
    int ordered = 0, outlined = 0;
    for (int seed = 0; seed < 1000; ++seed) {
        Random random(uint64_t(seed) + 1);
        const Extent extent = random_extent(random);
        PatternRef pattern = random_pattern(random, extent);
        if (random.one_in(2)) pattern = make_intersection({make_strided(random.in(2, 12)), pattern});
        check::context = "seed " + std::to_string(seed) + ": " + pattern->print();
        Problem problem{};
        problem.batch = extent.batch, problem.heads_q = problem.heads_kv = extent.heads;
        problem.seq_q = extent.seq_q, problem.seq_k = extent.seq_k, problem.q_offset = extent.q_offset;
        Lowering lowering(*pattern, problem);
        const int64_t plain = count_longest_column(lowering.at({64, 64, Order::plain, Owner::queries}));
        Longest by_key;
        const Case c{extent, pattern, {}};
        for (int64_t batch = 0; batch < extent.batch; ++batch)
            for (int64_t head = 0; head < extent.heads; ++head)
                by_key.add(dense_of_pattern(c, batch, head), extent, true);
        CHECK_EQ(plain, by_key.tokens);
        for (const Order order : {Order::residue, Order::packed}) {
            if (order == Order::residue ? lowering.modulus() <= 1 : !lowering.has_packed()) continue;
            CHECK_EQ(count_longest_column(lowering.at({64, 64, order, Owner::queries})), plain);
            ++ordered;
        }
        Layout planes;
        planes.extent = extent;
        if (const auto outline = build_outline(*pattern, planes)) {
            CHECK_EQ(outline->longest_column, plain);
            ++outlined;
        }
    }
    check::context.clear();
    CHECK(ordered > 20 && outlined > 20);  // the compiler orders draws, so that numbers differ
}
