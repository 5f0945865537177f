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
    unsigned cluster = 1;  // blocks of one, which divide all of them
};

// Launches a kernel with attributes that <<< >>> cannot say.
template <class... Params>
void launch_with(cudaLaunchAttribute* attributes, unsigned count, void (*kernel)(Params...), const Shape& shape,
                 void* stream, const Params&... params) {
    cudaLaunchConfig_t config{};
    config.gridDim = shape.blocks, config.blockDim = shape.threads, config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream), config.attrs = attributes, config.numAttrs = count;
    check(cudaLaunchKernelEx(&config, kernel, params...), "cudaLaunchKernelEx");
}

inline cudaLaunchAttribute cluster_of(const Shape& shape) {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {shape.cluster, 1, 1};
    return cluster;
}

template <class... Params>
void launch(void (*kernel)(Params...), const Shape& shape, void* stream, const Params&... params) {
    if (shape.cluster > 1) {
        cudaLaunchAttribute attributes[] = {cluster_of(shape)};
        return launch_with(attributes, 1, kernel, shape, stream, params...);
    }
    kernel<<<shape.blocks, shape.threads, shape.shared_bytes, static_cast<cudaStream_t>(stream)>>>(params...);
    check(cudaGetLastError(), "kernel launch");
}

// The same for a kernel that may begin before the one ahead of it in the stream has ended, as soon as that lets it
// (ptx/grid.cuh): it waits by itself before it touches what that one writes. What stands before both has ended.
template <class... Params>
void launch_early(void (*kernel)(Params...), const Shape& shape, void* stream, const Params&... params) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchAttribute attributes[] = {early, cluster_of(shape)};
    launch_with(attributes, shape.cluster > 1 ? 2 : 1, kernel, shape, stream, params...);
}

inline void clear(void* memory, size_t bytes, void* stream) {
    check(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
}

}  // namespace spattn::runtime
