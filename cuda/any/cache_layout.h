// SPDX-License-Identifier: MIT
#pragma once

#include "plan/cache.h"

namespace spattn::any {

// As Backend has them, on the call's stream.
CacheSteps cache_steps();

}  // namespace spattn::any
