// SPDX-License-Identifier: MIT
// Layouts over residue classes that are short: where a class fills at most half a tile, a tile has several.
#pragma once

#include <optional>

#include "layout/layout.h"

namespace spattn {

// Residue classes that stand in one tile, a whole number of one axis' in one of the other's. None where a tile has one.
struct ClassesOfTile {
    int32_t queries, keys;
};
std::optional<ClassesOfTile> find_classes_of_tile(const Extent& extent, int32_t modulus, int32_t block_q,
                                                  int32_t block_k);

// What build_residue_layout() (residue.h) makes, in listed tiles that have so many classes each.
std::optional<Layout> build_short_residue_layout(const Pattern& pattern, const Extent& extent, int32_t modulus,
                                                 const ClassesOfTile& classes, int32_t block_q, int32_t block_k);

}  // namespace spattn
