// SPDX-License-Identifier: MIT
// cuda/runtime/launch.h for the emulator.
#pragma once

#include <memory>
#include <tuple>

#include "emulator/launch.h"
#include "runtime/check.h"
#include "runtime/device.h"

namespace spattn::runtime {

template <class... Params>
void prepare(void (*kernel)(Params...), size_t shared_bytes) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               int(shared_bytes)),
          "cudaFuncSetAttribute");
}

struct Shape {
    unsigned blocks, threads;
    size_t shared_bytes;
    unsigned cluster = 1;
};

template <class... Params>
void launch(void (*kernel)(Params...), const Shape& shape, void* stream,
            const std::type_identity_t<Params>&... params) {
    const auto values = std::make_shared<std::tuple<std::remove_const_t<Params>...>>(params...);
    const emulator::Grid grid{{shape.blocks, 1, 1}, {shape.threads, 1, 1}, shape.shared_bytes, shape.cluster};
    check(emulator::launch(grid, static_cast<cudaStream_t>(stream), [=] { std::apply(kernel, *values); }),
          "kernel launch");
}

template <class... Params>
void launch_early(void (*kernel)(Params...), const Shape& shape, void* stream,
                  const std::type_identity_t<Params>&... params) {
    launch(kernel, shape, stream, params...);
}

inline void clear(void* memory, size_t bytes, void* stream) {
    check(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
}

}  // namespace spattn::runtime
