// SPDX-License-Identifier: MIT
// Memory that runs out while patterns are made, composed, read, written and asked.
#include <cstring>

#include "fault/sweep.h"

using namespace abi;
using fault::Case;
using fault::sweep;

namespace {

using Maker = std::function<spattn_status(spattn_pattern**)>;

// A pattern made with faults is NULL or equals the one made without.
long sweep_maker(const std::string& function, const Maker& make) {
    spattn_pattern* result = nullptr;
    succeed(make(&result), function.c_str());
    const Pattern expected(result);
    return sweep(function, {function,
                            [&] {
                                result = reinterpret_cast<spattn_pattern*>(&result);  // must be overwritten
                                return make(&result);
                            },
                            [&](spattn_status status) {
                                CHECK_EQ(status == SPATTN_OK, result != nullptr);
                                if (result) CHECK(spattn_pattern_equal(result, expected.get()));
                                spattn_pattern_release(result);
                            }});
}

// A question asked with faults answers as one asked without, or fails and leaves `Answer` as it was where it must.
template <class Answer>
long sweep_question(const std::string& function, const Answer& blank, bool is_kept_on_failure,
                    const std::function<spattn_status(Answer&)>& ask) {
    Answer expected = blank, answer = blank;
    succeed(ask(expected), function.c_str());
    CHECK(expected != blank);
    return sweep(function, {function, [&] { return ask(answer); },
                 [&](spattn_status status) {
                     if (status == SPATTN_OK)
                         CHECK(answer == expected);
                     else if (is_kept_on_failure)
                         CHECK(answer == blank);
                     answer = blank;
                 }});
}

Pattern make_mixed() {
    return parse("causal & (window(5,0) | bigbird(4,3,1,1,7) | global_tokens(3,9)) - documents(0,3,9,24) | "
                 "transpose(dilated(9,3,2)) & per_head([0,1], strided(3), landmark(5,2) | residue(4,1))");
}

spattn_extent mixed_extent() {
    auto extent = make_extent(17, 24);
    extent.heads = 2;
    extent.block_q = extent.block_k = 5;
    return extent;
}

}  // namespace

TEST(constructors) {
    long faults = 0;
    Numbers numbers({0, 3, 9, 24}), parents({-1, 0, 1, 1});
    auto bigbird = sized<spattn_bigbird>();
    bigbird.block = 4, bigbird.window_blocks = 3, bigbird.random_blocks = 2;
    Numbers words({5, 6, 5, 6});
    Tensor symbols({4, 2}, i64);
    auto xref = sized<spattn_xref>();
    xref.sinks = 1, xref.window = 1, xref.budget = 4;
    const Pattern text = parse("xref([5,6,5,6],[])");
    const std::pair<const char*, Maker> makers[] = {
        {"spattn_pattern_full", spattn_pattern_full},
        {"spattn_pattern_causal", spattn_pattern_causal},
        {"spattn_pattern_window", [](auto r) { return spattn_pattern_window(5, 2, r); }},
        {"spattn_pattern_sink", [](auto r) { return spattn_pattern_sink(4, r); }},
        {"spattn_pattern_block_diagonal", [](auto r) { return spattn_pattern_block_diagonal(8, r); }},
        {"spattn_pattern_documents", [&](auto r) { return spattn_pattern_documents(&numbers.view, r); }},
        {"spattn_pattern_dilated", [](auto r) { return spattn_pattern_dilated(9, 3, 2, r); }},
        {"spattn_pattern_strided", [](auto r) { return spattn_pattern_strided(7, r); }},
        {"spattn_pattern_landmark", [](auto r) { return spattn_pattern_landmark(8, 2, r); }},
        {"spattn_pattern_fixed", [](auto r) { return spattn_pattern_fixed(8, 2, r); }},
        {"spattn_pattern_logsparse", spattn_pattern_logsparse},
        {"spattn_pattern_residue", [](auto r) { return spattn_pattern_residue(6, 1, r); }},
        {"spattn_pattern_global_keys", [&](auto r) { return spattn_pattern_global_keys(&numbers.view, r); }},
        {"spattn_pattern_global_tokens", [&](auto r) { return spattn_pattern_global_tokens(&numbers.view, r); }},
        {"spattn_pattern_tree", [&](auto r) { return spattn_pattern_tree(&parents.view, r); }},
        {"spattn_pattern_bigbird", [&](auto r) { return spattn_pattern_bigbird(&bigbird, r); }},
        {"spattn_pattern_xref", [&](auto r) { return spattn_pattern_xref(&words.view, &symbols.view, &xref, r); }},
        {"spattn_pattern_xref_extend",
         [&](auto r) { return spattn_pattern_xref_extend(text.get(), &words.view, &symbols.view, r); }},
        {"spattn_pattern_runtime_tokens", [](auto r) { return spattn_pattern_runtime_tokens(8, r); }},
        {"spattn_pattern_runtime_blocks", [](auto r) { return spattn_pattern_runtime_blocks(4, 8, 2, r); }},
    };
    for (const auto& [name, make] : makers) faults += sweep_maker(name, make);
    CHECK(faults > 50);
}

TEST(index_patterns) {
    long faults = 0;
    Numbers row_ptr({0, 2, 2, 3}), col_idx({0, 4, 2});
    Tensor mask({2, 3, 5}, u8);
    for (size_t i = 0; i < mask.bytes; ++i) mask.data[i] = i % 3 == 0;
    for (uint32_t flags : {0u, uint32_t(SPATTN_BORROW), uint32_t(SPATTN_BORROW | SPATTN_TRUST)}) {
        faults += sweep_maker("spattn_pattern_csr", [&](auto r) {
            return spattn_pattern_csr(&row_ptr.view, &col_idx.view, 5, flags, r);
        });
        faults += sweep_maker("spattn_pattern_bsr", [&](auto r) {
            return spattn_pattern_bsr(&row_ptr.view, &col_idx.view, 2, 3, 6, 15, flags, r);
        });
        faults += sweep_maker("spattn_pattern_mask",
                              [&](auto r) { return spattn_pattern_mask(&mask.view, flags & SPATTN_BORROW, r); });
    }
    const spattn_keep_fn keep = [](void*, int64_t head, int64_t q, int64_t k) {
        return int32_t((head + q + k) % 3 == 0);
    };
    faults += sweep_maker("spattn_pattern_predicate",
                          [&](auto r) { return spattn_pattern_predicate(keep, nullptr, 2, 3, 5, r); });
    CHECK(faults > 50);
}

TEST(compositions) {
    long faults = 0;
    const Pattern a = parse("causal & window(5,0)"), b = parse("documents(0,3,9)");
    const spattn_pattern* parts[] = {a.get(), b.get(), a.get()};
    const int32_t map[] = {0, 2, 1, 0};
    const int64_t sizes[] = {4, 9, 2};
    Numbers cu_q({0, 3, 9}), cu_k({0, 5, 9});
    Pairs ranges({6, 9, 0, 2});
    const std::pair<const char*, Maker> makers[] = {
        {"spattn_pattern_union", [&](auto r) { return spattn_pattern_union(parts, 3, r); }},
        {"spattn_pattern_intersection", [&](auto r) { return spattn_pattern_intersection(parts, 3, r); }},
        {"spattn_pattern_difference", [&](auto r) { return spattn_pattern_difference(a.get(), b.get(), r); }},
        {"spattn_pattern_transpose", [&](auto r) { return spattn_pattern_transpose(a.get(), r); }},
        {"spattn_pattern_per_head", [&](auto r) { return spattn_pattern_per_head(parts, 3, map, 4, r); }},
        {"spattn_pattern_per_batch", [&](auto r) { return spattn_pattern_per_batch(parts, 3, map, 4, r); }},
        {"spattn_pattern_grid", [&](auto r) { return spattn_pattern_grid(sizes, sizes, parts, 3, r); }},
        {"spattn_pattern_per_document",
         [&](auto r) { return spattn_pattern_per_document(a.get(), &cu_q.view, &cu_k.view, r); }},
        {"spattn_pattern_rows", [&](auto r) { return spattn_pattern_rows(a.get(), &ranges.view, 9, r); }},
        {"spattn_pattern_columns", [&](auto r) { return spattn_pattern_columns(a.get(), &ranges.view, 9, r); }},
        {"spattn_pattern_parse",
         [&](auto r) {
             return spattn_pattern_parse(
                 "causal & (sink(4) | window(9,0)) - per_head([0,1,0], full, csr([0,1],[0],3)) | "
                 "transpose(bigbird(4,3,1,2,9)) & per_document([0,2],[0,3],mask([1,0],1,2)) - rows([0,2],4,full)",
                 r);
         }},
    };
    for (const auto& [name, make] : makers) faults += sweep_maker(name, make);
    CHECK(faults > 100);
}

namespace {

long sweep_texts_hashes_and_bytes(const Pattern& pattern) {
    long faults = sweep_question<std::array<char, 512>>("spattn_pattern_print", {}, true, [&](auto& answer) {
        size_t needed = 0;
        return spattn_pattern_print(pattern.get(), answer.data(), answer.size(), &needed);
    });
    faults += sweep_question<uint64_t>("spattn_pattern_hash", 0, true,
                                       [&](uint64_t& answer) { return spattn_pattern_hash(pattern.get(), &answer); });
    std::array<unsigned char, 2048> saved{};
    size_t size = 0;
    const auto save = [&](auto& answer) {
        return spattn_pattern_save(pattern.get(), answer.data(), answer.size(), &size);
    };
    faults += sweep_question<std::array<unsigned char, 2048>>("spattn_pattern_save", {}, true, save);
    succeed(save(saved), "save");
    return faults + sweep_maker("spattn_pattern_load",
                                [&](auto r) { return spattn_pattern_load(saved.data(), size, r); });
}

}  // namespace

TEST(texts_hashes_and_bytes) {
    CHECK(sweep_texts_hashes_and_bytes(make_mixed()) > 50);
    for (const char* text : {"csr([0,2,2,3],[0,4,2],5) | bsr([0,1,2],[0,1],2,3,3,5)", "mask([1,0,0,1,1,0],1,2,3)",
                             "per_document([0,3,9],[0,5,9],causal & window(2,0))",
                             "rows([6,9,0,2],9,causal & window(2,0))", "rows([0,4],8,runtime_tokens(8) & causal)",
                             "columns([6,9,0,2],9,causal & window(2,0))",
                             "causal & runtime_tokens(8)", "runtime_blocks(4,8,2) & (window(3,0) | sink(1))"})
        CHECK(sweep_texts_hashes_and_bytes(parse(text)) > 20);
}

TEST(questions) {
    const Pattern pattern = make_mixed();
    const auto extent = mixed_extent();
    struct Stats : spattn_stats {
        bool operator==(const Stats& other) const { return !std::memcmp(this, &other, sizeof(spattn_stats)); }
    };
    long faults = sweep_question<Stats>("spattn_pattern_stats", {sized<spattn_stats>()}, true, [&](Stats& answer) {
        return spattn_pattern_stats(pattern.get(), &extent, &answer);
    });
    faults += sweep_question<int32_t>("spattn_pattern_keeps", -1, true, [&](int32_t& answer) {
        return spattn_pattern_keeps(pattern.get(), &extent, 0, 1, 16, 20, &answer);
    });
    Tensor mask({1, 2, 17, 24}, u8), image({7, 9}, f32), row_ptr({18}, i64), col_idx({17 * 24}, i64);
    faults +=
        sweep_question<std::array<unsigned char, 2 * 17 * 24>>("spattn_pattern_to_mask", {}, false, [&](auto& answer) {
            const spattn_status status = spattn_pattern_to_mask(pattern.get(), &extent, &mask.view);
            std::copy_n(mask.data, answer.size(), answer.data());
            return status;
        });
    faults +=
        sweep_question<std::array<unsigned char, 7 * 9 * 4>>("spattn_pattern_to_image", {}, false, [&](auto& answer) {
            const spattn_status status = spattn_pattern_to_image(pattern.get(), &extent, 1, &image.view);
            std::copy_n(image.data, answer.size(), answer.data());
            return status;
        });
    // nnz is known, and written, before the columns are.
    faults += sweep_question<int64_t>("spattn_pattern_to_csr", -1, false, [&](int64_t& answer) {
        return spattn_pattern_to_csr(pattern.get(), &extent, 0, &row_ptr.view, &col_idx.view, &answer);
    });
    CHECK(faults > 100);
}

// A caller's mistake stays a caller's mistake, or becomes one of memory; it is never anything else.
TEST(mistakes_while_memory_is_short) {
    spattn_pattern* result = nullptr;
    const auto refused = [&](spattn_status) { CHECK(result == nullptr); };
    long faults = sweep("window(-5,0)", {"spattn_pattern_window", [&] { return spattn_pattern_window(-5, 0, &result); },
                                         refused, SPATTN_E_RANGE});
    faults += sweep("a broken text", {"spattn_pattern_parse",
                                      [&] { return spattn_pattern_parse("causal & (sink(4) | wind(3)", &result); },
                                      refused, SPATTN_E_FORMAT});
    CHECK(faults > 5);
}

TEST(a_predicate_that_fails_at_the_nth_pair) {
    struct Countdown {
        int left;
        static int32_t keep(void* user, int64_t, int64_t, int64_t) {
            return --static_cast<Countdown*>(user)->left ? 1 : -7;
        }
    };
    fault::settle();
    const long before = memory::live;
    for (int n = 1; n <= 2 * 3 * 5; ++n) {
        Countdown countdown{n};
        spattn_pattern* result = reinterpret_cast<spattn_pattern*>(&result);
        CHECK_EQ(spattn_pattern_predicate(Countdown::keep, &countdown, 2, 3, 5, &result), SPATTN_E_CALLBACK);
        CHECK(result == nullptr);
        CHECK_EQ(countdown.left, 0);  // never called again
    }
    fault::settle();
    CHECK_EQ(memory::live, before);
}
