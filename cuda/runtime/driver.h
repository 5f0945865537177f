// SPDX-License-Identifier: MIT
// Functions of the driver itself, which may be absent where the library is loaded: no link, a look-up.
#pragma once

#include <cudaTypedefs.h>

#include "runtime/check.h"

namespace spattn::runtime {

// version: of CUDA that brought the function as Function has it, 1000 major + 10 minor.
template <class Function>
Function driver_function(const char* name, unsigned version) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) fail(SPATTN_E_DRIVER_TOO_OLD, "", text("driver without ", name));
    return reinterpret_cast<Function>(function);
}

}  // namespace spattn::runtime
