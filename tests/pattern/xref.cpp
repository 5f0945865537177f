// SPDX-License-Identifier: MIT
// What xref promises beyond its definition: no row depends on a later token, rows keep their budget, and each link
// reaches what it is for.
#include "check.h"
#include "drawn.h"
#include "pattern/pattern.h"

using namespace spattn;

namespace {

struct Text {
    std::vector<int64_t> ids, symbols;
};

void add_token(Text& text, drawn::Random& random, int64_t words) {
    text.ids.push_back(random.in(0, words));
    for (int n = 0; n < 2; ++n) text.symbols.push_back(random.one_in(2) ? -1 : random.in(0, words));
}

Text random_text(drawn::Random& random, int64_t tokens, int64_t words) {
    Text text;
    for (int64_t i = 0; i < tokens; ++i) add_token(text, random, words);
    return text;
}

// Tokens [begin, end) of a text.
Text part(const Text& whole, int64_t begin, int64_t end) {
    return {{whole.ids.begin() + begin, whole.ids.begin() + end},
            {whole.symbols.begin() + 2 * begin, whole.symbols.begin() + 2 * end}};
}

XrefParams random_params(drawn::Random& random) {
    XrefParams p;
    p.sinks = random.in(0, 8), p.window = random.in(1, 20), p.links = random.in(0, 40);
    p.budget = p.sinks + p.window + p.links + random.in(0, 20);
    p.ngram_keys = random.in(0, 8), p.symbol_before = random.in(0, 4), p.symbol_after = random.in(0, 10);
    p.look_back = random.in(0, 32), p.stop_ratio = random.in(0, 3) * 16;
    return p;
}

std::vector<int64_t> keys_of(const PatternRef& pattern, int64_t tokens, int64_t row) {
    Intervals kept;
    pattern->keys(Plane{{1, 1, tokens, tokens, 0}}, row, {0, tokens}, kept);
    std::vector<int64_t> keys;
    for (const Interval& i : kept)
        for (int64_t k = i.begin; k < i.end; ++k) keys.push_back(k);
    return keys;
}

PatternRef make(const Text& text, const XrefParams& params) { return make_xref(text.ids, text.symbols, params); }

}  // namespace

// A row is the same whether the text ends with it, goes on as it does, or goes on in any other way.
TEST(no_row_depends_on_a_later_token) {
    int64_t rows = 0, linked = 0;
    for (uint64_t seed = 0; seed < 400; ++seed) {
        drawn::Random random(seed);
        const int64_t tokens = random.in(2, 400), words = random.in(0, 30);
        const Text whole = random_text(random, tokens, words);
        const XrefParams params = random.one_in(4) ? XrefParams() : random_params(random);
        const PatternRef pattern = make(whole, params);
        for (int n = 0; n < 12; ++n) {
            const int64_t row = random.in(0, tokens - 1);
            check::context = "seed " + std::to_string(seed) + ", row " + std::to_string(row);
            const std::vector<int64_t> keys = keys_of(pattern, tokens, row);
            Text changed = part(whole, 0, row + 1);
            CHECK(keys_of(make(changed, params), row + 1, row) == keys);
            while (int64_t(changed.ids.size()) < tokens) add_token(changed, random, random.in(0, 2 * words));
            CHECK(keys_of(make(changed, params), tokens, row) == keys);
            CHECK(keys.back() == row);
            CHECK(int64_t(keys.size()) == std::min(row + 1, params.budget) ||
                  (int64_t(keys.size()) < params.budget && keys.size() == size_t(row) + 1));
            ++rows;
            linked += keys.size() < size_t(row) + 1 && int64_t(keys.size()) > params.sinks + params.window;
        }
    }
    check::context.clear();
    CHECK(rows == 4800 && linked > 1500);
}

// Row 299 of a text without repeats but for those made here: spans of what it should see, beyond sinks and window.
TEST(links_reach_what_they_are_for) {
    Text text;
    for (int64_t i = 0; i < 300; ++i) text.ids.push_back(1000 + i), text.symbols.insert(text.symbols.end(), {-1, -1});
    const auto sees = [&](int64_t key, XrefParams params = {}) {
        params.links = std::min<int64_t>(params.links, 30);
        params.budget = params.sinks + params.window + params.links;  // so that the window hardly widens
        const std::vector<int64_t> keys = keys_of(make(text, params), 300, 299);
        return std::binary_search(keys.begin(), keys.end(), key);
    };
    const auto sees_from_to = [&](int64_t first, int64_t last) {
        for (int64_t k = first; k <= last; ++k)
            if (!sees(k)) return false;
        return !sees(first - 1) && !sees(last + 1);
    };
    XrefParams none;
    none.links = 0;
    const Text plain = text;

    text.ids[100] = text.ids[298], text.ids[101] = text.ids[299];  // a bigram, and what followed it
    CHECK(sees_from_to(101, 107));
    CHECK(!sees(101, none));

    text = plain;
    text.symbols[2 * 150] = text.symbols[2 * 299] = 7;  // the identifier that is being typed
    CHECK(sees_from_to(147, 160));

    text = plain;
    text.symbols[2 * 150] = text.symbols[2 * 280] = text.symbols[2 * 281 + 1] = 7;  // one typed a moment ago
    CHECK(sees_from_to(147, 160));
    XrefParams near;
    near.look_back = 18;
    CHECK(!sees(150, near));  // completed by token 281: 18 tokens back
    for (int64_t i = 40; i < 80; ++i) text.symbols[size_t(2 * i)] = 7;
    CHECK(!sees(150));  // too common by now
}

// A text that goes on, some tokens at a time, is the text read at once; so is each of two ways in which one goes on.
TEST(extended_texts_are_whole_texts) {
    for (uint64_t seed = 0; seed < 60; ++seed) {
        drawn::Random random(seed);
        check::context = "seed " + std::to_string(seed);
        const XrefParams params = random.one_in(3) ? XrefParams() : random_params(random);
        const int64_t words = random.in(0, 30), tokens = random.in(2, random.one_in(5) ? 1500 : 60);
        const Text text = random_text(random, tokens, words), other = random_text(random, 9, words);
        int64_t done = random.in(1, tokens - 1);
        PatternRef pattern = make(part(text, 0, done), params);
        while (done < tokens) {
            const int64_t end = std::min(tokens, done + random.in(0, random.one_in(4) ? 600 : 40));
            const PatternRef before = pattern;
            if (random.one_in(3)) extend_xref(before, other.ids, other.symbols);  // takes the index that was kept
            const Text more = part(text, done, end);
            pattern = extend_xref(before, more.ids, more.symbols);
            CHECK(before->identity() == make(part(text, 0, done), params)->identity());
            done = end;
        }
        const PatternRef whole = make(text, params);
        CHECK(pattern->identity() == whole->identity() && pattern->print() == whole->print());
        for (int64_t row = 0; row < tokens; ++row)
            CHECK(keys_of(pattern, tokens, row) == keys_of(whole, tokens, row));
    }
    check::context = "texts without symbols";
    const PatternRef none = make_xref({7, 8, 7}, {}, {});
    CHECK(none->identity() == make_xref({7, 8, 7}, {-1, -1, -1, -1, -1, -1}, {})->identity());
    CHECK(extend_xref(none, {8}, {})->identity() == make_xref({7, 8, 7, 8}, {}, {})->identity());
    CHECK(extend_xref(none, {8}, {4, -1})->identity() ==
          make_xref({7, 8, 7, 8}, {-1, -1, -1, -1, -1, -1, 4, -1}, {})->identity());
    CHECK(extend_xref(none, {}, {})->identity() == none->identity());
}
