// SPDX-License-Identifier: MIT
// The CPU backend: every arch folder's table, in the order of archs.inc.
#include "plan/backends.h"

namespace spattn::cpu {

#define SPATTN_CPU_ARCH(name, ...) \
    namespace name {               \
    KernelTable kernels();         \
    }
#include "cpu/archs.inc"
#undef SPATTN_CPU_ARCH

void add_kernels(std::vector<Kernel>& all) {
#define SPATTN_CPU_ARCH(name, ...) append(all, name::kernels());
#include "cpu/archs.inc"
#undef SPATTN_CPU_ARCH
}

}  // namespace spattn::cpu
