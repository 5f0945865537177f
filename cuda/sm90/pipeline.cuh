// SPDX-License-Identifier: MIT
// What producers and consumers of these kernels count by.
#pragma once

#include <cstdint>

#include "layout/view.h"

namespace spattn::sm90 {

constexpr int32_t end_of_work = -1;  // for a count of blocks, after the last task

// What a producer tells of a task.
struct TaskMessage {
    int32_t batch, head, row, count, part, index;  // index: the task's; count: blocks, or end_of_work
};

__device__ __forceinline__ const uint32_t* mask_words(const LayoutView& layout, int mask) {
    return reinterpret_cast<const uint32_t*>(layout.masks + size_t(mask) * layout.mask_words);
}

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
