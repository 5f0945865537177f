// SPDX-License-Identifier: MIT
// columns([begin,end,...],seq_k,P): keys of P's own extent, which has seq_k of them, as those of a shorter one: ranges of
// them, one after the other. What a cache keeps of a sequence, or a device of what others hold, is written so.
#include "core/error.h"
#include "pattern/composite.h"
#include "pattern/leaf.h"
#include "pattern/ranges.h"

namespace spattn {
namespace {

class Columns : public Composite {
public:
    Columns(PatternRef inner, Ranges ranges, bool is_from_zero)
        : Composite({std::move(inner)}), ranges_(std::move(ranges)), is_from_zero_(is_from_zero) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override;
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        return inner().row_key(of_inner(plane), row, rows, key);
    }
    void check(const Extent& extent) const override;
    std::optional<HotTokens> hot(const Extent& extent) const override;
    // What a query keeps to is the same of the inner keys, as long as both stand at the same remainder.
    int64_t modulus() const override { return is_from_zero_ ? ranges_.kept_modulus(inner().modulus()) : 1; }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override;
    Patterns pieces() const override;
    std::string print() const override { return text("columns(", ranges_.print(), ", ", inner().print(), ')'); }
    std::string identity() const override {
        return text("columns(", ranges_.identity(), ',', inner().identity(), ')');
    }
    void save(ByteWriter& out) const override {
        save_parts(Node::columns, out);
        ranges_.save(out);
    }

private:
    const Pattern& inner() const { return *parts()[0]; }
    // The same keys of another pattern.
    PatternRef of(PatternRef inner) const { return make_ref<Columns>(std::move(inner), ranges_, is_from_zero_); }
    // Queries stand as far from the end of all keys as they do from the end of these.
    Plane of_inner(const Plane& plane) const {
        const Extent& e = plane.extent;
        const int64_t seq_k = ranges_.tokens(), q_offset = is_from_zero_ ? 0 : e.q_offset + seq_k - e.seq_k;
        return {{e.batch, e.heads, e.seq_q, seq_k, q_offset}, plane.batch, plane.head};
    }

    Ranges ranges_;
    bool is_from_zero_;  // row i stands at position i, of the extent and of the inner one
};

void Columns::keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const {
    const Plane own = of_inner(plane);
    const int64_t end = std::min(clip.end, ranges_.count());
    const size_t first = out.size();
    for (int64_t key = std::max<int64_t>(clip.begin, 0), next; key < end; key = next) {
        const size_t range = ranges_.range_of(key), before = out.size();
        const int64_t shift = ranges_.shift(range);
        next = std::min(end, ranges_.end(range));
        inner().keys(own, row, {key + shift, next + shift}, out);
        for (size_t i = before; i < out.size(); ++i) out[i] = {out[i].begin - shift, out[i].end - shift};
        if (before > first && before < out.size() && out[before - 1].end == out[before].begin) {
            out[before].begin = out[before - 1].begin;
            out.erase(out.begin() + int64_t(before) - 1);
        }
    }
}

// A block may hold keys of several ranges: it is full, or empty, where it is so for each of them.
Coverage Columns::classify(const Plane& plane, const Block& block, Key& key, bool& known) const {
    const int64_t begin = std::max<int64_t>(block.key, 0), end = std::min(block.key + block.keys, ranges_.count());
    if (block.key >= ranges_.count()) return {Coverage::empty, forever};
    const size_t mark = key.size();
    bool is_full = end - begin == block.keys;  // what sticks out of the extent is no key, and nobody sees it
    Coverage whole{Coverage::empty, 1};
    for (int64_t first = begin, next; first < end; first = next) {
        const size_t range = ranges_.range_of(first), before = key.size();
        next = std::min(end, ranges_.end(range));
        key.insert(key.end(), {first - block.key, next - first});
        bool sure = true;
        const Block part{block.row, block.rows, first + ranges_.shift(range), next - first};
        const Coverage coverage = inner().classify(of_inner(plane), part, key, sure);
        if (next - first == block.keys)
            whole.repeat = std::min(coverage.repeat, (ranges_.end(range) - first) / block.keys);
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

std::optional<HotTokens> Columns::hot(const Extent& extent) const {
    std::optional<HotTokens> hot = inner().hot(of_inner({extent}).extent);
    if (!hot) return hot;
    hot->keys = ranges_.places_of(hot->keys);
    if (!hot->size()) return std::nullopt;
    for (PatternRef* part : {&hot->marks, &hot->among, &hot->apart}) *part = of(*part);
    return hot;
}

PatternRef Columns::in_residue(int64_t modulus, int64_t residue) const {
    if (!is_from_zero_) return {};
    std::optional<std::vector<int64_t>> bounds = ranges_.in_residue(modulus, residue);
    if (!bounds) return {};
    PatternRef part = inner().in_residue(modulus, residue);
    if (!part) return {};
    if (bounds->empty()) return make_nothing();
    return make_columns_from_zero(std::move(part), std::move(*bounds),
                                  bound_in_residue(ranges_.tokens(), modulus, residue));
}

Patterns Columns::pieces() const {
    Patterns parts = is_from_zero_ ? inner().pieces() : Patterns();
    if (parts.size() < 2) return {PatternRef::share(this)};
    for (PatternRef& part : parts) part = of(part);
    return parts;
}

void Columns::check(const Extent& extent) const {
    if (extent.seq_k != ranges_.count()) {
        fail(SPATTN_E_SHAPE, "pattern",
             text("columns has ", ranges_.count(), " keys where the extent has ", extent.seq_k,
                  "; accepted: equal numbers"));
    }
    require(!is_from_zero_ || extent.q_offset == 0, SPATTN_E_INTERNAL, "pattern",
            "columns from zero, on an extent that is not");
    inner().check(of_inner({extent}).extent);
}

PatternRef make_columns_of(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_k, bool is_from_zero) {
    require(bool(inner), SPATTN_E_NULL, "inner", "is NULL; accepted: a pattern");
    return make_ref<Columns>(std::move(inner), Ranges(std::move(bounds), seq_k, "seq_k"), is_from_zero);
}

}  // namespace

PatternRef make_columns(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_k) {
    return make_columns_of(std::move(inner), std::move(bounds), seq_k, false);
}

PatternRef make_columns_from_zero(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_k) {
    return make_columns_of(std::move(inner), std::move(bounds), seq_k, true);
}

}  // namespace spattn
