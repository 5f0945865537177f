// SPDX-License-Identifier: MIT
// What producers and consumers of these kernels count by.
#pragma once

#include <cstdint>

#include "layout/view.h"
#include "ptx/global.cuh"
#include "ptx/grid.cuh"
#include "tile/dtype.cuh"
#include "tile/fragment.h"

namespace spattn::sm90 {

// Tiles of 16-bit elements in swizzled panels of 64 columns, and who works on them: a warp has 16 rows of a product, a
// warpgroup 64.
template <Dtype D, int HeadDim, int HeadDimV>
struct TileConfig {
    static constexpr Dtype dtype = D;
    using Element = typename tile::Element<D>::type;
    static constexpr int head_dim = HeadDim, head_dim_v = HeadDimV;
    static constexpr int panel_columns = 64, row_bytes = 2 * panel_columns;  // of a panel
    static constexpr int panels = head_dim / panel_columns, v_panels = head_dim_v / panel_columns;
    // Panels of q and k have twice the columns where they are multiplied as float8.
    static constexpr bool multiplies_float8 = false;
    static constexpr int factor_blocks = 1;  // of keys multiplied so
    // CTAs that share a tile, each of which has some of the columns (pair.cuh).
    static constexpr int tile_ctas = 1;
    static constexpr bool in_pair = false;
    static constexpr int key_panel_columns = panel_columns, key_panels = panels;
    static constexpr int warpgroup_rows = tile::fragment_rows, warpgroup_bytes = warpgroup_rows * row_bytes;
    static constexpr int warp_rows = 16, warp_bytes = warp_rows * row_bytes;
    static_assert(sizeof(Element) == 2, "tiles are of 16-bit elements");
    static_assert(head_dim % panel_columns == 0 && head_dim_v % panel_columns == 0, "columns come in whole panels");
};

// The registers that warpgroups of a CTA may share out by setmaxnreg, as a sum of theirs a thread: what the launch
// gives, where a thread has a multiple of 8. One that asks for more than others gave back waits for ever.
constexpr int launch_registers(int threads, int ctas) { return 65536 / (threads * ctas) / 8 * 8 * (threads / 128); }

constexpr int32_t end_of_work = -1;  // for a count of blocks, after the last task

// What a producer tells of a task.
struct TaskMessage {
    int32_t batch, head, row, count, part, index;  // index: the task's; count: blocks, or end_of_work
};

struct ForwardMessage : TaskMessage {
    int32_t by_rows;    // out leaves row by row, not as boxes
    QuerySpan queries;  // where tokens are consecutive
};

// The task that a producer will have next. It asks when it begins to load the last block of the one at hand: so early
// that the round trip is not waited for, and so late that whoever is done first takes the longest that is left. (Asked
// for a task ahead, second tasks are dealt out in the order of the first: causal_4k backward with 64 heads on 8 took a
// fourth longer.) Tasks of short blocks feel where this stands among the producer's instructions: 7 % at head_dim 64.
struct NextTask {
    int due;  // blocks of the task at hand
    unsigned taken = 0;

    __device__ __forceinline__ explicit NextTask(int blocks) : due(blocks) {}
    __device__ __forceinline__ void begin_block(unsigned* counter, bool is_leader) {
        if (--due == 0) ask(counter, is_leader);
    }
    __device__ __forceinline__ void ask(unsigned* counter, bool is_leader) {
        if (!counter || !is_leader) return;
        ptx::wait_for_grid_ahead();  // which may be clearing the counter
        taken = ptx::count(counter);
    }
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
