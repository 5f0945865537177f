// SPDX-License-Identifier: MIT
// Checks of tensors that come through the ABI. Each failure names the argument, what was given and what is accepted.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "sparseattn/sparseattn.h"

namespace spattn {

constexpr int max_axes = 4;  // of a tensor that the ABI takes

std::string describe_device(spattn_device device);           // "cpu", "cuda:0"
std::string describe_shape(std::span<const int64_t> shape);  // "[2, 8, any]", where any is -1

void check_dtype(const spattn_tensor& tensor, const char* argument, std::initializer_list<spattn_dtype> accepted);

// The tensor must have exactly these sizes; -1 accepts any size >= 0.
void check_shape(const spattn_tensor& tensor, const char* argument, std::span<const int64_t> shape);

// Strides in elements, compact where NULL, 0 on axes of size 1. Negative strides and extents that overflow are errors.
std::array<int64_t, max_axes> tensor_strides(const spattn_tensor& tensor, const char* argument);

// data + byte_offset, aligned to the element; NULL only where the tensor has no element. The strides are those of
// tensor_strides(): nothing of the tensor lies beyond the address space.
void* tensor_data(const spattn_tensor& tensor, const char* argument, std::span<const int64_t> strides);

}  // namespace spattn
