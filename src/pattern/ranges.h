// SPDX-License-Identifier: MIT
// Ranges of the tokens of a longer extent, which are those of a shorter one: range after range, in any order.
#pragma once

#include <optional>
#include <string>

#include "pattern/pattern.h"

namespace spattn {

class Ranges {
public:
    // bounds: begin and end of each, one after the other; tokens: of the longer extent. Bad ones are typed errors, which
    // name the second one as `tokens_name`.
    Ranges(std::vector<int64_t> bounds, int64_t tokens, const char* tokens_name);

    int64_t tokens() const { return tokens_; }
    int64_t count() const { return first_.back(); }  // tokens of the shorter extent

    // The range of a token of the shorter extent, 0 <= token < count(), and where it ends there.
    size_t range_of(int64_t token) const {
        return size_t(std::upper_bound(first_.begin(), first_.end(), token) - first_.begin()) - 1;
    }
    int64_t end(size_t range) const { return first_[range + 1]; }
    // From a token of the range to that of the longer extent.
    int64_t shift(size_t range) const { return bounds_[2 * range] - first_[range]; }

    // Where tokens of the longer extent are in the shorter one, rising. given: rising.
    std::vector<int64_t> places_of(const std::vector<int64_t>& given) const;

    // The largest divisor of `modulus` by which all tokens keep their remainder in both extents.
    int64_t kept_modulus(int64_t modulus) const;
    // What of them is `residue` mod `modulus`, counted within that class in both extents. Nothing where remainders are
    // not kept; no bounds where there is no such token.
    std::optional<std::vector<int64_t>> in_residue(int64_t modulus, int64_t residue) const;

    // "[begin,end,...], tokens", with a hash where the list is long, and the same for equality.
    std::string print() const;
    std::string identity() const;
    void save(ByteWriter& out) const;

private:
    std::vector<int64_t> bounds_, first_{0};  // first_: the token that each range begins with, and behind the last
    int64_t tokens_;
};

}  // namespace spattn
