// SPDX-License-Identifier: MIT
#pragma once

#include "plan/cache.h"

namespace spattn::any {

// As CacheSteps has them, on the call's stream.
void list_keys_of_cache(const ForwardArgs& args, const ListedKeys& to);
void prepare_cache_lists(int32_t device);

}  // namespace spattn::any
