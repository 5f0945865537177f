// SPDX-License-Identifier: MIT
// What csr, bsr and mask share: they are lists for one extent, rows are rows of that extent, and nothing lies outside.
#pragma once

#include <string>

#include "pattern/intervals.h"

namespace spattn {

constexpr int64_t most_tokens = (int64_t(1) << 31) - 1;  // of a sequence: layouts count in 32 bits

class IndexPattern : public Pattern {
public:
    // The text is name(lists sizes), or name(#digest) where `lists` is empty: too long for a person.
    IndexPattern(const char* name, int64_t seq_q, int64_t seq_k, const std::string& lists, const std::string& sizes,
                 const std::string& digest);

    // Rows and keys outside of the extent hold nothing; inside, the rows are left to keys().
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;
    void check(const Extent& extent) const override;
    bool counts_rows() const override { return true; }
    std::string print() const override { return text_; }
    std::string identity() const override { return identity_; }

protected:
    int64_t seq_q() const { return seq_q_; }
    int64_t seq_k() const { return seq_k_; }
    bool has_row(int64_t row) const { return row >= 0 && row < seq_q_; }
    Interval cut(Interval clip) const { return {std::max<int64_t>(clip.begin, 0), std::min(clip.end, seq_k_)}; }

private:
    const char* name_;
    int64_t seq_q_, seq_k_;
    std::string text_, identity_;
};

}  // namespace spattn
