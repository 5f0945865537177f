// SPDX-License-Identifier: MIT
#include <cstdlib>
#include <cstring>
#include <new>

#include "device.h"

namespace random_test {

Device cpu_device() {
    const auto allocate = [](size_t bytes) {
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, bytes)) throw std::bad_alloc();
        return memory;
    };
    const auto copy = [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); };
    return {{SPATTN_CPU, 0}, allocate, [](void* memory) { std::free(memory); }, copy, copy, [] {}};
}

}  // namespace random_test
