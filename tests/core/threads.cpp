// SPDX-License-Identifier: MIT
// Every lane runs once, whoever runs it.
#include <atomic>
#include <cfenv>
#include <chrono>
#include <thread>
#include <vector>

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "core/error.h"
#include "core/threads.h"

using namespace spattn;

static bool runs_every_lane_once(Parallel& parallel) {
    std::vector<std::atomic<int>> seen(static_cast<size_t>(parallel.lanes()));
    parallel.run([](void* argument, int64_t lane) { ++(*static_cast<decltype(seen)*>(argument))[size_t(lane)]; },
                 &seen);
    for (const auto& count : seen)
        if (count != 1) return false;
    return true;
}

TEST(pool_runs_every_lane_once) {
    for (int threads : {1, 2, 3, 7}) {
        const auto pool = make_thread_pool(threads);
        CHECK_EQ(pool->lanes(), threads);
        for (int i = 0; i < 500; ++i) CHECK(runs_every_lane_once(*pool));
    }
    CHECK(make_thread_pool(0)->lanes() >= 1);
}

TEST(pool_serves_threads_at_once) {
    const auto pool = make_thread_pool(3);
    std::atomic<int> failures{0};
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i)
        callers.emplace_back([&] {
            for (int n = 0; n < 500; ++n) failures += !runs_every_lane_once(*pool);
        });
    for (std::thread& caller : callers) caller.join();
    CHECK_EQ(failures.load(), 0);
}

// No other thread takes part.
TEST(brief_work_is_the_callers_alone) {
    struct Lanes {
        const std::thread::id caller = std::this_thread::get_id();
        int done = 0, elsewhere = 0;
    } lanes;
    const auto pool = make_thread_pool(5);
    const auto body = [](void* argument, int64_t) {
        Lanes& lanes = *static_cast<Lanes*>(argument);
        ++lanes.done, lanes.elsewhere += std::this_thread::get_id() != lanes.caller;
    };
    for (int i = 0; i < 100; ++i) pool->run_briefly(body, &lanes);
    CHECK_EQ(lanes.done, 500);
    CHECK_EQ(lanes.elsewhere, 0);
}

// Two lanes that meet, so that each has a thread of its own; where did the caller's and the worker's run?
struct Meeting {
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<int> arrived{0}, caller_cpu{-1}, worker_cpu{-1};

    static void attend(void* argument, int64_t) {
        Meeting& meeting = *static_cast<Meeting*>(argument);
        ++meeting.arrived;
        const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(10);
        while (meeting.arrived < 2 && std::chrono::steady_clock::now() < late) std::this_thread::yield();
        (std::this_thread::get_id() == meeting.caller ? meeting.caller_cpu : meeting.worker_cpu) = sched_getcpu();
    }
};

TEST(workers_keep_off_the_callers_cpu) {
    cpu_set_t mine;
    CHECK_EQ(sched_getaffinity(0, sizeof mine, &mine), 0);
    if (CPU_COUNT(&mine) < 2) return;
    const auto pool = make_thread_pool(2);
    CHECK(runs_every_lane_once(*pool));  // starts the worker, which may use all CPUs
    for (int cpu = 0; cpu < 8; ++cpu) {
        if (!CPU_ISSET(cpu, &mine)) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
        for (int i = 0; i < 20; ++i) {
            Meeting meeting;
            pool->run(Meeting::attend, &meeting);
            CHECK_EQ(meeting.caller_cpu.load(), cpu);
            CHECK(meeting.worker_cpu >= 0 && meeting.worker_cpu != cpu);
        }
    }
    CHECK_EQ(sched_setaffinity(0, sizeof mine, &mine), 0);
}

// Threads round as the caller of this call does, whatever the caller that they were started by did, and those of a host
// get their own way back.
TEST(lanes_round_as_their_caller_does) {
    static std::atomic<int> wrong;
    wrong = 0;
    const auto body = [](void* caller, int64_t) { wrong += std::fegetround() != *static_cast<int*>(caller); };
    const auto own_threads = [](void*, int64_t tasks, void (*run)(void*, int64_t), void* argument) -> int32_t {
        for (int64_t t = 0; t < tasks; ++t)
            std::thread([&] {
                std::fesetround(FE_TOWARDZERO);
                run(argument, t);
                wrong += std::fegetround() != FE_TOWARDZERO;
            }).join();
        return 0;
    };
    const auto pool = make_thread_pool(3), host = make_host_parallel(own_threads, nullptr, 3);
    for (int i = 0; i < 10; ++i)
        for (int way : {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD}) {
            std::fesetround(way);
            Meeting meeting;
            pool->run(Meeting::attend, &meeting);  // so that workers are awake
            for (Parallel* parallel : {pool.get(), host.get()}) parallel->run(body, &way);
            CHECK_EQ(std::fegetround(), way);
        }
    std::fesetround(FE_TONEAREST);
    CHECK_EQ(wrong.load(), 0);
}

// A process that blocks a signal on all threads that it started has it pending, and not handled on one of the pool's.
TEST(workers_take_no_signals) {
    static std::atomic<int> handled;
    struct sigaction count {}, before {};
    count.sa_handler = [](int) { ++handled; };
    CHECK_EQ(sigaction(SIGUSR1, &count, &before), 0);
    const auto pool = make_thread_pool(3);
    CHECK(runs_every_lane_once(*pool));
    sigset_t usr1, waiting;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    CHECK_EQ(pthread_sigmask(SIG_BLOCK, &usr1, nullptr), 0);
    CHECK_EQ(kill(getpid(), SIGUSR1), 0);
    for (int i = 0; i < 20; ++i) {
        Meeting meeting;
        pool->run(Meeting::attend, &meeting);  // workers wake up, and would handle what is theirs
    }
    CHECK_EQ(handled.load(), 0);
    CHECK(sigpending(&waiting) == 0 && sigismember(&waiting, SIGUSR1) == 1);
    CHECK_EQ(pthread_sigmask(SIG_UNBLOCK, &usr1, nullptr), 0);
    CHECK_EQ(handled.load(), 1);
    CHECK_EQ(sigaction(SIGUSR1, &before, nullptr), 0);
}

TEST(pool_works_in_a_forked_child) {
    const auto pool = make_thread_pool(3);
    CHECK(runs_every_lane_once(*pool));
    const pid_t child = fork();
    if (child == 0) _exit(runs_every_lane_once(*pool) ? 0 : 1);
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
}

TEST(host_threads_and_their_failure) {
    const auto serial = [](void*, int64_t tasks, void (*body)(void*, int64_t), void* argument) -> int32_t {
        for (int64_t t = tasks; t-- > 0;) body(argument, t);
        return 0;
    };
    CHECK(runs_every_lane_once(*make_host_parallel(serial, nullptr, 5)));
    const auto refuses = [](void*, int64_t, void (*)(void*, int64_t), void*) -> int32_t { return 42; };
    try {
        runs_every_lane_once(*make_host_parallel(refuses, nullptr, 2));
        CHECK(false);
    } catch (const Error& error) {
        CHECK_EQ(error.status, SPATTN_E_CALLBACK);
        CHECK_EQ(error.argument, "options.parallel_for");
        CHECK(error.message.find("42") != std::string::npos);
    }
}
