// SPDX-License-Identifier: MIT
// The rows of bf16 on panels, with what the plan asks of them. An arch includes its tiles.h and product.h, then this.
#pragma once

#include "cpu/generic/rows.h"
#include "cpu/generic/panel_forward.h"
#include "cpu/generic/panel_backward.h"
#include "cpu/generic/panel_cost.h"
#include "cpu/generic/gather_forward_panels.h"
#include "cpu/generic/gather_backward_panels.h"

#define SPATTN_CPU_PANELS(arch, bq, bk)                                                                      \
    SPATTN_CPU_BLOCK_FORWARD(arch, bf16, bq, bk, (panel_cost<bq, bk, Pass::forward>),                        \
                             (workspace_of<panel_forward_workspace<bq, bk>>), (panel_forward<bq, bk>)),      \
    SPATTN_CPU_BLOCK_BACKWARD(arch, bf16, bq, bk, (panel_cost<bq, bk, Pass::backward>),                      \
                              (workspace_of<panel_backward_workspace<bq, bk>>), (panel_backward<bq, bk>), 1)
#define SPATTN_CPU_GATHER_PANELS(arch) \
    SPATTN_CPU_GATHER_ROWS(arch, Bf16, bf16, heads, PanelsForward, PanelsBackward, gather_panel_cost, true)
