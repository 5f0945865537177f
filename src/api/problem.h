// SPDX-License-Identifier: MIT
// Reading spattn_problem: of plans, and of calls on a cache that have none.
#pragma once

#include "plan/kernel.h"
#include "sparseattn/sparseattn.h"

namespace spattn {

// Checks every field and resolves defaults. Lists of a call are the pattern's to know.
Problem read_problem(const spattn_problem& given);

}  // namespace spattn
