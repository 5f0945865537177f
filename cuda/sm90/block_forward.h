// SPDX-License-Identifier: MIT
// What the host may know of the sm90 block forward kernels.
#pragma once

#include <cuda.h>

#include "plan/kernel.h"
#include "tile/fragment.h"

namespace spattn::sm90 {

// What a launch hands to the device.
struct BlockForwardParams {
    CUtensorMap q, k, v, out;  // [batch, seq, head, head_dim], boxes of one 64-column panel
    LayoutView layout;         // in device memory, as the tasks
    TasksView tasks;
    float* lse;                            // null where nobody asked
    int64_t lse_batch, lse_head, lse_row;  // strides, elements
    float* part_out;                       // [part][block_q][head_dim], normalised
    float* part_lse;                       // [part][block_q]
    unsigned* next_task;                   // tasks taken beyond the first of each block; null where there is but one
    int heads_q, group, seq_q;
    float scale, scale_log2;
};

// Bytes, for any block_q of these kernels.
size_t block_forward_workspace(const Problem& problem, const LayoutView& layout, const TasksView& tasks, int lanes);

// Null where the kernels can run the problem, else why not.
const char* block_forward_fits(const Problem& problem);

// True where the copy engine can read and write these operands.
bool block_forward_takes(const ForwardArgs& args);

// BlockQ: 128.
template <int BlockQ>
void block_forward(const ForwardArgs& args);
template <int BlockQ>
void prepare_block_forward(int device);
template <int BlockQ>
Cost block_forward_cost(const Problem& problem, const LayoutStats& stats, const Machine& machine);

}  // namespace spattn::sm90
