// SPDX-License-Identifier: MIT
// Drawn patterns as the library has them inside, and planes to ask them on.
#pragma once

#include <functional>
#include <string>

#include "drawn.h"
#include "pattern/pattern.h"

namespace trees {

using namespace spattn;
using drawn::random_blocks;

// Whether a query at position p sees key k on this plane.
using Meaning = std::function<bool(const Plane&, int64_t p, int64_t k)>;

struct Tree {
    PatternRef pattern;
    Meaning sees;
};

Tree tree_of(drawn::Model model);

// Three heads and two batch entries, and up to 40 tokens.
class Source {
public:
    explicit Source(uint32_t seed) : random_(seed) {}

    int64_t number(int64_t low, int64_t high) { return random_.number(low, high); }

    // These stand on any plane.
    Tree leaf();
    Tree tree(int depth);

    // These have lists of rows, and stand on this extent.
    Tree lists(const Extent& e);
    Tree per_document(const Extent& e, int depth);
    Tree rows(const Extent& e, int depth);
    Tree columns(const Extent& e, int depth);
    Tree mixed(const Extent& e, int depth);

    Plane plane();

private:
    drawn::Builder any();
    drawn::Builder on(const Extent& e);

    drawn::Random random_;
};

std::string describe(const Tree& tree, const Plane& plane, uint32_t seed);

}  // namespace trees
