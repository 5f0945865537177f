// SPDX-License-Identifier: MIT
#include "core/cancel.h"

#include <algorithm>

#include "core/error.h"

namespace spattn {

namespace {
// Short enough for a person who waits, long enough that a hook that takes microseconds (a lock of an interpreter) costs
// nothing. Calls that are shorter never ask.
constexpr std::chrono::milliseconds between_questions(20);

// One in so many calls of check_cancelled() reads the clock: a row of a plan may take less time than that does. The
// first calls all do, and so do those after a look that found long rows, until rows have shown to be short.
constexpr unsigned most_calls_between_looks = 32;
constexpr std::chrono::milliseconds long_rows(1);

thread_local CancelHook* of_thread = nullptr;
}  // namespace

bool CancelHook::says_end() {
    const Clock::time_point now = Clock::now();
    calls_between_looks_ =
        now - looked_ > long_rows ? 1 : std::min(2 * calls_between_looks_, most_calls_between_looks);
    calls_until_look_ = calls_between_looks_;
    looked_ = now;
    if (now - asked_ < between_questions) return false;
    asked_ = now;
    return ask_(user_) != 0;
}

void CancelHook::fail() const {
    spattn::fail(SPATTN_E_CANCELLED, argument_,
                 "ended the call before its results were complete; accepted: 0 to let it go on");
}

CancelScope::CancelScope(spattn_cancel_fn ask, void* user, const char* argument)
    : hook_(ask, user, argument), before_(of_thread) {
    of_thread = hook_ ? &hook_ : nullptr;
}

CancelScope::~CancelScope() { of_thread = before_; }

void check_cancelled() {
    if (of_thread && of_thread->is_due() && of_thread->says_end()) of_thread->fail();
}

bool CancellableParallel::is_cancelled() {
    if (!hook_) return false;
    if (cancelled_.load(std::memory_order_relaxed)) return true;
    if (std::this_thread::get_id() != caller_ || !hook_.says_end()) return false;
    cancelled_.store(true, std::memory_order_relaxed);
    return true;
}

void CancellableParallel::run(void (*body)(void*, int64_t), void* argument) {
    is_brief_ ? threads_.run_briefly(body, argument) : threads_.run(body, argument);
    if (cancelled_.load(std::memory_order_relaxed)) hook_.fail();
}

}  // namespace spattn
