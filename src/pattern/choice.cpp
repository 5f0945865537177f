// SPDX-License-Identifier: MIT
#include "pattern/choice.h"

#include <map>

#include "core/error.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"
#include "pattern/pieces.h"

namespace spattn {

Choice::Choice(const char* name, const char* map_argument, Patterns parts, std::vector<int32_t> map)
    : Composite(std::move(parts)), name_(name), map_(std::move(map)) {
    if (map_.empty()) fail(SPATTN_E_RANGE, map_argument, "has no number; accepted: 1 and more");
    const int64_t count = int64_t(this->parts().size());
    for (size_t i = 0; i < map_.size(); ++i) {
        if (map_[i] >= 0 && map_[i] < count) continue;
        fail(SPATTN_E_RANGE, text(map_argument, "[", i, "]"), text("is ", map_[i], "; accepted: 0 to ", count - 1));
    }
    std::map<std::string, int32_t> first;
    for (const PatternRef& part : this->parts()) {
        same_.push_back(first.try_emplace(part->identity(), int32_t(same_.size())).first->second);
    }
}

void Choice::keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const {
    parts()[chosen(plane)]->keys(plane, row, clip, out);
}

Coverage Choice::classify(const Plane& plane, const Block& block, Key& key, bool& known) const {
    const size_t mark = key.size();
    key.push_back(chosen(plane));
    const Coverage coverage = parts()[chosen(plane)]->classify(plane, block, key, known);
    if (coverage.kind != Coverage::partial) key.resize(mark);
    return coverage;
}

bool Choice::row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const {
    key.push_back(chosen(plane));
    return parts()[chosen(plane)]->row_key(plane, row, rows, key);
}

int64_t Choice::stem_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const {
    const size_t mark = key.size();
    key.push_back(chosen(plane));
    const int64_t end = parts()[chosen(plane)]->stem_key(plane, row, rows, key);
    if (end == lowest) key.resize(mark);
    return end;
}

void Choice::selection(const Plane& plane, Key& key) const {
    key.push_back(chosen(plane));
    parts()[chosen(plane)]->selection(plane, key);
}

PatternRef Choice::in_residue(int64_t modulus, int64_t residue) const {
    Patterns parts = parts_in_residue(modulus, residue);
    return parts.empty() ? PatternRef() : with(std::move(parts));
}

Patterns Choice::pieces() const {
    Patterns pieces;
    for (Patterns& parts : pieces_of_choice(parts())) pieces.push_back(with(std::move(parts)));
    return pieces.empty() ? Pattern::pieces() : pieces;
}

std::string Choice::print() const {
    const std::vector<int64_t> numbers(map_.begin(), map_.end());
    const bool is_short = numbers.size() <= printed_numbers;
    std::string out = std::string(name_) + "([" + short_list(numbers, is_short ? "" : identity()) + ']';
    for (const PatternRef& part : parts()) out += ", " + part->print();
    return out + ')';
}

std::string Choice::identity() const {
    std::string out = std::string(name_) + "([" + list({map_.begin(), map_.end()}) + ']';
    for (const PatternRef& part : parts()) out += ',' + part->identity();
    return out + ')';
}

void Choice::save(ByteWriter& out) const {
    save_parts(node(), out);
    out.array(std::vector<int64_t>(map_.begin(), map_.end()));
}

void Choice::check_count(int64_t count, const char* what) const {
    if (count == int64_t(map_.size())) return;
    fail(SPATTN_E_SHAPE, "pattern",
         text(name_, " maps ", map_.size(), ' ', what, " where the extent has ", count, "; accepted: equal numbers"));
}

}  // namespace spattn
