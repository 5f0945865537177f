// SPDX-License-Identifier: MIT
// parse(print(p)) == p, and what the parser says of texts it cannot read.
#include <ctime>

#include "check.h"
#include "core/error.h"
#include "dots.h"
#include "pattern/trees.h"

using namespace spattn;
using namespace trees;

namespace {

std::string reprint(const std::string& text) { return parse_pattern(text)->print(); }

// The message of the failure, which must be of the format family and blame the text; "" where there is none.
std::string complaint(const std::string& text) {
    try {
        parse_pattern(text);
        return "";
    } catch (const Error& error) {
        CHECK_EQ(error.status, int(SPATTN_E_FORMAT));
        CHECK_EQ(error.argument, "text");
        return error.message;
    }
}

}  // namespace

TEST(texts_come_back) {
    for (const char* text :
         {"full", "causal", "window(-1,0)", "window(4095,0)", "sink(0)", "block_diagonal(16)", "documents(0,10,20)",
          "dilated(1008,0,16)", "strided(64)", "landmark(64,4)", "fixed(8,1)", "logsparse", "residue(4,3)",
          "global_keys()",
          "global_keys(9,1,5,1)", "global_tokens(0)", "tree(-1,0,0)", "bigbird(64,3,1,3,18446744073709551615)",
          "xref([-9223372036854775808,5],[],2,3,9,0,0,1,2,0,0)",
          "xref([7,8,7],[],2,3,9,4,5,1,2,6,0)", "xref([7,8],[4,-1,-1,4],32,64,224,112,7,3,10,32,48)",
          "causal | full | sink(4)", "causal & full - sink(4) & strided(2)", "causal & (full - sink(4))",
          "(causal | full) & logsparse", "causal - (full | sink(1))", "causal - (full & sink(1))",
          "transpose(causal | transpose(full))", "per_head([0,1,0], causal, window(3,0) | sink(1))",
          "per_batch([0], per_head([1,0], full, causal)) - sink(1)",
          "grid([6,8], [3,4], window(1,1), causal | sink(1)) & grid([48], full)"}) {
        check::context = text;
        CHECK_EQ(reprint(text), text);
    }
}

// Texts are what equality, hashes and saved bytes are made of.
TEST(texts_are_the_same_in_every_locale) {
    const char* const text =
        "window(1023,0) | bigbird(1024,3,1,3,12345) | documents(0,4096) | csr([0,1],[4096],5000) | residue(2048,1024)";
    const std::string identity = parse_pattern(text)->identity(), bytes = save_pattern(*parse_pattern(text));
    const InDots dots;
    CHECK_EQ(reprint(text), text);
    CHECK(parse_pattern(text)->identity() == identity);
    CHECK(save_pattern(*parse_pattern(text)) == bytes);
    CHECK_EQ(complaint("residue(1000,2000)"),
             "column 1: residue: offset is 2000; accepted: 0 to 999, below the modulus");
}

TEST(spaces_are_free_and_parentheses_as_needed) {
    CHECK_EQ(reprint(" \tcausal&\r\n( window ( 3 , 0 )|sink( 1))  "), "causal & (window(3,0) | sink(1))");
    CHECK_EQ(reprint("((causal))"), "causal");
    CHECK_EQ(reprint("causal | (full | sink(1))"), "causal | full | sink(1)");
    CHECK_EQ(reprint("(causal & full) & sink(1)"), "causal & full & sink(1)");
    CHECK_EQ(reprint("(causal - full) - sink(1)"), "causal - full - sink(1)");
    CHECK_EQ(reprint("causal | full & sink(1)"), "causal | full & sink(1)");
    CHECK_EQ(reprint("grid ( [ 6,8 ] ,[ 6 , 8] , causal , full )"), "grid([6,8], causal, full)");
    CHECK_EQ(reprint("per_head ( [ 0 , 0 ] , causal )"), "per_head([0,0], causal)");
}

TEST(random_patterns_come_back) {
    for (uint32_t seed = 0; seed < 3000; ++seed) {
        Source source(seed);
        const PatternRef pattern = source.tree(4).pattern;
        check::context = "seed " + std::to_string(seed) + ": " + pattern->print();
        const PatternRef again = parse_pattern(pattern->print());
        CHECK_EQ(again->identity(), pattern->identity());
        CHECK_EQ(again->print(), pattern->print());
    }
}

TEST(long_lists_print_as_a_hash) {
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < 64; ++i) numbers.push_back(3 * i);
    CHECK_EQ(parse_pattern(make_documents(numbers)->print())->identity(), make_documents(numbers)->identity());
    numbers.push_back(500);
    for (const PatternRef& pattern : {make_documents(numbers), make_global_keys(numbers), make_global_tokens(numbers),
                                      make_per_head({make_full()}, std::vector<int32_t>(65))}) {
        const std::string text = pattern->print();
        check::context = text;
        CHECK(text.find('#') != std::string::npos && text.size() < 64);
        CHECK(complaint(text).find("found #, a long list printed by its hash") != std::string::npos);
    }
    CHECK(make_documents(numbers)->print() != make_documents({0, 1})->print());
    std::vector<int64_t> others = numbers;
    others.back() = 501;
    CHECK(make_documents(numbers)->print() != make_documents(others)->print());
}

TEST(malformed_texts) {
    const struct {
        const char* text;
        const char* message;  // its beginning
    } cases[] = {
        {"", "column 1: found the end; expected ( or one of full, causal, "},
        {"   ", "column 4: found the end; expected ( or one of"},
        {"causl", "column 1: found causl; expected ( or one of"},
        {"Causal", "column 1: found Causal; expected ( or one of"},
        {"causal &", "column 9: found the end; expected ( or one of"},
        {"causal & & full", "column 10: found &; expected"},
        {"causal full", "column 8: found full; expected |, &, - or the end"},
        {"causal()", "column 7: found (; expected |, &, - or the end"},
        {"(causal", "column 8: found the end; expected |, &, - or )"},
        {"causal)", "column 7: found ); expected |, &, - or the end"},
        {"window", "column 7: found the end; expected ( as in window(left,right)"},
        {"window(", "column 8: found the end; expected a number as in window(left,right)"},
        {"window()", "column 8: found ); expected a number as in window(left,right)"},
        {"window(1)", "column 9: found ); expected , as in window(left,right)"},
        {"window(1,2,3)", "column 11: found ,; expected ) as in window(left,right)"},
        {"window(1 2)", "column 10: found 2; expected , as in window(left,right)"},
        {"window(1,)", "column 10: found ); expected a number"},
        {"window(1.5,0)", "column 9: found .; expected , as in"},
        {"window(0x10,0)", "column 9: found x10; expected , as in"},
        {"window(+1,0)", "column 8: found +; expected a number"},
        {"window(- 1,0)", "column 8: found -; expected a number"},
        {"window(--1,0)", "column 8: found -; expected a number"},
        {"window(9223372036854775808,0)",
         "column 8: found 9223372036854775808; expected a number up to 9223372036854775807"},
        {"window(-9223372036854775809,0)",
         "column 8: found -9223372036854775809; expected a number up to 9223372036854775807"},
        {"window(99999999999999999999999999999,0)",
         "column 8: found 999999999999999999999999; expected a number up to"},
        {"window(-2,0)", "column 1: window: left is -2; accepted: -1 (unbounded), or 0 and more"},
        {"causal & sink(-1)", "column 10: sink: tokens is -1; accepted: 0 and more"},
        {"bigbird(0,3,1,2,0)", "column 1: bigbird: block is 0; accepted: 1 and more"},
        {"bigbird(1,2,1,2,0)", "column 1: bigbird: window_blocks is 2; accepted: 0, or odd and positive"},
        {"bigbird(1,3,1,2,-1)", "column 17: found -1; expected a number up to 18446744073709551615, not negative"},
        {"bigbird(1,3,1,2,18446744073709551616)", "column 17: found 18446744073709551616; expected a number up to"},
        {"documents()", "column 1: documents: cu_seqlens has no number"},
        {"documents(0,5,3)", "column 1: documents: cu_seqlens falls from 5 to 3 at index 2"},
        {"documents(#0123456789abcdef)", "column 11: found #, a long list printed by its hash"},
        {"global_keys(1,)", "column 15: found ); expected a number as in global_keys(positions...)"},
        {"tree(1,0)", "column 1: tree: parents has a cycle through node 0"},
        {"transpose causal", "column 11: found causal; expected ( after transpose"},
        {"transpose()", "column 11: found ); expected ( or one of"},
        {"per_head(causal)", "column 10: found causal; expected [ as in per_head([0,1,0], A, B)"},
        {"per_head([], causal)", "column 1: per_head: part_of_head has no number"},
        {"per_head([0])", "column 1: per_head: count is 0; accepted: 1 and more"},
        {"per_head([0,1], causal)", "column 1: per_head: part_of_head[1] is 1; accepted: 0 to 0"},
        {"grid(causal)", "column 6: found causal; expected [ as in grid([sizes...], [tile...], A, B)"},
        {"grid([])", "column 1: grid: axes is 0; accepted: 1 to 8"},
        {"grid([4])", "column 1: grid: parts has 0 entries; accepted: 1, as sizes has"},
        {"grid([4], [2], [1], causal)", "column 16: found [; expected ( or one of"},
        {"grid([4], [2,2], causal)", "column 1: grid: tile has 2 entries; accepted: 1, as sizes has"},
        {"grid([4,6], [2,4], causal, full)", "column 1: grid: tile[1] is 4; accepted: divisors of 6"},
        {"per_batch([4294967296], causal)", "column 12: number 4294967296 is too large"},
        {"per_batch([0 1], causal)", "column 14: found 1; expected , or ] as in per_batch"},
        {"causal \x01", "column 8: found byte 1; expected"},
        {"caus\xc3\xa9", "column 1: found caus; expected ( or one of"},
        {"causal | -1", "column 10: found -; expected ( or one of"},
    };
    for (const auto& c : cases) {
        const std::string message = complaint(c.text);
        check::context = std::string(c.text) + " said: " + message;
        CHECK_EQ(message.substr(0, std::strlen(c.message)), c.message);
    }
}

TEST(deep_and_wide_texts_end_in_an_error_or_a_pattern) {
    for (const char* open : {"(", "transpose(", "causal - (", "full & (sink(1) | "}) {
        std::string text;
        for (int i = 0; i < 100000; ++i) text += open;
        CHECK(complaint(text).find("expected at most 200 levels of parentheses") != std::string::npos);
    }
    std::string wide = "causal";
    for (int i = 0; i < 5000; ++i) wide += i % 2 ? " | full" : " | causal";
    CHECK_EQ(reprint(wide), wide);
    CHECK_EQ(parse_pattern(wide)->levels, 2);
    std::string mixed = "causal";
    for (int i = 0; i < 5000; ++i) mixed += i % 2 ? " & full" : " - sink(1)";
    CHECK(complaint(mixed).find("levels deep; accepted: up to 200") != std::string::npos);
    CHECK(complaint(std::string(100000, '(')).size() < 100);
}

// Lists that stand beside each other print inline together or not at all.
TEST(two_lists_print_inline_up_to_64_numbers_together) {
    for (int64_t documents : {31, 32}) {
        std::vector<int64_t> cu(size_t(documents) + 1);
        std::iota(cu.begin(), cu.end(), 0);
        const PatternRef pattern = make_per_document(make_causal(), cu, cu);
        const std::string text = pattern->print();
        CHECK_EQ(text.find('#') == std::string::npos, 2 * cu.size() <= 64);
        if (2 * cu.size() <= 64) CHECK_EQ(reprint(text), text);
        else CHECK(complaint(text).find("a long list printed by its hash") != std::string::npos);
    }
}

// As many parts as a pattern may have, of each operator: one after the other they would take minutes.
TEST(long_chains_take_no_time) {
    for (const char* sign : {" & ", " - ", " | "}) {
        std::string chain = "causal";
        for (int i = 1; i < 60000; ++i) chain += sign + std::string(i % 2 ? "full" : "causal");
        const std::clock_t start = std::clock();
        const PatternRef pattern = parse_pattern(chain);
        const double seconds = double(std::clock() - start) / CLOCKS_PER_SEC;
        CHECK_EQ(pattern->nodes, 60001);
        CHECK_EQ(pattern->levels, 2);
        CHECK(seconds < 2);
        CHECK(pattern->print() == chain);
        chain += sign + chain;
        CHECK(complaint(chain).find("parts in all; accepted: up to 65536") != std::string::npos);
    }
    const char* const mixed = "causal & full - sink(1) - sink(2) & full & sink(9) - strided(2)";
    CHECK_EQ(reprint(mixed), mixed);
}
