// SPDX-License-Identifier: MIT
// Patterns made of patterns.
#pragma once

#include "pattern/bytes.h"

namespace spattn {

class Composite : public Pattern {
public:
    // Fails where the parts nest too deep or are too many: see Pattern::levels. Of the parts, up to most_runtime may
    // have their lists given at run time.
    explicit Composite(Patterns parts, int most_runtime = 0);
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

// At least one part, none null.
void check_parts(const Patterns& parts);

// A part's text, in parentheses where its operator binds looser than its place or would group otherwise.
enum class Place { of_union, first_of_product, of_product };
std::string print_part(const Pattern& part, Place place);

}  // namespace spattn
