// SPDX-License-Identifier: MIT
#include "plan/backends.h"

#include <algorithm>

namespace spattn {

Machine this_machine(int lanes) {
    // Nominal on purpose: the clock a process would read changes from run to run, and the same problem should get the
    // same plan each time.
    constexpr double clock = 3.0;       // GHz
    const double bandwidth = std::min(12.0 * lanes, 96.0);  // GB/s: what a core can ask for, then what a socket has
    return {"cpu", lanes, clock, bandwidth};
}

}  // namespace spattn
