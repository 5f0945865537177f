// SPDX-License-Identifier: MIT
// Checks of tensors that come through the ABI. Each failure names the argument, what was given and what is accepted.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "sparseattn/sparseattn.h"

namespace spattn {

std::string describe_device(spattn_device device);                  // "cpu", "cuda:0"
std::string describe_shape(const std::vector<int64_t>& shape);      // "[2, 8, -1]", any size as "any"
bool same_device(spattn_device a, spattn_device b);

void check_dtype(const spattn_tensor& tensor, const char* argument, std::initializer_list<spattn_dtype> accepted);

// The tensor must have exactly these sizes; -1 accepts any size >= 0.
void check_shape(const spattn_tensor& tensor, const char* argument, const std::vector<int64_t>& shape);

// Strides in elements, compact where NULL, 0 on axes of size 1. Negative strides and extents that overflow are errors.
std::vector<int64_t> tensor_strides(const spattn_tensor& tensor, const char* argument);

// data + byte_offset, aligned to the element; NULL only where the tensor has no element.
void* tensor_data(const spattn_tensor& tensor, const char* argument);

// Bytes [begin, end) that a tensor with these strides can touch.
struct ByteRange {
    uintptr_t begin, end;
};
ByteRange byte_range(const spattn_tensor& tensor, const std::vector<int64_t>& strides, const void* data);

}  // namespace spattn
