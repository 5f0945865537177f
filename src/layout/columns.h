// SPDX-License-Identifier: MIT
// Columns (blocks of the axis that lists name) that all lists treat alike are of one kind. Where few lists serve many
// rows (residues, landmarks, global tokens) there are few kinds, however many runs a list has, and a transpose need
// look at one column of each kind only.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/layout.h"

namespace spattn {

struct ColumnKinds {
    std::vector<int32_t> kind_of;  // [columns]
    Lists lists;                   // the given lists over one column of each kind
    int32_t kinds = 0;
};

// Nothing where these rows have so many lists that looking at every column costs less.
std::optional<ColumnKinds> find_column_kinds(const Slice* slices, int32_t rows, const std::vector<Run>& runs,
                                             int32_t columns);

}  // namespace spattn
