// SPDX-License-Identifier: MIT
// Rows that are blocks and nothing else, and what two layouts come to for them.
#pragma once

#include "check.h"
#include "plan/kernel.h"

namespace spattn {

inline Kernel blocks_of(int32_t block, bool by_key) {
    Kernel kernel{};
    kernel.block_q = kernel.block_k = block;
    kernel.walks[0].owner = by_key ? Owner::keys : Owner::queries;
    kernel.num_walks = 1;
    return kernel;
}

inline void check_equal(const LayoutStats& got, const LayoutStats& want) {
    CHECK_EQ(got.pairs, want.pairs);
    CHECK_EQ(got.visited, want.visited);
    CHECK_EQ(got.worked, want.worked);
    CHECK_EQ(got.blocks, want.blocks);
    CHECK_EQ(got.masked, want.masked);
    CHECK_EQ(got.gathered, want.gathered);
    CHECK_EQ(got.rows, want.rows);
}

}  // namespace spattn
