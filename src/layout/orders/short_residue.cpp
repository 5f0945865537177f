// SPDX-License-Identifier: MIT
// All tokens are away from home, in listed tiles. Classes stand in the order of their keys' residues, and each has its
// own places in a tile, some of which may be without a token:
//
//     modulus 4, 11 tokens, blocks of 8       tile 0: 0 4 8 | 1 5 9 - -      tile 1: 2 6 10 | 3 7 - - -
//     causal                                          x . .   . . .                  x . .    . .
//                                                     x x .   . . .                  x x .    . .
//                                                     x x x   . . .                  x x x    . .
//                                                     . . .   x . .                  . . .    x .
#include "layout/orders/short_residue.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "core/cancel.h"
#include "core/math.h"
#include "layout/head_kinds.h"
#include "layout/live.h"
#include "layout/orders/hot_axis.h"
#include "layout/orders/residue.h"
#include "layout/tables.h"

namespace spattn {
namespace {

// Where the classes of an axis stand.
struct ClassAxis {
    int64_t seq, modulus, shift;  // class c has the tokens of residue (c + shift) mod modulus
    int32_t block, of_tile;       // classes

    int64_t length() const { return ceil_div(seq, modulus); }  // of the longest
    int64_t residue(int64_t c) const { return floor_mod(c + shift, modulus); }
    int32_t tiles() const { return int32_t(ceil_div(modulus, int64_t(of_tile))); }
    int64_t place(int64_t c) const { return c % of_tile * length(); }  // of its first token, in its tile

    Axis make() const {
        std::vector<int32_t> tokens(size_t(tiles()) * size_t(block), no_token);
        for (int64_t c = 0; c < modulus; ++c) {
            check_cancelled();
            int32_t* const at = &tokens[size_t(c / of_tile * block + place(c))];
            for (int64_t i = 0, token = residue(c); token < seq; ++i, token += modulus) at[i] = int32_t(token);
        }
        return make_hot_axis(std::move(tokens), block, int32_t(ceil_div(seq, int64_t(block))));
    }
};

class ShortClasses {
public:
    ShortClasses(const Patterns& patterns, const Extent& extent, const ClassesOfTile& classes, int32_t block_q,
                 int32_t block_k)
        : patterns_(patterns), modulus_(int64_t(patterns.size())),
          queries_{extent.seq_q, modulus_, -extent.q_offset, block_q, classes.queries},
          keys_{extent.seq_k, modulus_, 0, block_k, classes.keys}, words_(words_for(keys_.length())), masks_(whole_) {
        whole_.extent = extent;
        whole_.block_q = block_q, whole_.block_k = block_k;
        whole_.mask_words = words_for(int64_t(block_q) * block_k);
        whole_.queries = queries_.make(), whole_.keys = keys_.make();
    }

    Layout build(const Pattern& pattern) {
        const std::vector<Plane> planes = find_head_kinds(pattern, whole_);
        whole_.by_query.rows = queries_.tiles() + whole_.queries.residue_tiles;
        SliceTable slices(whole_.by_query);
        for (const Plane& plane : planes) {
            for (int32_t tile = 0; tile < queries_.tiles(); ++tile) {
                add_tile(plane, tile, slices);
                whole_.by_query.slices.push_back(slices.finish());
            }
            std::vector<Slice>& all = whole_.by_query.slices;
            all.insert(all.end(), size_t(whole_.queries.residue_tiles), slices.finish());
        }
        whole_.by_key = transpose_lists(whole_.by_query, whole_.head_kinds, keys_.tiles() + whole_.keys.residue_tiles);
        build_live(whole_);
        return std::move(whole_);
    }

private:
    // The blocks of a tile of queries: those of its classes and no others.
    void add_tile(const Plane& plane, int32_t tile, SliceTable& slices) {
        const int64_t first = int64_t(tile) * queries_.of_tile, end = std::min(first + queries_.of_tile, modulus_);
        for (int64_t other = first / keys_.of_tile; other * keys_.of_tile < end; ++other) {
            bits_.assign(size_t(whole_.mask_words), 0);
            const int64_t last = std::min((other + 1) * keys_.of_tile, end);
            for (int64_t c = std::max(other * keys_.of_tile, first); c < last; ++c) {
                check_cancelled();
                add_class(plane, c);
            }
            const int32_t mask = masks_.intern(bits_.data());
            if (mask != absent_block) slices.add({int32_t(other), 1, mask});
        }
    }

    void add_class(const Plane& plane, int64_t c) {
        const std::vector<uint64_t>& kept = find_kept(plane, c);
        const int64_t row = queries_.place(c), key = keys_.place(c);
        for (int64_t i = 0; i < int64_t(kept.size()) / words_; ++i)
            for (int32_t w = 0; w < words_; ++w) {
                const int count = int(std::min<int64_t>(64, keys_.length() - 64 * w));
                put_bits(bits_.data(), (row + i) * whole_.block_k + key + 64 * w, count, kept[size_t(i * words_ + w)]);
            }
    }

    // The pairs of a class, [its queries][words_]. Most classes are alike.
    const std::vector<uint64_t>& find_kept(const Plane& plane, int64_t c) {
        const Pattern& pattern = *patterns_[size_t(c)];
        const Extent& e = whole_.extent;
        const int64_t residue = queries_.residue(c);
        const Plane of_class{{e.batch, e.heads, members(e.seq_q, modulus_, residue), members(e.seq_k, modulus_, c),
                              floor_div(residue + e.q_offset, modulus_)},
                             plane.batch,
                             plane.head};
        const Extent& own = of_class.extent;
        const auto [place, is_first] = known_.try_emplace(
            {pattern.identity(), own.seq_q, own.seq_k, own.q_offset, plane.batch, plane.head}, std::vector<uint64_t>());
        if (is_first && own.seq_k > 0) {
            place->second.resize(size_t(own.seq_q * words_));
            for (int64_t i = 0; i < own.seq_q; ++i) {
                uint64_t* const row = &place->second[size_t(i * words_)];
                intervals_.clear();
                pattern.keys(of_class, i, {0, own.seq_k}, intervals_);
                for (const Interval& keys : intervals_) set_bits(row, keys.begin, keys.end);
            }
        }
        return place->second;
    }

    const Patterns& patterns_;  // of the residues of keys
    const int64_t modulus_;
    const ClassAxis queries_, keys_;
    const int32_t words_;  // of the keys of a class
    Layout whole_;
    MaskTable masks_;
    std::vector<uint64_t> bits_;
    Intervals intervals_;
    std::map<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t, int64_t>, std::vector<uint64_t>> known_;
};

}  // namespace

std::optional<ClassesOfTile> find_classes_of_tile(const Extent& extent, int32_t modulus, int32_t block_q,
                                                  int32_t block_k) {
    const int64_t classes = modulus;
    const int64_t length_q = ceil_div(extent.seq_q, classes), length_k = ceil_div(extent.seq_k, classes);
    if (length_q == 0 || length_k == 0 || 2 * length_q > block_q || 2 * length_k > block_k) return {};
    int64_t queries = block_q / length_q, keys = block_k / length_k;
    (queries > keys ? queries : keys) -= std::max(queries, keys) % std::min(queries, keys);
    return ClassesOfTile{int32_t(queries), int32_t(keys)};
}

std::optional<Layout> build_short_residue_layout(const Pattern& pattern, const Extent& extent, int32_t modulus,
                                                 const ClassesOfTile& classes, int32_t block_q, int32_t block_k) {
    pattern.check(extent);
    const Patterns patterns = find_residue_patterns(pattern, modulus);
    if (patterns.empty()) return {};
    return ShortClasses(patterns, extent, classes, block_q, block_k).build(pattern);
}

}  // namespace spattn
