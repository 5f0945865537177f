// SPDX-License-Identifier: MIT
#include "plan/backends.h"

namespace spattn {

Machine this_machine(int lanes) {
    // Nominal on purpose: the clock a process would read changes from run to run, and the same problem should get the same
    // plan each time.
    constexpr double clock = 3.0;       // GHz
    constexpr double bandwidth = 20.0;  // GB/s, two channels of ordinary memory
    return {"cpu", lanes, clock, bandwidth};
}

}  // namespace spattn
