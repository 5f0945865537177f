// SPDX-License-Identifier: MIT
// Columns that all lists treat alike. Where few lists serve many rows (residues, landmarks, global tokens) there are
// few kinds of columns too, however many runs a list has, and a transpose need look at one of each kind only.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"

namespace spattn {

struct ColumnKinds {
    std::vector<int32_t> kind_of;  // [columns]
    Lists lists;                   // the given lists over one column of each kind
    int32_t kinds = 0;
};

// True where the lists of these rows are so few that find_column_kinds() pays.
bool has_few_lists(const Slice* slices, int32_t rows, size_t runs);

ColumnKinds find_column_kinds(const Slice* slices, int32_t rows, const std::vector<Run>& runs, int32_t columns);

}  // namespace spattn
