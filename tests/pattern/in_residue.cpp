// SPDX-License-Identifier: MIT
// modulus() and in_residue() against what the pattern means, pair by pair.
#include <numeric>

#include "check.h"
#include "pattern/trees.h"

using namespace spattn;
using namespace trees;

namespace {

struct Found {
    long moduli = 0, residues = 0, kept = 0, cut = 0;  // what was there to check
};

// The keys in [low, high) that position p sees.
std::vector<bool> row_of(const Pattern& pattern, const Plane& plane, int64_t p, int64_t low, int64_t high) {
    std::vector<bool> row(size_t(high - low));
    Intervals kept;
    pattern.keys(plane, p - plane.extent.q_offset, {low, high}, kept);
    for (const Interval& i : kept)
        for (int64_t k = i.begin; k < i.end; ++k) row[size_t(k - low)] = true;
    return row;
}

void check_modulus(const Tree& tree, const Plane& plane, Found& found) {
    const int64_t modulus = tree.pattern->modulus(), low = -25, high = plane.extent.seq_k + 25;
    bool holds = modulus >= 0;
    for (int64_t row = 0; row < plane.extent.seq_q; ++row) {
        const int64_t p = plane.position(row);
        const std::vector<bool> kept = row_of(*tree.pattern, plane, p, low, high);
        for (int64_t k = low; k < high; ++k)
            if (kept[size_t(k - low)]) holds &= modulus == 0 ? k == p : (k - p) % modulus == 0;
    }
    CHECK(holds);
    found.moduli += modulus > 1;
}

void check_residue(const Tree& tree, const Plane& plane, int64_t modulus, int64_t residue, Found& found) {
    const PatternRef part = tree.pattern->in_residue(modulus, residue);
    if (!part) return;
    ++found.residues;
    const int64_t low = -4, high = plane.extent.seq_k / modulus + 4;
    bool is_same = true;
    for (int64_t p = low; p < high; ++p) {
        const std::vector<bool> kept = row_of(*part, plane, p, low, high);
        for (int64_t k = low; k < high; ++k) {
            const bool wanted = tree.sees(plane, residue + modulus * p, residue + modulus * k);
            is_same &= kept[size_t(k - low)] == wanted;
            ++(wanted ? found.kept : found.cut);
        }
    }
    CHECK(is_same);
}

void check_random(uint32_t seeds, int depth, Found& found) {
    for (uint32_t seed = 0; seed < seeds; ++seed) {
        Source source(seed);
        const Tree tree = source.tree(depth);
        const Plane plane = source.plane();
        check::context = describe(tree, plane, seed);
        check_modulus(tree, plane, found);
        const int64_t own = std::max<int64_t>(tree.pattern->modulus(), 1);
        const int64_t modulus = source.number(0, 3) ? source.number(1, 12) : own;
        for (int64_t residue = 0; residue < std::min<int64_t>(modulus, 12); ++residue)
            check_residue(tree, plane, modulus, residue, found);
    }
    check::context.clear();
}

}  // namespace

TEST(random_patterns) {
    Found leaves, compositions;
    check_random(3000, 0, leaves);
    check_random(3000, 3, compositions);
    for (const Found& found : {leaves, compositions}) {
        CHECK(found.moduli > 100);
        CHECK(found.residues > 3000);
        CHECK(found.kept > 100000 && found.cut > 100000);
    }
}

// Ranges of rows, and of keys, that lie a multiple of the modulus away from where they stand among all.
TEST(rows_and_columns_from_zero) {
    long moduli = 0, residues = 0, kept = 0, pieces = 0;
    for (uint32_t seed = 0; seed < 2000; ++seed) {
        Source source(seed);
        const Tree tree = source.tree(2);
        const int64_t modulus = source.number(1, 6), seq = modulus * source.number(2, 9);
        struct Drawn {
            std::vector<int64_t> bounds, among_all;  // among_all: the inner token of each token
        };
        const auto draw = [&] {
            Drawn drawn;
            for (int64_t n = source.number(1, 3); n > 0; --n) {
                const int64_t begin = source.number(0, seq / modulus - 1), end = source.number(begin + 1, seq / modulus);
                drawn.bounds.insert(drawn.bounds.end(), {begin * modulus, end * modulus});
                for (int64_t token = begin * modulus; token < end * modulus; ++token) drawn.among_all.push_back(token);
            }
            return drawn;
        };
        const Drawn rows = draw();
        Drawn columns = draw();
        PatternRef pattern = make_rows_from_zero(tree.pattern, rows.bounds, seq);
        if (source.number(0, 1)) {
            pattern = make_columns_from_zero(std::move(pattern), columns.bounds, seq);
        } else {
            columns.among_all.resize(size_t(seq));
            std::iota(columns.among_all.begin(), columns.among_all.end(), int64_t(0));
        }
        const auto count = int64_t(rows.among_all.size()), seq_k = int64_t(columns.among_all.size());
        const Plane whole{{2, 3, seq, seq, 0}, 1, 1}, own{{2, 3, count, seq_k, 0}, 1, 1};
        const auto sees = [&](int64_t row, int64_t k) {
            return tree.sees(whole, rows.among_all[size_t(row)], columns.among_all[size_t(k)]);
        };
        check::context = describe(tree, whole, seed);
        pattern->check(own.extent);
        const int64_t found = pattern->modulus();
        moduli += found > 1;
        const Patterns parts = pattern->pieces();
        pieces += int64_t(parts.size()) > 1;
        bool holds = found >= 0, is_same = true, is_divided = true;
        for (int64_t row = 0; row < count; ++row)
            for (int64_t k = 0; k < seq_k; ++k) {
                const bool is_seen = sees(row, k);
                if (is_seen) holds &= found == 0 ? k == row : (k - row) % found == 0;
                int64_t among = 0;
                for (const PatternRef& part : parts) among += row_of(*part, own, row, k, k + 1)[0];
                is_divided &= among == int64_t(is_seen);
                kept += is_seen;
            }
        for (int64_t residue = 0; residue < modulus; ++residue) {
            const PatternRef part = pattern->in_residue(modulus, residue);
            residues += bool(part);
            const int64_t keys = (seq_k - residue + modulus - 1) / modulus;
            const Plane of_class{{2, 3, (count - residue + modulus - 1) / modulus, keys, 0}, 1, 1};
            for (int64_t row = residue; part && row < count; row += modulus) {
                const std::vector<bool> seen = row_of(*part, of_class, row / modulus, 0, keys);
                for (int64_t k = 0; k < keys; ++k)
                    is_same &= seen[size_t(k)] == sees(row, residue + modulus * k);
            }
        }
        CHECK(holds);
        CHECK(is_divided);
        CHECK(is_same);
    }
    check::context.clear();
    CHECK(moduli > 50);
    CHECK(residues > 2000);
    CHECK(pieces > 20);
    CHECK(kept > 100000);
}

// The largest modulus and the plainest words: what a layout of residue classes is compiled from.
TEST(classes_have_plain_words) {
    struct Case {
        const char* text;
        int64_t modulus, residue;
        const char* in_residue;
    };
    const Case cases[] = {
        {"dilated(1008,0,16)", 16, 3, "window(63,0)"},
        {"causal & dilated(1008,0,16)", 16, 15, "causal & window(63,0)"},
        {"dilated(-1,0,4)", 4, 0, "causal"},
        {"strided(128)", 128, 127, "full"},
        {"causal & (dilated(4096,0,6) | strided(9))", 3, 1, "causal & (dilated(1365,0,2) | strided(3))"},
        {"residue(8,3)", 8, 3, "full"},
        {"residue(8,3)", 8, 4, "global_keys()"},
        {"residue(4,1) & strided(6)", 12, 5, "full"},
        {"strided(12) - strided(24)", 12, 7, "full - strided(2)"},
        {"strided(6) & (global_tokens(0,7,13,40) | sink(4))", 6, 1, "full & (global_tokens(1,2) | sink(1))"},
        {"strided(4) & documents(3,9,9,30)", 4, 2, "full & documents(1,2,7)"},
        {"strided(4) & fixed(16,6)", 4, 3, "full & fixed(4,2)"},
        {"strided(4) & landmark(2,1)", 4, 3, "full & full"},
        {"transpose(dilated(6,2,3))", 3, 0, "transpose(window(2,0))"},
        {"grid([9,4,6], causal, full, window(0,0))", 6, 2, "grid([9,4], causal, full)"},
        {"grid([9,4,6], causal, window(0,0), window(0,0))", 24, 23, "grid([9], causal)"},
        {"grid([4,6], [4,6], window(0,0), window(0,0))", 24, 5, "grid([1], full)"},
        {"per_head([0,1,0], strided(4), dilated(12,0,6))", 2, 1, "per_head([0,1,0], strided(2), dilated(6,0,3))"},
    };
    for (const Case& c : cases) {
        check::context = c.text;
        const PatternRef pattern = parse_pattern(c.text);
        CHECK_EQ(pattern->modulus(), c.modulus);
        CHECK_EQ(pattern->in_residue(c.modulus, c.residue)->identity(), parse_pattern(c.in_residue)->identity());
    }
}

TEST(what_is_not_known_says_so) {
    for (const char* text :
         {"grid([9,4], [3,4], causal, window(0,0))", "grid([4,9], window(0,0), causal)",
          "full", "causal & window(9,0)", "logsparse", "bigbird(4,3,1,1,0)", "strided(4) | causal"}) {
        check::context = text;
        CHECK_EQ(parse_pattern(text)->modulus(), 1);
    }
    for (const char* text :
         {"window(0,0)", "global_keys()", "strided(4) & global_keys()", "landmark(7,0)", "dilated(4,4,5)"}) {
        check::context = text;
        CHECK_EQ(parse_pattern(text)->modulus(), 0);
    }
    for (const char* text : {"strided(4) & logsparse", "strided(6) | (strided(6) & block_diagonal(8))",
                             "per_document([0,8], [0,8], strided(2))", "rows([0,8], 9, strided(2))",
                             "csr([0,1],[0],1)"}) {
        check::context = text;
        CHECK(!parse_pattern(text)->in_residue(6, 0));
    }
    // A least common multiple that no integer holds: the larger of the two holds as well.
    const PatternRef large = make_intersection({make_strided((int64_t(1) << 62) - 1), make_strided(int64_t(1) << 61)});
    CHECK_EQ(large->modulus(), (int64_t(1) << 62) - 1);
}
