// SPDX-License-Identifier: MIT
// What the GPU tests share: device tensors between guard zones, problems with hostile values, and the truth from the
// library's double-precision rows on the CPU. Through the C ABI alone.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <random>

#include "abi/abi.h"

namespace gpu {

using abi::Context;
using abi::Pattern;
using abi::Plan;
using abi::succeed;

inline bool is_here() {
    int32_t count = 0;
    return spattn_device_count(&count) == SPATTN_OK && count > 0;
}
// The first line of every test: without a GPU it is skipped, and says so.
#define NEEDS_GPU() \
    if (!gpu::is_here()) return check::skip("no GPU")

void cuda(cudaError_t error, const char* what);  // throws

// A 16-bit element of the dtype, rounded to nearest even, and back.
uint16_t to_16_bits(float x, spattn_dtype dtype);
float from_16_bits(uint16_t x, spattn_dtype dtype);

// A case of attention. Lengths, heads and memory as the tests want them.
struct Case {
    std::string pattern = "full";
    int64_t batch = 1, heads_q = 2, heads_kv = 1, seq_q = 128, seq_k = 128, head_dim = 128, head_dim_v = 128;
    spattn_dtype dtype = abi::bf16;
    spattn_enum axes = SPATTN_BSHD;
    int64_t padding = 0;      // elements between rows of each tensor
    int64_t column = 1;       // stride of the last axis
    int64_t shift = 0;        // elements by which tensors are off their allocation
    double scale = 0;         // 0: as the library does
    std::string name() const;
    spattn_problem problem() const;
};

// Values of [batch, heads, seq, columns] in the case's strides, in device memory with guard zones around and between.
class DeviceTensor {
public:
    DeviceTensor(const Case& c, int64_t heads, int64_t seq, int64_t columns, bool is_row = false);
    ~DeviceTensor();
    DeviceTensor(const DeviceTensor&) = delete;
    void write(const std::vector<float>& values);  // compact BHSD
    std::vector<float> read() const;
    bool guards_hold() const;  // bytes that belong to no element are as they were
    void spoil();              // everything to the guard's byte
    const spattn_tensor* view() const { return &view_; }

private:
    size_t offset(size_t element) const;  // of a compact index, in elements of memory
    int64_t shape_[4], strides_[4];
    int64_t tensor_shape_[4], tensor_strides_[4];
    size_t count_, memory_elements_, element_bytes_;
    spattn_dtype dtype_;
    void* memory_ = nullptr;
    spattn_tensor view_{};
};

// Inputs and the truth of a case; keys that no query sees and queries that see no key are NaN.
struct Truth {
    std::vector<float> q, k, v, out, lse;
};
Truth make_truth(const Case& c, unsigned seed);

Context make_context();
Plan make_plan(const Context& context, const Case& c, cudaStream_t stream = nullptr);

// Operands of one call on the device.
struct Run {
    Run(const Plan& plan, const Case& c, const Truth& truth);
    ~Run();
    spattn_status forward(cudaStream_t stream = nullptr);
    void demand_truth(const Case& c, const Truth& truth) const;

    const Plan& plan;
    DeviceTensor q, k, v, out, lse;
    void* workspace = nullptr;
    size_t workspace_bytes = 0;
};

}  // namespace gpu
