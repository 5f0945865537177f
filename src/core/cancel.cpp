// SPDX-License-Identifier: MIT
#include "core/cancel.h"

#include "core/error.h"

namespace spattn {

namespace {
// Short enough for a person who waits, long enough that a hook that takes microseconds (a lock of an interpreter) costs
// nothing. Runs that are shorter never ask.
constexpr std::chrono::milliseconds between_questions(20);
}  // namespace

bool CancellableParallel::is_cancelled() {
    if (!cancel_) return false;
    if (cancelled_.load(std::memory_order_relaxed)) return true;
    if (std::this_thread::get_id() != caller_) return false;
    const Clock::time_point now = Clock::now();
    if (now - asked_ < between_questions) return false;
    asked_ = now;
    if (cancel_(user_) == 0) return false;
    cancelled_.store(true, std::memory_order_relaxed);
    return true;
}

void CancellableParallel::run(void (*body)(void*, int64_t), void* argument) {
    threads_.run(body, argument);
    if (cancelled_.load(std::memory_order_relaxed))
        fail(SPATTN_E_CANCELLED, "options.cancel",
             "ended the call before its results were complete; accepted: 0 to let it go on");
}

}  // namespace spattn
