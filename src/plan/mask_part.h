// SPDX-License-Identifier: MIT
// Questions about a rectangle of a mask: which of its tokens see or are seen, and how far apart they lie.
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

// A bit for each key of a block.
using KeyBits = std::array<uint64_t, max_block / 64>;

// Keys that some, and that all, of these queries see.
struct SeenKeys {
    KeyBits by_some, by_all;
};

inline SeenKeys find_seen(const Layout& layout, int32_t mask, int32_t query, int32_t queries) {
    const uint64_t* bits = &layout.masks[size_t(mask) * layout.mask_words];
    SeenKeys seen;
    for (int32_t key = 0; key < layout.block_k; key += 64) {
        const int width = std::min(64, layout.block_k - key);
        uint64_t some = 0, all = ~uint64_t(0);
        for (int32_t row = query; row < query + queries; ++row) {
            const uint64_t kept = get_bits(bits, int64_t(row) * layout.block_k + key, width);
            some |= kept;
            all &= kept;
        }
        seen.by_some[size_t(key) / 64] = some;
        seen.by_all[size_t(key) / 64] = all;
    }
    return seen;
}

inline bool has_all(const KeyBits& bits, int32_t key, int32_t keys) {
    bool all = true;
    for (int32_t at = 0; at < keys; at += 64) {
        const int width = std::min(64, keys - at);
        all &= get_bits(bits.data(), key + at, width) == ~uint64_t(0) >> (64 - width);
    }
    return all;
}

inline bool has_any(const uint64_t* bits, int32_t begin, int32_t count) {
    uint64_t any = 0;
    for (int32_t at = 0; at < count; at += 64) any |= get_bits(bits, begin + at, std::min(64, count - at));
    return any;
}

// How many keys lie from the first set bit among these to the last, both included.
inline int32_t key_span(const KeyBits& bits, int32_t key, int32_t keys) {
    int32_t first = keys, end = 0;
    for (int32_t at = 0; at < keys; at += 64) {
        const uint64_t kept = get_bits(bits.data(), key + at, std::min(64, keys - at));
        if (!kept) continue;
        first = std::min(first, at + std::countr_zero(kept));
        end = at + 64 - std::countl_zero(kept);
    }
    return std::max(end - first, 0);
}

inline bool keeps(const Layout& layout, int32_t mask, int32_t query, int32_t key, int32_t keys) {
    return has_any(&layout.masks[size_t(mask) * layout.mask_words], query * layout.block_k + key, keys);
}

// How many queries lie from the first that keeps a pair of the area to the last, both included.
inline int32_t query_span(const Layout& layout, int32_t mask, MaskArea area) {
    int32_t first = area.query, end = area.query + area.queries;
    while (first < end && !keeps(layout, mask, first, area.key, area.keys)) ++first;
    while (first < end && !keeps(layout, mask, end - 1, area.key, area.keys)) --end;
    return end - first;
}

// How many queries of an area see a key of it, and how many of its keys are seen by one.
struct MaskTokens {
    int32_t queries = 0, keys = 0;
};

inline MaskTokens count_tokens(const Layout& layout, int32_t mask, MaskArea area) {
    const uint64_t* bits = &layout.masks[size_t(mask) * layout.mask_words];
    MaskTokens tokens;
    KeyBits seen{};
    for (int32_t query = area.query; query < area.query + area.queries; ++query) {
        uint64_t any = 0;
        for (int32_t at = 0; at < area.keys; at += 64) {
            const int width = std::min(64, area.keys - at);
            const uint64_t kept = get_bits(bits, int64_t(query) * layout.block_k + area.key + at, width);
            seen[size_t(at) / 64] |= kept, any |= kept;
        }
        tokens.queries += any != 0;
    }
    for (uint64_t keys : seen) tokens.keys += std::popcount(keys);
    return tokens;
}

}  // namespace spattn
