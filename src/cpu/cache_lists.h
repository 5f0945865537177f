// SPDX-License-Identifier: MIT
#pragma once

#include "plan/cache.h"

namespace spattn::cpu {

// As CacheSteps has it. Lanes share the queries.
void list_keys_of_cache(const ForwardArgs& args, const ListedKeys& to);

}  // namespace spattn::cpu
