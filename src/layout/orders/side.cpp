// SPDX-License-Identifier: MIT
#include "layout/orders/side.h"

#include <algorithm>
#include <bit>

#include "core/bit_square.h"
#include "core/cancel.h"

namespace spattn {

Side::Side(const Layout& plain, Owner owner)
    : plain_(plain),
      owner_(owner),
      own_(owner == Owner::queries ? plain.block_q : plain.block_k),
      other_(owner == Owner::queries ? plain.block_k : plain.block_q),
      words_(words_for(own_)) {
    std::vector<uint64_t> full(size_t(plain.mask_words));
    set_bits(full.data(), 0, int64_t(plain.block_q) * plain.block_k);
    add(full.data());
    for (int32_t mask = 0; mask < plain.num_masks; ++mask) add(&plain.masks[size_t(mask) * plain.mask_words]);
}

void Side::add(const uint64_t* bits) {
    check_cancelled();
    columns_.resize(columns_.size() + size_t(other_) * words_);
    uint64_t* columns = &columns_[columns_.size() - size_t(other_) * words_];
    const int32_t width = plain_.block_k;
    std::vector<int32_t> kept(own_);
    for (int32_t query = 0; query < plain_.block_q; query += 64)
        for (int32_t key = 0; key < width; key += 64) {
            uint64_t square[64] = {};
            const int32_t queries = std::min(64, plain_.block_q - query), keys = std::min(64, width - key);
            for (int32_t i = 0; i < queries; ++i) square[i] = get_bits(bits, int64_t(query + i) * width + key, keys);
            add_square(square, query, key, columns, kept);
        }
    kept_.insert(kept_.end(), kept.begin(), kept.end());
    alive_.push_back(count_alive(columns));
}

// 64 x 64 bits of a mask, a row a query.
void Side::add_square(uint64_t (&square)[64], int32_t query, int32_t key, uint64_t* columns,
                      std::vector<int32_t>& kept) const {
    const bool by_query = owner_ == Owner::queries;
    const int32_t own = by_query ? query : key, other = by_query ? key : query;
    const auto count_own = [&] {
        for (int32_t i = 0; i < std::min(64, own_ - own); ++i) kept[size_t(own + i)] += std::popcount(square[i]);
    };
    const auto copy_others = [&] {
        for (int32_t i = 0; i < std::min(64, other_ - other); ++i) columns[(other + i) * words_ + own / 64] = square[i];
    };
    by_query ? count_own() : copy_others();
    transpose_bits(square);
    by_query ? copy_others() : count_own();
}

bool Side::is_alive(const uint64_t* column) const {
    for (int32_t w = 0; w < words_; ++w)
        if (column[w]) return true;
    return false;
}

int32_t Side::count_alive(const uint64_t* columns) const {
    int32_t alive = 0;
    for (int32_t other = 0; other < other_; ++other) alive += is_alive(columns + other * words_);
    return alive;
}

void pack_columns(const uint64_t* columns, Owner owner, const Layout& layout, std::vector<uint64_t>& bits) {
    bits.assign(size_t(layout.mask_words), 0);
    const bool by_query = owner == Owner::queries;
    const int32_t own_block = by_query ? layout.block_q : layout.block_k, words = words_for(own_block);
    const int32_t other_block = by_query ? layout.block_k : layout.block_q;
    for (int32_t other = 0; other < other_block; other += 64)
        for (int32_t own = 0; own < own_block; own += 64) {
            uint64_t square[64] = {};
            const int32_t others = std::min(64, other_block - other), owns = std::min(64, own_block - own);
            for (int32_t i = 0; i < others; ++i) square[i] = columns[(other + i) * words + own / 64];
            if (by_query) transpose_bits(square);
            const int32_t query = by_query ? own : other, key = by_query ? other : own;
            for (int32_t i = 0; i < (by_query ? owns : others); ++i)
                put_bits(bits.data(), int64_t(query + i) * layout.block_k + key, by_query ? others : owns, square[i]);
        }
}

}  // namespace spattn
