// SPDX-License-Identifier: MIT
// Hostile arguments: a typed error that names the argument, or a pattern that answers without overflow.
#include "check.h"
#include "pattern/pattern.h"
#include "pattern/refuses.h"

using namespace spattn;

namespace {

constexpr int64_t huge = int64_t(1) << 62;
constexpr int64_t most = std::numeric_limits<int64_t>::max(), least = std::numeric_limits<int64_t>::min();

// Asks everything at the ends of what positions may be; sanitizers watch.
void survives(const PatternRef& pattern) {
    for (int64_t offset : {int64_t(0), int64_t(-1) << 40, int64_t(1) << 40}) {
        const Plane plane{{1, 1, 100, 100, offset}};
        for (const PatternRef& p : {pattern, make_transpose(pattern), make_union({pattern, make_causal()})}) {
            Intervals kept;
            for (int64_t row : {0, 50, 99}) p->keys(plane, row, {0, 100}, kept);
            for (const Interval& i : kept) CHECK(i.begin >= 0 && i.begin < i.end && i.end <= 100);
            Key key;
            bool known = true;
            for (int64_t at : {-64, 0, 64}) {
                const Coverage coverage = p->classify(plane, {0, 64, at, 64}, key, known);
                CHECK(coverage.repeat >= 1);
                p->row_key(plane, at, 64, key);
            }
            CHECK(!p->print().empty() && !p->identity().empty());
        }
    }
}

}  // namespace

TEST(numbers_out_of_range) {
    for (int64_t bad : {int64_t(-2), least}) {
        refuses(SPATTN_E_RANGE, "left", [&] { make_window(bad, 0); });
        refuses(SPATTN_E_RANGE, "right", [&] { make_window(0, bad); });
        refuses(SPATTN_E_RANGE, "left", [&] { make_dilated(bad, 0, 1); });
        refuses(SPATTN_E_RANGE, "right", [&] { make_dilated(0, bad, 1); });
    }
    for (int64_t bad : {int64_t(0), int64_t(-1), least}) {
        refuses(SPATTN_E_RANGE, "dilation", [&] { make_dilated(0, 0, bad); });
        refuses(SPATTN_E_RANGE, "stride", [&] { make_strided(bad); });
        refuses(SPATTN_E_RANGE, "block", [&] { make_block_diagonal(bad); });
        refuses(SPATTN_E_RANGE, "block", [&] { make_landmark(bad, 0); });
        refuses(SPATTN_E_RANGE, "block", [&] { make_fixed(bad, 0); });
        refuses(SPATTN_E_RANGE, "modulus", [&] { make_residue(bad, 0); });
        refuses(SPATTN_E_RANGE, "params.block", [&] { make_bigbird(bad, 0, 0, 0, 0); });
    }
    for (int64_t bad : {int64_t(-1), least}) {
        refuses(SPATTN_E_RANGE, "tokens", [&] { make_sink(bad); });
        refuses(SPATTN_E_RANGE, "landmarks", [&] { make_landmark(4, bad); });
        refuses(SPATTN_E_RANGE, "offset", [&] { make_residue(4, bad); });
        refuses(SPATTN_E_RANGE, "params.window_blocks", [&] { make_bigbird(1, bad, 0, 0, 0); });
        refuses(SPATTN_E_RANGE, "params.global_blocks", [&] { make_bigbird(1, 0, bad, 0, 0); });
        refuses(SPATTN_E_RANGE, "params.random_blocks", [&] { make_bigbird(1, 0, 0, bad, 0); });
    }
    refuses(SPATTN_E_RANGE, "landmarks", [] { make_fixed(4, 5); });
    refuses(SPATTN_E_RANGE, "offset", [] { make_residue(4, 4); });
    refuses(SPATTN_E_RANGE, "params.window_blocks", [] { make_bigbird(1, 2, 0, 0, 0); });
}

TEST(lists_that_mean_nothing) {
    refuses(SPATTN_E_SHAPE, "cu_seqlens", [] { make_documents({}); });
    refuses(SPATTN_E_RANGE, "cu_seqlens", [] { make_documents({-1, 5}); });
    refuses(SPATTN_E_RANGE, "cu_seqlens", [] { make_documents({0, 5, 4}); });
    refuses(SPATTN_E_RANGE, "positions", [] { make_global_keys({3, -1}); });
    refuses(SPATTN_E_RANGE, "positions", [] { make_global_tokens({most}); });
    refuses(SPATTN_E_SHAPE, "parents", [] { make_tree({}); });
    refuses(SPATTN_E_RANGE, "parents", [] { make_tree({-2}); });
    refuses(SPATTN_E_RANGE, "parents", [] { make_tree({-1, 2}); });
    refuses(SPATTN_E_ARGUMENT, "parents", [] { make_tree({0}); });
    refuses(SPATTN_E_ARGUMENT, "parents", [] { make_tree({-1, 2, 3, 1}); });
}

TEST(texts_that_mean_nothing) {
    const auto with = [](std::vector<int64_t> numbers) { return [=] { make_xref({1, 2}, {}, xref_params(numbers)); }; };
    refuses(SPATTN_E_RANGE, "token_ids", [] { make_xref({}, {}, XrefParams()); });
    refuses(SPATTN_E_SHAPE, "symbols", [] { make_xref({1, 2}, {0, 1}, XrefParams()); });
    refuses(SPATTN_E_RANGE, "symbols", [] { make_xref({1}, {0, -2}, XrefParams()); });
    refuses(SPATTN_E_RANGE, "params.links", with({32, 64, 100, 5}));
    refuses(SPATTN_E_RANGE, "params.budget", with({32, 64, 95}));
    const char* const names[] = {"sinks",         "window",       "budget",    "links",     "ngram_keys",
                                 "symbol_before", "symbol_after", "look_back", "stop_ratio"};
    for (size_t n = 0; n < std::size(names); ++n) {
        for (int64_t bad : {int64_t(-1), least, huge, most}) {
            std::vector<int64_t> numbers{32, 64, 224, 112, 7, 3, 10, 32, 48};
            numbers[n] = bad;
            refuses(SPATTN_E_RANGE, (std::string("params.") + names[n]).c_str(), with(numbers));
        }
    }
    make_xref({least, most, 0}, {most, 0, -1, most, -1, -1}, {32, 64})->check({1, 1, 3, 3, 0});
    refuses(SPATTN_E_SHAPE, "pattern", [] { make_xref({1, 2}, {}, XrefParams())->check({1, 1, 1, 3, 0}); });
}

TEST(parts_that_are_missing) {
    refuses(SPATTN_E_RANGE, "count", [] { make_union({}); });
    refuses(SPATTN_E_NULL, "parts[1]", [] { make_union({make_full(), {}}); });
    refuses(SPATTN_E_NULL, "parts[0]", [] { make_intersection({{}}); });
    refuses(SPATTN_E_NULL, "a", [] { make_difference({}, make_full()); });
    refuses(SPATTN_E_NULL, "b", [] { make_difference(make_full(), {}); });
    refuses(SPATTN_E_NULL, "pattern", [] { make_transpose({}); });
    refuses(SPATTN_E_RANGE, "part_of_head", [] { make_per_head({make_full()}, {}); });
    refuses(SPATTN_E_RANGE, "part_of_head[1]", [] { make_per_head({make_full()}, {0, 1}); });
    refuses(SPATTN_E_RANGE, "part_of_batch[0]", [] { make_per_batch({make_full()}, {-1}); });
}

TEST(grids) {
    const PatternRef full = make_full();
    refuses(SPATTN_E_RANGE, "axes", [] { make_grid({}, {}, {}); });
    refuses(SPATTN_E_RANGE, "axes", [&] { make_grid(std::vector<int64_t>(9, 1), {}, Patterns(9, full)); });
    refuses(SPATTN_E_SHAPE, "tile", [&] { make_grid({4, 4}, {2}, {full, full}); });
    refuses(SPATTN_E_SHAPE, "parts", [&] { make_grid({4, 4}, {}, {full}); });
    refuses(SPATTN_E_NULL, "parts[1]", [&] { make_grid({4, 4}, {}, {full, {}}); });
    refuses(SPATTN_E_RANGE, "sizes[1]", [&] { make_grid({4, 0}, {}, {full, full}); });
    refuses(SPATTN_E_RANGE, "sizes", [&] { make_grid({1 << 16, 1 << 15}, {}, {full, full}); });
    refuses(SPATTN_E_RANGE, "sizes", [&] { make_grid({forever, forever, 2}, {}, {full, full, full}); });
    refuses(SPATTN_E_RANGE, "tile[0]", [&] { make_grid({4, 4}, {3, 1}, {full, full}); });
    refuses(SPATTN_E_RANGE, "tile[1]", [&] { make_grid({4, 4}, {4, 0}, {full, full}); });
    refuses(SPATTN_E_UNSUPPORTED, "parts[0]", [&] { make_grid({4}, {}, {make_runtime_tokens(2)}); });
    // A part is meant on the places of its axis, whatever the extent.
    const PatternRef tree = make_grid({2, 3}, {}, {full, make_tree({-1, 0, 0})});
    tree->check({1, 1, 40, 50, 10});
    refuses(SPATTN_E_SHAPE, "pattern", [] { make_grid({2}, {}, {make_tree({-1, 0, 0})})->check({1, 1, 2, 2, 0}); });
    CHECK_EQ(make_grid({8, 4}, {}, {full, full})->identity(), make_grid({8, 4}, {8, 4}, {full, full})->identity());
}

TEST(extents_that_do_not_fit) {
    const PatternRef tree = make_tree({-1, 0, 0}), heads = make_per_head({make_full()}, {0, 0}),
                     batch = make_per_batch({make_full()}, {0});
    const auto asks = [](const PatternRef& p, Extent e) { return [=] { p->check(e); }; };
    const Extent fits{1, 2, 3, 3, 0};
    for (const PatternRef& p : {tree, heads, batch}) p->check(fits);
    for (const auto& wrap : {+[](PatternRef p) { return p; },
                             +[](PatternRef p) { return make_union({make_full(), p}); },
                             +[](PatternRef p) { return make_intersection({p, make_full()}); },
                             +[](PatternRef p) { return make_difference(make_full(), p); },
                             +[](PatternRef p) { return make_transpose(p); },
                             +[](PatternRef p) { return make_transpose(make_union({p, make_full()})); }}) {
        refuses(SPATTN_E_SHAPE, "pattern", asks(wrap(tree), {1, 2, 1, 2, 0}));
        refuses(SPATTN_E_SHAPE, "pattern", asks(wrap(tree), {1, 2, 4, 9, 0}));
        refuses(SPATTN_E_SHAPE, "pattern", asks(wrap(heads), {1, 3, 3, 3, 0}));
        refuses(SPATTN_E_SHAPE, "pattern", asks(wrap(batch), {2, 2, 3, 3, 0}));
        CHECK((wrap(tree)->check(fits), true));
    }
}

TEST(huge_numbers_do_not_overflow) {
    for (int64_t n : {huge, most}) {
        survives(make_window(n, n));
        survives(make_window(n, 0));
        survives(make_window(-1, n));
        survives(make_sink(n));
        survives(make_block_diagonal(n));
        survives(make_documents({0, n}));
        survives(make_documents({n, n}));
        survives(make_dilated(n, n, n));
        survives(make_dilated(-1, -1, n));
        survives(make_dilated(5, 5, n));
        survives(make_strided(n));
        survives(make_landmark(n, n));
        survives(make_landmark(n, 1));
        survives(make_landmark(n, n - 1));
        survives(make_fixed(n, n));
        survives(make_residue(n, n - 1));
        survives(make_residue(n, 0));
        survives(make_global_keys({n - 1, 0}));
        survives(make_global_tokens({n - 1, 50}));
        survives(make_bigbird(n, 0, n, n, n));
        survives(make_bigbird(1, most, 0, 0, 0));
        survives(make_bigbird(n, most, 1, 1, 0));
        survives(make_bigbird(3, 0, 0, n, 1));
    }
    constexpr int64_t widest = (int64_t(1) << 31) - 1;
    const std::vector<int64_t> ids(100, 7), symbols(200, 3);
    survives(make_xref(ids, symbols, {widest, widest, 3 * widest, widest, widest, widest, widest, widest, widest}));
    survives(make_xref(ids, symbols, {0, 1, 3 * widest, widest, widest, widest, widest, widest, widest}));
    survives(make_logsparse());
    survives(make_full());
}

TEST(compositions_are_bounded) {
    PatternRef deep = make_causal();
    int levels = 0;
    try {
        for (; levels < 100000; ++levels) deep = make_transpose(deep);
        CHECK(!"bounded");
    } catch (const Error& error) {
        CHECK_EQ(error.status, int(SPATTN_E_RANGE));
    }
    CHECK(levels > 100 && levels < 1000);
    survives(deep->levels < 199 ? deep : make_full());
    Intervals kept;
    deep->keys(Plane{{1, 1, 4, 4, 0}}, 1, {0, 4}, kept);
    CHECK(!kept.empty());

    PatternRef wide = make_causal();  // shared parts double what a walk visits with each level
    refuses(SPATTN_E_RANGE, "a", [&] {
        for (int i = 0; i < 100; ++i) {
            wide = make_difference(make_intersection({wide, make_full()}), make_transpose(wide));
        }
    });

    PatternRef flat = make_causal();  // one part at a time: as wide as it gets, but no deeper
    for (int i = 0; i < 1000; ++i) flat = make_union({flat, make_sink(i)});
    CHECK_EQ(flat->levels, 2);

    constexpr size_t most = 1 << 16;
    const PatternRef most_parts = make_union(Patterns(most, make_causal()));
    for (const auto& make : {make_union, make_intersection, +[](Patterns parts) { return make_difference(parts); }})
        CHECK_EQ(make(Patterns(most, make_causal()))->levels, 2);
    CHECK_EQ(make_transpose(make_transpose(most_parts))->levels, 4);
    refuses(SPATTN_E_RANGE, "parts[0]", [&] { make_union({most_parts, make_full()}); });
    refuses(SPATTN_E_RANGE, "parts[1]", [&] { make_intersection({make_full(), most_parts}); });
    refuses(SPATTN_E_RANGE, "parts[1]", [&] { make_per_head({make_full(), deep}, {0}); });
    refuses(SPATTN_E_RANGE, "inner", [&] { make_rows(most_parts, {0, 1}, 1); });
    refuses(SPATTN_E_RANGE, "b", [&] { make_difference(make_full(), deep); });
    refuses(SPATTN_E_RANGE, "pattern", [&] { make_transpose(deep); });
}
