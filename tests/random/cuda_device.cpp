// SPDX-License-Identifier: MIT
#include <stdexcept>
#include <string>

#ifdef SPATTN_TEST_CUDA
#include <cuda_runtime.h>
#endif

#include "device.h"

namespace random_test {

#ifdef SPATTN_TEST_CUDA

namespace {

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error));
}

// From the device's pool: cudaMalloc takes as long as a problem does. Whole chunks of 16 bytes: kernels copy such a chunk
// and say how much of it they want (cp.async's src-size), and compute-sanitizer counts all of it.
void* allocate(size_t bytes) {
    constexpr size_t chunk = 16;
    void* memory = nullptr;
    check(cudaMallocAsync(&memory, (bytes + chunk - 1) / chunk * chunk, nullptr), "cudaMallocAsync");
    return memory;
}

void release(void* memory) { check(cudaFreeAsync(memory, nullptr), "cudaFreeAsync"); }

void copy_in(void* to, const void* from, size_t bytes) {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy to the GPU");
}

void copy_out(void* to, const void* from, size_t bytes) {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy from the GPU");
}

void synchronize() { check(cudaDeviceSynchronize(), "run"); }

}  // namespace

Device cuda_device() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) throw std::runtime_error("no GPU");
    cudaMemPool_t pool;
    uint64_t kept = ~uint64_t(0);
    check(cudaDeviceGetDefaultMemPool(&pool, 0), "memory pool");
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept), "memory pool");
    return {{SPATTN_CUDA, 0}, allocate, release, copy_in, copy_out, synchronize};
}

#else

Device cuda_device() { throw std::runtime_error("no GPU: this program is built without CUDA"); }

#endif

}  // namespace random_test
