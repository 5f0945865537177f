// SPDX-License-Identifier: MIT
// rows([begin,end,...],seq_q,P): rows of P's own extent, which has seq_q of them, as those of a shorter one: ranges of
// them, one after the other. What each of several devices sees of one sequence is written so.
#include <numeric>

#include "core/error.h"
#include "pattern/composite.h"
#include "pattern/index_pattern.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

class Rows : public Composite {
public:
    // bounds: begin and end of each range, one after the other.
    Rows(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q, bool is_from_zero)
        : Composite({std::move(inner)}, 1), bounds_(std::move(bounds)), seq_q_(seq_q), is_from_zero_(is_from_zero) {
        for (size_t i = 0; i < bounds_.size(); i += 2) first_.push_back(first_.back() + bounds_[i + 1] - bounds_[i]);
    }

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        if (row < 0 || row >= count()) return;
        inner().keys(of_inner(plane), row + shift(range_of(row)), clip, out);
    }
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override;
    void check(const Extent& extent) const override;
    const RuntimeShape* runtime() const override { return inner().runtime(); }
    PatternRef known_part() const override {
        PatternRef known = inner().known_part();
        return known ? of(std::move(known)) : PatternRef();
    }
    bool counts_rows() const override { return true; }
    std::optional<HotTokens> hot(const Extent& extent) const override;
    int64_t modulus() const override;
    PatternRef in_residue(int64_t modulus, int64_t residue) const override;
    Patterns pieces() const override;
    std::string print() const override {
        return text("rows([", short_list(bounds_, list(bounds_)), "], ", seq_q_, ", ", inner().print(), ')');
    }
    std::string identity() const override {
        return text("rows([", list(bounds_), "],", seq_q_, ',', inner().identity(), ')');
    }
    void save(ByteWriter& out) const override {
        save_parts(Node::rows, out);
        out.number(seq_q_);
        out.array(bounds_);
    }

private:
    const Pattern& inner() const { return *parts()[0]; }
    int64_t count() const { return first_.back(); }
    size_t ranges() const { return first_.size() - 1; }
    // The same rows of another pattern.
    PatternRef of(PatternRef inner) const { return make_ref<Rows>(std::move(inner), bounds_, seq_q_, is_from_zero_); }
    size_t range_of(int64_t row) const {
        return size_t(std::upper_bound(first_.begin(), first_.end(), row) - first_.begin()) - 1;
    }
    // From a row of the range to that of the inner pattern.
    int64_t shift(size_t range) const { return bounds_[2 * range] - first_[range]; }
    Plane of_inner(const Plane& plane) const {
        const Extent& e = plane.extent;
        return {{e.batch, e.heads, seq_q_, e.seq_k, e.seq_k - seq_q_}, plane.batch, plane.head};
    }

    std::vector<int64_t> bounds_, first_{0};  // first_: the row that each range begins with, and behind the last
    int64_t seq_q_;
    bool is_from_zero_;  // row i of the extent stands at position i, and row r of the inner one at r
};

// A block may hold rows of several ranges: it is full, or empty, where it is so for each of them.
Coverage Rows::classify(const Plane& plane, const Block& block, Key& key, bool& known) const {
    const int64_t begin = std::max<int64_t>(block.row, 0), end = std::min(block.row + block.rows, count());
    const size_t mark = key.size();
    Coverage whole{Coverage::empty, forever};
    bool is_full = end - begin == block.rows;  // what sticks out of the extent is no row, and sees nothing
    for (int64_t row = begin, next; row < end; row = next) {
        const size_t range = range_of(row);
        next = std::min(end, first_[range + 1]);
        const size_t before = key.size();
        key.insert(key.end(), {row - block.row, next - row});
        bool sure = true;
        const Block part{row + shift(range), next - row, block.key, block.keys};
        const Coverage coverage = inner().classify(of_inner(plane), part, key, sure);
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

bool Rows::row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const {
    if (row < 0 || row + rows > count() || range_of(row) != range_of(row + rows - 1)) return false;
    return inner().row_key(of_inner(plane), row + shift(range_of(row)), rows, key);
}

std::optional<HotTokens> Rows::hot(const Extent& extent) const {
    std::optional<HotTokens> hot = inner().hot(of_inner({extent}).extent);
    if (!hot) return hot;
    std::vector<int64_t> queries;
    for (size_t range = 0; range < ranges(); ++range)
        for (const int64_t query : hot->queries)
            if (query >= bounds_[2 * range] && query < bounds_[2 * range + 1]) queries.push_back(query - shift(range));
    hot->queries = std::move(queries);
    if (!hot->size()) return std::nullopt;
    for (PatternRef* part : {&hot->marks, &hot->among, &hot->apart}) *part = of(*part);
    return hot;
}

// What a row keeps to is that of the inner row, as long as both stand at the same remainder.
int64_t Rows::modulus() const {
    int64_t modulus = is_from_zero_ ? inner().modulus() : 1;
    for (size_t range = 0; range < ranges(); ++range) modulus = std::gcd(modulus, shift(range));
    return modulus;
}

PatternRef Rows::in_residue(int64_t modulus, int64_t residue) const {
    if (!is_from_zero_) return {};
    for (size_t range = 0; range < ranges(); ++range)
        if (shift(range) % modulus) return {};
    PatternRef part = inner().in_residue(modulus, residue);
    if (!part) return {};
    std::vector<int64_t> bounds;
    for (size_t range = 0; range < ranges(); ++range) {
        const int64_t begin = bound_in_residue(bounds_[2 * range], modulus, residue);
        const int64_t end = bound_in_residue(bounds_[2 * range + 1], modulus, residue);
        if (begin < end) bounds.insert(bounds.end(), {begin, end});
    }
    if (bounds.empty()) return make_nothing();
    return make_ref<Rows>(std::move(part), std::move(bounds), bound_in_residue(seq_q_, modulus, residue), true);
}

Patterns Rows::pieces() const {
    Patterns parts = is_from_zero_ ? inner().pieces() : Patterns();
    if (parts.size() < 2) return {PatternRef::share(this)};
    for (PatternRef& part : parts) part = of(part);
    return parts;
}

void Rows::check(const Extent& extent) const {
    if (extent.seq_q != count()) {
        fail(SPATTN_E_SHAPE, "pattern",
             text("rows has ", count(), " rows where the extent has ", extent.seq_q,
                  " queries; accepted: equal numbers"));
    }
    const Extent whole = of_inner({extent}).extent;
    require(!is_from_zero_ || (extent.q_offset == 0 && whole.q_offset == 0), SPATTN_E_INTERNAL, "pattern",
            "rows from zero, on an extent that is not");
    inner().check(whole);
}

void check_bounds(const PatternRef& inner, const std::vector<int64_t>& bounds, int64_t seq_q) {
    require(bool(inner), SPATTN_E_NULL, "inner", "is NULL; accepted: a pattern");
    require_range(seq_q, 1, most_tokens, "seq_q");
    if (bounds.empty() || bounds.size() % 2)
        fail(SPATTN_E_SHAPE, "ranges",
             text("has ", bounds.size(), " numbers; accepted: two of each range, 1 range and more"));
    int64_t count = 0;
    for (size_t i = 0; i < bounds.size(); i += 2) {
        const int64_t begin = bounds[i], end = bounds[i + 1];
        if (begin < 0 || begin >= end || end > seq_q)
            fail(SPATTN_E_RANGE, "ranges",
                 text("has [", begin, ", ", end, "); accepted: 0 <= begin < end <= ", seq_q, ", which is seq_q"));
        count += end - begin;
        if (count > most_tokens)
            fail(SPATTN_E_RANGE, "ranges", text("has more than ", most_tokens, " rows; accepted: up to so many"));
    }
}

}  // namespace

PatternRef make_rows(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q) {
    check_bounds(inner, bounds, seq_q);
    return make_ref<Rows>(std::move(inner), std::move(bounds), seq_q, false);
}

PatternRef make_rows_from_zero(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q) {
    check_bounds(inner, bounds, seq_q);
    return make_ref<Rows>(std::move(inner), std::move(bounds), seq_q, true);
}

}  // namespace spattn
