// SPDX-License-Identifier: MIT
// Calls that their caller may end before they are done.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "core/parallel.h"
#include "sparseattn/sparseattn.h"

namespace spattn {

// Asks a host's hook whether a call is to end, now and then.
class CancelHook {
public:
    // ask may be null: never; argument is what the caller calls it.
    CancelHook(spattn_cancel_fn ask, void* user, const char* argument) : ask_(ask), user_(user), argument_(argument) {}
    explicit operator bool() const { return ask_ != nullptr; }
    bool says_end();
    // Counts calls that do little: whether this one is to look at the clock, through says_end().
    bool is_due() { return --calls_until_look_ == 0; }
    [[noreturn]] void fail() const;

private:
    using Clock = std::chrono::steady_clock;

    const spattn_cancel_fn ask_;
    void* const user_;
    const char* const argument_;
    Clock::time_point asked_ = Clock::now(), looked_ = asked_;
    unsigned calls_between_looks_ = 1, calls_until_look_ = 1;
};

// For work without tasks, as that on a plan or on a question about a pattern: while this object lives, its thread's
// check_cancelled() asks the hook.
class CancelScope {
public:
    CancelScope(spattn_cancel_fn ask, void* user, const char* argument);
    ~CancelScope();
    CancelScope(const CancelScope&) = delete;
    CancelScope& operator=(const CancelScope&) = delete;

private:
    CancelHook hook_;
    CancelHook* const before_;
};

// Fails with SPATTN_E_CANCELLED where the hook of this thread's scope wants the call to end. Loops over rows, of blocks
// or of tokens, call it once a row, and so do others whose length a caller chooses, once a step: a call costs nanoseconds.
void check_cancelled();

// For loops whose steps take about a nanosecond, and may be very many: one step in so many calls check_cancelled().
class Pace {
public:
    void step() {
        if (++steps_ % steps_between_calls == 0) check_cancelled();
    }

private:
    static constexpr uint32_t steps_between_calls = 1 << 12;
    uint32_t steps_ = 0;
};

// The threads of a context for one call, which ends early where the context's hook says so. The hook is asked on the
// thread that made this object and made the call: a host's signals are its own thread's matter.
class CancellableParallel : public Parallel {
public:
    // is_brief: what is run takes less time than it takes to wake threads.
    CancellableParallel(Parallel& threads, spattn_cancel_fn cancel, void* user, bool is_brief = false)
        : threads_(threads), is_brief_(is_brief), hook_(cancel, user, "options.cancel") {}

    int lanes() const override { return threads_.lanes(); }
    void run(void (*body)(void*, int64_t), void* argument) override;
    bool is_cancelled() override;

private:
    Parallel& threads_;
    const bool is_brief_;
    CancelHook hook_;  // touched by the caller's thread alone
    const std::thread::id caller_ = std::this_thread::get_id();
    std::atomic<bool> cancelled_ = false;
};

}  // namespace spattn
