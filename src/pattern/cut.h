// SPDX-License-Identifier: MIT
// What rows and columns have in common: of the rows, or of the keys, of an inner pattern's own extent some ranges.
#pragma once

#include "pattern/composite.h"
#include "pattern/ranges.h"

namespace spattn {

class Cut : public Composite {
public:
    // is_from_zero: row i stands at position i, of the extent and of the inner one, so that residue classes may be kept.
    Cut(Node node, const char* name, PatternRef inner, Ranges ranges, bool is_from_zero, int most_runtime)
        : Composite({std::move(inner)}, {of_inner.name_of, most_runtime}), node_(node), name_(name),
          ranges_(std::move(ranges)), is_from_zero_(is_from_zero) {}

    int64_t modulus() const override { return is_from_zero_ ? ranges_.kept_modulus(inner().modulus()) : 1; }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override;
    Patterns pieces() const override;
    std::string print() const override;
    std::string identity() const override;
    void save(ByteWriter& out) const override;

protected:
    const Pattern& inner() const { return *parts()[0]; }
    const Ranges& ranges() const { return ranges_; }
    bool is_from_zero() const { return is_from_zero_; }

    // One of the same kind, and these ranges of another pattern.
    virtual PatternRef make(PatternRef inner, Ranges ranges) const = 0;
    PatternRef of(PatternRef inner) const { return make(std::move(inner), ranges_); }

    // Hot tokens of the inner pattern, of which those of the axis that is cut are where the ranges have them.
    std::optional<HotTokens> hot_of(const Extent& whole, std::vector<int64_t> HotTokens::* cut) const;

    // A block may hold tokens of several ranges, from `first` on of the axis that is cut: it is full, or empty, where it
    // is so for each of them. ask(token, tokens, range, key, known): that of the inner pattern, as in classify.
    template <class Ask>
    Coverage join(int64_t first, int64_t count, Key& key, bool& known, Ask ask) const {
        const int64_t begin = std::max<int64_t>(first, 0), end = std::min(first + count, ranges_.count());
        const size_t mark = key.size();
        Coverage whole{Coverage::empty, forever};
        bool is_full = end - begin == count;  // what sticks out of the extent keeps nothing
        for (int64_t token = begin, next; token < end; token = next) {
            const size_t range = ranges_.range_of(token), before = key.size();
            next = std::min(end, ranges_.end(range));
            key.insert(key.end(), {token - first, next - token});
            bool sure = true;
            const Coverage coverage = ask(token, next - token, range, key, sure);
            whole.repeat = std::min(whole.repeat, coverage.repeat);
            is_full &= coverage.kind == Coverage::full;
            if (coverage.kind == Coverage::empty) {
                key.resize(before);
                continue;
            }
            whole.kind = Coverage::partial;
            key.push_back(coverage.kind);
            known &= sure || coverage.kind != Coverage::partial;
        }
        if (is_full) whole.kind = Coverage::full;
        if (whole.kind != Coverage::partial) key.resize(mark);
        if (key.size() - mark > 512) known = false;  // many short ranges: longer to compare than to make
        return whole;
    }

private:
    Node node_;
    const char* name_;
    Ranges ranges_;
    bool is_from_zero_;
};

}  // namespace spattn
