// SPDX-License-Identifier: MIT
#include "pattern/cut.h"

#include "core/error.h"
#include "pattern/leaf.h"

namespace spattn {

PatternRef Cut::in_residue(int64_t modulus, int64_t residue) const {
    if (!is_from_zero_) return {};
    std::optional<std::vector<int64_t>> bounds = ranges_.in_residue(modulus, residue);
    if (!bounds) return {};
    PatternRef part = inner().in_residue(modulus, residue);
    if (!part) return {};
    if (bounds->empty()) return make_nothing();
    return make(std::move(part),
                Ranges(std::move(*bounds), bound_in_residue(ranges_.tokens(), modulus, residue), "tokens"));
}

Patterns Cut::pieces() const {
    Patterns parts = is_from_zero_ ? inner().pieces() : Patterns();
    if (parts.size() < 2) return {PatternRef::share(this)};
    for (PatternRef& part : parts) part = of(part);
    return parts;
}

std::optional<HotTokens> Cut::hot_of(const Extent& whole, std::vector<int64_t> HotTokens::* cut) const {
    std::optional<HotTokens> hot = inner().hot(whole);
    if (!hot) return hot;
    (*hot).*cut = ranges_.places_of((*hot).*cut);
    if (!hot->size()) return std::nullopt;
    for (PatternRef* part : {&hot->marks, &hot->among, &hot->apart}) *part = of(*part);
    return hot;
}

std::string Cut::print() const { return text(name_, '(', ranges_.print(), ", ", inner().print(), ')'); }

std::string Cut::identity() const { return text(name_, '(', ranges_.identity(), ',', inner().identity(), ')'); }

void Cut::save(ByteWriter& out) const {
    save_parts(node_, out);
    ranges_.save(out);
}

}  // namespace spattn
