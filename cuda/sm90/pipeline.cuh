// SPDX-License-Identifier: MIT
// What producers and consumers of these kernels count by.
#pragma once

#include <cstdint>

namespace spattn::sm90 {

constexpr int32_t end_of_work = -1;  // for a count of blocks, after the last task

// A position in a ring of tiles and the parity of its turn.
template <int Size>
struct Cursor {
    int index = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        const bool wraps = index == Size - 1;
        index = wraps ? 0 : index + 1;
        phase ^= wraps;
    }
};

}  // namespace spattn::sm90
