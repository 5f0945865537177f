// SPDX-License-Identifier: MIT
#include "pattern/leaf.h"

#include <charconv>
#include <cstdio>
#include <iterator>

#include "pattern/bytes.h"

namespace spattn {

std::string list(const std::vector<int64_t>& numbers) {
    std::string out;
    char digits[20];
    for (int64_t number : numbers) {
        if (!out.empty()) out += ',';
        out.append(digits, std::to_chars(digits, std::end(digits), number).ptr);
    }
    return out;
}

std::string short_list(const std::vector<int64_t>& numbers, const std::string& identity) {
    if (numbers.size() <= printed_numbers) return list(numbers);
    char hash[20];
    std::snprintf(hash, sizeof hash, "#%016llx", static_cast<unsigned long long>(hash_identity(identity)));
    return hash;
}

std::string ListLeaf::print() const {
    const std::lock_guard lock(text_lock_);
    if (text_.empty()) {
        const bool is_short = given_.size() <= printed_numbers;
        text_ = std::string(name_) + '(' + (is_short ? list(given_) : short_list(given_, identity())) + ')';
    }
    return text_;
}

std::string ListLeaf::identity() const { return std::string(name_) + '(' + list(canonical()) + ')'; }

// Texts last for ever, so a new word needs no new form of bytes.
void Leaf::save(ByteWriter& out) const {
    out.node(Node::text);
    out.string(text_);
}

void ListLeaf::save(ByteWriter& out) const {
    out.node(Node::text);
    out.string(std::string(name_) + '(' + list(given_) + ')');
}

}  // namespace spattn
