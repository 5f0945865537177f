// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "emulator/cta.h"

namespace emulator {

// Runs a kernel to its end, or keeps it for the graph that the stream captures. What goes wrong is told on stderr.
cudaError_t launch(const Grid& grid, cudaStream_t stream, std::function<void()> kernel);

}  // namespace emulator
