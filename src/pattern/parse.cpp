// SPDX-License-Identifier: MIT
// The text of a pattern. Spaces, tabs and line ends may stand between any two words.
//
//   union    = product { "|" product }
//   product  = factor { ("&" | "-") factor }                          equally, left to right
//   factor   = "(" union ")" | "transpose" "(" union ")"
//            | ("per_head" | "per_batch") "(" "[" [numbers] "]" { "," union } ")"
//            | ("csr" | "bsr" | "mask" | "xref") "(" list { "," list } { "," number } ")"
//            | "grid" "(" list [ "," list ] { "," union } ")"
//            | "per_document" "(" list "," list "," union ")"
//            | ("rows" | "columns") "(" list "," number "," union ")"
//            | name [ "(" [numbers] ")" ]                             no parentheses where a pattern has no numbers
//   list     = "[" [numbers] "]"
//   numbers  = number { "," number }
//
// grid([4,6], [2,3], causal, full): sizes, tile, and a pattern for each axis; without a tile the whole grid is one.
// per_head([0,1,0], causal, window(3,0)): heads 0 and 2 see the first pattern of the list, head 1 the second.
#include <cstring>

#include "core/error.h"
#include "pattern/pattern.h"

namespace spattn {
namespace {

using Numbers = std::vector<int64_t>;

constexpr int any_count = -1;

// A pattern of numbers; `form` is how messages spell it.
struct Word {
    const char* name;
    const char* form;
    int count;
    PatternRef (*make)(const Numbers& n);
};

const Word words[] = {
    {"full", "full", 0, [](const Numbers&) { return make_full(); }},
    {"causal", "causal", 0, [](const Numbers&) { return make_causal(); }},
    {"window", "window(left,right)", 2, [](const Numbers& n) { return make_window(n[0], n[1]); }},
    {"sink", "sink(tokens)", 1, [](const Numbers& n) { return make_sink(n[0]); }},
    {"block_diagonal", "block_diagonal(block)", 1, [](const Numbers& n) { return make_block_diagonal(n[0]); }},
    {"documents", "documents(cu_seqlens...)", any_count, [](const Numbers& n) { return make_documents(n); }},
    {"dilated", "dilated(left,right,dilation)", 3, [](const Numbers& n) { return make_dilated(n[0], n[1], n[2]); }},
    {"strided", "strided(stride)", 1, [](const Numbers& n) { return make_strided(n[0]); }},
    {"landmark", "landmark(block,landmarks)", 2, [](const Numbers& n) { return make_landmark(n[0], n[1]); }},
    {"fixed", "fixed(block,landmarks)", 2, [](const Numbers& n) { return make_fixed(n[0], n[1]); }},
    {"logsparse", "logsparse", 0, [](const Numbers&) { return make_logsparse(); }},
    {"residue", "residue(modulus,offset)", 2, [](const Numbers& n) { return make_residue(n[0], n[1]); }},
    {"global_keys", "global_keys(positions...)", any_count, [](const Numbers& n) { return make_global_keys(n); }},
    {"global_tokens", "global_tokens(positions...)", any_count, [](const Numbers& n) { return make_global_tokens(n); }},
    {"tree", "tree(parents...)", any_count, [](const Numbers& n) { return make_tree(n); }},
    {"bigbird", "bigbird(block,window,global,random,seed)", 5,
     [](const Numbers& n) { return make_bigbird(n[0], n[1], n[2], n[3], uint64_t(n[4])); }},
    {"runtime_tokens", "runtime_tokens(max)", 1, [](const Numbers& n) { return make_runtime_tokens(n[0]); }},
    {"runtime_blocks", "runtime_blocks(block_q,block_k,max)", 3,
     [](const Numbers& n) { return make_runtime_blocks(n[0], n[1], n[2]); }},
};

// A pattern of lists and then numbers: `least` to `most` of these.
struct ListWord {
    const char* name;
    const char* form;
    size_t lists, least, most;
    PatternRef (*make)(const std::vector<Numbers>& l, const Numbers& n);
};

const ListWord list_words[] = {
    {"csr", "csr([row_ptr...],[col_idx...],seq_k)", 2, 1, 1,
     [](const std::vector<Numbers>& l, const Numbers& n) { return make_csr(l[0], l[1], n[0], false); }},
    {"bsr", "bsr([row_ptr...],[col_idx...],block_q,block_k,seq_q,seq_k)", 2, 4, 4,
     [](const std::vector<Numbers>& l, const Numbers& n) {
         return make_bsr(l[0], l[1], n[0], n[1], n[2], n[3], false);
     }},
    {"xref",
     "xref([ids...],[symbols...],sinks,window,budget,links,ngram_keys,symbol_before,symbol_after,look_back,stop_ratio)",
     2, 0, 9, [](const std::vector<Numbers>& l, const Numbers& n) { return make_xref(l[0], l[1], xref_params(n)); }},
    {"mask", "mask([values...],seq_q,seq_k)", 1, 2, 4,
     [](const std::vector<Numbers>& l, const Numbers& n) { return make_mask(l[0], n); }},
};

// Seeds are unsigned: the only number that may exceed int64.
bool is_seed(const Word& word, size_t index) { return word.count == 5 && index == 4; }

// Each level of a text takes a frame of three to five of these functions, and a thread may have a stack of 128 KiB, as
// musl gives. Inlined into each other they would have room in each frame for all of their lists and messages.
class Parser {
public:
    explicit Parser(const std::string& text) : text_(text) {}

    PatternRef whole() {
        PatternRef result = parse_union();
        if (!at_end()) expected("|, &, - or the end");
        return result;
    }

private:
    PatternRef parse_union() {
        // The text bounds the recursion, not the patterns made: parentheses may hold nothing but parentheses.
        if (++depth_ > 200) expected("at most 200 levels of parentheses");
        PatternRef result = parse_product();
        const size_t start = peek();
        if (take('|')) result = parse_chain(start, std::move(result), '|');
        --depth_;
        return result;
    }

    [[gnu::noinline]] PatternRef parse_product() {
        PatternRef result = parse_factor();
        for (;;) {
            const size_t start = peek();
            const bool is_intersection = take('&');
            if (!is_intersection && !take('-')) return result;
            result = parse_chain(start, std::move(result), is_intersection ? '&' : '-');
        }
    }

    // All that one operator joins, after its first sign: put together one by one, a long text would take the square of
    // its length.
    [[gnu::noinline]] PatternRef parse_chain(size_t start, PatternRef first, char sign) {
        Patterns parts;
        parts.push_back(std::move(first));
        do {
            parts.push_back(sign == '|' ? parse_product() : parse_factor());
        } while (take(sign));
        const char name[] = {sign, '\0'};
        return made(start, name, [&] {
            return sign == '|'   ? make_union(std::move(parts))
                   : sign == '&' ? make_intersection(std::move(parts))
                                 : make_difference(std::move(parts));
        });
    }

    [[gnu::noinline]] PatternRef parse_factor() {
        const size_t start = peek();
        if (take('(')) return parse_inner();
        const std::string_view name = read_name();
        if (name == "transpose") return parse_transpose(start);
        if (name == "per_head") return parse_choice(start, "per_head", "per_head([0,1,0], A, B)", make_per_head);
        if (name == "per_batch") return parse_choice(start, "per_batch", "per_batch([0,1,0], A, B)", make_per_batch);
        if (name == "grid") return parse_grid(start);
        if (name == "per_document") return parse_per_document(start);
        if (name == "rows") return parse_ranges(start, "rows", "rows([begin,end,...], seq_q, A)", make_rows);
        if (name == "columns") return parse_ranges(start, "columns", "columns([begin,end,...], seq_k, A)", make_columns);
        for (const Word& word : words) {
            if (name == word.name) return parse_word(start, word);
        }
        for (const ListWord& word : list_words) {
            if (name == word.name) return parse_list_word(start, word);
        }
        at_ = start;
        expected_word();
    }

    // What stands last in parentheses.
    PatternRef parse_inner() {
        PatternRef result = parse_union();
        need(')', "|, &, - or )");
        return result;
    }

    [[gnu::noinline]] PatternRef parse_transpose(size_t start) {
        need('(', "( after transpose");
        PatternRef inner = parse_inner();
        return made(start, "transpose", [&] { return make_transpose(std::move(inner)); });
    }

    [[gnu::noinline]] PatternRef parse_word(size_t start, const Word& word) {
        if (word.count == 0) return word.make({});
        need('(', "(", word.form);
        Numbers numbers;
        const auto wanted = size_t(word.count == any_count ? forever : word.count);
        const bool may_be_empty = word.count == any_count;
        if (!(may_be_empty && take(')'))) {
            do {
                if (numbers.size() == wanted) need(')', ")", word.form);
                numbers.push_back(read_number(is_seed(word, numbers.size()), word.form));
            } while (numbers.size() < wanted && take(','));
            if (word.count != any_count && numbers.size() < wanted) expected(",", word.form);
            need(')', word.count == any_count ? ", or )" : ")", word.form);
        }
        return made(start, word.name, [&] { return word.make(numbers); });
    }

    [[gnu::noinline]] PatternRef parse_list_word(size_t start, const ListWord& word) {
        need('(', "(", word.form);
        std::vector<Numbers> lists;
        for (size_t i = 0; i < word.lists; ++i) {
            if (i > 0) need(',', ",", word.form);
            lists.push_back(read_list(word.form));
        }
        Numbers numbers;
        while (numbers.size() < word.most && take(',')) numbers.push_back(read_number(false, word.form));
        if (numbers.size() < word.least) expected(",", word.form);
        need(')', ")", word.form);
        return made(start, word.name, [&] { return word.make(lists, numbers); });
    }

    [[gnu::noinline]] PatternRef parse_per_document(size_t start) {
        const char* const form = "per_document([cu_q...], [cu_k...], A)";
        need('(', "(", form);
        Numbers cu_q = read_list(form);
        need(',', ",", form);
        Numbers cu_k = read_list(form);
        need(',', ",", form);
        PatternRef inner = parse_inner();
        return made(start, "per_document",
                    [&] { return make_per_document(std::move(inner), std::move(cu_q), std::move(cu_k)); });
    }

    [[gnu::noinline]] PatternRef parse_grid(size_t start) {
        const char* const form = "grid([sizes...], [tile...], A, B)";
        need('(', "(", form);
        Numbers sizes = read_list(form), tile;
        Patterns parts;
        while (take(',')) {
            const bool is_tile = parts.empty() && tile.empty() && peek() < text_.size() && text_[at_] == '[';
            if (is_tile)
                tile = read_list(form);
            else
                parts.push_back(parse_union());
        }
        need(')', ", or )", form);
        return made(start, "grid", [&] { return make_grid(std::move(sizes), std::move(tile), std::move(parts)); });
    }

    [[gnu::noinline]] PatternRef parse_ranges(size_t start, const char* name, const char* form,
                                              PatternRef (*make)(PatternRef inner, Numbers bounds, int64_t tokens)) {
        need('(', "(", form);
        Numbers bounds = read_list(form);
        need(',', ",", form);
        const int64_t tokens = read_number(false, form);
        need(',', ",", form);
        PatternRef inner = parse_inner();
        return made(start, name, [&] { return make(std::move(inner), std::move(bounds), tokens); });
    }

    [[gnu::noinline]] Numbers read_list(const char* form) {
        if (peek() < text_.size() && text_[at_] == '#') refuse_hash();
        need('[', "[", form);
        Numbers numbers;
        if (take(']')) return numbers;
        do {
            numbers.push_back(read_number(false, form));
        } while (take(','));
        need(']', ", or ]", form);
        return numbers;
    }

    [[gnu::noinline]] PatternRef parse_choice(size_t start, const char* name, const char* form,
                                              PatternRef (*make)(Patterns parts, std::vector<int32_t> map)) {
        need('(', "(", form);
        std::vector<int32_t> map = read_map(form);
        Patterns parts;
        while (take(',')) parts.push_back(parse_union());
        need(')', ", or )", form);
        return made(start, name, [&] { return make(std::move(parts), std::move(map)); });
    }

    [[gnu::noinline]] std::vector<int32_t> read_map(const char* form) {
        need('[', "[", form);
        std::vector<int32_t> map;
        if (take(']')) return map;
        do {
            const size_t at = peek();
            const int64_t number = read_number(false, form);
            map.push_back(int32_t(number));
            if (number != map.back()) refuse(at, text("number ", number, " is too large for the place of a pattern"));
        } while (take(','));
        need(']', ", or ]", form);
        return map;
    }

    // ---- words ----

    std::string_view read_name() {
        const size_t start = peek();
        while (at_ < text_.size() && (is_letter(text_[at_]) || (at_ > start && is_digit(text_[at_])))) ++at_;
        return std::string_view(text_).substr(start, at_ - start);
    }

    [[gnu::noinline]] int64_t read_number(bool is_unsigned, const char* form) {
        const size_t start = peek();
        if (at_ < text_.size() && text_[at_] == '#') refuse_hash();
        const bool is_negative = take('-');
        if (at_ >= text_.size() || !is_digit(text_[at_])) {
            at_ = start;
            expected("a number", form);
        }
        uint64_t value = 0;
        bool overflows = false;
        for (; at_ < text_.size() && is_digit(text_[at_]); ++at_) {
            overflows |= __builtin_mul_overflow(value, uint64_t(10), &value);
            overflows |= __builtin_add_overflow(value, uint64_t(text_[at_] - '0'), &value);
        }
        const uint64_t limit = is_unsigned ? ~uint64_t(0) : uint64_t(forever);
        const bool is_least = !is_unsigned && is_negative && value == limit + 1;  // a token id may be any number
        if (overflows || (value > limit && !is_least) || (is_unsigned && is_negative)) {
            refuse(start, text("found ", text_.substr(start, std::min<size_t>(at_ - start, 24)),
                               "; expected a number up to ", limit, is_unsigned ? ", not negative" : ""));
        }
        return int64_t(is_negative ? -value : value);
    }

    static bool is_digit(char c) { return c >= '0' && c <= '9'; }
    static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

    size_t peek() { return at_ < text_.size() && text_[at_] > ' ' ? at_ : skip_spaces(); }
    [[gnu::noinline]] size_t skip_spaces() {
        while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_]) && text_[at_] != '\0') ++at_;
        return at_;
    }
    bool at_end() { return peek() == text_.size(); }
    bool take(char c) {
        if (at_end() || text_[at_] != c) return false;
        ++at_;
        return true;
    }
    void need(char c, const char* wanted, const char* form = nullptr) {
        if (!take(c)) expected(wanted, form);
    }

    // ---- errors ----

    // What a constructor refuses becomes an error of the text, at the word's column.
    template <class Make>
    [[gnu::noinline]] PatternRef made(size_t start, const char* name, Make make) {
        try {
            return make();
        } catch (const Error& error) {
            refuse(start, name, error);
        }
    }

    [[noreturn, gnu::noinline]] void refuse(size_t start, const char* name, const Error& error) {
        const std::string prefix = "params.";  // of a struct, which a text does not have
        const std::string argument = error.argument.compare(0, prefix.size(), prefix) == 0
                                         ? error.argument.substr(prefix.size())
                                         : error.argument;
        refuse(start, std::string(name) + ": " + argument + ' ' + error.message);
    }

    [[noreturn, gnu::noinline]] void refuse_hash() {
        refuse(
            at_,
            "found #, a long list printed by its hash; expected the numbers: make this pattern from its list, or keep "
            "it with spattn_pattern_save");
    }

    [[noreturn, gnu::noinline]] void refuse(size_t at, const std::string& why) {
        fail(SPATTN_E_FORMAT, "text", text("column ", at + 1, ": ", why));
    }

    // form: how the word is spelled that needs it, or null.
    [[noreturn, gnu::noinline]] void expected(const char* wanted, const char* form = nullptr) {
        refuse(peek(), "found " + found() + "; expected " + wanted + (form ? std::string(" as in ") + form : ""));
    }
    [[noreturn, gnu::noinline]] void expected_word() { expected(("( or one of " + all_names()).c_str()); }

    // The word or sign at the cursor, short and printable.
    std::string found() {
        if (at_end()) return "the end";
        size_t end = at_;
        while (end < text_.size() && end - at_ < 24 && (is_letter(text_[end]) || is_digit(text_[end]))) ++end;
        if (end > at_) return text_.substr(at_, end - at_);
        const auto byte = static_cast<unsigned char>(text_[at_]);
        return byte > 32 && byte < 127 ? std::string(1, text_[at_]) : text("byte ", int(byte));
    }

    static std::string all_names() {
        std::string names;
        for (const Word& word : words) names += std::string(word.name) + ", ";
        for (const ListWord& word : list_words) names += std::string(word.name) + ", ";
        return names + "transpose, per_head, per_batch, grid, per_document, rows, columns";
    }

    const std::string& text_;
    size_t at_ = 0;
    int depth_ = 0;
};

}  // namespace

PatternRef parse_pattern(const std::string& text) { return Parser(text).whole(); }

}  // namespace spattn
