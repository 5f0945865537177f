// SPDX-License-Identifier: MIT
// Random patterns together with what they mean, written from the definitions alone.
#pragma once

#include <functional>
#include <random>
#include <set>
#include <string>

#include "meaning.h"
#include "pattern/pattern.h"

namespace trees {

using namespace spattn;
using namespace meaning;

// Whether a query at position p sees key k on this plane.
using Meaning = std::function<bool(const Plane&, int64_t p, int64_t k)>;

struct Tree {
    PatternRef pattern;
    Meaning sees;
};

inline std::set<int64_t> random_blocks(int64_t i, int64_t blocks, int64_t window, int64_t global, int64_t random,
                                       uint64_t seed) {
    std::set<int64_t> chosen, seen;
    for (int64_t j = 0; j < blocks; ++j) {
        if (2 * std::abs(i - j) < window || j < global || i < global) seen.insert(j);
    }
    uint64_t state = seed + uint64_t(i) * 0x9E3779B97F4A7C15;
    while (int64_t(chosen.size()) < random && int64_t(seen.size()) < blocks) {
        uint64_t z = state += 0x9E3779B97F4A7C15;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        const int64_t j = int64_t((z ^ (z >> 31)) % uint64_t(blocks));
        if (seen.insert(j).second) chosen.insert(j);
    }
    return chosen;
}

class Source {
public:
    explicit Source(uint32_t seed) : random_(seed) {}

    int64_t number(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }

    // tree() is left out where the extent may not fit it.
    Tree leaf() {
        switch (number(0, 14)) {
            case 0: return {make_full(), [](const Plane&, int64_t, int64_t) { return true; }};
            case 1: return {make_causal(), [](const Plane&, int64_t p, int64_t k) { return k <= p; }};
            case 2: return dilated(true);
            case 3: return dilated(false);
            case 4: return sink();
            case 5: return block_diagonal();
            case 6: return documents();
            case 7: return strided();
            case 8: return landmark();
            case 9: return fixed();
            case 10: return logsparse();
            case 11: return residue();
            case 12: return global(true);
            case 13: return global(false);
            default: return bigbird();
        }
    }

    Tree tree(int depth) {
        if (depth == 0 || number(0, 4) == 0) return leaf();
        const Tree a = tree(depth - 1), b = tree(depth - 1);
        switch (number(0, 5)) {
            case 4:
                return {make_per_batch({a.pattern, b.pattern}, {1, 0}),
                        choice(std::vector{a.sees, b.sees}, {1, 0}, false)};
            case 5: return {make_transpose(a.pattern), transpose(a.sees)};
            default: return composition(a, b);
        }
    }

    Tree composition(const Tree& a, const Tree& b) {
        const std::vector<Meaning> both{a.sees, b.sees};
        switch (number(0, 3)) {
            case 0: return {make_union({a.pattern, b.pattern}), any_of(both)};
            case 1: return {make_intersection({a.pattern, b.pattern}), all_of(both)};
            case 2: return {make_difference(a.pattern, b.pattern), difference(a.sees, b.sees)};
            default: return {make_per_head({a.pattern, b.pattern}, {0, 1, 0}), choice(both, {0, 1, 0}, true)};
        }
    }

    // Three heads and two batch entries, for per_head and per_batch above.
    Plane plane() {
        Plane plane;
        plane.extent = {2, 3, number(1, 40), number(1, 40), 0};
        const int64_t aligned = plane.extent.seq_k - plane.extent.seq_q;
        plane.extent.q_offset = number(0, 2) ? aligned : number(-30, 30);
        plane.batch = number(0, 1);
        plane.head = number(0, 2);
        return plane;
    }

private:
    Tree dilated(bool is_window) {
        const int64_t l = number(-1, 12), r = number(-1, 9), s = is_window ? 1 : number(1, 7);
        return {is_window ? make_window(l, r) : make_dilated(l, r, s), [=](const Plane&, int64_t p, int64_t k) {
                    return (l < 0 || k >= p - l) && (r < 0 || k <= p + r) && mod(k - p, s) == 0;
                }};
    }
    Tree sink() {
        const int64_t n = number(0, 12);
        return {make_sink(n), [=](const Plane&, int64_t, int64_t k) { return k < n; }};
    }
    Tree block_diagonal() {
        const int64_t b = number(1, 17);
        return {make_block_diagonal(b),
                [=](const Plane&, int64_t p, int64_t k) { return p >= 0 && div(k, b) == div(p, b); }};
    }
    Tree documents() {
        std::vector<int64_t> cu{number(0, 5)};
        for (int64_t n = number(0, 8); n > 0; --n) cu.push_back(cu.back() + number(0, 9));
        return {make_documents(cu), [=](const Plane&, int64_t p, int64_t k) {
                    for (size_t t = 0; t + 1 < cu.size(); ++t) {
                        if (cu[t] <= p && p < cu[t + 1] && cu[t] <= k && k < cu[t + 1]) return true;
                    }
                    return false;
                }};
    }
    Tree strided() {
        const int64_t s = number(1, 11);
        return {make_strided(s), [=](const Plane&, int64_t p, int64_t k) { return mod(k - p, s) == 0; }};
    }
    Tree landmark() {
        const int64_t b = number(1, 11), m = number(0, b);
        return {make_landmark(b, m), [=](const Plane&, int64_t, int64_t k) { return mod(k, b) >= b - m; }};
    }
    Tree fixed() {
        const int64_t b = number(1, 11), m = number(0, b);
        return {make_fixed(b, m), [=](const Plane&, int64_t p, int64_t k) {
                    return (p >= 0 && div(k, b) == div(p, b)) || mod(k, b) >= b - m;
                }};
    }
    static Tree logsparse() {
        return {make_logsparse(), [](const Plane&, int64_t p, int64_t k) {
                    return p == k || (p > k && ((p - k) & (p - k - 1)) == 0);
                }};
    }
    Tree residue() {
        const int64_t r = number(1, 9), o = number(0, r - 1);
        return {make_residue(r, o),
                [=](const Plane&, int64_t p, int64_t k) { return mod(p, r) == o && mod(k, r) == o; }};
    }
    Tree global(bool keys_only) {
        std::vector<int64_t> list;
        for (int64_t n = number(0, 12); n > 0; --n) list.push_back(number(0, 30));
        const std::set<int64_t> set(list.begin(), list.end());
        return {keys_only ? make_global_keys(list) : make_global_tokens(list), [=](const Plane&, int64_t p, int64_t k) {
                    return set.count(k) || (!keys_only && set.count(p));
                }};
    }
    Tree bigbird() {
        const int64_t b = number(1, 9), window = number(0, 3) ? number(0, 2) * 2 + 1 : 0;
        const int64_t g = number(0, 2), r = number(0, 3);
        const uint64_t seed = uint64_t(number(0, 1000));
        return {make_bigbird(b, window, g, r, seed), [=](const Plane& s, int64_t p, int64_t k) {
                    if (p < 0) return false;
                    const int64_t i = div(p, b), j = div(k, b);
                    if (2 * std::abs(i - j) < window || j < g || i < g) return true;
                    return random_blocks(i, div(s.extent.seq_k + b - 1, b), window, g, r, seed).count(j) > 0;
                }};
    }

    std::mt19937 random_;
};

inline std::string describe(const Tree& tree, const Plane& plane, uint32_t seed) {
    const Extent& e = plane.extent;
    return "seed " + std::to_string(seed) + ": " + tree.pattern->print() + " on " + std::to_string(e.seq_q) + " x " +
           std::to_string(e.seq_k) + " offset " + std::to_string(e.q_offset) + " batch " + std::to_string(plane.batch) +
           " head " + std::to_string(plane.head);
}

}  // namespace trees
