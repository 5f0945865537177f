// SPDX-License-Identifier: MIT
// The rows of bf16 on panels, with what the plan asks of them. An arch includes its tiles.h and product.h, then this.
#pragma once

#include "cpu/generic/rows.h"
#include "cpu/generic/panel_forward.h"
#include "cpu/generic/panel_backward.h"
#include "cpu/generic/panel_cost.h"

#define SPATTN_CPU_PANEL_FORWARD(arch, bq, bk)                       \
    {.name = #arch "_block_forward_bf16_" #bq "x" #bk,               \
     .device = SPATTN_CPU,                                           \
     .pass = Pass::forward,                                          \
     .dtype = Dtype::bf16,                                           \
     .block_q = bq,                                                  \
     .block_k = bk,                                                  \
     .mask_words = bq * bk / 64,                                     \
     .permute = permute_to_key_major<bq, bk>,                        \
     .walks = {{Owner::queries, {}}},                                \
     .num_walks = 1,                                                 \
     .runs_here = runs_here,                                         \
     .fits = block_fits,                                             \
     .cost = panel_cost<bq, bk, Pass::forward>,                      \
     .workspace = workspace_of<panel_forward_workspace<bq, bk>>,     \
     .forward = panel_forward<bq, bk>,                               \
     .orders = true,                                                 \
     .max_logits = true,                                             \
     .carries = forward_carries}
#define SPATTN_CPU_PANEL_BACKWARD(arch, bq, bk)                      \
    {.name = #arch "_block_backward_bf16_" #bq "x" #bk,              \
     .device = SPATTN_CPU,                                           \
     .pass = Pass::backward,                                         \
     .dtype = Dtype::bf16,                                           \
     .block_q = bq,                                                  \
     .block_k = bk,                                                  \
     .mask_words = bq * bk / 64,                                     \
     .walks = {{Owner::keys, equal_shares}},                         \
     .num_walks = 1,                                                 \
     .runs_here = runs_here,                                         \
     .fits = block_fits,                                             \
     .cost = panel_cost<bq, bk, Pass::backward>,                     \
     .workspace = workspace_of<panel_backward_workspace<bq, bk>>,    \
     .backward = panel_backward<bq, bk>,                             \
     .orders = true,                                                 \
     .carries = backward_carries}
#define SPATTN_CPU_PANELS(arch, bq, bk) SPATTN_CPU_PANEL_FORWARD(arch, bq, bk), SPATTN_CPU_PANEL_BACKWARD(arch, bq, bk)
