// SPDX-License-Identifier: MIT
// Masks of a call on a cache whose queries are nodes of trees. Their own keys lie in a few tiles, and of each a row of
// tiles of queries has a mask: what the plan's keeps, and of own keys those on a query's way to its root.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "plan/cache.h"

namespace spattn::cpu {

class TreeMasks {
public:
    // For a tile of queries of batch entry `batch`, where a sequence's are those from number `begin` on. nodes: how many it
    // has up to the tile's last that sees anything; first: the number among them of the tile's first place, perhaps below 0.
    TreeMasks(const CacheLayout& made, const CallCache& cache, int64_t batch, int64_t begin, int64_t first, int64_t nodes)
        : made_(made), cache_(cache), batch_(batch), begin_(begin) {
        for (int64_t row = 0; row < made_.tile_q; ++row)
            ways_[size_t(row)] = first + row < nodes ? std::max<int64_t>(first + row, -1) : -1;
        std::transform(ways_.begin(), ways_.end(), is_query_.begin(), [](int64_t node) { return node >= 0; });
    }

    // The mask of a tile of keys, the first of which is number `first_node`'s own, or lies before all own keys if that is
    // below 0. All own tiles come, from the last to the first, as ways to the root go. plan_mask: of the plan's masks, or
    // no_pair, and then there is no mask to make.
    void make(int64_t first_node, int32_t plan_mask, uint64_t* to) {
        const int64_t tile_k = made_.tile_k;
        kept_.fill(0);
        for (int64_t row = 0; row < made_.tile_q; ++row) {
            if (!is_query_[size_t(row)]) continue;
            for (int64_t key = 0; key < std::min(-first_node, tile_k); ++key) keep(row * tile_k + key);
            int64_t& node = ways_[size_t(row)];
            for (; node >= std::max<int64_t>(first_node, 0); node = cache_.parent_of(batch_, begin_, node))
                keep(row * tile_k + node - first_node);
        }
        if (plan_mask == no_pair) return;
        const uint64_t* const plan =
            plan_mask == full_block ? nullptr : made_.known.masks + int64_t(plan_mask) * made_.known.mask_words;
        for (int64_t word = 0; word < made_.known.mask_words; ++word) {
            uint64_t bits = 0;
            for (int64_t bit = 0; bit < 64; ++bit)
                bits |= uint64_t(keeps(made_.of_plan.bit_places[64 * word + bit])) << bit;
            to[word] = plan ? bits & plan[word] : bits;
        }
    }

private:
    void keep(int64_t pair) { kept_[size_t(pair / 64)] |= uint64_t(1) << pair % 64; }
    bool keeps(uint16_t place) const {
        return place < bit_of_all ? kept_[place / 64] >> place % 64 & 1 : place == bit_of_all;
    }

    const CacheLayout& made_;
    const CallCache& cache_;
    const int64_t batch_, begin_;
    std::array<int64_t, most_tree_side> ways_{};  // where each row's has come to
    std::array<bool, most_tree_side> is_query_{};
    std::array<uint64_t, most_tree_pairs / 64> kept_;  // row-major
};

}  // namespace spattn::cpu
