// SPDX-License-Identifier: MIT
// Plain CUDA for every dtype, head_dim, stride and block: the floor under the tuned kernels, and the truth on the
// device.
#pragma once

#include "plan/kernel.h"

namespace spattn::any {

// Which bit of a mask is (row, key).
enum class MaskOrder { rows, fragments };

// A workspace starts with `head` bytes for the row's own use; partial results lie behind: out
// [part][block_q][head_dim_v],
// normalised, then lse [part][block_q].
constexpr size_t workspace_head = 256;
size_t block_forward_workspace(const Problem& problem, const LayoutView& layout, const TasksView& tasks, int lanes);

template <class T, MaskOrder Order>
void block_forward(const ForwardArgs& args);
template <class T, MaskOrder Order>
void prepare_block_forward(int device);

// Puts the parts of each join together. Nothing to do, nothing launched, where there are none.
template <class T>
void combine(const ForwardArgs& args);
template <class T>
void prepare_combine(int device);

const char* block_forward_fits(const Problem& problem);
Cost block_forward_cost(const Problem& problem, const LayoutStats& stats, const Machine& machine);

}  // namespace spattn::any
