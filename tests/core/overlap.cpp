// SPDX-License-Identifier: MIT
// Overlap of strided tensors against the sets of bytes they touch.
#include <random>
#include <set>

#include "check.h"
#include "core/overlap.h"

using namespace spattn;

static std::multiset<uintptr_t> bytes_of(const StridedBytes& t) {
    std::multiset<uintptr_t> bytes;
    for (int64_t a = 0; a < t.axes[0].size; ++a)
        for (int64_t b = 0; b < t.axes[1].size; ++b)
            for (int64_t c = 0; c < t.axes[2].size; ++c)
                for (int64_t e = 0; e < t.element; ++e)
                    bytes.insert(t.begin +
                                 uintptr_t(a * t.axes[0].stride + b * t.axes[1].stride + c * t.axes[2].stride + e));
    return bytes;
}

static StridedBytes random_tensor(std::mt19937& random) {
    StridedBytes t{1000 + random() % 40, int64_t(1) << random() % 3};
    for (int i = 0; i < 3; ++i) t.axes[size_t(i)] = {int64_t(random() % 4), int64_t(random() % 12) * t.element};
    return t;
}

TEST(overlap_is_the_intersection_of_bytes) {
    std::mt19937 random(7);
    int found = 0;
    for (int i = 0; i < 20000; ++i) {
        const StridedBytes a = random_tensor(random), b = random_tensor(random);
        const auto in_a = bytes_of(a), in_b = bytes_of(b);
        bool shared = false;
        for (uintptr_t byte : in_a) shared |= in_b.count(byte) > 0;
        CHECK_EQ(overlaps(a, b), shared);
        CHECK_EQ(overlaps(b, a), shared);
        found += shared;
    }
    CHECK(found > 1000 && found < 19000);
}

// Tagged pointers lie in the upper half: addresses further apart than signed numbers can say.
TEST(tensors_at_both_ends_of_memory_share_nothing) {
    const auto at = [](uintptr_t begin) { return StridedBytes{begin, 4, {{{1 << 20, 4}}}}; };
    for (const uintptr_t low : {uintptr_t(64), uintptr_t(1) << 40})
        for (const uintptr_t high : {(uintptr_t(1) << 63) - 64, (uintptr_t(1) << 63) + low, UINTPTR_MAX - (64 << 20)}) {
            CHECK(!overlaps(at(low), at(high)) && !overlaps(at(high), at(low)));
            CHECK(overlaps(at(high), at(high + 4)) && overlaps(at(high + 4), at(high)));
        }
}

// Strides need not nest: 2 x 3 elements that are 3 and 2 apart share no byte.
TEST(self_overlap_is_a_byte_met_twice) {
    std::mt19937 random(8);
    int found = 0;
    for (int i = 0; i < 20000; ++i) {
        const StridedBytes t = random_tensor(random);
        const auto bytes = bytes_of(t);
        const bool repeats = std::set<uintptr_t>(bytes.begin(), bytes.end()).size() != bytes.size();
        CHECK_EQ(overlaps_itself(t), repeats);
        found += repeats;
    }
    CHECK(found > 1000 && found < 19000);
    const StridedBytes nested{4096, 4, {{{2, 800}, {5, 160}, {4, 4}, {2, 16}}}};
    CHECK(!overlaps_itself(nested));
}

// Where two take turns, however their strides lie to each other, sums of these are even: a search for one that is odd
// would not end soon.
TEST(every_other_element_is_apart_from_the_rest) {
    const auto at = [](uintptr_t begin, int64_t scale) {
        return StridedBytes{begin, 4, {{{1000, 8 * 210 * scale}, {1000, 8 * 330}, {1000, 8 * 462}, {1000, 8 * 770}}}};
    };
    for (int64_t scale : {1, 3, 7}) {
        CHECK(!overlaps(at(1 << 20, 1), at((1 << 20) + 4, scale)));
        CHECK(!overlaps(at((1 << 20) + 4, 1), at(1 << 20, scale)));
        CHECK(overlaps(at(1 << 20, 1), at(1 << 20, scale)));
    }
}

TEST(slices_of_a_packed_tensor_interleave) {
    // [batch 2, seq 1000, 3, heads 4, dim 64] of float32: dq, dk, dv.
    const int64_t row = 3 * 4 * 64 * 4;
    for (int64_t i = 0; i < 3; ++i)
        for (int64_t j = 0; j < 3; ++j) {
            const auto slice = [&](int64_t n) {
                return StridedBytes{uintptr_t(1 << 20) + uintptr_t(n * 4 * 64 * 4), 4,
                                    {{{2, 1000 * row}, {1000, row}, {4, 256}, {64, 4}}}};
            };
            CHECK_EQ(overlaps(slice(i), slice(j)), i == j);
        }
}
