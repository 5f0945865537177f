// SPDX-License-Identifier: MIT
// Every backend's rows. plan/backends.cpp is the only file that names a backend.
#pragma once

#include <vector>

#include "plan/kernel.h"

namespace spattn {

inline void append(std::vector<Kernel>& all, KernelTable table) {
    all.insert(all.end(), table.rows, table.rows + table.count);
}

// Best first. The order never changes within a build.
const std::vector<Kernel>& all_kernels();

// The CPU of this process: lanes as given, clock and bandwidth as nominal figures. Costs compare rows with each other;
// they are no promise.
Machine this_machine(int lanes);

}  // namespace spattn
