// SPDX-License-Identifier: MIT
// Do two strided tensors share a byte? Slices of one packed buffer interleave without sharing, so address ranges alone
// would refuse what users do every day (dq, dk and dv in one tensor).
#pragma once

#include <array>
#include <cstdint>

namespace spattn {

struct StridedBytes {
    uintptr_t begin;
    int64_t element;  // bytes
    struct Axis {
        int64_t size = 1, stride = 0;  // elements of the axis; bytes
    };
    static constexpr int max_axes = 4;  // of operands; fixed, because calls allocate nothing
    std::array<Axis, max_axes> axes{};  // unused axes have size 1
};

// Exact for every layout that can be decided in some thousand steps, as all can whose strides nest, and most others; else
// true.
bool overlaps(const StridedBytes& a, const StridedBytes& b);

// Whether two different indices of one tensor address the same byte. The same limits.
bool overlaps_itself(const StridedBytes& tensor);

}  // namespace spattn
