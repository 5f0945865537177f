// SPDX-License-Identifier: MIT
// Layouts and patterns as dense masks, and what must hold of every layout, whatever the order of its axes.
#pragma once

#include <string>
#include <vector>

#include "layout/layout.h"
#include "layout/pairs.h"

namespace spattn {

struct Case {
    Extent extent;
    PatternRef pattern;
    Layout layout;
};

std::string describe(const Case& c);
Dense dense_of_pattern(const Case& c, int64_t batch, int64_t head);

inline bool mask_bit(const Layout& layout, int32_t mask, int64_t row, int64_t key) {
    const int64_t bit = row * layout.block_k + key;
    return layout.masks[size_t(mask) * layout.mask_words + size_t(bit / 64)] >> (bit % 64) & 1;
}

std::vector<Run> runs_of(const Lists& lists, int32_t head_kind, int32_t row);

// The token at each place of each tile of an axis, [tiles * block]; no_token where there is none.
std::vector<int64_t> tokens_of(const AxisView& axis, int32_t block, int64_t seq, int32_t tiles);
std::vector<int64_t> query_tokens(const Layout& layout);
std::vector<int64_t> key_tokens(const Layout& layout);

// Every pair the lists say; more than once, or of a place without a token, is a failure.
Dense dense_of_lists(const Layout& layout, int32_t head_kind, bool by_key);

void check_meaning(const Case& c);
void check_masks(const Layout& layout);
void check_runs(const Lists& lists, int32_t head_kinds, int32_t others);
void check_runs(const Layout& layout);

inline bool is_alive(const Live& live, int64_t block, int64_t bit) {
    const int32_t set = live.set_of[size_t(block)];
    return set == all_live || (live.sets[size_t(set) * live.words + size_t(bit / 64)] >> (bit % 64) & 1);
}

// For axes without listed tiles: there a place is alive exactly where its token sees a key, or is seen.
void check_live(const Case& c);

// For axes with listed tiles: a key's place is alive exactly where the lists say a pair of it.
void check_live_keys(const Layout& layout);

void check_counts(const Counts& got, const Counts& want);

}  // namespace spattn
