// SPDX-License-Identifier: MIT
// Elements of operands as fp32 and back.
#pragma once

#include <cuda_bf16.h>

namespace spattn::tile {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x) {
    return T(x);
}

}  // namespace spattn::tile
