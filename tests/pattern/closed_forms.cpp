// SPDX-License-Identifier: MIT
// classify() and row_key() against keys(): kinds, repeats, and equal keys for equal content only.
#include <map>

#include "check.h"
#include "pattern/leaf.h"
#include "pattern/trees.h"

using namespace spattn;
using namespace trees;

namespace {

using Mask = std::vector<bool>;

Mask mask_of(const Pattern& pattern, const Plane& plane, const Block& b) {
    Mask mask(size_t(b.rows * b.keys));
    Intervals kept;
    for (int64_t row = 0; row < b.rows; ++row) {
        kept.clear();
        pattern.keys(plane, b.row + row, {b.key, b.key + b.keys}, kept);
        for (const Interval& i : kept) {
            for (int64_t k = i.begin; k < i.end; ++k) mask[size_t(row * b.keys + k - b.key)] = true;
        }
    }
    return mask;
}

Coverage::Kind kind_of(const Mask& mask) {
    size_t ones = 0;
    for (bool bit : mask) ones += bit;
    return ones == 0 ? Coverage::empty : ones == mask.size() ? Coverage::full : Coverage::partial;
}

// What was seen under each key: the next block with that key must have the same mask.
struct Seen {
    std::map<Key, Mask> masks;
    long known = 0, found_again = 0;
};

bool is_certain(Coverage::Kind kind, Coverage::Kind truth, bool is_leaf) {
    return kind == truth || (!is_leaf && kind == Coverage::partial);
}

// One block and the few that its repeat promises.
void check_block(const Pattern& pattern, const Plane& plane, Block block, bool is_leaf, Seen& seen) {
    Key key{-99};
    bool known = true;
    const Coverage coverage = pattern.classify(plane, block, key, known);
    CHECK(key[0] == -99 && coverage.repeat >= 1);
    if (coverage.kind != Coverage::partial) CHECK(key.size() == 1 && known);
    const Mask mask = mask_of(pattern, plane, block);
    CHECK(is_certain(coverage.kind, kind_of(mask), is_leaf && known));
    if (coverage.kind == Coverage::partial && known) {
        ++seen.known;
        const auto [place, is_first] = seen.masks.emplace(key, mask);
        seen.found_again += !is_first;
        CHECK(place->second == mask);
    }
    for (int64_t n = 1; n < std::min<int64_t>(coverage.repeat, 6); ++n) {
        block.key += block.keys;
        const Mask next = mask_of(pattern, plane, block);
        CHECK(coverage.kind == Coverage::partial ? next == mask : kind_of(next) == coverage.kind);
    }
}

void check_closed_forms(const Tree& tree, const Plane& plane, Source& source, bool is_leaf, Seen& all) {
    const int64_t rows = source.number(1, 12), keys = source.number(1, 12);
    Seen seen;
    for (int64_t row = -rows; row < plane.extent.seq_q + rows; row += rows) {
        for (int64_t key = -2 * keys; key < plane.extent.seq_k + 2 * keys; key += keys) {
            check_block(*tree.pattern, plane, {row, rows, key, keys}, is_leaf, seen);
        }
    }
    all.known += seen.known;
    all.found_again += seen.found_again;
}

// Rows of blocks with equal keys are equal over all keys.
long check_row_keys(const Tree& tree, const Plane& plane, Source& source) {
    const int64_t rows = source.number(1, 6), keys = plane.extent.seq_k + 20;
    std::map<Key, Mask> seen;
    long found_again = 0;
    for (int64_t row = -6; row < plane.extent.seq_q + 6; ++row) {
        Key key;
        if (!tree.pattern->row_key(plane, row, rows, key)) continue;
        const Mask mask = mask_of(*tree.pattern, plane, {row, rows, -10, keys});
        const auto [place, is_first] = seen.emplace(key, mask);
        found_again += !is_first;
        CHECK(place->second == mask);
    }
    return found_again;
}

// Rows of blocks with equal keys of stems are equal over the keys before both ends.
long check_stem_keys(const Tree& tree, const Plane& plane, Source& source) {
    const int64_t rows = source.number(1, 6), first = -10, last = plane.extent.seq_k + 10;
    struct Stem {
        int64_t row, end;
    };
    std::map<Key, Stem> seen;
    long found_again = 0;
    for (int64_t row = -6; row < plane.extent.seq_q + 6; ++row) {
        Key key{-99};
        const int64_t end = std::min(tree.pattern->stem_key(plane, row, rows, key), last);
        CHECK(key[0] == -99);
        if (end <= first) continue;
        const auto [place, is_first] = seen.emplace(key, Stem{row, end});
        Stem& known = place->second;
        const int64_t keys = std::min(end, known.end) - first;
        CHECK(mask_of(*tree.pattern, plane, {row, rows, first, keys}) ==
              mask_of(*tree.pattern, plane, {known.row, rows, first, keys}));
        found_again += !is_first && keys > 10;
        if (end > known.end) known = {row, end};
    }
    return found_again;
}

void check_random(uint32_t seeds, int depth) {
    Seen all;
    long rows_again = 0, stems_again = 0;
    for (uint32_t seed = 0; seed < seeds; ++seed) {
        Source source(seed);
        const Tree tree = depth ? source.tree(depth) : source.leaf();
        const Plane plane = source.plane();
        check::context = describe(tree, plane, seed);
        check_closed_forms(tree, plane, source, depth == 0 && tree.pattern->print().find("fixed") != 0, all);
        rows_again += check_row_keys(tree, plane, source);
        stems_again += check_stem_keys(tree, plane, source);
    }
    check::context.clear();
    // The checks above had something to check.
    CHECK(all.known > 1000 && all.found_again > 1000 && rows_again > 100 && stems_again > 100);
}

}  // namespace

TEST(leaves) { check_random(1500, 0); }
TEST(compositions) { check_random(800, 3); }

TEST(trees_of_tokens) {
    Source source(1);
    const Tree tree{make_tree({-1, 0, 0, 1, 1, 2, -1, 6}), {}};
    Seen seen;
    for (int64_t offset = 0; offset < 30; ++offset) {
        const Plane plane{{1, 1, 8, 20, offset}};
        check_closed_forms(tree, plane, source, false, seen);
        check_row_keys(tree, plane, source);
    }
    CHECK(seen.known > 0);
}

// Lengths where rows cannot be walked: what the closed form says at once must be all there is to say.
TEST(long_rows_take_few_questions) {
    struct Case {
        const char* text;
        int most;  // questions along one row of blocks
    };
    const Case cases[] = {{"full", 1},         {"causal", 3},           {"window(1023,0)", 5}, {"sink(64)", 2},
                          {"strided(64)", 1},  {"block_diagonal(128)", 3}, {"landmark(64,4)", 1}, {"residue(8,3)", 1},
                          {"dilated(1008,0,16)", 20}, {"logsparse", 60},   {"global_keys(7,500000)", 4},
                          {"bigbird(64,3,1,3,0)", 16}, {"documents(0,300000,1000000)", 5},
                          {"causal & (sink(64) | window(1023,0))", 7}, {"transpose(causal)", 3},
                          {"transpose(sink(64))", 1},    {"transpose(bigbird(64,3,1,3,0))", 24},
                          {"transpose(logsparse)", 60}};
    for (const Case& c : cases) {
        check::context = c.text;
        const Plane plane{{1, 1, 1 << 20, 1 << 20, 0}};
        const PatternRef pattern = parse_pattern(c.text);
        int asked = 0;
        for (int64_t block = 0; block < 1 << 14; ++asked) {
            Key key;
            bool known = true;
            const Coverage coverage = pattern->classify(plane, {524288, 64, block * 64, 64}, key, known);
            block = coverage.repeat > (1 << 14) ? 1 << 14 : block + coverage.repeat;
        }
        CHECK(asked <= c.most);
    }
}

namespace {

// Every second key, and what it was asked about.
class Recorder : public Leaf {
public:
    Recorder() : Leaf("recorder") {}
    void keys(const Plane&, int64_t, Interval clip, Intervals& out) const override {
        asked.push_back(clip);
        for (int64_t k = round_up(clip.begin, 2); k < clip.end; k += 2) out.push_back({k, k + 1});
    }
    int64_t period() const override { return 2; }
    mutable Intervals asked;
};

}  // namespace

TEST(what_repeats_is_asked_about_few_keys) {
    const auto repeats = make_ref<Recorder>();
    const PatternRef both = make_intersection({repeats, make_window(9, 0), repeats});
    Intervals kept;
    both->keys({{1, 1, 1 << 20, 1 << 20, 0}}, 1000, {0, 1 << 20}, kept);
    CHECK_EQ(kept.size(), size_t(5));
    CHECK_EQ(repeats->asked.size(), size_t(2));
    for (const Interval& asked : repeats->asked) CHECK(asked.begin >= 991 && asked.end <= 1001);
}
