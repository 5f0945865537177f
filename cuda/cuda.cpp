// SPDX-License-Identifier: MIT
// The CUDA backend: its devices, and the rows of every folder in archs.inc.
#include "any/cache_layout.h"
#include "any/call_layout.h"
#include "any/exchange.h"
#include "any/float8.h"
#include "plan/backends.h"
#include "runtime/device.h"

namespace spattn {

#define SPATTN_CUDA_ARCH(folder, ...) \
    namespace folder {                \
    KernelTable kernels();            \
    }
#include "archs.inc"
#undef SPATTN_CUDA_ARCH

namespace cuda {

void add_kernels(std::vector<Kernel>& all) {
#define SPATTN_CUDA_ARCH(folder, ...) append(all, folder::kernels());
#include "archs.inc"
#undef SPATTN_CUDA_ARCH
}

Backend backend() {
    return {"cuda", SPATTN_CUDA, runtime::count_devices, runtime::allocate, runtime::release, runtime::copy_in,
            runtime::clear, runtime::make_machine, any::make_call_layout, any::prepare_call_layout,
            any::cache_steps(), any::float8_steps(), any::exchange_steps()};
}

}  // namespace cuda
}  // namespace spattn
