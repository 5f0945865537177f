// SPDX-License-Identifier: MIT
// A call that its caller may end before it is done.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "core/parallel.h"
#include "sparseattn/sparseattn.h"

namespace spattn {

// The threads of a context for one call, which ends early where the context's hook says so. The hook is asked on the
// thread that made this object and made the call: a host's signals are its own thread's matter.
class CancellableParallel : public Parallel {
public:
    CancellableParallel(Parallel& threads, spattn_cancel_fn cancel, void* user)
        : threads_(threads), cancel_(cancel), user_(user) {}

    int lanes() const override { return threads_.lanes(); }
    void run(void (*body)(void*, int64_t), void* argument) override;
    bool is_cancelled() override;

private:
    using Clock = std::chrono::steady_clock;

    Parallel& threads_;
    const spattn_cancel_fn cancel_;  // may be null
    void* const user_;
    const std::thread::id caller_ = std::this_thread::get_id();
    Clock::time_point asked_ = Clock::now();  // touched by the caller's thread alone
    std::atomic<bool> cancelled_ = false;
};

}  // namespace spattn
