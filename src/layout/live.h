// SPDX-License-Identifier: MIT
#pragma once

#include "layout/layout.h"

namespace spattn {

// Fills live_queries and live_keys from the lists and masks.
void build_live(Layout& layout);

}  // namespace spattn
