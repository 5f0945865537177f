// SPDX-License-Identifier: MIT
// transpose(P) = { k : p in P(k) }. Through P's own transposed form where it has one; else pair by pair, and block by
// block in closed forms, with rows and keys changing places.
#include "core/cancel.h"
#include "core/error.h"
#include "pattern/hot.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

// The closed form of a composition is made of transposes of its parts, of which there are as many as may be already.
constexpr Composing of_pattern{.name_of = [](size_t) { return std::string("pattern"); }, .nodes = 0};

class Transpose : public Composite {
public:
    explicit Transpose(PatternRef pattern) : Composite({pattern}, of_pattern), closed_(pattern->transposed()) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        if (closed_) return closed_->keys(plane, row, clip, out);
        const int64_t p = plane.position(row);
        Intervals found;
        Cutter cutter(clip, out);
        for (int64_t k = clip.begin; k < clip.end; ++k) {
            check_cancelled();  // each key is a row of the inner pattern
            found.clear();
            inner().keys(plane, k - plane.extent.q_offset, {p, p + 1}, found);
            if (!found.empty()) cutter.add(k, k + 1);
        }
    }

    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override {
        if (closed_) return closed_->classify(plane, block, key, known);
        const Block swapped{block.key - plane.extent.q_offset, block.keys, plane.position(block.row), block.rows};
        return {inner().classify(plane, swapped, key, known).kind, 1};
    }

    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        return closed_ && closed_->row_key(plane, row, rows, key);
    }

    std::string print() const override { return "transpose(" + inner().print() + ')'; }
    std::string identity() const override { return "transpose(" + inner().identity() + ')'; }
    void save(ByteWriter& out) const override { save_parts(Node::transpose, out); }
    PatternRef transposed() const override { return parts()[0]; }
    // A closed form that has arrays of its own has been made of the inner pattern, which it holds.
    size_t bytes() const override { return closed_ ? closed_->bytes() : inner().bytes(); }
    int64_t modulus() const override { return inner().modulus(); }
    std::optional<HotTokens> hot(const Extent& extent) const override {
        return closed_ ? closed_->hot(extent) : std::nullopt;
    }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        PatternRef part = inner().in_residue(modulus, residue);
        return part ? make_transpose(std::move(part)) : PatternRef();
    }

private:
    const Pattern& inner() const { return *parts()[0]; }

    PatternRef closed_;
};

// The queries at the positions that `constant` lists see every key; the others see none.
class QuerySide : public Composite {
public:
    explicit QuerySide(PatternRef constant) : Composite({std::move(constant)}, of_pattern) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        const int64_t p = plane.position(row);
        Intervals found;
        inner().keys(plane, 0, {p, p + 1}, found);
        if (!found.empty() && clip.begin < clip.end) out.push_back(clip);
    }

    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override {
        const Block rows{0, 1, plane.position(block.row), block.rows};
        return {inner().classify(plane, rows, key, known).kind, forever};
    }

    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        bool known = true;
        const size_t mark = key.size();
        key.push_back(0);
        key[mark] = classify(plane, {row, rows, 0, 1}, key, known).kind;
        return known;
    }

    std::string print() const override { return "transpose(" + inner().print() + ')'; }
    std::string identity() const override { return "transpose(" + inner().identity() + ')'; }
    void save(ByteWriter& out) const override { save_parts(Node::transpose, out); }
    PatternRef transposed() const override { return parts()[0]; }
    std::optional<HotTokens> hot(const Extent& extent) const override { return hot_queries(inner(), *this, extent); }

private:
    const Pattern& inner() const { return *parts()[0]; }
};

}  // namespace

PatternRef make_query_side(PatternRef constant) { return make_ref<QuerySide>(std::move(constant)); }

PatternRef make_transpose(PatternRef pattern) {
    return make_ref<Transpose>(std::move(pattern));
}

}  // namespace spattn
