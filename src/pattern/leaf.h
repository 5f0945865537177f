// SPDX-License-Identifier: MIT
// Patterns that are a name and numbers.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "pattern/pattern.h"

namespace spattn {

// Its text is its identity.
class Leaf : public Pattern {
public:
    explicit Leaf(std::string text) : text_(std::move(text)) {}
    std::string print() const override { return text_; }
    std::string identity() const override { return text_; }
    void save(ByteWriter& out) const override;

private:
    std::string text_;
};

// Lists longer than this print as a hash: a text is for people.
constexpr size_t printed_numbers = 64;

// "1,5,9"; short_list gives "#hash" of the identity instead where the list is long.
std::string list(const std::vector<int64_t>& numbers);
std::string hash_of(const std::string& identity);
std::string short_list(const std::vector<int64_t>& numbers, const std::string& identity);

// A list as given, which prints; `canonical` is what equality compares.
class ListLeaf : public Pattern {
public:
    ListLeaf(const char* name, std::vector<int64_t> given) : name_(name), given_(std::move(given)) {}
    ~ListLeaf() override { delete text_.load(std::memory_order_relaxed); }
    std::string print() const override;
    std::string identity() const override;
    void save(ByteWriter& out) const override;
    size_t bytes() const override { return given_.size() * sizeof(int64_t); }

protected:
    virtual std::vector<int64_t> canonical() const { return given_; }
    const std::vector<int64_t>& given() const { return given_; }

private:
    const char* name_;
    std::vector<int64_t> given_;
    // Null before the first question, then kept: plans ask again and again, and hashing a long list takes a while. No
    // lock guards it, which another thread might hold in the moment of a fork(): the child would wait for ever.
    mutable std::atomic<const std::string*> text_ = nullptr;
};

// Keeps no pair, whatever the position. (sink(0) does before position 0.)
inline PatternRef make_nothing() { return make_global_keys({}); }

// transpose(P) of a pattern whose keys are the same for every query: the queries at those positions see every key.
PatternRef make_query_side(PatternRef constant);

}  // namespace spattn
