// SPDX-License-Identifier: MIT
#pragma once

#include "plan/cache.h"

namespace spattn::cpu {

// As CacheSteps has it. Lanes share the new tokens.
void append_to_cache(const CacheAppend& args);

}  // namespace spattn::cpu
