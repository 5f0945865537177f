// SPDX-License-Identifier: MIT
#include "pattern/composite.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace spattn {

// Recursion over 200 levels, of texts and of all that is asked of patterns, stays within a thread's stack of 128 KiB. Only
// a plan of so many grids in grids takes 160.
constexpr int32_t most_levels = 200, most_nodes = 1 << 16;

Composite::Composite(Patterns parts, int most_runtime) : parts_(std::move(parts)) {
    int64_t sum = 1;
    for (const PatternRef& part : parts_) {
        if (part->runtime() && --most_runtime < 0) {
            fail(SPATTN_E_UNSUPPORTED, "pattern",
                 text("has ", part->print(), ", whose lists are given at run time, where its keys must be known; "
                      "accepted: such a pattern alone, or one of them under & with others"));
        }
        levels = std::max(levels, part->levels + 1);
        sum += part->nodes;
    }
    if (levels > most_levels) {
        fail(SPATTN_E_RANGE, "pattern", text("nests ", levels, " levels deep; accepted: up to ", most_levels));
    }
    if (sum > most_nodes) {
        fail(SPATTN_E_RANGE, "pattern", text("has ", sum, " parts in all; accepted: up to ", most_nodes));
    }
    nodes = int32_t(sum);
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

void check_parts(const Patterns& parts) {
    require(!parts.empty(), SPATTN_E_RANGE, "count", "is 0; accepted: 1 and more");
    for (size_t i = 0; i < parts.size(); ++i) {
        if (!parts[i]) fail(SPATTN_E_NULL, text("parts[", i, "]"), "is NULL; accepted: a pattern");
    }
}

}  // namespace spattn
