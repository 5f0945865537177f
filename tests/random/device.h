// SPDX-License-Identifier: MIT
// Memory of the device that is tested.
#pragma once

#include <cstddef>

#include "sparseattn/sparseattn.h"

namespace random_test {

// Functions throw std::runtime_error; after that a GPU is of no use to this process.
struct Device {
    spattn_device id;
    void* (*allocate)(size_t bytes);  // of exactly that size, so that tools see who reads beyond it
    void (*release)(void* memory);
    void (*copy_in)(void* to, const void* from, size_t bytes);
    void (*copy_out)(void* to, const void* from, size_t bytes);
    void (*synchronize)();
};

Device cpu_device();
Device cuda_device();  // throws where there is none, or where this program is built without CUDA

}  // namespace random_test
