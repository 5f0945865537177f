// SPDX-License-Identifier: MIT
// pieces(): each pair of a pattern lies in exactly one of them, and what keeps to residue classes lies apart.
#include "check.h"
#include "core/text.h"
#include "pattern/trees.h"

using namespace spattn;
using namespace trees;

namespace {

// How many pieces hold each pair of a plane, row after row.
std::vector<int> count_holders(const Patterns& pieces, const Plane& plane) {
    const Extent& e = plane.extent;
    std::vector<int> holders(size_t(e.seq_q * e.seq_k));
    Intervals kept;
    for (const PatternRef& piece : pieces)
        for (int64_t row = 0; row < e.seq_q; ++row) {
            kept.clear();
            piece->keys(plane, row, {0, e.seq_k}, kept);
            for (const Interval& i : kept)
                for (int64_t k = i.begin; k < i.end; ++k) ++holders[size_t(row * e.seq_k + k)];
        }
    return holders;
}

bool cover_once(const Patterns& pieces, const Tree& tree, const Plane& plane) {
    const std::vector<int> holders = count_holders(pieces, plane);
    bool is_same = true;
    for (int64_t row = 0; row < plane.extent.seq_q; ++row)
        for (int64_t k = 0; k < plane.extent.seq_k; ++k)
            is_same &= holders[size_t(row * plane.extent.seq_k + k)] == tree.sees(plane, plane.position(row), k);
    return is_same;
}

}  // namespace

TEST(random_patterns) {
    int cut = 0;
    for (uint32_t seed = 0; seed < 6000; ++seed) {
        Source source(seed);
        const Tree tree = source.tree(4);
        const Plane plane = source.plane();
        check::context = describe(tree, plane, seed);
        const Patterns pieces = tree.pattern->pieces();
        CHECK(!pieces.empty());
        CHECK(cover_once(pieces, tree, plane));
        cut += pieces.size() > 1;
    }
    check::context.clear();
    CHECK(cut > 50);
}

TEST(pieces_have_moduli_of_their_own) {
    struct Case {
        const char* text;
        std::vector<const char*> pieces;
    };
    const Case cases[] = {
        {"causal & (window(128,0) | strided(128))",
         {"causal & window(128,0)", "causal & (strided(128) - window(128,0))"}},
        {"strided(8) | sink(4) | window(9,9)", {"sink(4) | window(9,9)", "strided(8) - (sink(4) | window(9,9))"}},
        {"(window(5,0) | dilated(60,0,6)) - sink(2)",
         {"window(5,0) - sink(2)", "dilated(60,0,6) - window(5,0) - sink(2)"}},
        {"block_diagonal(64) | block_diagonal(256) & residue(4,1) | block_diagonal(512) & residue(8,1)",
         {"block_diagonal(64)", "block_diagonal(256) & residue(4,1) - block_diagonal(64)",
          "block_diagonal(512) & residue(8,1) - block_diagonal(64) - (block_diagonal(256) & residue(4,1))"}},
        {"strided(4) | strided(6)", {"strided(4)", "strided(6) - strided(4)"}},
        {"causal & (sink(3) | (documents(0,40,90) & (window(7,0) | strided(5))))",
         {"causal & (sink(3) | documents(0,40,90) & window(7,0))",
          "causal & (documents(0,40,90) & (strided(5) - window(7,0)) - (sink(3) | documents(0,40,90) & window(7,0)))"}},
        {"per_head([0,1,1], window(63,63), dilated(124,124,4))",
         {"per_head([0,1,1], window(63,63), global_keys())", "per_head([0,1,1], global_keys(), dilated(124,124,4))"}},
        {"per_batch([1,0], causal, window(9,0) | strided(6)) & per_head([0,1], strided(4), strided(6) | sink(2))",
         {"per_batch([1,0], causal, window(9,0)) & per_head([0,1], strided(4), strided(6) | sink(2))",
          "per_batch([1,0], global_keys(), strided(6) - window(9,0)) & "
          "per_head([0,1], strided(4), strided(6) | sink(2))"}},
        {"per_head([1,0], block_diagonal(64) | residue(4,0), block_diagonal(64) | residue(4,3) | residue(8,1))",
         {"per_head([1,0], block_diagonal(64), block_diagonal(64))",
          "per_head([1,0], residue(4,0) - block_diagonal(64), residue(4,3) - block_diagonal(64))",
          "per_head([1,0], global_keys(), residue(8,1) - block_diagonal(64) - residue(4,3))"}},
    };
    for (const Case& c : cases) {
        check::context = c.text;
        const Patterns pieces = parse_pattern(c.text)->pieces();
        CHECK_EQ(pieces.size(), c.pieces.size());
        for (size_t i = 0; i < pieces.size() && i < c.pieces.size(); ++i)
            CHECK_EQ(pieces[i]->identity(), parse_pattern(c.pieces[i])->identity());
    }
}

TEST(the_rest_stays_whole) {
    for (const char* text :
         {"full", "strided(8)", "causal & window(9,0)", "strided(8) | dilated(64,0,8)", "window(4,4) | window(0,0)",
          "causal & (sink(4) | window(9,0))", "fixed(16,4) & causal", "logsparse | strided(8)",
          "strided(2) | strided(3) | strided(5) | strided(7) | causal", "per_head([0,1], strided(8), dilated(64,0,8))",
          "per_head([0,1,2,3,4], full, strided(2), strided(3), strided(5), strided(7))"}) {
        check::context = text;
        const PatternRef pattern = parse_pattern(text);
        const Patterns pieces = pattern->pieces();
        CHECK_EQ(pieces.size(), size_t(1));
        CHECK_EQ(pieces[0].get(), pattern.get());
    }
}

// LongNet's heads, all of a layer of a large model.
TEST(many_heads_are_cut_like_few) {
    Patterns heads;
    std::vector<int32_t> part_of_head;
    for (int32_t head = 0; head < 128; ++head) {
        heads.push_back(parse_pattern(text("block_diagonal(512) | block_diagonal(2048) & residue(4,", head % 4,
                                           ") | block_diagonal(8192) & residue(16,", head % 16, ")")));
        part_of_head.push_back(head);
    }
    const PatternRef pattern = make_intersection({make_causal(), make_per_head(heads, part_of_head)});
    CHECK_EQ(pattern->pieces().size(), size_t(3));
}

// Compositions as deep and as wide as they may be are asked like any other.
TEST(large_compositions_are_answered) {
    PatternRef deep = parse_pattern("window(3,0) | strided(4)"), wide = deep;
    for (int level = 0; level < 150; ++level)
        deep = level % 2 ? make_union({deep, make_strided(level + 2)}) : make_intersection({deep, make_causal()});
    for (int part = 0; part < 3000; ++part) wide = make_union({wide, make_dilated(part, 0, 1 + part % 2)});
    for (const PatternRef& pattern : {deep, wide}) {
        const Patterns pieces = pattern->pieces();
        CHECK_EQ(pieces.size(), size_t(1));
        CHECK_EQ(pieces[0].get(), pattern.get());
    }
}
