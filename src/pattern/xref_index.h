// SPDX-License-Identifier: MIT
// Which keys each token of a text sees by xref, token after token: an index of n-grams and identifiers, which a token
// joins only when it is far enough behind to be linked.
#pragma once

#include <array>

#include "pattern/intervals.h"

namespace spattn {

// Keys [begin, end), narrow because every row keeps some.
struct Span {
    int32_t begin, end;
};
using Spans = std::vector<Span>;

// Numbers 0, 1, 2, ... for keys in the order of their first appearance.
class Interner {
public:
    int32_t number(uint64_t key);
    int32_t size() const { return used_; }

private:
    struct Slot {
        uint64_t key = 0;
        int32_t number = -1;  // none: the slot is free
    };
    Slot& slot_of(uint64_t key);
    void grow();

    std::vector<Slot> slots_;  // a power of 2 of them
    int32_t used_ = 0;
};

// For each thing with a number (an n-gram, an identifier) the tokens where it occurs, the latest first.
class Occurrences {
public:
    // The next token has this one, -1 for none. It is not found before it is inserted.
    void append(int32_t number);
    void insert_next();

    int64_t inserted() const { return inserted_; }
    int32_t number_of(int64_t token) const { return tokens_[size_t(token)].number; }
    int32_t before(int32_t token) const { return tokens_[size_t(token)].before; }
    int32_t latest(int32_t number) const { return found_[size_t(number)].latest; }
    int32_t first(int32_t number) const { return found_[size_t(number)].first; }
    int32_t appended(int32_t number) const { return found_[size_t(number)].appended; }
    void make_room(int32_t number);  // for questions about a number that no token has yet

private:
    struct Token {
        int32_t number, before;
    };
    struct Found {
        int32_t latest = -1, first = -1, appended = 0;
    };
    std::vector<Token> tokens_;
    std::vector<Found> found_;  // of each number
    int64_t inserted_ = 0;
};

class XrefIndex {
public:
    explicit XrefIndex(const XrefParams& params) : params_(params) {}

    // The next token: its id, the identifier open at its end and the one that it completed (-1 for none). Appends the
    // keys that it sees to `row`: sorted, disjoint, not touching.
    void append(int64_t id, int64_t open, int64_t completed, Spans& row);

private:
    static constexpr size_t longest = 4, shortest = 2;  // n-grams

    void register_token(int64_t id, int64_t open, int64_t completed);
    void link_ngrams();
    void link_open_symbol();
    void link_completed_symbols();
    void link_symbol(int32_t number, int latest);
    void link(int64_t begin, int64_t end);
    void collect_links();
    void write(Spans& row);

    XrefParams params_;
    int64_t i_ = -1;  // the token whose row is being made
    Interner tokens_, symbols_;
    std::array<Interner, longest + 1> pairs_;      // an n-gram is the one before it, a token shorter, and a token
    std::array<Occurrences, longest + 1> ngrams_;  // by length; none of length 0 and 1
    std::array<int32_t, longest + 1> last_{};      // the n-grams that end at the last token
    Occurrences open_;
    struct Completed {
        int32_t token, symbol;
    };
    std::vector<Completed> completed_;
    std::vector<int32_t> asked_by_;    // of each identifier: the last row that linked it
    std::vector<uint64_t> linked_;     // a bit a key: those that this row links
    std::vector<int32_t> touched_;     // words of `linked_` that are not 0
    int64_t room_ = 0;                 // keys that this row may still link
    Spans links_;
};

}  // namespace spattn
