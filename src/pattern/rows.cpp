// SPDX-License-Identifier: MIT
// rows([begin,end,...],seq_q,P): rows of P's own extent, which has seq_q of them, as those of a shorter one: ranges of
// them, one after the other. What each of several devices sees of one sequence is written so.
#include "core/error.h"
#include "pattern/composite.h"
#include "pattern/leaf.h"
#include "pattern/ranges.h"

namespace spattn {
namespace {

class Rows : public Composite {
public:
    Rows(PatternRef inner, Ranges ranges, bool is_from_zero)
        : Composite({std::move(inner)}, 1), ranges_(std::move(ranges)), is_from_zero_(is_from_zero) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        if (row < 0 || row >= ranges_.count()) return;
        inner().keys(of_inner(plane), inner_row(row), clip, out);
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
    // What a row keeps to is that of the inner row, as long as both stand at the same remainder.
    int64_t modulus() const override { return is_from_zero_ ? ranges_.kept_modulus(inner().modulus()) : 1; }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override;
    Patterns pieces() const override;
    std::string print() const override { return text("rows(", ranges_.print(), ", ", inner().print(), ')'); }
    std::string identity() const override { return text("rows(", ranges_.identity(), ',', inner().identity(), ')'); }
    void save(ByteWriter& out) const override {
        save_parts(Node::rows, out);
        ranges_.save(out);
    }

private:
    const Pattern& inner() const { return *parts()[0]; }
    int64_t inner_row(int64_t row) const { return row + ranges_.shift(ranges_.range_of(row)); }
    // The same rows of another pattern.
    PatternRef of(PatternRef inner) const { return make_ref<Rows>(std::move(inner), ranges_, is_from_zero_); }
    Plane of_inner(const Plane& plane) const {
        const Extent& e = plane.extent;
        const int64_t seq_q = ranges_.tokens();
        return {{e.batch, e.heads, seq_q, e.seq_k, e.seq_k - seq_q}, plane.batch, plane.head};
    }

    Ranges ranges_;
    bool is_from_zero_;  // row i of the extent stands at position i, and row r of the inner one at r
};

// A block may hold rows of several ranges: it is full, or empty, where it is so for each of them.
Coverage Rows::classify(const Plane& plane, const Block& block, Key& key, bool& known) const {
    const int64_t begin = std::max<int64_t>(block.row, 0), end = std::min(block.row + block.rows, ranges_.count());
    const size_t mark = key.size();
    Coverage whole{Coverage::empty, forever};
    bool is_full = end - begin == block.rows;  // what sticks out of the extent is no row, and sees nothing
    for (int64_t row = begin, next; row < end; row = next) {
        const size_t range = ranges_.range_of(row);
        next = std::min(end, ranges_.end(range));
        const size_t before = key.size();
        key.insert(key.end(), {row - block.row, next - row});
        bool sure = true;
        const Block part{row + ranges_.shift(range), next - row, block.key, block.keys};
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
    if (row < 0 || row + rows > ranges_.count()) return false;
    if (ranges_.range_of(row) != ranges_.range_of(row + rows - 1)) return false;
    return inner().row_key(of_inner(plane), inner_row(row), rows, key);
}

std::optional<HotTokens> Rows::hot(const Extent& extent) const {
    std::optional<HotTokens> hot = inner().hot(of_inner({extent}).extent);
    if (!hot) return hot;
    hot->queries = ranges_.places_of(hot->queries);
    if (!hot->size()) return std::nullopt;
    for (PatternRef* part : {&hot->marks, &hot->among, &hot->apart}) *part = of(*part);
    return hot;
}

PatternRef Rows::in_residue(int64_t modulus, int64_t residue) const {
    if (!is_from_zero_) return {};
    std::optional<std::vector<int64_t>> bounds = ranges_.in_residue(modulus, residue);
    if (!bounds) return {};
    PatternRef part = inner().in_residue(modulus, residue);
    if (!part) return {};
    if (bounds->empty()) return make_nothing();
    return make_rows_from_zero(std::move(part), std::move(*bounds),
                               bound_in_residue(ranges_.tokens(), modulus, residue));
}

Patterns Rows::pieces() const {
    Patterns parts = is_from_zero_ ? inner().pieces() : Patterns();
    if (parts.size() < 2) return {PatternRef::share(this)};
    for (PatternRef& part : parts) part = of(part);
    return parts;
}

void Rows::check(const Extent& extent) const {
    if (extent.seq_q != ranges_.count()) {
        fail(SPATTN_E_SHAPE, "pattern",
             text("rows has ", ranges_.count(), " rows where the extent has ", extent.seq_q,
                  " queries; accepted: equal numbers"));
    }
    const Extent whole = of_inner({extent}).extent;
    require(!is_from_zero_ || (extent.q_offset == 0 && whole.q_offset == 0), SPATTN_E_INTERNAL, "pattern",
            "rows from zero, on an extent that is not");
    inner().check(whole);
}

PatternRef make_rows_of(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q, bool is_from_zero) {
    require(bool(inner), SPATTN_E_NULL, "inner", "is NULL; accepted: a pattern");
    return make_ref<Rows>(std::move(inner), Ranges(std::move(bounds), seq_q, "seq_q"), is_from_zero);
}

}  // namespace

PatternRef make_rows(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q) {
    return make_rows_of(std::move(inner), std::move(bounds), seq_q, false);
}

PatternRef make_rows_from_zero(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q) {
    return make_rows_of(std::move(inner), std::move(bounds), seq_q, true);
}

}  // namespace spattn
