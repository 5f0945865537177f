// SPDX-License-Identifier: MIT
#include "plan/backends.h"

namespace spattn {

namespace cpu {
void add_kernels(std::vector<Kernel>& all);
}

const std::vector<Kernel>& all_kernels() {
    static const std::vector<Kernel> all = [] {
        std::vector<Kernel> rows;
        cpu::add_kernels(rows);
        return rows;
    }();
    return all;
}

}  // namespace spattn
