// SPDX-License-Identifier: MIT
#include "core/threads.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

#include "core/error.h"

namespace spattn {
namespace {

int lanes_or_default(int lanes) { return lanes ? lanes : int(std::max(1u, std::thread::hardware_concurrency())); }

class ThreadPool : public Parallel {
public:
    explicit ThreadPool(int threads) : lanes_(lanes_or_default(threads)) {}

    ~ThreadPool() override {
        stop_ = true;
        wake();
        for (std::thread& thread : threads_) process_ == getpid() ? thread.join() : thread.detach();
    }

    int lanes() const override { return lanes_; }

    void run(void (*body)(void*, int64_t), void* argument) override {
        std::unique_lock turn(busy_, std::defer_lock);
        if (lanes_ == 1 || process_ != getpid() || !turn.try_lock()) {
            for (int64_t lane = 0; lane < lanes_; ++lane) body(argument, lane);
            return;
        }
        start();
        body_ = body;
        argument_ = argument;
        pending_.store(int(threads_.size()), std::memory_order_relaxed);
        wake();
        body(argument, 0);
        // Lanes whose thread the system refused to start.
        for (int64_t lane = int64_t(threads_.size()) + 1; lane < lanes_; ++lane) body(argument, lane);
        for (int left; (left = pending_.load(std::memory_order_acquire)) != 0;) pending_.wait(left);
    }

private:
    void start() {
        if (was_started_) return;
        was_started_ = true;
        try {
            threads_.reserve(size_t(lanes_ - 1));
            for (int64_t lane = 1; lane < lanes_; ++lane) threads_.emplace_back([this, lane] { work(lane); });
        } catch (const std::system_error&) {
            // Fewer threads are slower, not wrong.
        }
    }

    // Release: a worker that sees the new turn sees body_, argument_ and pending_, or stop_.
    void wake() {
        turn_.fetch_add(1, std::memory_order_release);
        turn_.notify_all();
    }

    void work(int64_t lane) {
        for (uint32_t seen = 0;;) {
            turn_.wait(seen, std::memory_order_acquire);
            seen = turn_.load(std::memory_order_acquire);
            if (stop_) return;
            body_(argument_, lane);
            if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
        }
    }

    const int lanes_;
    const pid_t process_ = getpid();
    std::mutex busy_;  // one run at a time owns the members below
    bool was_started_ = false;
    std::vector<std::thread> threads_;
    void (*body_)(void*, int64_t) = nullptr;
    void* argument_ = nullptr;
    std::atomic<bool> stop_{false};
    std::atomic<uint32_t> turn_{0};
    std::atomic<int> pending_{0};
};

class HostParallel : public Parallel {
public:
    HostParallel(spattn_parallel_for_fn parallel_for, void* user, int lanes)
        : parallel_for_(parallel_for), user_(user), lanes_(lanes_or_default(lanes)) {}
    int lanes() const override { return lanes_; }
    void run(void (*body)(void*, int64_t), void* argument) override {
        if (const int32_t status = parallel_for_(user_, lanes_, body, argument))
            fail(SPATTN_E_CALLBACK, "options.parallel_for", text("returned ", status, "; accepted: 0"));
    }

private:
    spattn_parallel_for_fn parallel_for_;
    void* user_;
    int lanes_;
};

}  // namespace

std::unique_ptr<Parallel> make_thread_pool(int threads) { return std::make_unique<ThreadPool>(threads); }

std::unique_ptr<Parallel> make_host_parallel(spattn_parallel_for_fn parallel_for, void* user, int lanes) {
    return std::make_unique<HostParallel>(parallel_for, user, lanes);
}

}  // namespace spattn
