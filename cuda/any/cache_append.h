// SPDX-License-Identifier: MIT
#pragma once

#include "plan/cache.h"

namespace spattn::any {

// As CacheSteps has them, on the call's stream.
void append_to_cache(const CacheAppend& args);
void prepare_cache_append(int32_t device);

}  // namespace spattn::any
