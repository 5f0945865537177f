// SPDX-License-Identifier: MIT
#pragma once

#include "core/dtype.h"

namespace spattn::sm80 {

// Turing multiplies elements of 16 bits that are fp16, and a CTA has 64 KiB of shared memory. Kernels of blocks that need
// no more run there, too; all others are compiled for it as empty ones. They ran on an H200, by their PTX.
template <Dtype D, int SharedBytes>
constexpr bool runs_on_turing = D == Dtype::f16 && SharedBytes <= 64 * 1024;

// Whether this is compiled for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool is_turing = true;
#else
constexpr bool is_turing = false;
#endif

}  // namespace spattn::sm80
