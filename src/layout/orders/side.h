// SPDX-License-Identifier: MIT
// A layout seen from the axis that owns its lists (the queries forward, the keys backward), so that the same code
// builds lists for both passes: `own` is that axis, `other` the one whose blocks are listed, and a mask becomes
// columns, which say for each other token of the block which own tokens keep a pair with it.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"
#include "layout/tables.h"

namespace spattn {

class Side {
public:
    Side(const Layout& plain, Owner owner);

    const Lists& lists() const { return owner_ == Owner::queries ? plain_.by_query : plain_.by_key; }
    int32_t own_block() const { return own_; }
    int32_t other_block() const { return other_; }
    int64_t own_tokens() const { return owner_ == Owner::queries ? plain_.extent.seq_q : plain_.extent.seq_k; }
    int32_t words() const { return words_; }  // of a column: a bit for each own token

    // The columns of a mask, or of a full block: [other_block][words].
    const uint64_t* columns(int32_t mask) const {
        return &columns_[size_t(mask - full_block) * size_t(other_) * words_];
    }
    // Whether a column has a bit, and how many columns do.
    bool is_alive(const uint64_t* column) const;
    int32_t count_alive(const uint64_t* columns) const;
    int32_t alive(int32_t mask) const { return alive_[size_t(mask - full_block)]; }
    // How many pairs of a mask each own token keeps, [own_block].
    const int32_t* kept(int32_t mask) const { return &kept_[size_t(mask - full_block) * own_]; }

private:
    void add(const uint64_t* bits);
    void add_square(uint64_t (&square)[64], int32_t query, int32_t key, uint64_t* columns,
                    std::vector<int32_t>& kept) const;

    const Layout& plain_;
    Owner owner_;
    int32_t own_, other_, words_;
    std::vector<uint64_t> columns_;
    std::vector<int32_t> alive_, kept_;
};

// Turns columns into the bits of a mask, as a layout of these blocks holds them.
void pack_columns(const uint64_t* columns, Owner owner, const Layout& layout, std::vector<uint64_t>& bits);

}  // namespace spattn
