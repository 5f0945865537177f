// SPDX-License-Identifier: MIT
// The rows of a 16-bit dtype on panels, with what the plan asks of them. An arch includes its product.h, then this.
#pragma once

#include "cpu/generic/rows.h"
#include "cpu/generic/panel_forward.h"
#include "cpu/generic/panel_backward.h"
#include "cpu/generic/panel_cost.h"
#include "cpu/generic/gather_forward_panels.h"
#include "cpu/generic/gather_backward_panels.h"

namespace spattn::cpu {
namespace {

constexpr SchedulePolicy in_turns{.alike = most_in_turn};

}  // namespace
}  // namespace spattn::cpu

#define SPATTN_CPU_PANELS(arch, dtype, bq, bk)                                                          \
    SPATTN_CPU_BLOCK_FORWARD(arch, dtype, bq, bk, (panel_cost<bq, bk, Pass::forward>),                  \
                             (workspace_of<panel_forward_workspace<bq, bk>>), (panel_forward<bq, bk>), in_turns,    \
                             false),                                                                    \
        SPATTN_CPU_BLOCK_BACKWARD(arch, dtype, bq, bk, (panel_cost<bq, bk, Pass::backward>),            \
                                  (workspace_of<panel_backward_workspace<bq, bk>>), (panel_backward<bq, bk>), 1)
#define SPATTN_CPU_GATHER_PANELS(arch, dtype) \
    SPATTN_CPU_GATHER_ROWS(arch, Element, dtype, heads, PanelsForward, PanelsBackward, gather_panel_cost, true)
