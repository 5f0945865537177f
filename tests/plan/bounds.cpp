// SPDX-License-Identifier: MIT
// Is what the planner expects of layouts that it does not make what these would come to?
#include "plan/bounds.h"

#include "check.h"
#include "layout/random_patterns.h"
#include "plan/blocks.h"
#include "plan/stats.h"

using namespace spattn;

namespace {

constexpr int cases = 1000;

struct Case {
    Extent extent;
    PatternRef pattern;
    Problem problem{};

    explicit Case(int seed) {
        Random random(uint64_t(seed) + 1);
        extent = random_extent(random);
        pattern = random_pattern(random, extent);
        if (random.one_in(3)) pattern = make_intersection({make_strided(random.in(2, 12)), pattern});
        problem.batch = extent.batch, problem.heads_q = problem.heads_kv = extent.heads;
        problem.seq_q = extent.seq_q, problem.seq_k = extent.seq_k, problem.q_offset = extent.q_offset;
        check::context = "seed " + std::to_string(seed) + ": " + pattern->print();
    }
};

std::vector<Order> orders_of(const Lowering& lowering) {
    std::vector<Order> orders{Order::plain};
    if (lowering.modulus() > 1) orders.push_back(Order::residue);
    if (lowering.has_packed()) orders.push_back(Order::packed);
    return orders;
}

}  // namespace

TEST(smaller_blocks_are_known_exactly) {
    int met[4] = {};  // with masks, in each order
    for (int seed = 0; seed < cases; ++seed) {
        const Case c(seed);
        Lowering lowering(*c.pattern, c.problem);
        for (const Order order : orders_of(lowering)) {
            const Lowered& coarse = lowering.at({64, 64, order, Owner::queries});
            if (!lowering.coarser({16, 16, order, Owner::queries})) continue;  // short residue classes share its tiles
            const Lowered& fine = lowering.at({16, 16, order, Owner::queries});
            met[int(order)] += coarse.layout->num_masks > 0;
            for (const bool by_key : {false, true}) {
                LayoutStats got =
                    make_finer_stats(coarse, make_layout_stats(coarse, by_key), blocks_of(16, by_key));
                const LayoutStats want = make_layout_stats(fine, by_key);
                if (order == Order::packed) {  // what hot tokens gather is known from below alone
                    CHECK(got.gathered <= want.gathered);
                    got.gathered = want.gathered;
                }
                check_equal(got, want);
                if (order != Order::plain) continue;
                const auto least = [&](const Lowered& from) {
                    return make_least_listed_stats(from, make_layout_stats(from, by_key), blocks_of(16, by_key));
                };
                check_equal(least(coarse), least(fine));
            }
        }
    }
    check::context.clear();
    // How many depends on the compiler, which chooses the order in which arguments draw from `random`.
    CHECK(met[int(Order::plain)] > 500);
    CHECK(met[int(Order::residue)] > 10);
    CHECK(met[int(Order::packed)] > 10);
}

TEST(no_layout_comes_to_less_than_its_least) {
    int tight = 0, scattered = 0;
    for (int seed = 0; seed < cases; ++seed) {
        const Case c(seed);
        Lowering lowering(*c.pattern, c.problem);
        const int32_t modulus = lowering.modulus();
        for (const int32_t block : {16, 64})
            for (const Order order : orders_of(lowering)) {
                if (order == Order::packed) continue;
                const Lowered& made = lowering.at({block, block, order, Owner::queries});
                for (const bool by_key : {false, true}) {
                    const int32_t apart = order == Order::plain ? modulus : 1;
                    const LayoutStats least =
                        make_least_stats(c.problem, made.counts, blocks_of(block, by_key), apart);
                    const LayoutStats got = make_layout_stats(made, by_key);
                    CHECK_EQ(least.pairs, got.pairs);
                    CHECK(least.visited <= got.visited);
                    CHECK(least.blocks <= got.blocks);
                    CHECK(least.rows <= got.rows);
                    CHECK(least.worked <= got.worked || apart > 1);
                    tight += least.blocks == got.blocks && got.blocks > 0;
                    scattered += apart > 1;
                }
            }
    }
    check::context.clear();
    CHECK(tight > 50);
    CHECK(scattered > 50);
}
