// SPDX-License-Identifier: MIT
// The counter that persistent grids take tasks from. A grid of one warp clears it and lets the grid that counts begin
// meanwhile; that one waits where it takes the first task (NextTask::ask).
#pragma once

#include "ptx/grid.cuh"
#include "runtime/launch.h"

namespace spattn::sm90 {

constexpr runtime::Shape counter_shape{1, 32, 0};

static __global__ void clear_counter_kernel(unsigned* counter) {
    ptx::let_next_grid_begin();
    if (threadIdx.x == 0) *counter = 0;
}

}  // namespace spattn::sm90
