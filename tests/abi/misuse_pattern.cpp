// SPDX-License-Identifier: MIT
// What is wrong in the content of arguments that make a pattern: a typed error that names the argument, and no handle.
// What their types tell, test_misuse.py says.
#include <cstring>

#include "abi/abi.h"

using namespace abi;
using BadPattern = BadCall<spattn_pattern>;

namespace {

// An index tensor of one of the constructors that take one.
using Indexed = spattn_status (*)(const spattn_tensor*, spattn_pattern**);

BadPattern bad_numbers(const char* what, Indexed make, std::vector<int64_t> values, spattn_status status,
                       const char* argument) {
    const auto call = [=](spattn_pattern** result) {
        const Numbers numbers(values);
        return make(&numbers.view, result);
    };
    return {what, call, status, argument};
}

}  // namespace

TEST(index_values) {
    demand_no_handle<spattn_pattern>(
        "spattn_pattern_documents",
        {
            bad_numbers("unsorted", spattn_pattern_documents, {0, 5, 4, 9}, SPATTN_E_RANGE, "cu_seqlens"),
            bad_numbers("negative", spattn_pattern_documents, {-1, 5}, SPATTN_E_RANGE, "cu_seqlens"),
            bad_numbers("no number", spattn_pattern_documents, {}, SPATTN_E_SHAPE, "cu_seqlens"),
        });
    demand_no_handle<spattn_pattern>("spattn_pattern_global_keys", {bad_numbers("negative", spattn_pattern_global_keys,
                                                                                {3, -1}, SPATTN_E_RANGE, "positions")});
    demand_no_handle<spattn_pattern>(
        "spattn_pattern_global_tokens",
        {bad_numbers("least", spattn_pattern_global_tokens, {3, least}, SPATTN_E_RANGE, "positions")});
    demand_no_handle<spattn_pattern>(
        "spattn_pattern_tree",
        {
            bad_numbers("a cycle of one", spattn_pattern_tree, {-1, 1}, SPATTN_E_ARGUMENT, "parents"),
            bad_numbers("a cycle of three", spattn_pattern_tree, {-1, 3, 1, 2}, SPATTN_E_ARGUMENT, "parents"),
            bad_numbers("a parent beyond", spattn_pattern_tree, {-1, 2}, SPATTN_E_RANGE, "parents"),
            bad_numbers("a parent of -2", spattn_pattern_tree, {-1, -2}, SPATTN_E_RANGE, "parents"),
            bad_numbers("a parent of 2^62", spattn_pattern_tree, {-1, huge}, SPATTN_E_RANGE, "parents"),
            bad_numbers("no node", spattn_pattern_tree, {}, SPATTN_E_SHAPE, "parents"),
        });
}

TEST(errors_about_shapes_say_which_size) {
    const int64_t shape[] = {-1};
    const Numbers numbers({0, 3});
    spattn_tensor view = numbers.view;
    view.shape = shape;
    spattn_pattern* made = nullptr;
    CHECK_EQ(spattn_pattern_documents(&view, &made), SPATTN_E_SHAPE);
    CHECK(std::string(spattn_last_error_text()).find("has size -1 on axis 0; accepted: [any]") != std::string::npos);
}

TEST(texts_that_cannot_be_read) {
    const std::string deep = std::string(1000000, '(') + "full" + std::string(1000000, ')');
    const std::string turned = [] {
        std::string text = "full";
        for (int i = 0; i < 20000; ++i) text = "transpose(" + text + ")";
        return text;
    }();
    std::vector<std::string> texts = {"",
                                      "  ",
                                      "cuasal",
                                      "causal causal",
                                      "causal &",
                                      "| causal",
                                      "(causal",
                                      "causal)",
                                      "window(1)",
                                      "window(1,2,3)",
                                      "window(1,x)",
                                      "window(99999999999999999999,0)",
                                      "sink",
                                      "sink()",
                                      "causal(1)",
                                      "documents(#0123456789abcdef)",
                                      "causal\x01",
                                      "caus\xc3\xa4l",
                                      "transpose()",
                                      "per_head()",
                                      deep,
                                      turned};
    for (const std::string& text : texts) {
        const std::string what = "\"" + text.substr(0, 40) + "\"";
        spattn_pattern* result = reinterpret_cast<spattn_pattern*>(&result);
        demand(what, "spattn_pattern_parse", spattn_pattern_parse(text.c_str(), &result), SPATTN_E_FORMAT, "text");
        CHECK_EQ(result, static_cast<spattn_pattern*>(nullptr));
    }
}

// What spattn_xref cannot hold, and symbols that do not fit the tokens.
TEST(xref) {
    const auto call = [](int64_t tokens, int64_t rows, int64_t symbol, spattn_xref params) {
        return [=](spattn_pattern** result) {
            const Numbers ids(std::vector<int64_t>(size_t(tokens), 5));
            Tensor symbols({rows, 2}, i64);
            for (int64_t i = 0; i < 2 * rows; ++i) symbols.as<int64_t>()[i] = symbol;
            return spattn_pattern_xref(&ids.view, &symbols.view, &params, result);
        };
    };
    const auto plain = sized<spattn_xref>();
    auto flags = plain, links = plain, budget = plain;
    flags.flags = 1;
    links.budget = 100, links.links = 5;
    budget.sinks = 100, budget.window = 200;
    demand_no_handle<spattn_pattern>(
        "spattn_pattern_xref",
        {
            {"no token", call(0, 0, 0, plain), SPATTN_E_RANGE, "token_ids"},
            {"fewer symbols than tokens", call(3, 2, 0, plain), SPATTN_E_SHAPE, "symbols"},
            {"more symbols than tokens", call(3, 4, 0, plain), SPATTN_E_SHAPE, "symbols"},
            {"a symbol of -2", call(3, 3, -2, plain), SPATTN_E_RANGE, "symbols"},
            {"the least symbol", call(3, 3, least, plain), SPATTN_E_RANGE, "symbols"},
            {"flags", call(3, 3, 0, flags), SPATTN_E_UNKNOWN_FIELD, "params.flags"},
            {"more links than the budget has room for", call(3, 3, 0, links), SPATTN_E_RANGE, "params.links"},
            {"a budget below sinks and window", call(3, 3, 0, budget), SPATTN_E_RANGE, "params.budget"},
        });
    const auto extend = [](const char* text, int64_t rows) {
        return [=](spattn_pattern** result) {
            const Numbers ids({5, 6});
            const Tensor symbols({rows, 2}, i64);
            return spattn_pattern_xref_extend(parse(text).get(), &ids.view, &symbols.view, result);
        };
    };
    demand_no_handle<spattn_pattern>(
        "spattn_pattern_xref_extend",
        {
            {"of another pattern", extend("causal", 2), SPATTN_E_ARGUMENT, "pattern"},
            {"of a pattern with a text inside", extend("xref([1],[]) | sink(1)", 2), SPATTN_E_ARGUMENT, "pattern"},
            {"fewer symbols than tokens", extend("xref([1],[])", 1), SPATTN_E_SHAPE, "symbols"},
        });
}

// Ranges that are none, or do not lie within the rows.
TEST(rows) {
    const auto call = [](const std::vector<int64_t>& bounds, int64_t seq_q) {
        return [=](spattn_pattern** result) {
            const Pairs ranges(bounds);
            return spattn_pattern_rows(parse("causal").get(), &ranges.view, seq_q, result);
        };
    };
    const auto of_shape = [](const std::vector<int64_t>& shape) {
        return [=](spattn_pattern** result) {
            const Tensor ranges(shape, i64);
            return spattn_pattern_rows(parse("causal").get(), &ranges.view, 9, result);
        };
    };
    demand_no_handle<spattn_pattern>("spattn_pattern_rows",
                                     {{"no range", call({}, 9), SPATTN_E_SHAPE, "ranges"},
                                      {"three numbers a range", of_shape({2, 3}), SPATTN_E_SHAPE, "ranges"},
                                      {"a list", of_shape({4}), SPATTN_E_SHAPE, "ranges"},
                                      {"a range without rows", call({0, 2, 5, 5}, 9), SPATTN_E_RANGE, "ranges"},
                                      {"an end before its begin", call({5, 2}, 9), SPATTN_E_RANGE, "ranges"},
                                      {"a begin below 0", call({-1, 2}, 9), SPATTN_E_RANGE, "ranges"},
                                      {"an end behind the rows", call({0, 2, 8, 10}, 9), SPATTN_E_RANGE, "ranges"},
                                      {"the least begin", call({least, 2}, 9), SPATTN_E_RANGE, "ranges"},
                                      {"no rows", call({0, 2}, 0), SPATTN_E_RANGE, "seq_q"}});
}

TEST(columns) {
    const auto call = [](const char* inner, const std::vector<int64_t>& bounds, int64_t seq_k) {
        return [=](spattn_pattern** result) {
            const Pairs ranges(bounds);
            return spattn_pattern_columns(parse(inner).get(), &ranges.view, seq_k, result);
        };
    };
    demand_no_handle<spattn_pattern>(
        "spattn_pattern_columns",
        {{"no range", call("causal", {}, 9), SPATTN_E_SHAPE, "ranges"},
         {"an end behind the keys", call("causal", {0, 2, 8, 10}, 9), SPATTN_E_RANGE, "ranges"},
         {"no keys", call("causal", {0, 2}, 0), SPATTN_E_RANGE, "seq_k"},
         {"lists of a call", call("runtime_tokens(2)", {0, 2}, 9), SPATTN_E_UNSUPPORTED, "inner"}});
}

TEST(texts_with_numbers_out_of_range) {
    for (const char* text :
         {"window(-2,0)", "sink(-1)", "block_diagonal(0)", "landmark(4,5)", "residue(3,3)", "tree(0)", "documents(3,2)",
          "bigbird(4,2,0,0,0)", "global_keys(-1)", "per_head([1],full)", "xref([],[])", "xref([1],[0])",
          "xref([1],[],32,64,95)", "xref([1],[0,-2])", "rows([0,2],1,full)", "rows([],1,full)", "rows([0,1],0,full)",
          "columns([0,2],1,full)"}) {
        spattn_pattern* result = reinterpret_cast<spattn_pattern*>(&result);
        demand(text, "spattn_pattern_parse", spattn_pattern_parse(text, &result), SPATTN_E_FORMAT, "text");
        CHECK_EQ(result, static_cast<spattn_pattern*>(nullptr));
    }
}

// Numbers near the ends of int64 are legal bounds: no question may overflow on them.
TEST(enormous_numbers_are_plain_numbers) {
    const char* texts[] = {
        "window(4611686018427387904,4611686018427387904)",
        "window(9223372036854775807,0)",
        "sink(9223372036854775807)",
        "block_diagonal(9223372036854775807)",
        "causal & strided(4611686018427387904)",
        "dilated(9223372036854775807,9223372036854775807,9223372036854775807)",
        "landmark(9223372036854775807,9223372036854775807)",
        "residue(9223372036854775807,9223372036854775806)",
        "documents(0,9223372036854775807)",
        "global_keys(9223372036854775806)",
        "global_tokens(0,4611686018427387904)",
        "bigbird(4611686018427387904,4611686018427387903,4611686018427387904,4611686018427387904,18446744073709551615)",
        "transpose(window(9223372036854775807,3))",
        "window(33,9223372036854775806)",
        "window(33,9223372036854775780) & causal",
        "transpose(window(9223372036854775806,9223372036854775806))",
        "dilated(31,9223372036854775806,5) & block_diagonal(59)",
        "transpose(dilated(9223372036854775806,31,5)) & block_diagonal(59)",
    };
    for (const char* text : texts) {
        check::context = text;
        const Pattern pattern = parse(text);
        if (!pattern) continue;
        for (int64_t offset : {int64_t(0), int64_t(1) << 40, -(int64_t(1) << 40)}) {
            auto extent = make_extent(70, 90);
            extent.flags = SPATTN_EXTENT_Q_OFFSET;
            extent.q_offset = offset;
            extent.block_q = 11, extent.block_k = 10;
            auto stats = sized<spattn_stats>();
            CHECK_EQ(spattn_pattern_stats(pattern.get(), &extent, &stats), SPATTN_OK);
            Tensor mask({1, 1, 70, 90}, u8);
            CHECK_EQ(spattn_pattern_to_mask(pattern.get(), &extent, &mask.view), SPATTN_OK);
            double pairs = 0;
            for (int i = 0; i < 70 * 90; ++i) pairs += mask.as<uint8_t>()[i];
            CHECK_EQ(pairs, stats.pairs);
        }
    }
}

// Blocks and rows have numbers of 64 bits, also where pairs, which are floating, go on.
TEST(more_blocks_than_numbers_are_refused) {
    const Pattern pattern = parse("full");
    auto extent = make_extent(2147483647, 2147483647);
    extent.block_q = extent.block_k = 1, extent.heads = 3;
    auto stats = sized<spattn_stats>();
    CHECK_EQ(spattn_pattern_stats(pattern.get(), &extent, &stats), SPATTN_E_RANGE);
    CHECK(std::strstr(spattn_last_error_text(), "argument extent"));
    extent.heads = 2;
    CHECK_EQ(spattn_pattern_stats(pattern.get(), &extent, &stats), SPATTN_OK);
    CHECK_EQ(stats.blocks_full, 2 * int64_t(2147483647) * 2147483647);
}
