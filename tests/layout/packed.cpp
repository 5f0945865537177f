// SPDX-License-Identifier: MIT
// Packed tokens say what the pattern says: each pair once, and each token is written once by either pass.
#include "check.h"
#include "layout/dense.h"
#include "layout/orders/packed.h"
#include "layout/random_patterns.h"
#include "pattern/leaf.h"

using namespace spattn;

namespace {

constexpr int cases = 2000;

PatternRef random_hot_leaf(Random& random, const Extent& e) {
    const int64_t limit = std::max(e.seq_q, e.seq_k) + 20, block = random.in(8, 40);
    const auto positions = [&] {
        std::vector<int64_t> out(size_t(random.in(1, 12)));
        for (int64_t& position : out) position = random.in(0, limit);
        return out;
    };
    switch (random.in(0, 5)) {
        case 0: return make_landmark(block, random.in(1, block / 8));
        case 1: return make_fixed(block, random.in(1, block / 8));
        case 2: return make_global_keys(positions());
        case 3: return make_transpose(make_global_keys(positions()));
        case 4: return make_transpose(make_landmark(block, random.in(1, block / 8)));
    }
    return make_global_tokens(positions());
}

// Compositions around a leaf that has hot tokens.
PatternRef random_hot_pattern(Random& random, const Extent& e) {
    PatternRef pattern = random_hot_leaf(random, e);
    for (int64_t n = random.in(0, 3); n > 0; --n) {
        PatternRef other = random.one_in(3) ? random_hot_leaf(random, e) : random_pattern(random, e);
        switch (random.in(0, 3)) {
            case 0: pattern = make_union({pattern, other}); break;
            case 1: pattern = make_intersection({make_causal(), pattern}); break;
            case 2: pattern = make_intersection({other, pattern}); break;
            default: pattern = make_difference(pattern, other);
        }
    }
    return pattern;
}

struct HotCase : Case {
    std::optional<HotTokens> hot;
};

HotCase make_case(int seed) {
    Random random(uint64_t(seed) + 1);
    HotCase c;
    c.extent = random_extent(random);
    c.pattern = random_hot_pattern(random, c.extent);
    if (const int64_t seq = c.extent.seq_q; seq > 1 && random.one_in(4)) {  // its last rows, and then its first
        c.pattern = make_rows(c.pattern, {seq / 2, seq, 0, (seq + 2) / 3}, seq);
        c.extent.seq_q = seq - seq / 2 + (seq + 2) / 3;
    }
    if (const int64_t seq = c.extent.seq_k; seq > 1 && random.one_in(4)) {  // its first keys, and its last ones
        c.pattern = make_columns(c.pattern, {0, (seq + 2) / 3, seq / 2, seq}, seq);
        c.extent.seq_k = seq - seq / 2 + (seq + 2) / 3;
        c.extent.q_offset += c.extent.seq_k - seq;
    }
    c.hot = c.pattern->hot(c.extent);
    const int32_t sizes[] = {8, 16, 24, 32, 64, 100};
    const int32_t block_q = sizes[random.in(0, 5)], block_k = sizes[random.in(0, 5)];
    if (c.hot) c.layout = build_packed_layout(*c.hot, c.extent, block_q, block_k);
    check::context = "seed " + std::to_string(seed) + ": " + describe(c) + ", asked for blocks " +
                     std::to_string(block_q) + " x " + std::to_string(block_k);
    return c;
}

bool is_among(const std::vector<int64_t>& tokens, int64_t token) {
    return std::binary_search(tokens.begin(), tokens.end(), token);
}

}  // namespace

TEST(hot_tokens_divide_the_pattern) {
    int with_keys = 0, with_queries = 0;
    for (int seed = 0; seed < cases; ++seed) {
        HotCase c = make_case(seed);
        if (!c.hot) continue;
        with_keys += !c.hot->keys.empty();
        with_queries += !c.hot->queries.empty();
        CHECK(std::is_sorted(c.hot->keys.begin(), c.hot->keys.end()));
        CHECK(std::is_sorted(c.hot->queries.begin(), c.hot->queries.end()));
        const auto dense_of = [&](const PatternRef& pattern, int64_t plane) {
            Case other{c.extent, pattern, {}};
            return dense_of_pattern(other, plane / c.extent.heads, plane % c.extent.heads);
        };
        const Dense marks = dense_of(c.hot->marks, 0);
        bool is_marked = true, is_divided = true;
        for (int64_t plane = 0; plane < c.extent.batch * c.extent.heads; ++plane) {
            const Dense whole = dense_of(c.pattern, plane), among = dense_of(c.hot->among, plane),
                        apart = dense_of(c.hot->apart, plane);
            for (size_t q = 0; q < whole.size(); ++q)
                for (size_t k = 0; k < whole[q].size(); ++k) {
                    const bool is_hot = is_among(c.hot->queries, int64_t(q)) || is_among(c.hot->keys, int64_t(k));
                    is_marked &= marks[q][k] == is_hot;
                    is_divided &= whole[q][k] == (is_hot ? among : apart)[q][k];
                }
        }
        CHECK(is_marked);
        CHECK(is_divided);
    }
    check::context.clear();
    CHECK(with_keys > cases / 4);  // else the cases show nothing
    CHECK(with_queries > cases / 10);
}

TEST(pairs_are_said_once) {
    for (int seed = 0; seed < cases; ++seed) {
        const HotCase c = make_case(seed);
        if (!c.hot) continue;
        check_masks(c.layout);
        check_runs(c.layout);
        check_meaning(c);
    }
}

TEST(every_token_is_written_once) {
    for (int seed = 0; seed < cases; ++seed) {
        const HotCase c = make_case(seed);
        if (!c.hot) continue;
        const LayoutView v = view(c.layout);
        const auto are_once = [](const std::vector<int>& writers) {
            return std::all_of(writers.begin(), writers.end(), [](int n) { return n == 1; });
        };
        CHECK(are_once(count_writers(v.queries, v.block_q, v.seq_q, v.by_query.rows)));
        CHECK(are_once(count_writers(v.keys, v.block_k, v.seq_k, v.by_key.rows)));
    }
}

TEST(live_sets_and_counts_are_exact) {
    for (int seed = 0; seed < cases; ++seed) {
        const HotCase c = make_case(seed);
        if (!c.hot) continue;
        check_live_keys(c.layout);
        const Counts got = count(c.layout);
        const Counts wanted = count(build_layout(*c.pattern, c.extent, c.layout.block_q, c.layout.block_k));
        CHECK_EQ(got.pairs, wanted.pairs);
        CHECK_EQ(got.row_min, wanted.row_min);
        CHECK_EQ(got.row_max, wanted.row_max);
        CHECK_EQ(got.rows_empty, wanted.rows_empty);
    }
}

TEST(hot_parts_of_a_union_are_packed_together) {
    const Extent extent{1, 1, 1000, 1000, 0};
    const auto hot_of = [&](const char* text) { return find_scattered(*parse_pattern(text), extent, 64).value(); };
    const std::vector<int64_t> tokens{3, 200, 201, 450}, both{3, 70, 200, 201, 450, 640}, keys{70, 200, 640};
    for (const char* text : {"global_tokens(3,200,201,450) | window(9,9) | global_keys(70,200,640)",
                             "causal & (global_keys(70,200,640) | (window(9,0) | global_tokens(3,200,201,450)))"}) {
        check::context = text;
        CHECK(hot_of(text).keys == both);
        CHECK(hot_of(text).queries == tokens);
    }
    // What one part sees of its tokens the other does not see of its own: the larger one alone.
    check::context.clear();
    CHECK(hot_of("causal & global_keys(70,200,640) | global_tokens(3,200,201,450)").keys == tokens);
    CHECK(hot_of("causal & global_keys(70,200,640) | global_keys(3,200)").keys == keys);
}

// Counts how often it is asked for its hot tokens.
class Asked : public Leaf {
public:
    explicit Asked(int& times) : Leaf("asked"), times_(times) {}
    void keys(const Plane&, int64_t, Interval, Intervals&) const override {}
    std::optional<HotTokens> hot(const Extent& extent) const override {
        ++times_;
        return make_global_keys({70, 200, 640})->hot(extent);
    }

private:
    int& times_;
};

TEST(parts_are_asked_once_on_every_level) {
    int times = 0;
    PatternRef pattern = make_ref<Asked>(times);
    for (int level = 0; level < 8; ++level)
        pattern = make_intersection({make_union({pattern, make_window(level, 0)}), make_sink(700 + level)});
    CHECK(pattern->hot({1, 1, 1000, 1000, 0}).has_value());
    CHECK_EQ(times, 1);
}

TEST(longest_extents_are_not_looked_through) {
    const Extent extent{1, 1, 100, 10, -90};
    CHECK(parse_pattern("columns([60,70], 16777216, landmark(64,1))")->hot(extent).has_value());
    CHECK(!parse_pattern("columns([60,70], 16777217, landmark(64,1))")->hot(extent).has_value());
}

TEST(lists_of_hot_tokens_stay_short) {
    const Extent extent{1, 1, 1 << 17, 1 << 17, 0};
    const PatternRef landmarks = parse_pattern("causal & (block_diagonal(64) | landmark(64,1))");
    const Layout layout = build_packed_layout(find_scattered(*landmarks, extent, 64).value(), extent, 64, 64);
    CHECK_EQ(layout.keys.tokens.size(), size_t(2048));
    CHECK(layout.by_query.runs.size() <= size_t(3 * layout.by_query.rows));
    CHECK(layout.bytes() <= size_t(1) << 20);
    CHECK(!find_scattered(*parse_pattern("global_tokens(0,1,2,3)"), extent, 64));  // in one block as it is
    CHECK(!find_scattered(*parse_pattern("landmark(4,1)"), extent, 64));           // a quarter of all keys
    CHECK(!find_scattered(*parse_pattern("causal - landmark(64,1)"), extent, 64));
}
