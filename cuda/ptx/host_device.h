// SPDX-License-Identifier: MIT
// Functions for host and device, in headers that a compiler without CUDA reads as well.
#pragma once

#ifdef __CUDACC__
#define SPATTN_HOST_DEVICE __host__ __device__
#else
#define SPATTN_HOST_DEVICE
#endif
