// SPDX-License-Identifier: MIT
// The one place that launches kernels.
#pragma once

#include "runtime/check.h"
#include "runtime/device.h"

namespace spattn::runtime {

// Loads a kernel on the current device and lets it have that much shared memory: at plan time, so that no launch pays.
template <class... Params>
void prepare(void (*kernel)(Params...), size_t shared_bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)),
          "cudaFuncSetAttribute");
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

struct Shape {
    unsigned blocks, threads;
    size_t shared_bytes;
};

template <class... Params>
void launch(void (*kernel)(Params...), const Shape& shape, void* stream, const Params&... params) {
    kernel<<<shape.blocks, shape.threads, shape.shared_bytes, static_cast<cudaStream_t>(stream)>>>(params...);
    check(cudaGetLastError(), "kernel launch");
}

inline void clear(void* memory, size_t bytes, void* stream) {
    check(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
}

}  // namespace spattn::runtime
