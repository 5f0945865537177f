// SPDX-License-Identifier: MIT
// Patterns made of patterns.
#pragma once

#include "pattern/bytes.h"

namespace spattn {

inline std::string name_in_list(size_t part) { return text("parts[", part, ']'); }

// How a composition takes its parts.
struct Composing {
    std::string (*name_of)(size_t part) = name_in_list;  // the argument that a part came as
    int most_runtime = 0;                                // so many may have their lists given at run time
    int nodes = 1;  // that the composition adds: none where its closed form has one for each part instead
};
inline constexpr Composing of_inner{[](size_t) { return std::string("inner"); }};

// Fails where there is no part, one is null, they nest too deep or are too many (see Pattern::levels), or more than may
// be have lists given at run time.
void check_parts(const Patterns& parts, const Composing& composing = {});

class Composite : public Pattern {
public:
    // Checks its parts.
    explicit Composite(Patterns parts, const Composing& composing = {});
    void selection(const Plane& plane, Key& key) const override;
    void check(const Extent& extent) const override;
    bool counts_rows() const override;
    bool borrows() const override;
    size_t bytes() const override;
    int64_t period() const override;  // of all parts together

    const Patterns& parts() const { return parts_; }

protected:
    Patterns transposed_parts() const;
    Patterns parts_in_residue(int64_t modulus, int64_t residue) const;  // none where a part has no closed form
    int64_t modulus_of_parts() const;                                   // that all of them keep to
    void save_parts(Node node, ByteWriter& out) const;  // the node, the number of parts, the parts

private:
    Patterns parts_;
};

// A part's text, in parentheses where its operator binds looser than its place or would group otherwise.
enum class Place { of_union, first_of_product, of_product };
std::string print_part(const Pattern& part, Place place);

}  // namespace spattn
