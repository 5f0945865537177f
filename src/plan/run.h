// SPDX-License-Identifier: MIT
// Running a pass.
#pragma once

#include "plan/backends.h"
#include "plan/placed.h"

namespace spattn {

// Runs the pieces of a pass, one after the other, on the backend of their rows. The caller fills `args` but for what
// differs from piece to piece (layout, tasks, tokens, piece); the workspace is the whole of the pass's.
void run_pass(const Backend& backend, const PassPlan& pass, const PlacedPass& placed, ForwardArgs args);
void run_pass(const Backend& backend, const PassPlan& pass, const PlacedPass& placed, BackwardArgs args);

}  // namespace spattn
