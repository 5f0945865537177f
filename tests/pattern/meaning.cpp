// SPDX-License-Identifier: MIT
// keys() against the definitions, pair by pair, over random patterns and extents.
#include "check.h"
#include "pattern/trees.h"

using namespace spattn;
using namespace trees;

namespace {

bool is_tidy(const Intervals& intervals, Interval clip) {
    int64_t last = clip.begin - 2;
    for (const Interval& i : intervals) {
        if (i.begin <= last || i.begin >= i.end || i.begin < clip.begin || i.end > clip.end) return false;
        last = i.end;
    }
    return true;
}

bool contains(const Intervals& intervals, int64_t k) {
    for (const Interval& i : intervals) {
        if (i.begin <= k && k < i.end) return true;
    }
    return false;
}

void check_rows(const Tree& tree, const Plane& plane, Interval clip) {
    Intervals kept;
    for (int64_t row = -3; row < plane.extent.seq_q + 3; ++row) {
        kept.assign(1, {7, 8});  // what the caller has already: untouched, and never joined to
        tree.pattern->keys(plane, row, clip, kept);
        const bool is_kept = kept[0].begin == 7 && kept[0].end == 8;
        kept.erase(kept.begin());
        bool is_right = is_kept && is_tidy(kept, clip);
        for (int64_t k = clip.begin; k < clip.end; ++k) {
            is_right &= contains(kept, k) == tree.sees(plane, plane.position(row), k);
        }
        CHECK(is_right);
    }
}

}  // namespace

TEST(leaves_keep_what_their_definition_says) {
    for (uint32_t seed = 0; seed < 1500; ++seed) {
        Source source(seed);
        const Tree tree = source.leaf();
        const Plane plane = source.plane();
        check::context = describe(tree, plane, seed);
        check_rows(tree, plane, {0, plane.extent.seq_k});
        check_rows(tree, plane, {-20, plane.extent.seq_k + 20});
        check_rows(tree, plane, {8, 9});
    }
}

TEST(compositions_keep_what_their_definition_says) {
    for (uint32_t seed = 0; seed < 600; ++seed) {
        Source source(seed);
        const Tree tree = source.tree(3);
        const Plane plane = source.plane();
        check::context = describe(tree, plane, seed);
        check_rows(tree, plane, {0, plane.extent.seq_k});
        check_rows(tree, plane, {-9, plane.extent.seq_k + 9});
        check_rows(tree, plane, {source.number(0, 10), source.number(0, 40)});
    }
}

TEST(tree_sees_ancestors) {
    for (uint32_t seed = 0; seed < 200; ++seed) {
        Source source(seed);
        const int64_t size = source.number(1, 24);
        std::vector<int64_t> order(static_cast<size_t>(size)), parents(order);
        for (int64_t n = 0; n < size; ++n) order[n] = n;
        for (int64_t n = size - 1; n > 0; --n) std::swap(order[n], order[source.number(0, n)]);
        for (int64_t n = 0; n < size; ++n) parents[order[n]] = n ? order[source.number(0, n - 1)] : -1;
        if (size > 2) parents[order[size - 1]] = -1;  // a forest
        Plane plane;
        plane.extent = {1, 1, source.number(1, size), size + source.number(0, 20), 0};
        plane.extent.q_offset = plane.extent.seq_k - plane.extent.seq_q - source.number(0, 9);
        const Meaning sees = [=](const Plane& s, int64_t p, int64_t k) {
            const int64_t base = s.extent.seq_k - size;
            if (k < base) return true;
            if (p < base || p >= s.extent.seq_k) return false;
            for (int64_t n = p - base; n >= 0; n = parents[n]) {
                if (n == k - base) return true;
            }
            return false;
        };
        const Tree tree{make_tree(parents), sees};
        check::context = describe(tree, plane, seed);
        check_rows(tree, plane, {0, plane.extent.seq_k});
        const Tree transposed{make_transpose(tree.pattern),
                              [=](const Plane& s, int64_t p, int64_t k) { return sees(s, k, p); }};
        check_rows(transposed, plane, {0, plane.extent.seq_k});
    }
}

TEST(bigbird_takes_all_blocks_where_it_wants_as_many) {
    const Plane plane{{1, 1, 40, 40, 0}};
    for (int64_t random : {7, 8, 9, 10, 11}) {
        const Meaning sees = [=](const Plane&, int64_t p, int64_t k) {
            const int64_t i = p / 4, j = k / 4;
            return p >= 0 && (std::abs(i - j) < 2 || random_blocks(i, 10, 3, 0, random, 5).count(j) > 0);
        };
        check_rows({make_bigbird(4, 3, 0, random, 5), sees}, plane, {0, 40});
    }
}

// More draws than a thread keeps for its next question: the rows are drawn again, and are the same.
TEST(transposed_bigbird_of_many_draws) {
    const Plane plane{{1, 1, 4, 2000, 700}};
    const Meaning sees = [](const Plane&, int64_t p, int64_t k) {
        if (k < 0) return false;
        return std::abs(k - p) < 2 || p < 1 || k < 1 || random_blocks(k, 2000, 3, 1, 200, 5).count(p) > 0;
    };
    const Tree tree{make_transpose(make_bigbird(1, 3, 1, 200, 5)), sees};
    check_rows(tree, plane, {-3, 30});
    check_rows(tree, plane, {690, 720});
    check_rows(tree, plane, {1990, 2010});
}
