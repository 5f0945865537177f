// SPDX-License-Identifier: MIT
#include "pattern/composite.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace spattn {

// Recursion over 200 levels, of texts and of all that is asked of patterns, stays within a thread's stack of 128 KiB. Only
// a plan of so many grids in grids takes 160.
constexpr int32_t most_levels = 200, most_parts = 1 << 16;

namespace {

int64_t count_nodes(const Patterns& parts) {
    int64_t nodes = 0;
    for (const PatternRef& part : parts) nodes += part->nodes;
    return nodes;
}

}  // namespace

void check_parts(const Patterns& parts, const Composing& composing) {
    require(!parts.empty(), SPATTN_E_RANGE, "count", "is 0; accepted: 1 and more");
    int left = composing.most_runtime;
    size_t largest = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
        const PatternRef& part = parts[i];
        if (!part) fail(SPATTN_E_NULL, composing.name_of(i), "is NULL; accepted: a pattern");
        if (part->runtime() && --left < 0)
            fail(SPATTN_E_UNSUPPORTED, composing.name_of(i),
                 text("is ", part->print(), ", whose lists are given at run time, where its keys must be known; "
                      "accepted: such a pattern alone, or one of them under & with others"));
        if (part->levels >= most_levels)
            fail(SPATTN_E_RANGE, composing.name_of(i),
                 text("makes a pattern that nests ", part->levels + 1, " levels deep; accepted: up to ", most_levels));
        if (part->nodes > parts[largest]->nodes) largest = i;
    }
    const int64_t inside = composing.nodes + count_nodes(parts) - 1;
    if (inside > most_parts)
        fail(SPATTN_E_RANGE, composing.name_of(largest),
             text("makes a pattern with ", inside, " parts in all; accepted: up to ", most_parts));
}

Composite::Composite(Patterns parts, const Composing& composing) : parts_(std::move(parts)) {
    check_parts(parts_, composing);
    for (const PatternRef& part : parts_) levels = std::max(levels, part->levels + 1);
    nodes = int32_t(composing.nodes + count_nodes(parts_));
}

void Composite::selection(const Plane& plane, Key& key) const {
    for (const PatternRef& part : parts_) part->selection(plane, key);
}

void Composite::check(const Extent& extent) const {
    for (const PatternRef& part : parts_) part->check(extent);
}

bool Composite::counts_rows() const {
    return std::any_of(parts_.begin(), parts_.end(), [](const PatternRef& part) { return part->counts_rows(); });
}

bool Composite::borrows() const {
    return std::any_of(parts_.begin(), parts_.end(), [](const PatternRef& part) { return part->borrows(); });
}

size_t Composite::bytes() const {
    size_t bytes = 0;
    for (const PatternRef& part : parts_) bytes += part->bytes();
    return bytes;
}

int64_t Composite::period() const {
    int64_t period = 1;
    for (const PatternRef& part : parts_) {
        const int64_t other = part->period();
        if (period == forever || other == forever) return forever;
        period = multiply_saturated(period / std::gcd(period, other), other);
    }
    return period;
}

void Composite::save_parts(Node node, ByteWriter& out) const {
    out.node(node);
    out.number(int64_t(parts_.size()));
    for (const PatternRef& part : parts_) part->save(out);
}

Patterns Composite::transposed_parts() const {
    Patterns result;
    for (const PatternRef& part : parts_) result.push_back(make_transpose(part));
    return result;
}

Patterns Composite::parts_in_residue(int64_t modulus, int64_t residue) const {
    Patterns result;
    for (const PatternRef& part : parts_) {
        result.push_back(part->in_residue(modulus, residue));
        if (!result.back()) return {};
    }
    return result;
}

int64_t Composite::modulus_of_parts() const {
    int64_t modulus = 0;
    for (const PatternRef& part : parts_) modulus = std::gcd(modulus, part->modulus());
    return modulus;
}

}  // namespace spattn
