// SPDX-License-Identifier: MIT
// What a rectangle of a mask keeps.
#pragma once

#include <algorithm>
#include <array>
#include <bit>

#include "layout/tables.h"

namespace spattn {

constexpr int32_t strip = 16;  // rows that work on a masked block together

struct MaskArea {
    int32_t query, queries, key, keys;
};

struct MaskPart {
    int32_t queries = 0, keys = 0;  // that keep anything
    int32_t first_query = 0, end_query = 0, first_key = 0, end_key = 0;  // all of those between
    bool is_full = true;
    bool is_empty() const { return queries == 0; }
    int32_t query_span() const { return end_query - first_query; }
    int32_t key_span() const { return end_key - first_key; }
};

inline MaskPart measure(const Layout& layout, int32_t mask, MaskArea area) {
    const uint64_t* bits = &layout.masks[size_t(mask) * layout.mask_words];
    std::array<uint64_t, max_block / 64> seen;
    std::fill_n(seen.begin(), words_for(area.keys), 0);
    MaskPart part;
    for (int32_t query = area.query; query < area.query + area.queries; ++query) {
        uint64_t any = 0;
        for (int32_t key = 0; key < area.keys; key += 64) {
            const int width = std::min(64, area.keys - key);
            const uint64_t kept = get_bits(bits, int64_t(query) * layout.block_k + area.key + key, width);
            part.is_full &= kept == ~uint64_t(0) >> (64 - width);
            seen[size_t(key) / 64] |= kept;
            any |= kept;
        }
        if (!any) continue;
        if (part.queries++ == 0) part.first_query = query;
        part.end_query = query + 1;
    }
    for (int32_t key = 0; key < area.keys; key += 64) {
        const uint64_t any = seen[size_t(key) / 64];
        if (!any) continue;
        if (part.keys == 0) part.first_key = area.key + key + std::countr_zero(any);
        part.end_key = area.key + key + 64 - std::countl_zero(any);
        part.keys += std::popcount(any);
    }
    return part;
}

}  // namespace spattn
