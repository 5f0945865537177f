// SPDX-License-Identifier: MIT
// What the house knows of its backends. plan/backends.cpp is the only file that names one.
#pragma once

#include <vector>

#include "plan/cache.h"
#include "plan/call_lists.h"
#include "plan/exchange.h"
#include "plan/float8.h"
#include "plan/kernel.h"

namespace spattn {

inline void append(std::vector<Kernel>& all, KernelTable table) {
    all.insert(all.end(), table.rows, table.rows + table.count);
}

// Best first. The order never changes within a build.
const std::vector<Kernel>& all_kernels();

// A kind of device: its memory, where plans keep their lists. index is the device's number among its kind.
struct Backend {
    const char* name;
    int32_t device;  // spattn_device_type
    int (*count)();  // devices that this machine has and this build has kernels for
    // Aligned to 256 bytes. Fails with a typed error, never returns null.
    void* (*allocate)(int index, size_t bytes, void* stream);
    void (*release)(int index, void* memory, size_t bytes, void* stream);
    // Copies from host memory and returns when `from` may be reused. Fails with a typed error on a capturing stream.
    void (*copy_in)(int index, void* to, const void* from, size_t bytes, void* stream);
    void (*clear)(int index, void* memory, size_t bytes, void* stream);  // zeros, in the stream's order
    Machine (*machine)(int index, int lanes);  // lanes: threads of a CPU context
    // Fills what `to` points to from the call's lists; args hold the plan's layout and tasks.
    void (*make_call_layout)(const CallArgs& args, const CallLayout& to);
    void (*prepare_call_layout)(int index);  // as Kernel::prepare
    CacheSteps cache;
    Float8Steps float8;
    ExchangeSteps exchange;
};

// The preferred first: a context without a wish takes the first backend that has a device.
const std::vector<Backend>& all_backends();

// The CPU of this process: lanes as given, clock and bandwidth as nominal figures. Costs compare rows with each other;
// they are no promise.
Machine this_machine(int lanes);

}  // namespace spattn
