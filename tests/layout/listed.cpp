// SPDX-License-Identifier: MIT
// Listed tiles say what the plain layout said: each pair once, whoever owns the pass, and each token is written once.
#include "check.h"
#include "layout/dense.h"
#include "layout/orders/listed.h"
#include "layout/random_patterns.h"

using namespace spattn;

namespace {

constexpr int cases = 1500;

struct ListedCase {
    PatternRef pattern;
    Layout plain, listed;
    Owner owner;
};

ListedCase make_case(int seed) {
    Random random(uint64_t(seed) + 1);
    const Extent extent = random_extent(random);
    ListedCase c;
    c.pattern = random_pattern(random, extent);
    const int32_t sizes[] = {8, 16, 24, 32, 64, 100};
    c.plain = build_layout(*c.pattern, extent, sizes[random.in(0, 5)], sizes[random.in(0, 5)]);
    c.owner = seed % 2 ? Owner::queries : Owner::keys;
    c.listed = list_tiles(c.plain, c.owner);
    check::context = "seed " + std::to_string(seed) + ": " + c.pattern->print() + " on " +
                     std::to_string(extent.seq_q) + " x " + std::to_string(extent.seq_k) + " blocks " +
                     std::to_string(c.plain.block_q) + " x " + std::to_string(c.plain.block_k);
    return c;
}

}  // namespace

TEST(pairs_are_said_once) {
    int with_tiles = 0, with_hot = 0;
    for (int seed = 0; seed < cases; ++seed) {
        const ListedCase c = make_case(seed);
        const Axis& own = c.owner == Owner::queries ? c.listed.queries : c.listed.keys;
        const Axis& other = c.owner == Owner::queries ? c.listed.keys : c.listed.queries;
        with_tiles += !other.tokens.empty();
        with_hot += !own.tokens.empty();
        for (int32_t head_kind = 0; head_kind < c.plain.head_kinds; ++head_kind) {
            const Dense wanted = read_lists(c.plain, head_kind, false).pairs;
            for (bool by_key : {false, true}) CHECK(dense_of_lists(c.listed, head_kind, by_key) == wanted);
        }
    }
    check::context.clear();
    CHECK(with_tiles > cases / 4);  // else the cases show nothing
    CHECK(with_hot > cases / 50);
}

TEST(every_token_is_written_once) {
    for (int seed = 0; seed < cases; ++seed) {
        const ListedCase c = make_case(seed);
        const LayoutView v = view(c.listed);
        const std::vector<int> writers = c.owner == Owner::queries
                                             ? count_writers(v.queries, v.block_q, v.seq_q, v.by_query.rows)
                                             : count_writers(v.keys, v.block_k, v.seq_k, v.by_key.rows);
        CHECK(writers == std::vector<int>(writers.size(), 1));
    }
}

TEST(live_sets_say_who_takes_part) {
    for (int seed = 0; seed < cases; ++seed) check_live_keys(make_case(seed).listed);
}

TEST(equal_tiles_are_one) {
    // All rows see the same three keys beside their block: four listed tiles (three blocks have one of them at home),
    // not one a block.
    const PatternRef pattern = parse_pattern("block_diagonal(64) | global_keys(1000,3000,7000)");
    const Layout plain = build_layout(*pattern, {1, 1, 8192, 8192, 0}, 64, 64);
    const Layout listed = list_tiles(plain, Owner::queries);
    CHECK_EQ(listed.keys.tokens.size(), size_t(4) * 64);
    CHECK_EQ(count(listed).blocks_partial, 128);
}

TEST(global_tokens_leave_their_blocks) {
    const PatternRef pattern = parse_pattern("window(64,64) | global_tokens(100,2500,4000)");
    const Layout plain = build_layout(*pattern, {1, 2, 8192, 8192, 0}, 64, 64);
    for (Owner owner : {Owner::queries, Owner::keys}) {
        const Layout listed = list_tiles(plain, owner);
        const Axis& own = owner == Owner::queries ? listed.queries : listed.keys;
        CHECK_EQ(own.tokens.size(), size_t(64));
        CHECK_EQ(own.tokens[0], 100);
        CHECK_EQ(own.tokens[2], 4000);
        CHECK_EQ(own.tokens[3], no_token);
        CHECK(count(listed).visited < count(plain).visited);
    }
}
