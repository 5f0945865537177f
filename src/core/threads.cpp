// SPDX-License-Identifier: MIT
#include "core/threads.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cfenv>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.h"

namespace spattn {

bool Parallel::is_cancelled() { return false; }

void Parallel::run_briefly(void (*body)(void*, int64_t), void* argument) { run(body, argument); }

namespace {

int lanes_or_default(int lanes) {
    if (lanes) return lanes;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    const unsigned all = std::thread::hardware_concurrency();  // more CPUs than a cpu_set_t holds
    return all ? int(all) : 1;
}

// ---- lanes of one call --------------------------------------------------------------------------------------------

// One call of Parallel::run: lanes are taken from a counter, so any number of threads, even one, finishes them all.
class Lanes {
public:
    Lanes(int lanes, void (*body)(void*, int64_t), void* argument) : lanes_(lanes), body_(body), argument_(argument) {}

    void run_one(int64_t lane) noexcept {
        std::exception_ptr thrown;
        try {
            body_(argument_, lane);
        } catch (...) {
            thrown = std::current_exception();
        }
        const std::lock_guard lock(mutex_);
        ++ended_;
        if (!thrown_) thrown_ = thrown;
    }

    void run_all() noexcept {  // until none is left to take
        for (;;) {
            int64_t lane;
            {
                const std::lock_guard lock(mutex_);
                if (next_ == lanes_) return;
                lane = next_++;
            }
            run_one(lane);
        }
    }

    // Read when no thread works on the call any more.
    int64_t ended() const { return ended_; }
    void rethrow() const {
        if (thrown_) std::rethrow_exception(thrown_);
    }

private:
    const int lanes_;
    void (*const body_)(void*, int64_t);
    void* const argument_;
    std::mutex mutex_;
    int64_t next_ = 0, ended_ = 0;
    std::exception_ptr thrown_;
};

// ---- our pool -----------------------------------------------------------------------------------------------------

// Threads that start while it lives take none of the signals that are sent to the process: who handles these, or blocks
// them and waits for them, counts on its own threads. Workers keep what they cause themselves, and what profilers send.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t signals;
        sigfillset(&signals);
        for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF}) sigdelset(&signals, own);
        pthread_sigmask(SIG_BLOCK, &signals, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

private:
    sigset_t before_;
};

struct Pool {
    const pid_t pid = getpid();
    cpu_set_t cpus;       // of the thread that made the pool, and so of its workers
    int caller_cpu = -1;  // which workers keep off
    std::mutex mutex;
    std::condition_variable wake, idle;
    Lanes* call = nullptr;    // what workers may join; null once the caller found no lane left to take
    std::fenv_t floats{};     // how its caller rounds and takes denormals: bits must not tell who ran a lane
    uint64_t calls = 0;       // so that a worker joins a call once
    int working = 0;
    bool stop = false;
    std::vector<std::thread> threads;

    void work() {
        std::unique_lock lock(mutex);
        for (uint64_t seen = 0;;) {
            wake.wait(lock, [&] { return stop || (call && calls != seen); });
            if (stop) return;
            Lanes* mine = call;
            seen = calls;
            ++working;
            lock.unlock();
            std::fesetenv(&floats);
            mine->run_all();
            lock.lock();
            if (--working == 0) idle.notify_one();
        }
    }

    // A worker may wake up on the CPU that the caller computes on although others idle: where CPUs were busy a moment
    // ago, Linux does not search for an idle one. The two would take turns for milliseconds, all that a short call has.
    void keep_off(int cpu) {
        if (cpu == caller_cpu || CPU_COUNT(&cpus) <= int(threads.size())) return;
        cpu_set_t others = cpus;
        CPU_CLR(cpu, &others);
        for (std::thread& thread : threads) pthread_setaffinity_np(thread.native_handle(), sizeof others, &others);
        caller_cpu = cpu;
    }

    void run(Lanes& lanes) {
        keep_off(sched_getcpu());
        {
            std::lock_guard lock(mutex);
            call = &lanes;
            std::fegetenv(&floats);
            ++calls;
        }
        wake.notify_all();
        lanes.run_all();
        // Workers that slept through the call must not join it any more: `lanes` is about to go.
        std::unique_lock lock(mutex);
        call = nullptr;
        idle.wait(lock, [&] { return working == 0; });
    }

    ~Pool() {
        {
            std::lock_guard lock(mutex);
            stop = true;
        }
        wake.notify_all();
        for (std::thread& thread : threads) thread.join();
    }
};

class ThreadPool : public Parallel {
public:
    explicit ThreadPool(int lanes) : lanes_(lanes) {}

    ~ThreadPool() override {
        // In a child of fork() there is nothing to join, and waiting would never end.
        if (pool_ && pool_->pid != getpid()) static_cast<void>(pool_.release());
    }

    int lanes() const override { return lanes_; }

    void run(void (*body)(void*, int64_t), void* argument) override {
        Lanes call(lanes_, body, argument);
        std::unique_lock taken(taken_, std::defer_lock);
        if (lanes_ > 1 && taken.try_lock() && is_started())
            pool_->run(call);
        else
            call.run_all();
        call.rethrow();
    }

    // Threads start all the same, so that whatever the first call is, later ones need no memory for that.
    void run_briefly(void (*body)(void*, int64_t), void* argument) override {
        Lanes call(lanes_, body, argument);
        if (const std::unique_lock taken(taken_, std::try_to_lock); lanes_ > 1 && taken) is_started();
        call.run_all();
        call.rethrow();
    }

private:
    // False in a child of fork(), whose copy of the pool has no threads.
    bool is_started() {
        if (pool_) return pool_->pid == getpid();
        pool_ = std::make_unique<Pool>();
        if (sched_getaffinity(0, sizeof pool_->cpus, &pool_->cpus) != 0) CPU_ZERO(&pool_->cpus);
        try {
            const SignalsBlocked blocked;
            for (int i = 1; i < lanes_; ++i) pool_->threads.emplace_back([pool = pool_.get()] { pool->work(); });
        } catch (const std::system_error&) {
            // Fewer threads than asked for are enough: lanes are taken, not assigned.
        } catch (const std::bad_alloc&) {
            pool_.reset();  // this call fails for want of memory; the next one starts anew
            throw;
        }
        return true;
    }

    const int lanes_;
    std::mutex taken_;  // held by the call that has the pool
    std::unique_ptr<Pool> pool_;
};

// ---- the host's threads -------------------------------------------------------------------------------------------

class HostParallel : public Parallel {
public:
    HostParallel(spattn_parallel_for_fn parallel_for, void* user, int lanes)
        : parallel_for_(parallel_for), user_(user), lanes_(lanes) {}

    int lanes() const override { return lanes_; }

    void run(void (*body)(void*, int64_t), void* argument) override {
        Lanes call(lanes_, body, argument);
        struct Caller {
            Lanes& call;
            std::fenv_t floats;  // as in Pool; a thread of the host gets its own back
        } caller{call, {}};
        std::fegetenv(&caller.floats);
        const auto one = [](void* argument, int64_t lane) {
            const Caller& caller = *static_cast<Caller*>(argument);
            std::fenv_t own;
            std::fegetenv(&own);
            std::fesetenv(&caller.floats);
            caller.call.run_one(lane);
            std::fesetenv(&own);
        };
        const int32_t answer = parallel_for_(user_, lanes_, one, &caller);
        call.rethrow();
        if (answer != 0) fail(SPATTN_E_CALLBACK, "options.parallel_for", text("returned ", answer, "; accepted: 0"));
        if (call.ended() != lanes_)
            fail(SPATTN_E_CALLBACK, "options.parallel_for",
                 text("ran ", call.ended(), " tasks; accepted: each of ", lanes_, " once"));
    }

private:
    const spattn_parallel_for_fn parallel_for_;
    void* const user_;
    const int lanes_;
};

}  // namespace

std::unique_ptr<Parallel> make_thread_pool(int threads) {
    return std::make_unique<ThreadPool>(lanes_or_default(threads));
}

std::unique_ptr<Parallel> make_host_parallel(spattn_parallel_for_fn parallel_for, void* user, int lanes) {
    return std::make_unique<HostParallel>(parallel_for, user, lanes_or_default(lanes));
}

}  // namespace spattn
