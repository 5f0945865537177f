// SPDX-License-Identifier: MIT
#pragma once

#include "plan/call_lists.h"

namespace spattn::any {

// As Backend has them. Makes the layout on the call's stream.
void make_call_layout(const CallArgs& args, const CallLayout& to);
void prepare_call_layout(int32_t device);

}  // namespace spattn::any
