// SPDX-License-Identifier: MIT
// Do the lists cover each allowed pair exactly once, and say nothing else? Random algebra against keys().
#include <map>
#include <set>

#include "check.h"
#include "layout/layout.h"
#include "layout/random_patterns.h"

using namespace spattn;

namespace {

constexpr int cases = 1500;

using Dense = std::vector<std::vector<bool>>;  // [seq_q][seq_k]

struct Case {
    Extent extent;
    PatternRef pattern;
    Layout layout;
};

Case make_case(int seed) {
    Random random(uint64_t(seed) + 1);
    Case c;
    c.extent = random_extent(random);
    c.pattern = random_pattern(random, c.extent);
    const int32_t sizes[] = {8, 16, 24, 32, 40, 64, 100, 128};
    c.layout = build_layout(*c.pattern, c.extent, sizes[random.in(0, 7)], sizes[random.in(0, 7)]);
    check::context = "seed " + std::to_string(seed) + ": " + c.pattern->print() + " on " +
                     std::to_string(c.extent.seq_q) + " x " + std::to_string(c.extent.seq_k) + " offset " +
                     std::to_string(c.extent.q_offset) + " blocks " + std::to_string(c.layout.block_q) + " x " +
                     std::to_string(c.layout.block_k);
    return c;
}

Dense dense_of_pattern(const Case& c, int64_t batch, int64_t head) {
    Dense dense(size_t(c.extent.seq_q), std::vector<bool>(size_t(c.extent.seq_k)));
    Intervals intervals;
    for (int64_t row = 0; row < c.extent.seq_q; ++row) {
        intervals.clear();
        c.pattern->keys({c.extent, batch, head}, row, {0, c.extent.seq_k}, intervals);
        for (Interval i : intervals)
            for (int64_t key = i.begin; key < i.end; ++key) dense[size_t(row)][size_t(key)] = true;
    }
    return dense;
}

bool mask_bit(const Layout& layout, int32_t mask, int64_t row, int64_t key) {
    const int64_t bit = row * layout.block_k + key;
    return layout.masks[size_t(mask) * layout.mask_words + size_t(bit / 64)] >> (bit % 64) & 1;
}

std::vector<Run> runs_of(const Lists& lists, int32_t class_id, int32_t row) {
    const Slice slice = lists.slices[size_t(class_id) * lists.rows + row];
    return {lists.runs.begin() + slice.begin, lists.runs.begin() + slice.end};
}

// Every pair the lists say, and how often: more than once is a failure.
Dense dense_of_lists(const Layout& layout, const Lists& lists, int32_t class_id, bool by_key) {
    const Extent& e = layout.extent;
    Dense dense(size_t(e.seq_q), std::vector<bool>(size_t(e.seq_k)));
    bool is_inside = true, is_once = true;
    for (int32_t list = 0; list < lists.rows; ++list)
        for (const Run& run : runs_of(lists, class_id, list))
            for (int32_t other = run.first; other < run.first + run.count; ++other) {
                const int64_t row0 = int64_t(by_key ? other : list) * layout.block_q;
                const int64_t key0 = int64_t(by_key ? list : other) * layout.block_k;
                for (int64_t row = 0; row < layout.block_q; ++row)
                    for (int64_t key = 0; key < layout.block_k; ++key) {
                        if (run.mask != full_block && !mask_bit(layout, run.mask, row, key)) continue;
                        if (row0 + row >= e.seq_q || key0 + key >= e.seq_k) {
                            is_inside = false;
                            continue;
                        }
                        is_once &= !dense[size_t(row0 + row)][size_t(key0 + key)];
                        dense[size_t(row0 + row)][size_t(key0 + key)] = true;
                    }
            }
    CHECK(is_inside);
    CHECK(is_once);
    return dense;
}

void check_runs(const Lists& lists, int32_t classes, int32_t others) {
    std::map<std::vector<int32_t>, std::pair<int32_t, int32_t>> slices;
    bool is_sorted = true, is_maximal = true, is_shared = true;
    for (int32_t i = 0; i < classes * lists.rows; ++i) {
        const std::vector<Run> runs = runs_of(lists, 0, i);
        std::vector<int32_t> content;
        for (size_t r = 0; r < runs.size(); ++r) {
            const int32_t end = r ? runs[r - 1].first + runs[r - 1].count : 0;
            is_sorted &= runs[r].count > 0 && runs[r].first >= end && runs[r].first + runs[r].count <= others;
            if (r && runs[r].first == end) is_maximal &= runs[r].mask != runs[r - 1].mask;
            content.insert(content.end(), {runs[r].first, runs[r].count, runs[r].mask});
        }
        const std::pair<int32_t, int32_t> place{lists.slices[i].begin, lists.slices[i].end};
        is_shared &= slices.emplace(content, place).first->second == place;
    }
    CHECK(is_sorted);
    CHECK(is_maximal);
    CHECK(is_shared);
}

bool is_alive(const Live& live, int32_t block, int64_t bit) {
    const int32_t set = live.set_of[size_t(block)];
    return set == all_live || (live.sets[size_t(set) * live.words + size_t(bit / 64)] >> (bit % 64) & 1);
}

}  // namespace

TEST(lists_mean_the_pattern) {
    for (int seed = 0; seed < cases; ++seed) {
        const Case c = make_case(seed);
        for (int64_t plane = 0; plane < c.extent.batch * c.extent.heads; ++plane) {
            const Dense wanted = dense_of_pattern(c, plane / c.extent.heads, plane % c.extent.heads);
            const int32_t class_id = c.layout.class_of[size_t(plane)];
            CHECK(dense_of_lists(c.layout, c.layout.by_query, class_id, false) == wanted);
            CHECK(dense_of_lists(c.layout, c.layout.by_key, class_id, true) == wanted);
        }
    }
}

TEST(blocks_are_exact_and_masks_are_stored_once) {
    for (int seed = 0; seed < cases; ++seed) {
        const Case c = make_case(seed);
        const Layout& layout = c.layout;
        std::set<std::vector<uint64_t>> distinct;
        bool is_exact = true;
        for (int32_t mask = 0; mask < layout.num_masks; ++mask) {
            const auto begin = layout.masks.begin() + int64_t(mask) * layout.mask_words;
            distinct.emplace(begin, begin + layout.mask_words);
            int64_t kept = 0;
            for (int32_t row = 0; row < layout.block_q; ++row)
                for (int32_t key = 0; key < layout.block_k; ++key) kept += mask_bit(layout, mask, row, key);
            is_exact &= kept > 0 && kept < int64_t(layout.block_q) * layout.block_k;
        }
        CHECK(is_exact);
        CHECK_EQ(distinct.size(), size_t(layout.num_masks));
        CHECK_EQ(layout.masks.size(), size_t(layout.num_masks) * layout.mask_words);
    }
}

TEST(runs_are_sorted_maximal_and_shared) {
    for (int seed = 0; seed < cases; ++seed) {
        const Case c = make_case(seed);
        check_runs(c.layout.by_query, c.layout.classes, c.layout.by_key.rows);
        check_runs(c.layout.by_key, c.layout.classes, c.layout.by_query.rows);
    }
}

TEST(transpose_twice_is_identity) {
    for (int seed = 0; seed < cases; ++seed) {
        const Case c = make_case(seed);
        const Lists back = transpose_lists(c.layout.by_key, c.layout.classes, c.layout.by_query.rows);
        CHECK_EQ(back.rows, c.layout.by_query.rows);
        CHECK_EQ(back.runs.size(), c.layout.by_query.runs.size());
        bool is_same = true;
        for (int32_t i = 0; i < c.layout.classes * back.rows; ++i) {
            const std::vector<Run> a = runs_of(back, 0, i), b = runs_of(c.layout.by_query, 0, i);
            is_same &= a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](Run x, Run y) {
                           return x.first == y.first && x.count == y.count && x.mask == y.mask;
                       });
        }
        CHECK(is_same);
    }
}

TEST(live_sets_are_exact) {
    for (int seed = 0; seed < cases; ++seed) {
        const Case c = make_case(seed);
        const Layout& layout = c.layout;
        const Dense dense = dense_of_pattern(c, 0, 0);
        const int32_t first = layout.class_of[0];
        bool rows_right = true, keys_right = true;
        for (int64_t row = 0; row < int64_t(layout.by_query.rows) * layout.block_q; ++row) {
            bool sees = false;
            if (row < c.extent.seq_q)
                for (bool kept : dense[size_t(row)]) sees |= kept;
            const int32_t block = int32_t(first * layout.by_query.rows + row / layout.block_q);
            rows_right &= is_alive(layout.live_queries, block, row % layout.block_q) == sees;
        }
        for (int64_t key = 0; key < int64_t(layout.by_key.rows) * layout.block_k; ++key) {
            bool is_seen = false;
            if (key < c.extent.seq_k)
                for (const auto& row : dense) is_seen |= row[size_t(key)];
            const int32_t block = int32_t(first * layout.by_key.rows + key / layout.block_k);
            keys_right &= is_alive(layout.live_keys, block, key % layout.block_k) == is_seen;
        }
        CHECK(rows_right);
        CHECK(keys_right);
    }
}

TEST(counts_are_brute_force_counts) {
    for (int seed = 0; seed < cases; ++seed) {
        const Case c = make_case(seed);
        const Layout& layout = c.layout;
        Counts wanted;
        wanted.row_min = c.extent.seq_k;
        for (int64_t plane = 0; plane < c.extent.batch * c.extent.heads; ++plane) {
            const Dense dense = dense_of_pattern(c, plane / c.extent.heads, plane % c.extent.heads);
            std::map<std::pair<int64_t, int64_t>, int64_t> blocks;
            for (size_t row = 0; row < dense.size(); ++row) {
                int64_t kept = 0;
                for (size_t key = 0; key < dense[row].size(); ++key) {
                    if (!dense[row][key]) continue;
                    ++kept;
                    ++blocks[{int64_t(row) / layout.block_q, int64_t(key) / layout.block_k}];
                }
                wanted.pairs += double(kept);
                wanted.row_min = std::min(wanted.row_min, kept);
                wanted.row_max = std::max(wanted.row_max, kept);
                wanted.rows_empty += kept == 0;
            }
            for (const auto& [place, kept] : blocks)
                ++(kept == int64_t(layout.block_q) * layout.block_k ? wanted.blocks_full : wanted.blocks_partial);
            wanted.blocks_empty += int64_t(layout.by_query.rows) * layout.by_key.rows - int64_t(blocks.size());
        }
        const Counts got = count(layout);
        CHECK_EQ(got.pairs, wanted.pairs);
        CHECK_EQ(got.visited, double(wanted.blocks_full + wanted.blocks_partial) * layout.block_q * layout.block_k);
        CHECK_EQ(got.blocks_full, wanted.blocks_full);
        CHECK_EQ(got.blocks_partial, wanted.blocks_partial);
        CHECK_EQ(got.blocks_empty, wanted.blocks_empty);
        CHECK_EQ(got.row_min, wanted.row_min);
        CHECK_EQ(got.row_max, wanted.row_max);
        CHECK_EQ(got.rows_empty, wanted.rows_empty);
    }
}

TEST(layouts_grow_with_runs_not_with_blocks) {
    const Extent million{1, 2, 1 << 20, 1 << 20, 0};
    const PatternRef causal = make_causal();
    const PatternRef streaming = make_intersection({causal, make_union({make_sink(64), make_window(1023, 0)})});
    for (const PatternRef& pattern : {make_full(), causal, streaming, make_block_diagonal(128)}) {
        const Layout layout = build_layout(*pattern, million, 64, 64);
        check::context = pattern->print();
        CHECK(layout.by_query.runs.size() <= size_t(4 * layout.by_query.rows));
        CHECK(layout.by_key.runs.size() <= size_t(4 * layout.by_key.rows));
        CHECK(layout.num_masks <= 4);
        CHECK(layout.bytes() <= size_t(8) << 20);
    }
    CHECK(build_layout(*causal, million, 64, 64).by_query.runs.size() <= size_t(2) << 14);
}
