// SPDX-License-Identifier: MIT
#include "pattern/leaf.h"

#include <charconv>
#include <cstdio>
#include <iterator>
#include <memory>

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

std::string hash_of(const std::string& identity) {
    char hash[20];
    std::snprintf(hash, sizeof hash, "#%016llx", static_cast<unsigned long long>(hash_identity(identity)));
    return hash;
}

std::string short_list(const std::vector<int64_t>& numbers, const std::string& identity) {
    return numbers.size() <= printed_numbers ? list(numbers) : hash_of(identity);
}

std::string ListLeaf::print() const {
    if (const std::string* kept = text_.load(std::memory_order_acquire)) return *kept;
    const bool is_short = given_.size() <= printed_numbers;
    const std::string numbers = is_short ? list(given_) : short_list(given_, identity());
    auto made = std::make_unique<const std::string>(std::string(name_) + '(' + numbers + ')');
    const std::string* kept = nullptr;  // or what another thread has made meanwhile
    if (text_.compare_exchange_strong(kept, made.get(), std::memory_order_acq_rel)) kept = made.release();
    return *kept;
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
