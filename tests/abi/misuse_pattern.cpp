// SPDX-License-Identifier: MIT
// Wrong arguments to everything that makes a pattern: a typed error that names the argument, and no handle.
#include "abi/tensors.h"

using namespace abi;
using BadPattern = BadCall<spattn_pattern>;

namespace {

spattn_bigbird bigbird(int64_t block, int64_t window, int64_t global, int64_t random) {
    auto params = sized<spattn_bigbird>();
    params.block = block;
    params.window_blocks = window;
    params.global_blocks = global;
    params.random_blocks = random;
    return params;
}

// make(numbers...) must call `argument` out of range.
template <auto make, class... Numbers>
void out_of_range(const char* function, const char* argument, Numbers... numbers) {
    const auto call = [=](spattn_pattern** result) { return make(numbers..., result); };
    demand_no_handle<spattn_pattern>(function, {{argument, call, SPATTN_E_RANGE, argument}});
}

BadPattern bad_bigbird(const char* what, spattn_bigbird params, spattn_status status, const char* argument) {
    return {what, [=](auto r) { return spattn_pattern_bigbird(&params, r); }, status, argument};
}

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

void demand_index_checks(const char* function, Indexed make, const char* argument) {
    const auto null = [=](auto r) { return make(nullptr, r); };
    demand_no_handle<spattn_pattern>(function, {{"tensor NULL", null, SPATTN_E_NULL, argument}});
    demand_tensor_checks(
        function, argument, true, [] { return std::make_unique<Numbers>(std::vector<int64_t>{0, 0, 1}); },
        [&](const spattn_tensor* t) {
            spattn_pattern* result = reinterpret_cast<spattn_pattern*>(&result);
            const spattn_status status = make(t, &result);
            CHECK(result == nullptr);
            return status;
        });
}

}  // namespace

TEST(numbers_out_of_range) {
    for (int64_t bad : {int64_t(-2), least}) {
        out_of_range<spattn_pattern_window>("spattn_pattern_window", "left", bad, 0);
        out_of_range<spattn_pattern_window>("spattn_pattern_window", "right", 0, bad);
        out_of_range<spattn_pattern_sink>("spattn_pattern_sink", "tokens", bad);
        out_of_range<spattn_pattern_dilated>("spattn_pattern_dilated", "left", bad, 1, 1);
        out_of_range<spattn_pattern_dilated>("spattn_pattern_dilated", "right", 1, bad, 1);
    }
    for (int64_t bad : {int64_t(0), int64_t(-1), least}) {
        out_of_range<spattn_pattern_block_diagonal>("spattn_pattern_block_diagonal", "block", bad);
        out_of_range<spattn_pattern_strided>("spattn_pattern_strided", "stride", bad);
        out_of_range<spattn_pattern_dilated>("spattn_pattern_dilated", "dilation", 1, 1, bad);
        out_of_range<spattn_pattern_landmark>("spattn_pattern_landmark", "block", bad, 0);
        out_of_range<spattn_pattern_fixed>("spattn_pattern_fixed", "block", bad, 0);
        out_of_range<spattn_pattern_residue>("spattn_pattern_residue", "modulus", bad, 0);
    }
    for (int64_t bad : {int64_t(-1), int64_t(5), huge, least}) {
        out_of_range<spattn_pattern_landmark>("spattn_pattern_landmark", "landmarks", 4, bad);
        out_of_range<spattn_pattern_fixed>("spattn_pattern_fixed", "landmarks", 4, bad);
        out_of_range<spattn_pattern_residue>("spattn_pattern_residue", "offset", 4, bad);
    }
}

TEST(result_null) {
    demand("result NULL", "spattn_pattern_full", spattn_pattern_full(nullptr), SPATTN_E_NULL, "result");
    demand("result NULL", "spattn_pattern_causal", spattn_pattern_causal(nullptr), SPATTN_E_NULL, "result");
    demand("result NULL", "spattn_pattern_logsparse", spattn_pattern_logsparse(nullptr), SPATTN_E_NULL, "result");
}

TEST(index_tensors) {
    demand_index_checks("spattn_pattern_documents", spattn_pattern_documents, "cu_seqlens");
    demand_index_checks("spattn_pattern_global_keys", spattn_pattern_global_keys, "positions");
    demand_index_checks("spattn_pattern_global_tokens", spattn_pattern_global_tokens, "positions");
    demand_index_checks("spattn_pattern_tree", spattn_pattern_tree, "parents");
}

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

TEST(bigbird_struct) {
    auto flags = bigbird(4, 3, 1, 1);
    flags.flags = 1;
    auto short_size = bigbird(4, 3, 1, 1);
    short_size.struct_size = 8;
    demand_no_handle<spattn_pattern>(
        "spattn_pattern_bigbird",
        {
            {"params NULL", [](auto r) { return spattn_pattern_bigbird(nullptr, r); }, SPATTN_E_NULL, "params"},
            bad_bigbird("short", short_size, SPATTN_E_STRUCT_SIZE, "params"),
            bad_bigbird("flags", flags, SPATTN_E_UNKNOWN_FIELD, "params.flags"),
            bad_bigbird("block 0", bigbird(0, 3, 1, 1), SPATTN_E_RANGE, "params.block"),
            bad_bigbird("block least", bigbird(least, 3, 1, 1), SPATTN_E_RANGE, "params.block"),
            bad_bigbird("window even", bigbird(4, 2, 1, 1), SPATTN_E_RANGE, "params.window_blocks"),
            bad_bigbird("window -1", bigbird(4, -1, 1, 1), SPATTN_E_RANGE, "params.window_blocks"),
            bad_bigbird("global -1", bigbird(4, 3, -1, 1), SPATTN_E_RANGE, "params.global_blocks"),
            bad_bigbird("random -1", bigbird(4, 3, 1, -1), SPATTN_E_RANGE, "params.random_blocks"),
        });
}

TEST(composition) {
    const Pattern a = parse("causal"), b = parse("sink(1)");
    const spattn_pattern* two[] = {a.get(), b.get()};
    const spattn_pattern* hole[] = {a.get(), nullptr};
    const auto check_parts = [&](const char* function, auto make) {
        demand_no_handle<spattn_pattern>(
            function, {
                          {"parts NULL", [=](auto r) { return make(nullptr, 2, r); }, SPATTN_E_NULL, "parts"},
                          {"a part NULL", [&](auto r) { return make(hole, 2, r); }, SPATTN_E_NULL, "parts[1]"},
                          {"no part", [&](auto r) { return make(two, 0, r); }, SPATTN_E_RANGE, "count"},
                          {"2^62 parts", [&](auto r) { return make(two, size_t(huge), r); }, SPATTN_E_RANGE, "count"},
                      });
    };
    check_parts("spattn_pattern_union", spattn_pattern_union);
    check_parts("spattn_pattern_intersection", spattn_pattern_intersection);
    demand_no_handle<spattn_pattern>(
        "spattn_pattern_difference",
        {
            {"a NULL", [&](auto r) { return spattn_pattern_difference(nullptr, b.get(), r); }, SPATTN_E_NULL, "a"},
            {"b NULL", [&](auto r) { return spattn_pattern_difference(a.get(), nullptr, r); }, SPATTN_E_NULL, "b"},
        });
    demand_no_handle<spattn_pattern>(
        "spattn_pattern_transpose",
        {{"NULL", [](auto r) { return spattn_pattern_transpose(nullptr, r); }, SPATTN_E_NULL, "pattern"}});
}

TEST(selections) {
    const Pattern a = parse("causal"), b = parse("sink(1)");
    const spattn_pattern* two[] = {a.get(), b.get()};
    const spattn_pattern* hole[] = {a.get(), nullptr};
    const int32_t good[] = {0, 1, 1}, beyond[] = {0, 2, 1}, negative[] = {0, -1, 1};
    const auto check_selection = [&](const char* function, auto make, const char* chosen, const char* length) {
        const std::string second = std::string(chosen) + "[1]";
        demand_no_handle<spattn_pattern>(
            function,
            {
                {"parts NULL", [=](auto r) { return make(nullptr, 2, good, 3, r); }, SPATTN_E_NULL, "parts"},
                {"a part NULL", [&](auto r) { return make(hole, 2, good, 3, r); }, SPATTN_E_NULL, "parts[1]"},
                {"no part", [&](auto r) { return make(two, 0, good, 3, r); }, SPATTN_E_RANGE, "count"},
                {"2^62 parts", [&](auto r) { return make(two, size_t(huge), good, 3, r); }, SPATTN_E_RANGE, "count"},
                {"choice NULL", [&](auto r) { return make(two, 2, nullptr, 3, r); }, SPATTN_E_NULL, chosen},
                {"choice beyond", [&](auto r) { return make(two, 2, beyond, 3, r); }, SPATTN_E_RANGE, second.c_str()},
                {"choice negative", [&](auto r) { return make(two, 2, negative, 3, r); }, SPATTN_E_RANGE,
                 second.c_str()},
                {"none to choose for", [&](auto r) { return make(two, 2, good, 0, r); }, SPATTN_E_RANGE, length},
                {"2^62 to choose for", [&](auto r) { return make(two, 2, good, size_t(huge), r); }, SPATTN_E_RANGE,
                 length},
            });
    };
    check_selection("spattn_pattern_per_head", spattn_pattern_per_head, "part_of_head", "heads");
    check_selection("spattn_pattern_per_batch", spattn_pattern_per_batch, "part_of_batch", "batch");
}

TEST(texts_that_cannot_be_read) {
    demand_no_handle<spattn_pattern>(
        "spattn_pattern_parse",
        {{"NULL", [](auto r) { return spattn_pattern_parse(nullptr, r); }, SPATTN_E_NULL, "text"}});
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

TEST(texts_with_numbers_out_of_range) {
    for (const char* text :
         {"window(-2,0)", "sink(-1)", "block_diagonal(0)", "landmark(4,5)", "residue(3,3)", "tree(0)", "documents(3,2)",
          "bigbird(4,2,0,0,0)", "global_keys(-1)", "per_head([1],full)"}) {
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
    };
    for (const char* text : texts) {
        check::context = text;
        const Pattern pattern = parse(text);
        if (!pattern) continue;
        for (int64_t offset : {int64_t(0), int64_t(1) << 40, -(int64_t(1) << 40)}) {
            auto extent = make_extent(70, 90);
            extent.flags = SPATTN_EXTENT_Q_OFFSET;
            extent.q_offset = offset;
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
