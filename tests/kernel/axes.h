// SPDX-License-Identifier: MIT
// Layouts over random axes, straight from the pairs that a pattern keeps: every pair stands in one place of one tile,
// drawn among the places that its query and its key have. Slow, and shares nothing with src/layout but the structs.
#pragma once

#include <algorithm>
#include <map>

#include "attention.h"

namespace attention {

struct AxisDraw {
    int64_t tokens;
    int32_t block;
    int modulus;   // of homes; 1: plain
    int listed;    // tiles
    bool once;     // a token is listed once at most, and then away from home
};

// Where the tokens of an axis stand: an axis, and the places of each token, counted in `block` a tile.
struct DrawnAxis {
    Axis axis;
    int32_t tiles;
    std::vector<std::vector<int64_t>> places;  // of each token, the listed ones first
};

inline DrawnAxis draw_axis(const AxisDraw& draw, std::mt19937& random) {
    const int64_t residue_tokens = (draw.tokens + draw.modulus - 1) / draw.modulus;
    DrawnAxis drawn;
    Axis& axis = drawn.axis;
    axis.modulus = draw.modulus;
    axis.residue_tiles = int32_t((residue_tokens + draw.block - 1) / draw.block);
    drawn.tiles = draw.listed + axis.modulus * axis.residue_tiles;
    drawn.places.resize(size_t(draw.tokens));
    for (int64_t place = 0; place < int64_t(draw.listed) * draw.block; ++place) {
        const int64_t token = int64_t(random() % uint64_t(draw.tokens));
        std::vector<int64_t>& places = drawn.places[size_t(token)];
        const bool is_hole = random() % 5 == 0 || (draw.once && !places.empty());
        axis.tokens.push_back(is_hole ? no_token : int32_t(token));
        if (!is_hole) places.push_back(place);
    }
    const size_t words = size_t(draw.block + 63) / 64;
    if (draw.once && draw.listed > 0) axis.away.resize(size_t(drawn.tiles - draw.listed) * words);
    for (int64_t token = 0; token < draw.tokens; ++token) {
        const int64_t nth = token / draw.modulus, tile = token % draw.modulus * axis.residue_tiles + nth / draw.block;
        std::vector<int64_t>& places = drawn.places[size_t(token)];
        const int64_t row = nth % draw.block;
        if (draw.once && !places.empty())
            axis.away[size_t(tile) * words + size_t(row / 64)] |= uint64_t(1) << (row % 64);
        else
            places.push_back((draw.listed + tile) * draw.block + row);
    }
    return drawn;
}

class DrawnLayout {
public:
    // orderly: pairs stand in the first of their places, so that tiles fill up; else in any.
    DrawnLayout(const Kernel& kernel, const DrawnAxis& queries, const DrawnAxis& keys, bool orderly, unsigned seed)
        : queries_(queries), keys_(keys), orderly_(orderly), random_(seed) {
        layout_.block_q = kernel.block_q, layout_.block_k = kernel.block_k;
        layout_.mask_words = (kernel.block_q * kernel.block_k + 63) / 64;
        layout_.queries = queries_.axis, layout_.keys = keys_.axis;
        layout_.by_query.rows = queries_.tiles, layout_.by_key.rows = keys_.tiles;
        layout_.live_queries.words = (kernel.block_q + 63) / 64;
        layout_.live_keys.words = (kernel.block_k + 63) / 64;
    }

    std::shared_ptr<const Layout> build(const Problem& p, const TokenRows& rows) {
        layout_.extent = {p.batch, p.heads_q, p.seq_q, p.seq_k, p.q_offset};
        std::map<std::vector<std::vector<int64_t>>, int32_t> head_kinds;  // by what their rows keep
        for (int64_t b = 0; b < p.batch; ++b)
            for (int64_t h = 0; h < p.heads_q; ++h) {
                std::vector<std::vector<int64_t>> kept(size_t(p.seq_q));
                for (int64_t i = 0; i < p.seq_q; ++i) rows.keys(b, h, i, kept[size_t(i)]);
                const auto [at, is_first] = head_kinds.emplace(kept, layout_.head_kinds);
                layout_.kind_of_head.push_back(at->second);
                if (is_first) add_head_kind(kept);
            }
        return std::make_shared<const Layout>(layout_);
    }

private:
    using Tiles = std::map<std::pair<int32_t, int32_t>, std::vector<uint64_t>>;  // bits of (query tile, key tile)

    int64_t choose(const std::vector<int64_t>& places) {
        return places[orderly_ ? 0 : size_t(random_()) % places.size()];
    }

    void add_head_kind(const std::vector<std::vector<int64_t>>& kept) {
        Tiles tiles;
        for (size_t i = 0; i < kept.size(); ++i)
            for (size_t n = 0; n < kept[i].size(); n += 2)
                for (int64_t key = kept[i][n]; key < kept[i][n + 1]; ++key) {
                    const int64_t q = choose(queries_.places[i]), k = choose(keys_.places[size_t(key)]);
                    std::vector<uint64_t>& bits =
                        tiles[{int32_t(q / layout_.block_q), int32_t(k / layout_.block_k)}];
                    bits.resize(size_t(layout_.mask_words));
                    const int64_t bit = q % layout_.block_q * layout_.block_k + k % layout_.block_k;
                    bits[size_t(bit / 64)] |= uint64_t(1) << (bit % 64);
                }
        add_lists(tiles);
        add_live(tiles);
        ++layout_.head_kinds;
    }

    int32_t mask_of(const std::vector<uint64_t>& bits) {
        int64_t kept = 0;
        for (const uint64_t word : bits) kept += __builtin_popcountll(word);
        if (kept == int64_t(layout_.block_q) * layout_.block_k) return full_block;
        const auto [at, is_first] = ids_.emplace(bits, layout_.num_masks);
        if (is_first) {
            layout_.masks.insert(layout_.masks.end(), bits.begin(), bits.end());
            ++layout_.num_masks;
        }
        return at->second;
    }

    void add_lists(const Tiles& tiles) {
        std::vector<std::map<int32_t, int32_t>> by_query(size_t(queries_.tiles)), by_key(size_t(keys_.tiles));
        for (const auto& [at, bits] : tiles)
            by_query[size_t(at.first)][at.second] = by_key[size_t(at.second)][at.first] = mask_of(bits);
        append(by_query, layout_.by_query);
        append(by_key, layout_.by_key);
    }

    static void append(const std::vector<std::map<int32_t, int32_t>>& rows, spattn::Lists& lists) {
        for (const auto& row : rows) {
            const int32_t begin = int32_t(lists.runs.size());
            for (const auto& [block, mask] : row) {
                Run* last = int32_t(lists.runs.size()) > begin ? &lists.runs.back() : nullptr;
                if (last && last->mask == mask && last->first + last->count == block)
                    ++last->count;
                else
                    lists.runs.push_back({block, 1, mask});
            }
            lists.slices.push_back({begin, int32_t(lists.runs.size())});
        }
    }

    using Alive = std::vector<bool>;  // of the tokens of a tile

    void add_live(const Tiles& tiles) {
        std::vector<Alive> rows(size_t(queries_.tiles), Alive(size_t(layout_.block_q)));
        std::vector<Alive> keys(size_t(keys_.tiles), Alive(size_t(layout_.block_k)));
        for (const auto& [at, bits] : tiles)
            for (int64_t bit = 0; bit < int64_t(layout_.block_q) * layout_.block_k; ++bit) {
                if (!(bits[size_t(bit / 64)] >> (bit % 64) & 1)) continue;
                rows[size_t(at.first)][size_t(bit / layout_.block_k)] = true;
                keys[size_t(at.second)][size_t(bit % layout_.block_k)] = true;
            }
        append(rows, layout_.live_queries);
        append(keys, layout_.live_keys);
    }

    static void append(const std::vector<Alive>& tiles, Live& live) {
        for (const Alive& alive : tiles) {
            if (std::find(alive.begin(), alive.end(), false) == alive.end()) {
                live.set_of.push_back(all_live);
                continue;
            }
            live.set_of.push_back(int32_t(live.sets.size()) / live.words);
            std::vector<uint64_t> set(size_t(live.words));
            for (size_t row = 0; row < alive.size(); ++row) set[row / 64] |= uint64_t(alive[row]) << (row % 64);
            live.sets.insert(live.sets.end(), set.begin(), set.end());
        }
    }

    DrawnAxis queries_, keys_;
    bool orderly_;
    std::mt19937 random_;
    Layout layout_;
    std::map<std::vector<uint64_t>, int32_t> ids_;
};

}  // namespace attention
