// SPDX-License-Identifier: MIT
// The pairs that the lists of a layout say, through its axes, and who writes each token: for any order, with no check
// of its own.
#pragma once

#include <vector>

#include "layout/layout.h"

namespace spattn {

// Token i of a tile, or no_token.
inline int64_t token_at(const TileView& tile, int64_t i) {
    if (i >= tile.count) return no_token;
    return tile.tokens ? tile.tokens[i] : tile.first + i * tile.stride;
}

using Dense = std::vector<std::vector<bool>>;  // [seq_q][seq_k]

struct Said {
    Dense pairs;
    bool is_once = true, is_inside = true;
};

// What the lists of a kind of heads say, through the axes.
Said read_lists(const Layout& layout, int32_t head_kind, bool by_key);

// How often the tiles of an axis write each token.
std::vector<int> count_writers(const AxisView& axis, int32_t block, int64_t seq, int32_t tiles);

}  // namespace spattn
