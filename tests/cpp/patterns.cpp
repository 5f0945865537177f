// SPDX-License-Identifier: MIT
// Patterns of sparseattn.hpp: every constructor makes what its text form says; values, sets and questions.
#include <array>
#include <sparseattn/sparseattn.hpp>
#include <sstream>
#include <thread>
#include <unordered_set>

#include "check.h"

namespace sa = sparseattn;

namespace {

const sa::Extent square = [] {
    sa::Extent extent;
    extent.seq_q = extent.seq_k = 12;
    return extent;
}();

}  // namespace

TEST(every_constructor_is_its_text) {
    const std::vector<int32_t> few{0, 3, 8};
    const std::array<int64_t, 3> positions{7, 2, 9};
    const std::vector<int64_t> none;
    const unsigned char bits[] = {1, 0, 0, 1, 1, 0};
    const int64_t symbols[] = {4, -1, -1, 4};
    const int32_t pairs[] = {5, 9, 0, 1};
    const std::vector<sa::Range> some{{6, 8}, {0, 1}};
    sa::Xref few_params;
    few_params.sinks = few_params.look_back = -1, few_params.window = 1, few_params.budget = 8;
    const std::pair<sa::Pattern, const char*> table[] = {
        {sa::full(), "full"},
        {sa::causal(), "causal"},
        {sa::logsparse(), "logsparse"},
        {sa::window(3, -1), "window(3,-1)"},
        {sa::sink(4), "sink(4)"},
        {sa::block_diagonal(4), "block_diagonal(4)"},
        {sa::strided(3), "strided(3)"},
        {sa::dilated(6, 0, 3), "dilated(6,0,3)"},
        {sa::landmark(4, 1), "landmark(4,1)"},
        {sa::fixed(5, 2), "fixed(5,2)"},
        {sa::residue(3, 2), "residue(3,2)"},
        {sa::documents({0, 3, 8}), "documents(0,3,8)"},
        {sa::documents(few), "documents(0,3,8)"},
        {sa::documents(sa::view(few)), "documents(0,3,8)"},
        {sa::global_keys(positions), "global_keys(7,2,9)"},
        {sa::global_keys(none), "global_keys()"},
        {sa::global_keys({}), "global_keys()"},
        {sa::global_tokens({2}), "global_tokens(2)"},
        {sa::tree({-1, 0, 0, 1}), "tree(-1,0,0,1)"},
        {sa::bigbird({4, 3, 1, 2, 11}), "bigbird(4,3,1,2,11)"},
        {sa::xref({7, 8, 7}), "xref([7,8,7],[],32,64,224,112,7,3,10,32,48)"},
        {sa::xref({7, 8, 7}, few_params), "xref([7,8,7],[],0,1,8,4,7,3,10,0,48)"},
        {sa::xref({7, 8}, {}), "xref([7,8],[])"},
        {sa::xref({7, 8}, {}, {}), "xref([7,8],[])"},
        {sa::xref({7, 8}, sa::view(symbols, {2, 2})), "xref([7,8],[4,-1,-1,4])"},
        {sa::xref_extend(sa::xref({7}), {8}), "xref([7,8],[])"},
        {sa::xref_extend(sa::xref({7}), {8, 9}, sa::view(symbols, {2, 2})), "xref([7,8,9],[-1,-1,4,-1,-1,4])"},
        {sa::csr({0, 2, 3}, {0, 4, 1}, 5), "csr([0,2,3],[0,4,1],5)"},
        {sa::bsr({0, 1}, {0}, 64, 64, 9, 11), "bsr([0,1],[0],64,64,9,11)"},
        {sa::mask(sa::view(bits, {2, 3})), "mask([1,0,0,1,1,0],2,3)"},
        {sa::runtime_tokens(8), "runtime_tokens(8)"},
        {sa::runtime_blocks(64, 32, 4), "runtime_blocks(64,32,4)"},
        {sa::transpose(sa::window(4, 1)), "transpose(window(4,1))"},
        {sa::per_head({sa::causal(), sa::full()}, {0, 1, 1}), "per_head([0,1,1],causal,full)"},
        {sa::per_batch({sa::sink(5), sa::sink(3)}, {0, 1}), "per_batch([0,1],sink(5),sink(3))"},
        {sa::grid({{6, sa::window(1, 1)}, {8, sa::causal(), 4}}), "grid([6,8],[6,4],window(1,1),causal)"},
        {sa::per_document(sa::causal(), {0, 4}, {0, 9}), "per_document([0,4],[0,9],causal)"},
        {sa::rows(sa::causal(), {{0, 4}}, 8), "rows([0,4],8,causal)"},
        {sa::rows(sa::causal(), {{12, 16}, {0, 4}}, 16), "rows([12,16,0,4],16,causal)"},
        {sa::rows(sa::causal(), some, 8), "rows([6,8,0,1],8,causal)"},
        {sa::rows(sa::runtime_tokens(8), sa::view(pairs, {2, 2}), 9), "rows([5,9,0,1],9,runtime_tokens(8))"},
        {sa::columns(sa::causal(), {{0, 4}}, 8), "columns([0,4],8,causal)"},
        {sa::columns(sa::causal(), {{12, 16}, {0, 4}}, 16), "columns([12,16,0,4],16,causal)"},
        {sa::columns(sa::causal(), some, 8), "columns([6,8,0,1],8,causal)"},
        {sa::columns(sa::causal(), sa::view(pairs, {2, 2}), 9), "columns([5,9,0,1],9,causal)"},
        {sa::causal() & (sa::window(3, 0) | sa::sink(1)), "causal & (window(3,0) | sink(1))"},
        {sa::unite({sa::sink(1), sa::causal(), sa::full()}), "sink(1) | causal | full"},
        {sa::intersect({sa::sink(1), sa::causal(), sa::full()}), "sink(1) & causal & full"},
        {sa::full() - sa::causal(), "full - causal"},
    };
    for (const auto& [pattern, text] : table) {
        check::context = text;
        CHECK(pattern == sa::parse(text));
        CHECK(sa::parse(pattern.text()) == pattern);
        CHECK(sa::load(pattern.save()) == pattern);
    }
}

TEST(lists_are_arrays_of_c) {
    const int32_t narrow[] = {0, 3, 8};
    int64_t wide[] = {0, 3, 8};
    CHECK(sa::documents(narrow) == sa::documents({0, 3, 8}) && sa::documents(wide) == sa::documents({0, 3, 8}));
    CHECK(sa::documents(sa::view(wide)) == sa::documents(wide));
    CHECK(sa::per_document(sa::causal(), narrow, wide) == sa::per_document(sa::causal(), {0, 3, 8}, {0, 3, 8}));
    CHECK(sa::xref(narrow) == sa::xref({0, 3, 8}) && sa::documents({0, 3}) != sa::documents({0, 3, 8}));
}

TEST(patterns_are_values) {
    sa::Pattern one = sa::window(3, 0), other = one, empty;
    CHECK(one == other && one && !empty && empty != one && empty == sa::Pattern());
    sa::Pattern moved = std::move(other);
    CHECK(moved == one && !other);
    other = moved;
    other = *&other;
    CHECK(other == one);
    std::unordered_set<sa::Pattern> set{one, moved, sa::sink(1) | one, one | sa::sink(1)};
    CHECK_EQ(set.size(), 2u);
    CHECK_EQ(one.hash(), moved.hash());
    sa::Pattern grown = sa::causal();
    ((grown &= one) |= sa::sink(4)) -= sa::global_keys({7});
    CHECK(grown == ((sa::causal() & one) | sa::sink(4)) - sa::global_keys({7}));
    grown -= grown;
    CHECK_EQ(grown.stats(square).pairs, 0.0);
    std::ostringstream out;
    out << one;
    CHECK_EQ(out.str(), "window(3,0)");
}

TEST(questions) {
    const sa::Pattern pattern = sa::causal() & sa::window(2, 0);
    CHECK(pattern.keeps(square, 5, 3) && !pattern.keeps(square, 5, 2) && !pattern.keeps(square, 5, 6));
    const sa::Stats stats = pattern.stats(square);
    CHECK_EQ(stats.pairs, 33.0);
    CHECK_EQ(stats.row_min, 1);
    CHECK_EQ(stats.row_max, 3);
    const sa::Csr csr = pattern.to_csr(square);
    CHECK_EQ(csr.row_ptr.size(), 13u);
    CHECK_EQ(csr.row_ptr[12], 33);
    CHECK(sa::csr(csr.row_ptr, csr.columns, 12) != pattern);
    CHECK_EQ(sa::csr(csr.row_ptr, csr.columns, 12).stats(square).pairs, 33.0);
    const sa::Csr nothing = (sa::full() - sa::full()).to_csr(square);
    CHECK(nothing.columns.empty());
    float image[4] = {};
    sa::causal().to_image(square, sa::view(image, {2, 2}));
    CHECK_EQ(image[2], 1.0f);
    CHECK_EQ(image[1], 0.0f);
    sa::Extent offset = square;
    offset.q_offset = 12;
    CHECK_EQ(sa::causal().stats(offset).pairs, 144.0);
    // Query 0 of these is the third of four; key 0 is the third of four.
    sa::Extent two_queries, two_keys;
    two_queries.seq_q = two_keys.seq_k = 2, two_queries.seq_k = two_keys.seq_q = 4;
    const sa::Pattern rows = sa::rows(sa::causal(), {{2, 4}}, 4), columns = sa::columns(sa::causal(), {{2, 4}}, 4);
    CHECK(rows.keeps(two_queries, 0, 2) && !rows.keeps(two_queries, 0, 3));
    CHECK(columns.keeps(two_keys, 2, 0) && !columns.keeps(two_keys, 1, 0));
}

TEST(a_question_can_be_cancelled) {
    sa::Extent long_one;
    long_one.seq_q = long_one.seq_k = 1 << 20;
    int asked = 0;
    long_one.cancel = [](void* user) { return int32_t(++*static_cast<int*>(user)); };
    long_one.cancel_user = &asked;
    spattn_status status = SPATTN_OK;
    try {
        sa::bigbird({1, 1, 0, 64}).stats(long_one);  // no two rows are alike
    } catch (const sa::Error& e) {
        status = e.status();
    }
    CHECK_EQ(status, SPATTN_E_CANCELLED);
    CHECK_EQ(asked, 1);
}

TEST(predicates_and_what_they_throw) {
    const auto keep = [](int64_t head, int64_t q, int64_t k) { return (q + k) % 2 == head; };
    const sa::Pattern pattern = sa::predicate(keep, 2, 12, 12);
    sa::Extent two = square;
    two.heads = 2;
    CHECK_EQ(pattern.stats(two).pairs, 144.0);
    try {
        sa::predicate([](int64_t, int64_t q, int64_t) -> bool { throw q; }, 1, 4, 4);
        CHECK(false);
    } catch (int64_t q) {
        CHECK_EQ(q, 0);
    }
}

TEST(threads_share_handles) {
    const sa::Pattern shared = sa::causal() & sa::window(5, 0);
    std::vector<std::thread> threads;
    std::vector<int> right(4);
    for (size_t t = 0; t < right.size(); ++t)
        threads.emplace_back([&, t] {
            for (int i = 0; i < 500; ++i) {
                const sa::Pattern copy = shared;
                right[t] += (copy | sa::sink(i)) != shared && copy == shared;
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (int count : right) CHECK_EQ(count, 500);
}
