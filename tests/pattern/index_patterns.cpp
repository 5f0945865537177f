// SPDX-License-Identifier: MIT
// csr, bsr, mask and predicate against their definitions: rows, closed forms, layouts, text, equality, hostile
// arguments.
#include <map>
#include <memory>

#include "check.h"
#include "pattern/index_trees.h"
#include "pattern/refuses.h"

using namespace spattn;
using namespace trees;

namespace {

constexpr int64_t huge = int64_t(1) << 62;

IndexArray ints(std::vector<int64_t> numbers) { return numbers; }

}  // namespace

TEST(index_patterns_mean_their_lists) {
    for (uint32_t seed = 0; seed < 1500; ++seed) {
        Source source(seed);
        const Plane plane = source.plane();
        const Tree tree = seed % 5 == 0   ? source.per_document(plane.extent, 2)
                          : seed % 5 == 1 ? source.rows(plane.extent, 2)
                          : seed % 5 == 2 ? source.columns(plane.extent, 2)
                                          : source.lists(plane.extent);
        check_meaning(tree, plane, seed);
    }
}

TEST(compositions_mean_their_parts) {
    for (uint32_t seed = 0; seed < 1500; ++seed) {
        Source source(seed + 9000);
        const Plane plane = source.plane();
        check_meaning(source.mixed(plane.extent, 3), plane, seed + 9000);
    }
}

TEST(text_reads_back) {
    int inline_texts = 0, hashes = 0;
    for (uint32_t seed = 0; seed < 600; ++seed) {
        Source source(seed);
        const PatternRef pattern = source.mixed(source.plane().extent, 2).pattern;
        const std::string printed = pattern->print();
        check::context = printed;
        if (printed.find('#') == std::string::npos) {
            ++inline_texts;
            const PatternRef again = parse_pattern(printed);
            CHECK_EQ(again->print(), printed);
            CHECK(again->identity() == pattern->identity());
        } else {
            ++hashes;
            refuses(SPATTN_E_FORMAT, "text", [&] { parse_pattern(printed); });
        }
    }
    check::context.clear();
    CHECK(inline_texts > 50 && hashes > 50);
    CHECK_EQ(parse_pattern(" csr ( [0,2, 3 ] , [0,1,1],2)")->print(), "csr([0,2,3],[0,1,1],2)");
    CHECK_EQ(parse_pattern("mask([1,0,0,5],2,2)")->print(), "mask([1,0,0,1],2,2)");
    CHECK_EQ(parse_pattern("mask([1,0],1,2,1,1)")->print(), "mask([1,0],2,1,1)");
    for (const char* bad : {"csr", "csr()", "csr([0,1])", "csr([0,1],[0])", "csr([0,1],[0],1,2)", "csr([0,1],[1],1)",
                            "csr(0,1)", "bsr([0,1],[0],1,1,1)", "mask([1],1)", "mask([1],1,2)", "mask([],0,0)",
                            "mask([1],1,1,1,1,1)", "mask(#0123)", "bsr(#0123)"}) {
        refuses(SPATTN_E_FORMAT, "text", [&] { parse_pattern(bad); });
    }
}

TEST(equal_content_is_equal) {
    const std::vector<int32_t> rows32{0, 2, 2, 3}, columns32{0, 2, 1};
    const std::vector<int64_t> rows64{0, 2, 2, 3}, columns64{0, 2, 1};
    const PatternRef wide = make_csr(rows64, columns64, 3, false), narrow = make_csr(rows32, columns32, 3, true);
    const PatternRef borrowed =
        make_csr(IndexArray::borrow(rows32.data(), 4), IndexArray::borrow(columns64.data(), 3), 3, false);
    CHECK(wide->identity() == narrow->identity());
    CHECK(wide->identity() == borrowed->identity());
    CHECK(wide->identity() != make_csr(rows64, columns64, 4, false)->identity());
    CHECK(wide->identity() != make_csr(rows64, std::vector<int64_t>{0, 1, 1}, 3, false)->identity());
    const auto first = [](void*, int64_t, int64_t q, int64_t k) -> int32_t { return 2 * (q == k); };
    CHECK(make_predicate(first, nullptr, 1, 2, 2)->identity() == make_mask({1, 0, 0, 7}, {2, 2})->identity());
    CHECK(make_mask({1, 0, 0, 1}, {2, 2})->identity() != make_mask({1, 0, 0, 1}, {4, 1})->identity());
    CHECK(make_mask({1, 0, 0, 1}, {4, 1})->identity() != make_mask({1, 0, 0, 1}, {2, 2, 1})->identity());
}

TEST(equal_planes_share_their_lists) {
    const PatternRef mask = make_mask({1, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1}, {3, 2, 2});
    std::vector<Key> keys(3);
    for (int64_t head = 0; head < 3; ++head) mask->selection({{1, 3, 2, 2, 0}, 0, head}, keys[size_t(head)]);
    CHECK(keys[0] == keys[2] && keys[0] != keys[1]);
}

TEST(sizes_that_do_not_fit) {
    const PatternRef csr = make_csr(ints({0, 1, 1}), ints({2}), 3, false), heads = make_mask({1, 0}, {2, 1, 1}),
                     batch = make_mask({1, 0}, {2, 1, 1, 1});
    csr->check({4, 5, 2, 3, 77});
    heads->check({9, 2, 1, 1, 0});
    batch->check({2, 9, 1, 1, 0});
    for (const Extent& e : {Extent{1, 1, 3, 3, 0}, Extent{1, 1, 2, 2, 0}})
        refuses(SPATTN_E_SHAPE, "pattern", [&] { csr->check(e); });
    refuses(SPATTN_E_SHAPE, "pattern", [&] { heads->check({1, 3, 1, 1, 0}); });
    refuses(SPATTN_E_SHAPE, "pattern", [&] { batch->check({3, 1, 1, 1, 0}); });
    refuses(SPATTN_E_SHAPE, "pattern", [&] { make_union({make_full(), csr})->check({1, 1, 3, 3, 0}); });
}

TEST(lists_that_break_the_rules) {
    for (bool trust : {false, true}) {
        refuses(SPATTN_E_SHAPE, "row_ptr", [&] { make_csr(ints({}), ints({}), 3, trust); });
        refuses(SPATTN_E_SHAPE, "row_ptr", [&] { make_csr(ints({0}), ints({}), 3, trust); });
        refuses(SPATTN_E_RANGE, "row_ptr", [&] { make_csr(ints({1, 2}), ints({0, 1}), 3, trust); });
        refuses(SPATTN_E_RANGE, "row_ptr", [&] { make_csr(ints({0, 2, 1}), ints({0}), 3, trust); });
        refuses(SPATTN_E_RANGE, "row_ptr", [&] { make_csr(ints({0, huge, -huge}), ints({0}), 3, trust); });
        refuses(SPATTN_E_SHAPE, "col_idx", [&] { make_csr(ints({0, huge}), ints({0}), 3, trust); });
        refuses(SPATTN_E_SHAPE, "col_idx", [&] { make_csr(ints({0, 1}), ints({0, 1}), 3, trust); });
        refuses(SPATTN_E_SHAPE, "row_ptr", [&] { make_bsr(ints({0, 1}), ints({0}), 2, 2, 4, 4, trust); });
    }
    refuses(SPATTN_E_RANGE, "col_idx", [] { make_csr(ints({0, 1}), ints({3}), 3, false); });
    refuses(SPATTN_E_RANGE, "col_idx", [] { make_csr(ints({0, 1}), ints({-1}), 3, false); });
    refuses(SPATTN_E_RANGE, "col_idx", [] { make_csr(ints({0, 2}), ints({1, 1}), 3, false); });
    refuses(SPATTN_E_RANGE, "col_idx", [] { make_csr(ints({0, 2}), ints({2, 1}), 3, false); });
    refuses(SPATTN_E_RANGE, "col_idx", [] { make_bsr(ints({0, 1}), ints({2}), 4, 2, 4, 4, false); });
    for (int64_t bad : {int64_t(0), int64_t(-1), huge}) {
        refuses(SPATTN_E_RANGE, "seq_k", [&] { make_csr(ints({0, 0}), ints({}), bad, false); });
        refuses(SPATTN_E_RANGE, "block_q", [&] { make_bsr(ints({0, 0}), ints({}), bad, 2, 4, 4, false); });
        refuses(SPATTN_E_RANGE, "block_k", [&] { make_bsr(ints({0, 0}), ints({}), 4, bad, 4, 4, false); });
        refuses(SPATTN_E_RANGE, "seq_q", [&] { make_bsr(ints({0, 0}), ints({}), 4, 2, bad, 4, false); });
        refuses(SPATTN_E_RANGE, "seq_k", [&] { make_bsr(ints({0, 0}), ints({}), 4, 2, 4, bad, false); });
        refuses(SPATTN_E_RANGE, "mask", [&] { make_mask({1}, {bad, 1}); });
    }
    refuses(SPATTN_E_SHAPE, "mask", [] { make_mask({1}, {1}); });
    refuses(SPATTN_E_SHAPE, "mask", [] { make_mask({1, 1}, {1, 1}); });
}

// Columns that a caller vouched for wrongly: unspecified keys, but within the extent and in order.
// Asked pair by pair, a transpose takes the square of a sequence's length.
TEST(transposes_of_lists_have_lists) {
    const PatternRef csr = make_csr(ints({0, 2, 3, 3}), ints({0, 3, 3}), 5, false), transposed = csr->transposed();
    CHECK(bool(transposed));
    for (int64_t offset : {-2, 0, 2}) {
        const Plane plane{{1, 1, 3, 5, offset}};
        for (int64_t p = -1; p < 6; ++p)
            for (int64_t k = -4; k < 6; ++k) {
                Intervals found, expected;
                transposed->keys(plane, p - offset, {k, k + 1}, found);
                csr->keys(plane, k - offset, {p, p + 1}, expected);
                CHECK_EQ(found.size(), expected.size());
            }
    }
    CHECK(!make_csr(ints({0, 1}), ints({7}), int64_t(1) << 30, false)->transposed());  // lists of all of these keys
}

TEST(trusted_lies_stay_within_the_extent) {
    for (uint32_t seed = 0; seed < 300; ++seed) {
        Source source(seed);
        std::vector<int64_t> rows{0}, columns;
        for (int row = 0; row < 20; ++row) {
            for (int64_t n = source.number(0, 9); n > 0; --n)
                columns.push_back(source.number(0, 3) ? source.number(-9, 60) : huge);
            rows.push_back(int64_t(columns.size()));
        }
        for (const PatternRef& p : {make_csr(rows, columns, 40, true), make_bsr(rows, columns, 2, 3, 40, 40, true)}) {
            const Extent extent{1, 1, p->identity()[0] == 'c' ? 20 : 40, 40, 0};
            for (int64_t row = 0; row < extent.seq_q; ++row) {
                Intervals kept;
                p->keys({extent}, row, {0, 40}, kept);
                int64_t last = -1;
                for (const Interval& i : kept) {
                    CHECK(i.begin > last && i.begin < i.end && i.end <= 40);
                    last = i.end;
                }
            }
            CHECK_EQ(build_layout(*p, extent, 16, 16).by_query.rows, int32_t((extent.seq_q + 15) / 16));
        }
    }
}

TEST(documents_that_break_the_rules) {
    const PatternRef full = make_full();
    refuses(SPATTN_E_NULL, "inner", [] { make_per_document({}, {0, 1}, {0, 1}); });
    refuses(SPATTN_E_SHAPE, "cu_q", [&] { make_per_document(full, {}, {0}); });
    refuses(SPATTN_E_SHAPE, "cu_k", [&] { make_per_document(full, {0}, {}); });
    refuses(SPATTN_E_SHAPE, "cu_k", [&] { make_per_document(full, {0, 1, 2}, {0, 1}); });
    refuses(SPATTN_E_RANGE, "cu_q", [&] { make_per_document(full, {-1, 1}, {0, 1}); });
    refuses(SPATTN_E_RANGE, "cu_k", [&] { make_per_document(full, {0, 5, 9}, {0, 5, 4}); });
    refuses(SPATTN_E_SHAPE, "pattern", [&] { make_per_document(full, {0, huge}, {0, 1})->check({1, 1, 9, 9, 0}); });
    refuses(SPATTN_E_SHAPE, "pattern", [&] { make_per_document(full, {0, 9}, {0, 10})->check({1, 1, 9, 9, 0}); });
    refuses(SPATTN_E_SHAPE, "pattern",
            [] { make_per_document(make_tree({-1, 0}), {0, 2, 5}, {0, 2, 5})->check({1, 1, 5, 5, 0}); });
    make_per_document(make_tree({-1, 0}), {0, 2, 4}, {0, 2, 6})->check({1, 1, 5, 7, 0});
    for (const char* bad :
         {"per_document()", "per_document([0,1],[0,1])", "per_document([0,1],causal)",
          "per_document([0,1],[0,1],causal", "per_document([1,0],[0,1],causal)", "per_document([#01],[0],full)"}) {
        refuses(SPATTN_E_FORMAT, "text", [&] { parse_pattern(bad); });
    }
    CHECK_EQ(parse_pattern("per_document( [0,2],[0 ,3],full|causal )")->print(),
             "per_document([0,2], [0,3], full | causal)");
}

TEST(rows_that_break_the_rules) {
    const PatternRef full = make_full();
    refuses(SPATTN_E_NULL, "inner", [] { make_rows({}, {0, 1}, 1); });
    for (int64_t bad : {int64_t(0), int64_t(-1), huge})
        refuses(SPATTN_E_RANGE, "seq_q", [&] { make_rows(full, {0, 1}, bad); });
    refuses(SPATTN_E_SHAPE, "ranges", [&] { make_rows(full, {}, 9); });
    refuses(SPATTN_E_SHAPE, "ranges", [&] { make_rows(full, {0, 4, 5}, 9); });
    const std::pair<int64_t, int64_t> wrong[] = {{-1, 1}, {4, 4}, {5, 4}, {0, 10}, {9, 10}, {-huge, huge}};
    for (const auto& [begin, end] : wrong)
        refuses(SPATTN_E_RANGE, "ranges", [&, begin = begin, end = end] { make_rows(full, {0, 1, begin, end}, 9); });
    const int64_t most = (int64_t(1) << 31) - 1;
    refuses(SPATTN_E_RANGE, "ranges", [&] { make_rows(full, {0, most, 0, 1}, most); });
    make_rows(full, {0, most}, most);
    const PatternRef six = make_rows(make_tree({-1, 0, 0}), {1, 3, 0, 2, 1, 3}, 3);
    six->check({1, 1, 6, 3, 77});
    for (const Extent& e : {Extent{1, 1, 3, 3, 0}, Extent{1, 1, 5, 3, 0}, Extent{1, 1, 7, 3, 0}, Extent{1, 1, 6, 2, 0}})
        refuses(SPATTN_E_SHAPE, "pattern", [&] { six->check(e); });
    refuses(SPATTN_E_SHAPE, "pattern", [&] { make_union({full, six})->check({1, 1, 3, 3, 0}); });
    for (const char* bad :
         {"rows()", "rows([0,1])", "rows([0,1],causal)", "rows([0,1],1)", "rows([0,1],1,causal", "rows(0,1,1,causal)",
          "rows([],1,causal)", "rows([0],1,causal)", "rows([1,0],1,causal)", "rows([0,2],1,causal)",
          "rows([0,1],0,causal)", "rows([0,1],[1],causal)", "rows([#01],1,full)"}) {
        refuses(SPATTN_E_FORMAT, "text", [&] { parse_pattern(bad); });
    }
    CHECK_EQ(parse_pattern("rows( [0,2,1 ,3], 9,full|causal )")->print(), "rows([0,2,1,3], 9, full | causal)");
}

TEST(columns_that_break_the_rules) {
    const PatternRef full = make_full();
    refuses(SPATTN_E_NULL, "inner", [] { make_columns({}, {0, 1}, 1); });
    for (int64_t bad : {int64_t(0), int64_t(-1), huge})
        refuses(SPATTN_E_RANGE, "seq_k", [&] { make_columns(full, {0, 1}, bad); });
    refuses(SPATTN_E_SHAPE, "ranges", [&] { make_columns(full, {}, 9); });
    refuses(SPATTN_E_RANGE, "ranges", [&] { make_columns(full, {0, 1, 9, 10}, 9); });
    refuses(SPATTN_E_UNSUPPORTED, "inner", [] { make_columns(make_runtime_tokens(3), {0, 1}, 9); });
    const PatternRef six = make_columns(make_csr(ints({0, 1, 1}), ints({2}), 3, false), {1, 3, 0, 2, 1, 3}, 3);
    six->check({1, 1, 2, 6, 77});
    for (const Extent& e : {Extent{1, 1, 2, 3, 0}, Extent{1, 1, 2, 5, 0}, Extent{1, 1, 2, 7, 0}, Extent{1, 1, 3, 6, 0}})
        refuses(SPATTN_E_SHAPE, "pattern", [&] { six->check(e); });
    for (const char* bad : {"columns()", "columns([0,1],causal)", "columns([0,1],1)", "columns([0,1],1,causal",
                            "columns([0],1,causal)", "columns([0,2],1,causal)", "columns([0,1],[1],causal)"}) {
        refuses(SPATTN_E_FORMAT, "text", [&] { parse_pattern(bad); });
    }
    CHECK_EQ(parse_pattern("columns( [0,2,1 ,3], 9,full|causal )")->print(), "columns([0,2,1,3], 9, full | causal)");
}

TEST(predicates) {
    struct Calls {
        int64_t count, fail_at;
    };
    const auto keep = [](void* user, int64_t head, int64_t q, int64_t k) -> int32_t {
        auto& calls = *static_cast<Calls*>(user);
        if (calls.count++ == calls.fail_at) return -7;
        return (head + q + k) % 3 == 0;
    };
    Calls calls{0, -1};
    const PatternRef pattern = make_predicate(keep, &calls, 2, 5, 7);
    CHECK_EQ(calls.count, 70);
    for (int64_t head = 0; head < 2; ++head) {
        for (int64_t q = 0; q < 5; ++q) {
            for (int64_t k = 0; k < 7; ++k) {
                Intervals kept;
                pattern->keys({{1, 2, 5, 7, 0}, 0, head}, q, {k, k + 1}, kept);
                CHECK_EQ(!kept.empty(), (head + q + k) % 3 == 0);
            }
        }
    }
    CHECK_EQ(calls.count, 70);
    calls = {0, 12};
    refuses(SPATTN_E_CALLBACK, "keep", [&] { make_predicate(keep, &calls, 2, 5, 7); });
    CHECK_EQ(calls.count, 13);
    refuses(SPATTN_E_NULL, "keep", [] { make_predicate(nullptr, nullptr, 1, 1, 1); });
    refuses(SPATTN_E_RANGE, "seq_k", [&] { make_predicate(keep, &calls, 2, 1 << 15, (1 << 14) + 1); });
    refuses(SPATTN_E_RANGE, "seq_k",
            [&] { make_predicate(keep, &calls, 1 << 20, (int64_t(1) << 31) - 1, (int64_t(1) << 31) - 1); });
    for (int64_t bad : {int64_t(0), int64_t(-1), huge}) {
        refuses(SPATTN_E_RANGE, "heads", [&] { make_predicate(keep, &calls, bad, 1, 1); });
        refuses(SPATTN_E_RANGE, "seq_q", [&] { make_predicate(keep, &calls, 1, bad, 1); });
        refuses(SPATTN_E_RANGE, "seq_k", [&] { make_predicate(keep, &calls, 1, 1, bad); });
    }
}

// Aligned blocks at a length where rows cannot be walked.
TEST(long_block_rows_take_few_questions) {
    std::vector<int64_t> rows{0}, columns;
    for (int64_t row = 0; row < 8192; ++row) {
        for (int64_t column : {0, 1, 2, 3, 4000, 8191}) columns.push_back(column);
        rows.push_back(int64_t(columns.size()));
    }
    const PatternRef pattern = make_bsr(rows, columns, 128, 128, 1 << 20, 1 << 20, false);
    for (int64_t size : {64, 128, 256}) {
        int asked = 0;
        for (int64_t block = 0; block < (1 << 20) / size; ++asked) {
            Key key;
            bool known = true;
            const Coverage c =
                pattern->classify({{1, 1, 1 << 20, 1 << 20, 0}}, {512, size, block * size, size}, key, known);
            CHECK(known);
            block = std::min<int64_t>(c.repeat, (1 << 20) / size) + block;
        }
        CHECK(asked <= 6);
    }
}
