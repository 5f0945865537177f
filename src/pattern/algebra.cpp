// SPDX-License-Identifier: MIT
// A | B, A & B, A - B: merges of interval lists, and closed forms from the closed forms of the parts.
#include <memory>
#include <numeric>
#include <set>

#include "core/error.h"
#include "pattern/bytes.h"
#include "pattern/hot.h"
#include "pattern/intervals.h"
#include "pattern/pieces.h"

namespace spattn {
namespace {

// The key of a composition is the number and key of each part that is partial, then this.
constexpr int64_t end_of_parts = -1;

// Asks one part; its number stays in `key` only where it is partial. `sure` turns false with a part that is not known.
Coverage classify_part(const Composite& whole, size_t i, const Plane& plane, const Block& block, Key& key, bool& sure) {
    const size_t mark = key.size();
    key.push_back(int64_t(i));
    const Coverage coverage = whole.parts()[i]->classify(plane, block, key, sure);
    if (coverage.kind != Coverage::partial) key.resize(mark);
    return coverage;
}

// What the laws of equality leave of a pattern: a union of several terms, or a product of factors from which others are
// taken away. X & (Y - Z) = (X & Y) - Z moves every subtrahend to the end, and with X & X = X and X | X = X neither order
// nor repeats matter.
struct Normal {
    bool is_sum = false;
    std::set<std::string> parts, taken;  // terms or factors; subtrahends of a product

    std::string text() const {
        const std::string all = parts.size() == 1 ? *parts.begin() : call(is_sum ? "union" : "intersection", parts);
        return taken.empty() ? all : call("difference", taken, all);
    }

private:
    static std::string call(const char* name, const std::set<std::string>& parts, const std::string& first = {}) {
        std::string out = std::string(name) + '(' + first;
        for (const std::string& part : parts) out += (out.back() == '(' ? "" : ",") + part;
        return out + ')';
    }
};

class Algebra : public Composite {
public:
    using Composite::Composite;

    // `decides` settles a block alone when the kind of part i is its own; else all parts must agree on `result`.
    Coverage classify_with(Coverage::Kind first_decides, Coverage::Kind rest_decides, Coverage::Kind decision,
                           const Plane& plane, const Block& block, Key& key, bool& known) const {
        const size_t mark = key.size();
        bool sure = true;
        int64_t decided = 0, repeat = forever;
        for (size_t i = 0; i < parts().size(); ++i) {
            const Coverage part = classify_part(*this, i, plane, block, key, sure);
            if (part.kind == (i == 0 ? first_decides : rest_decides)) decided = std::max(decided, part.repeat);
            if (decided == forever) break;
            repeat = std::min(repeat, part.repeat);
        }
        const bool is_partial = key.size() > mark;
        if (decided > 0 || !is_partial) {
            key.resize(mark);
            const Coverage::Kind other = decision == Coverage::full ? Coverage::empty : Coverage::full;
            return decided > 0 ? Coverage{decision, decided} : Coverage{other, repeat};
        }
        known &= sure;
        key.push_back(end_of_parts);
        return {Coverage::partial, repeat};
    }

    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        for (const PatternRef& part : parts()) {
            if (!part->row_key(plane, row, rows, key)) return false;
        }
        return true;
    }

    int64_t stem_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        const size_t mark = key.size();
        int64_t end = forever;
        for (const PatternRef& part : parts()) end = std::min(end, part->stem_key(plane, row, rows, key));
        if (end == lowest) key.resize(mark);
        return end;
    }

    Patterns pieces() const override {
        Patterns pieces = cut();
        return pieces.empty() ? Pattern::pieces() : pieces;
    }

    std::string identity() const override { return normal()->text(); }
    virtual std::unique_ptr<Normal> normal() const = 0;

protected:
    virtual Patterns cut() const = 0;  // none where it stays whole
};

class Union : public Algebra {
public:
    static constexpr Composing composing{};
    using Algebra::Algebra;

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        const size_t mark = out.size();
        for (const PatternRef& part : parts()) {
            const size_t middle = out.size();
            part->keys(plane, row, clip, out);
            if (middle == mark || middle == out.size()) continue;
            std::inplace_merge(out.begin() + mark, out.begin() + middle, out.end(), is_earlier);
            join_touching(out, mark);
        }
    }

    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override {
        return classify_with(Coverage::full, Coverage::full, Coverage::full, plane, block, key, known);
    }

    std::string print() const override {
        std::string out;
        for (const PatternRef& part : parts()) out += (out.empty() ? "" : " | ") + print_part(*part, Place::of_union);
        return out;
    }

    void save(ByteWriter& out) const override { save_parts(Node::union_of, out); }
    std::unique_ptr<Normal> normal() const override;
    PatternRef transposed() const override { return make_union(transposed_parts()); }
    int64_t modulus() const override { return modulus_of_parts(); }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        Patterns parts = parts_in_residue(modulus, residue);
        return parts.empty() ? PatternRef() : make_union(std::move(parts));
    }

    std::optional<HotTokens> hot(const Extent& extent) const override {
        return hot_of_union(parts(), extent);
    }

protected:
    Patterns cut() const override { return pieces_of_union(parts()); }
};

class Intersection : public Algebra {
public:
    static constexpr Composing composing{.most_runtime = 1};

    // A part that repeats may list a key of each period, however many there are: it is asked last, about those that the
    // others have left.
    explicit Intersection(Patterns parts) : Algebra(std::move(parts), composing) {
        for (const PatternRef& part : this->parts()) in_turn_.push_back(part.get());
        std::stable_partition(in_turn_.begin(), in_turn_.end(),
                              [](const Pattern* part) { return part->period() == 1; });
    }

    const RuntimeShape* runtime() const override {
        for (const PatternRef& part : parts())
            if (part->runtime()) return part->runtime();
        return nullptr;
    }

    PatternRef known_part() const override {
        Patterns known;
        for (const PatternRef& part : parts())
            if (!part->runtime()) known.push_back(part);
        return known.empty() ? PatternRef() : make_intersection(std::move(known));
    }

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        Intervals kept, next;
        in_turn_[0]->keys(plane, row, clip, kept);
        for (size_t part = 1; part < in_turn_.size() && !kept.empty(); ++part) {
            next.clear();
            in_turn_[part]->keys(plane, row, {kept.front().begin, kept.back().end}, next);
            meet(kept, next);
        }
        out.insert(out.end(), kept.begin(), kept.end());
    }

    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override {
        return classify_with(Coverage::empty, Coverage::empty, Coverage::empty, plane, block, key, known);
    }

    std::string print() const override {
        std::string out = print_part(*parts()[0], Place::first_of_product);
        for (size_t i = 1; i < parts().size(); ++i) out += " & " + print_part(*parts()[i], Place::of_product);
        return out;
    }

    void save(ByteWriter& out) const override { save_parts(Node::intersection_of, out); }
    std::unique_ptr<Normal> normal() const override;
    PatternRef transposed() const override { return make_intersection(transposed_parts()); }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        Patterns parts = parts_in_residue(modulus, residue);
        return parts.empty() ? PatternRef() : make_intersection(std::move(parts));
    }

    // Each part's modulus holds, so their least common multiple does; where that is too large, the larger one.
    int64_t modulus() const override {
        int64_t modulus = 1;
        for (const PatternRef& part : parts()) {
            const int64_t other = part->modulus();
            if (other == 0) return 0;
            const int64_t both = multiply_saturated(modulus / std::gcd(modulus, other), other);
            modulus = both == forever ? std::max(modulus, other) : both;
        }
        return modulus;
    }

    std::optional<HotTokens> hot(const Extent& extent) const override {
        return hot_of_parts(parts(), parts().size(), extent, make_intersection);
    }

protected:
    Patterns cut() const override { return pieces_of_intersection(parts()); }

private:
    static void meet(Intervals& kept, const Intervals& other) {
        Intervals result;
        for (size_t a = 0, b = 0; a < kept.size() && b < other.size();) {
            const int64_t begin = std::max(kept[a].begin, other[b].begin), end = std::min(kept[a].end, other[b].end);
            if (begin < end) result.push_back({begin, end});
            kept[a].end < other[b].end ? ++a : ++b;
        }
        kept = std::move(result);
    }

    std::vector<const Pattern*> in_turn_;
};

// parts[0] without all the others.
class Difference : public Algebra {
public:
    using Algebra::Algebra;

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        Intervals kept, taken;
        parts()[0]->keys(plane, row, clip, kept);
        for (size_t part = 1; part < parts().size() && !kept.empty(); ++part) {
            taken.clear();
            parts()[part]->keys(plane, row, {kept.front().begin, kept.back().end}, taken);
            subtract(kept, taken);
        }
        out.insert(out.end(), kept.begin(), kept.end());
    }

    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override {
        return classify_with(Coverage::empty, Coverage::full, Coverage::empty, plane, block, key, known);
    }

    std::string print() const override {
        std::string out = print_part(*parts()[0], Place::first_of_product);
        for (size_t i = 1; i < parts().size(); ++i) out += " - " + print_part(*parts()[i], Place::of_product);
        return out;
    }

    void save(ByteWriter& out) const override { save_parts(Node::difference_of, out); }
    std::unique_ptr<Normal> normal() const override;
    PatternRef transposed() const override { return subtract_all(transposed_parts()); }
    int64_t modulus() const override { return parts()[0]->modulus(); }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        return subtract_all(parts_in_residue(modulus, residue));
    }

    std::optional<HotTokens> hot(const Extent& extent) const override {
        return hot_of_parts(parts(), 1, extent, subtract_all);
    }

protected:
    Patterns cut() const override { return pieces_of_difference(parts()); }

private:
    static PatternRef subtract_all(Patterns parts) {
        return parts.empty() ? PatternRef() : make_difference(std::move(parts));
    }

    static void subtract(Intervals& kept, const Intervals& taken) {
        Intervals result;
        size_t t = 0;
        for (Interval rest : kept) {
            while (t < taken.size() && taken[t].end <= rest.begin) ++t;
            for (size_t i = t; i < taken.size() && taken[i].begin < rest.end; ++i) {
                if (rest.begin < taken[i].begin) result.push_back({rest.begin, taken[i].begin});
                rest.begin = taken[i].end;
            }
            if (rest.begin < rest.end) result.push_back(rest);
        }
        kept = std::move(result);
    }
};

// ---- equality ----

// Null of patterns that are neither unions nor products. On the heap, as the sets of each level are: compositions nest
// deep, and stacks may be small.
std::unique_ptr<Normal> normal_of(const Pattern& pattern) {
    const auto* algebra = dynamic_cast<const Algebra*>(&pattern);
    return algebra ? algebra->normal() : nullptr;
}

// A | A is A, also where that is a product, which then joins one around it.
std::unique_ptr<Normal> Union::normal() const {
    auto sum = std::make_unique<Normal>();
    std::unique_ptr<Normal> last;
    for (const PatternRef& part : parts()) {
        last = normal_of(*part);
        if (last && last->is_sum) sum->parts.merge(last->parts);
        else sum->parts.insert(last ? last->text() : part->identity());
    }
    sum->is_sum = sum->parts.size() > 1;
    return last && !sum->is_sum ? std::move(last) : std::move(sum);
}

// The product of some parts, without what is taken away. A & A is A, also where that is a union.
std::unique_ptr<Normal> multiply(const Patterns& parts, size_t factors) {
    auto product = std::make_unique<Normal>();
    std::unique_ptr<Normal> last;
    for (size_t i = 0; i < factors; ++i) {
        last = normal_of(*parts[i]);
        if (last && !last->is_sum) {
            product->parts.merge(last->parts);
            product->taken.merge(last->taken);
        } else {
            product->parts.insert(last ? last->text() : parts[i]->identity());
        }
    }
    for (size_t i = factors; i < parts.size(); ++i) product->taken.insert(parts[i]->identity());
    const bool is_last = last && last->is_sum && product->parts.size() == 1 && product->taken.empty();
    return is_last ? std::move(last) : std::move(product);
}

std::unique_ptr<Normal> Intersection::normal() const { return multiply(parts(), parts().size()); }
std::unique_ptr<Normal> Difference::normal() const { return multiply(parts(), 1); }

// Nested operators of one kind become one: same text, same set, and loops that add a part at a time stay shallow.
template <class Node>
PatternRef make_flat(const Patterns& parts) {
    check_parts(parts, Node::composing);
    if (parts.size() == 1) return parts[0];
    Patterns flat;
    for (const PatternRef& part : parts) {
        if (const auto* inner = dynamic_cast<const Node*>(part.get())) {
            flat.insert(flat.end(), inner->parts().begin(), inner->parts().end());
        } else {
            flat.push_back(part);
        }
    }
    return make_ref<Node>(std::move(flat));
}

}  // namespace

std::string print_part(const Pattern& part, Place place) {
    const bool is_sum = dynamic_cast<const Union*>(&part);
    const bool is_product = !is_sum && dynamic_cast<const Algebra*>(&part);
    const bool needs = (is_sum && place != Place::of_union) || (is_product && place == Place::of_product);
    return needs ? '(' + part.print() + ')' : part.print();
}

PatternRef make_union(Patterns parts) { return make_flat<Union>(parts); }
PatternRef make_intersection(Patterns parts) { return make_flat<Intersection>(parts); }

PatternRef make_difference(PatternRef a, PatternRef b) {
    Patterns parts{std::move(a), std::move(b)};
    check_parts(parts, {[](size_t part) { return std::string(part == 0 ? "a" : "b"); }});
    return make_difference(std::move(parts));
}

PatternRef make_difference(Patterns parts) {
    check_parts(parts);
    if (parts.size() == 1) return parts[0];
    if (const auto* inner = dynamic_cast<const Difference*>(parts[0].get())) {
        Patterns flat = inner->parts();
        flat.insert(flat.end(), parts.begin() + 1, parts.end());
        return make_ref<Difference>(std::move(flat));
    }
    return make_ref<Difference>(std::move(parts));
}

}  // namespace spattn
