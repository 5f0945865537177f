// SPDX-License-Identifier: MIT
// Rows of lists that calls make on the device.
#pragma once

#include "layout/view.h"

namespace spattn::any {

// One row, by a warp. find(entry, act) calls act(run) for each run that an entry comes to; these go to `runs`, in the
// order of entries. Returns how many there are; blocks: and how many blocks they have.
template <class Find>
__device__ __forceinline__ int make_row(int64_t entries, Run* runs, int& blocks, Find find) {
    const int lane = int(threadIdx.x) % 32;
    int made = 0, own_blocks = 0;
    for (int64_t first = 0; first < entries; first += 32) {
        const bool is_there = first + lane < entries;
        int own = 0;
        if (is_there) find(first + lane, [&](const Run& run) { ++own, own_blocks += run.count; });
        int end = own;
        for (int n = 1; n < 32; n *= 2) {
            const int more = __shfl_up_sync(~0u, end, n);
            if (lane >= n) end += more;
        }
        Run* to = runs + made + end - own;
        if (is_there) find(first + lane, [&](const Run& run) { *to++ = run; });
        made += __shfl_sync(~0u, end, 31);
    }
    for (int n = 16; n; n /= 2) own_blocks += __shfl_xor_sync(~0u, own_blocks, n);
    blocks = own_blocks;
    return made;
}

}  // namespace spattn::any
