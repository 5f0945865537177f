// SPDX-License-Identifier: MIT
// What rows of several folders refuse alike: null where a problem fits.
#pragma once

#include <algorithm>

#include "plan/call.h"

namespace spattn::any {

constexpr int64_t most_ctas = (int64_t(1) << 31) - 1;  // of a grid

// A grid has a CTA for each task and part of its columns. Tasks are tiles and what long ones are split into; residue
// classes have at least 8 tokens, so that there are never more tiles than eighths of a sequence.
inline const char* grid_fits(const Problem& p, int64_t parts = 1) {
    const int64_t tasks = std::max(p.seq_q, p.seq_k) / 4 + 64;
    return p.batch * p.heads_q > most_ctas / parts / tasks ? "more blocks than a grid has" : nullptr;
}

inline const char* columns_fit(const Problem& p, int64_t head_dim, int64_t head_dim_v) {
    if (p.head_dim > head_dim) return "head_dim above the tile's";
    return p.head_dim_v > head_dim_v ? "head_dim_v above the tile's" : nullptr;
}

// Rows whose tiles have so many heads of a group, at most 16: of those that divide a group, the most.
template <int Heads>
const char* tile_heads_fit(const Problem& p) {
    constexpr int most = 16;
    if (p.group() % Heads) return "groups that its tiles' heads do not divide";
    return Heads > 1 && Heads < most && p.group() % (2 * Heads) == 0 ? "groups for more heads a tile" : nullptr;
}

// Rows that gather listed keys count tiles, and places of a list, by 32 bits.
inline const char* lists_fit(const Problem& p) {
    constexpr int64_t most = int64_t(1) << 30;
    const bool fits = p.batch * p.heads_q * p.seq_q <= most && p.call_lists.tokens() <= most;
    return fits ? nullptr : "more rows, or longer lists, than it counts";
}

// Tiles of more than 256 columns are for values that are the first columns of keys.
inline const char* values_fit(const Problem& p, int64_t head_dim) {
    return head_dim > 256 && !p.value_in_key ? "reads values as columns of keys, and these stand apart" : nullptr;
}

// Rows that look for the maximum of products, before the scale, need one that keeps their order.
inline const char* maximum_fits(const Problem& p) {
    return !(p.scale > 0) && p.softcap == 0 ? "scale not above 0" : nullptr;
}

}  // namespace spattn::any
