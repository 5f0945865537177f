// SPDX-License-Identifier: MIT
// The CPU backend: every arch folder's tables, in the order of archs.inc.
#include "plan/backends.h"

namespace spattn::cpu {

#define SPATTN_CPU_ARCH(name, ...) \
    namespace name {               \
    KernelTable kernels();         \
    }
#define SPATTN_CPU_F64(name)   \
    namespace name {           \
    KernelTable kernels_f64(); \
    }
#include "cpu/archs.inc"
#undef SPATTN_CPU_ARCH
#undef SPATTN_CPU_F64

void add_kernels(std::vector<Kernel>& all) {
#define SPATTN_CPU_ARCH(name, ...) append(all, name::kernels());
#define SPATTN_CPU_F64(name) append(all, name::kernels_f64());
#include "cpu/archs.inc"
#undef SPATTN_CPU_ARCH
#undef SPATTN_CPU_F64
}

}  // namespace spattn::cpu
