// SPDX-License-Identifier: MIT
// Running a pass.
#pragma once

#include "plan/image.h"

namespace spattn {

// The pieces of a pass, one after the other. Of `args` all is given but what differs from piece to piece; the workspace
// is the whole of it.
void run_pass(const PassPlan& pass, const PassImage& image, ForwardArgs args);
void run_pass(const PassPlan& pass, const PassImage& image, BackwardArgs args);

}  // namespace spattn
