// SPDX-License-Identifier: MIT
#include "pattern/ranges.h"

#include <numeric>

#include "core/error.h"
#include "pattern/bytes.h"
#include "pattern/index_pattern.h"
#include "pattern/leaf.h"

namespace spattn {

Ranges::Ranges(std::vector<int64_t> bounds, int64_t tokens, const char* tokens_name)
    : bounds_(std::move(bounds)), tokens_(tokens) {
    require_range(tokens, 1, most_tokens, tokens_name);
    if (bounds_.empty() || bounds_.size() % 2)
        fail(SPATTN_E_SHAPE, "ranges",
             text("has ", bounds_.size(), " numbers; accepted: two of each range, 1 range and more"));
    for (size_t i = 0; i < bounds_.size(); i += 2) {
        const int64_t begin = bounds_[i], end = bounds_[i + 1];
        if (begin < 0 || begin >= end || end > tokens)
            fail(SPATTN_E_RANGE, "ranges",
                 text("has [", begin, ", ", end, "); accepted: 0 <= begin < end <= ", tokens, ", which is ",
                      tokens_name));
        first_.push_back(count() + end - begin);
        if (count() > most_tokens)
            fail(SPATTN_E_RANGE, "ranges", text("has more than ", most_tokens, " tokens; accepted: up to so many"));
    }
}

std::vector<int64_t> Ranges::places_of(const std::vector<int64_t>& given) const {
    std::vector<int64_t> places;
    for (size_t range = 0; 2 * range < bounds_.size(); ++range) {
        const auto begin = std::lower_bound(given.begin(), given.end(), bounds_[2 * range]);
        const auto end = std::lower_bound(begin, given.end(), bounds_[2 * range + 1]);
        for (auto token = begin; token != end; ++token) places.push_back(*token - shift(range));
    }
    return places;
}

int64_t Ranges::kept_modulus(int64_t modulus) const {
    for (size_t range = 0; 2 * range < bounds_.size(); ++range) modulus = std::gcd(modulus, shift(range));
    return modulus;
}

std::optional<std::vector<int64_t>> Ranges::in_residue(int64_t modulus, int64_t residue) const {
    if (kept_modulus(modulus) != modulus) return std::nullopt;
    std::vector<int64_t> bounds;
    for (size_t i = 0; i < bounds_.size(); i += 2) {
        const int64_t begin = bound_in_residue(bounds_[i], modulus, residue);
        const int64_t end = bound_in_residue(bounds_[i + 1], modulus, residue);
        if (begin < end) bounds.insert(bounds.end(), {begin, end});
    }
    return bounds;
}

std::string Ranges::print() const { return text('[', short_list(bounds_, list(bounds_)), "], ", tokens_); }

std::string Ranges::identity() const { return text('[', list(bounds_), "],", tokens_); }

void Ranges::save(ByteWriter& out) const {
    out.number(tokens_);
    out.array(bounds_);
}

}  // namespace spattn
