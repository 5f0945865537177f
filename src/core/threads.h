// SPDX-License-Identifier: MIT
// The two implementations of Parallel: threads of our own, and the host's.
//
// An exception that leaves a body reaches the caller of run(): the first one, after all lanes ended. Kernels throw
// none; only the reference rows may, when memory is short.
#pragma once

#include <memory>

#include "core/parallel.h"
#include "sparseattn/sparseattn.h"

namespace spattn {

// threads = 0: as many as this process may use. Threads start with the first call. Two calls at once do not wait for
// each other: the second does its lanes on its own thread. So does a child process after fork, where the threads are
// gone.
std::unique_ptr<Parallel> make_thread_pool(int threads);

// lanes = 0: as many as this process may use. A hook that returns non-zero, or 0 without having run every lane, fails
// the call with SPATTN_E_CALLBACK.
std::unique_ptr<Parallel> make_host_parallel(spattn_parallel_for_fn parallel_for, void* user, int lanes);

}  // namespace spattn
