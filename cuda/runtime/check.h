// SPDX-License-Identifier: MIT
// CUDA's errors as ours. The text keeps CUDA's name, native_code its number.
#pragma once

#include <cuda_runtime.h>

#include "core/error.h"

namespace spattn::runtime {

inline spattn_status status_of(cudaError_t error) {
    switch (error) {
        case cudaErrorMemoryAllocation: return SPATTN_E_DEVICE_MEMORY;
        case cudaErrorInsufficientDriver: return SPATTN_E_DRIVER_TOO_OLD;
        case cudaErrorNoDevice: return SPATTN_E_NO_GPU;
        case cudaErrorStreamCaptureUnsupported:
        case cudaErrorStreamCaptureInvalidated:
        case cudaErrorStreamCaptureUnjoined:
        case cudaErrorStreamCaptureImplicit:
        case cudaErrorStreamCaptureWrongThread: return SPATTN_E_CAPTURE;
        default: return SPATTN_E_CUDA;
    }
}

// what: the call that answered, as a person would name it.
inline void check(cudaError_t error, const char* what, Where where = Where::current()) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // an error that was reported must not surface again in the caller's next check
    throw Error(status_of(error), "", text(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)),
                int(error), int(where.line()));
}

}  // namespace spattn::runtime
