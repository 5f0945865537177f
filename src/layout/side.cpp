// SPDX-License-Identifier: MIT
#include "layout/side.h"

#include <bit>

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

// Walks the bits that are set: the masks this is for are nearly empty.
void Side::add(const uint64_t* bits) {
    columns_.resize(columns_.size() + size_t(other_) * words_);
    kept_.resize(kept_.size() + size_t(own_));
    uint64_t* columns = &columns_[columns_.size() - size_t(other_) * words_];
    int32_t* kept = &kept_[kept_.size() - size_t(own_)];
    for (int32_t w = 0; w < plain_.mask_words; ++w)
        for (uint64_t left = bits[w]; left; left &= left - 1) {
            const int32_t bit = 64 * w + std::countr_zero(left);
            const int32_t query = bit / plain_.block_k, key = bit % plain_.block_k;
            const int32_t own = owner_ == Owner::queries ? query : key, other = owner_ == Owner::queries ? key : query;
            columns[other * words_ + own / 64] |= uint64_t(1) << (own % 64);
            ++kept[own];
        }
    alive_.push_back(count_alive(columns));
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

void Side::pack(const uint64_t* columns, std::vector<uint64_t>& bits) const {
    bits.assign(size_t(plain_.mask_words), 0);
    for (int32_t other = 0; other < other_; ++other)
        for (int32_t w = 0; w < words_; ++w)
            for (uint64_t left = columns[other * words_ + w]; left; left &= left - 1) {
                const int64_t own = 64 * w + std::countr_zero(left);
                const int64_t bit =
                    owner_ == Owner::queries ? own * plain_.block_k + other : other * plain_.block_k + own;
                bits[size_t(bit / 64)] |= uint64_t(1) << (bit % 64);
            }
}

}  // namespace spattn
