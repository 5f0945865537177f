// SPDX-License-Identifier: MIT
// The rows of bf16 on panels, with what the plan asks of them. An arch includes its tiles.h and product.h, then this.
#pragma once

#include "cpu/generic/rows.h"
#include "cpu/generic/panel_forward.h"
#include "cpu/generic/panel_backward.h"
#include "cpu/generic/panel_cost.h"

#define SPATTN_CPU_PANELS(arch, bq, bk)                                                                      \
    SPATTN_CPU_BLOCK_FORWARD(arch, bf16, bq, bk, (panel_cost<bq, bk, Pass::forward>),                        \
                             (workspace_of<panel_forward_workspace<bq, bk>>), (panel_forward<bq, bk>)),      \
    SPATTN_CPU_BLOCK_BACKWARD(arch, bf16, bq, bk, (panel_cost<bq, bk, Pass::backward>),                      \
                              (workspace_of<panel_backward_workspace<bq, bk>>), (panel_backward<bq, bk>), 1)
