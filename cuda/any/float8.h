// SPDX-License-Identifier: MIT
#pragma once

#include "plan/float8.h"

namespace spattn::any {

// As Backend has them, on the call's stream.
Float8Steps float8_steps();

}  // namespace spattn::any
