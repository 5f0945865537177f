// SPDX-License-Identifier: MIT
#pragma once

#include "layout/layout.h"

namespace spattn {

// Fills the live sets of both directions from lists and masks.
void build_live(Layout& layout);

}  // namespace spattn
