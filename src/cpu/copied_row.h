// SPDX-License-Identifier: MIT
// Rows of tokens that are copied as they are, whatever their elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace spattn::cpu {

// Steps lead from an element to the next, in elements.
struct CopiedRow {
    const char* from;
    int64_t from_step;
    char* to;
    int64_t to_step;
    int64_t columns, element;  // element: bytes
};

inline void copy_row(const CopiedRow& row) {
    if (row.columns == 1 || (row.from_step == 1 && row.to_step == 1)) {
        std::memcpy(row.to, row.from, size_t(row.columns * row.element));
        return;
    }
    for (int64_t column = 0; column < row.columns; ++column)
        std::memcpy(row.to + column * row.to_step * row.element, row.from + column * row.from_step * row.element,
                    size_t(row.element));
}

// How many tokens a lane takes one after the other: less is written before another thread has woken up.
inline int64_t tokens_of_stretch(int64_t token_bytes) {
    constexpr int64_t least_bytes = 1 << 16;
    return std::max<int64_t>(least_bytes / std::max<int64_t>(token_bytes, 1), 1);
}

}  // namespace spattn::cpu
