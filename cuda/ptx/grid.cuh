// SPDX-License-Identifier: MIT
// Grids that begin before the one ahead in their stream has ended, where the launch allows it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
#pragma once

namespace spattn::ptx {

// The next grid may begin once all CTAs of this one have said so.
__device__ __forceinline__ void let_next_grid_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Until the grid ahead has ended, and what it wrote is there; at once where this one began after that.
__device__ __forceinline__ void wait_for_grid_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace spattn::ptx
