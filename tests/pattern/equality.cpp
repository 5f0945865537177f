// SPDX-License-Identifier: MIT
// The laws of equality, and only those; hashes that every process and release agrees on.
#include <random>

#include "check.h"
#include "pattern/trees.h"

using namespace spattn;

namespace {

bool equal(const char* a, const char* b) {
    check::context = std::string(a) + " and " + b;
    return parse_pattern(a)->identity() == parse_pattern(b)->identity();
}

}  // namespace

TEST(equal_by_the_laws) {
    CHECK(equal("causal | full", "full | causal"));
    CHECK(equal("causal & full", "full & causal"));
    CHECK(equal("causal | causal", "causal"));
    CHECK(equal("causal & causal", "causal"));
    CHECK(equal("causal | (full | sink(1))", "(sink(1) | causal) | full"));
    CHECK(equal("causal & (full & sink(1))", "(sink(1) & causal) & full & full"));
    CHECK(equal("causal & (full - sink(1))", "causal & full - sink(1)"));
    CHECK(equal("(full - sink(1)) & causal", "(causal & full) - sink(1)"));
    CHECK(equal("(full - sink(1)) & (causal - sink(2))", "full & causal - sink(2) - sink(1)"));
    CHECK(equal("causal - sink(1) - sink(2)", "causal - sink(2) - sink(1)"));
    CHECK(equal("causal - sink(1) - sink(1)", "causal - sink(1)"));
    CHECK(equal("transpose(causal | full)", "transpose(full | causal)"));
    CHECK(equal("per_head([0,1], causal | full, sink(1))", "per_head([0,1], full | causal, sink(1))"));
    CHECK(equal("global_keys(5,1,5)", "global_keys(1,5)"));
    CHECK(equal("(causal | full) & sink(1)", "sink(1) & (full | causal)"));
    CHECK(equal("causal & (full & sink(1) | sink(1) & full)", "causal & full & sink(1)"));
    CHECK(equal("causal & (full - sink(1) | full - sink(1))", "causal & full - sink(1)"));
    CHECK(equal("causal | (full | sink(1)) & (sink(1) | full)", "causal | full | sink(1)"));
    CHECK(equal("full - ((causal | sink(1)) & (sink(1) | causal))", "full - (causal | sink(1))"));
}

namespace {

struct Spellings {
    PatternRef plain, repeated;
};

// The same composition twice, once with parts that are there twice.
Spellings spell(std::mt19937& random, int levels) {
    const char* leaves[] = {"causal", "full", "sink(1)", "window(2,0)"};
    if (levels == 0) {
        const PatternRef leaf = parse_pattern(leaves[random() % 4]);
        return {leaf, leaf};
    }
    const Spellings a = spell(random, levels - 1), b = spell(random, levels - 1);
    const unsigned kind = random() % 3;
    const auto join = [&](Patterns parts) {
        return kind == 0   ? make_union(std::move(parts))
               : kind == 1 ? make_intersection(std::move(parts))
                           : make_difference(std::move(parts));
    };
    const PatternRef repeated = join({a.repeated, b.repeated});
    const auto twice = random() % 2 ? make_union : make_intersection;
    return {join({a.plain, b.plain}), random() % 2 ? twice({repeated, repeated}) : repeated};
}

}  // namespace

TEST(repeats_make_no_difference_on_any_level) {
    std::mt19937 random(11);
    for (int i = 0; i < 2000; ++i) {
        const Spellings spellings = spell(random, 1 + i % 5);
        check::context = spellings.plain->print() + " and " + spellings.repeated->print();
        CHECK(spellings.plain->identity() == spellings.repeated->identity());
    }
}

TEST(equal_by_no_other_law) {
    CHECK(!equal("causal", "window(-1,0)"));
    CHECK(!equal("causal", "full"));
    CHECK(!equal("causal - sink(1)", "sink(1) - causal"));
    CHECK(!equal("causal - (full - sink(1))", "causal - full - sink(1)"));
    CHECK(!equal("causal - sink(1) - sink(2)", "causal - (sink(1) | sink(2))"));
    CHECK(!equal("causal & (full | sink(1))", "causal & full | causal & sink(1)"));
    CHECK(!equal("transpose(transpose(causal))", "causal"));
    CHECK(!equal("transpose(full)", "full"));
    CHECK(!equal("fixed(4,1)", "block_diagonal(4) | landmark(4,1)"));
    CHECK(!equal("documents(0,5,5,9)", "documents(0,5,9)"));
    CHECK(!equal("per_head([0,1], causal, full)", "per_head([1,0], full, causal)"));
    CHECK(!equal("per_head([0], causal)", "per_batch([0], causal)"));
    CHECK(!equal("global_keys(1,12)", "global_keys(11,2)"));
    CHECK(!equal("causal | full & sink(1)", "(causal | full) & sink(1)"));
}

// Equality that the text form cannot see would break caches: equal identities must mean equal masks.
TEST(equal_patterns_keep_the_same) {
    long equals = 0;
    for (uint32_t seed = 0; seed < 4000; ++seed) {
        trees::Source source(seed);
        const trees::Tree x = source.leaf(), y = source.leaf(), z = source.leaf();
        const Plane plane = source.plane();
        const PatternRef left = make_intersection({x.pattern, make_difference(y.pattern, z.pattern)});
        const PatternRef right = make_difference(make_intersection({y.pattern, x.pattern}), z.pattern);
        CHECK_EQ(left->identity(), right->identity());
        for (int64_t row = 0; row < plane.extent.seq_q; ++row) {
            Intervals a, b;
            left->keys(plane, row, {0, plane.extent.seq_k}, a);
            right->keys(plane, row, {0, plane.extent.seq_k}, b);
            bool is_same = a.size() == b.size();
            for (size_t i = 0; is_same && i < a.size(); ++i) is_same = a[i].begin == b[i].begin && a[i].end == b[i].end;
            CHECK(is_same);
            equals += is_same;
        }
    }
    CHECK(equals > 4000);
}

TEST(hashes_are_pinned) {
    const struct {
        const char* text;
        uint64_t hash;
    } pinned[] = {
        {"full", 0x6153797e5363b39c},
        {"causal", 0x5fffede74f03298f},
        {"causal & (sink(4) | window(4095,0))", 0x8d39a70193e34dae},
        {"full & causal - sink(1)", 0x55afeaac0a105e3f},
        {"bigbird(64,3,1,3,7)", 0x5eaa5b231d6f2c0b},
        {"documents(0,10,20)", 0x99dfbfb9bae62310},
        {"global_keys(9,1,5)", 0x8b10e5184d101dd0},
        {"xref([3,4,3,4],[-1,7,7,-1,-1,7,7,-1],1,1,3)", 0xf85eeb76c4949cc3},
        {"tree(-1,0,0)", 0x974354a662f24b15},
        {"per_head([0,1,0], causal, window(3,0))", 0x1aa0ed03a5f3109d},
        {"grid([6,8], [3,4], window(1,1), causal)", 0x972839e7ddd2707},
        {"transpose(logsparse)", 0x7962fa6b767279d3},
    };
    for (const auto& p : pinned) {
        check::context = p.text;
        CHECK_EQ(hash_identity(parse_pattern(p.text)->identity()), p.hash);
    }
}
