// SPDX-License-Identifier: MIT
#include "emulator/cta.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "emulator/barrier.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef __x86_64__
#error "fibers switch by x86-64's registers"
#endif

// Keeps what a call must keep on the stack, the stack pointer in *rdi, and goes on where rsi was kept.
extern "C" void spattn_emulator_switch(void** keep, void* to);
asm(R"(
.text
.p2align 4
.type spattn_emulator_switch, @function
spattn_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size spattn_emulator_switch, . - spattn_emulator_switch
)");

namespace emulator {

constinit thread_local Thread* here = nullptr;
constinit thread_local Watched watched{};

namespace {

constexpr size_t stack_bytes = 512 * 1024, page = 4096;
constexpr int most_threads = 1024, kept_registers = 6;
constexpr size_t most_ctas = 2;  // of a cluster

}  // namespace

void Groups::wait(size_t pending) {
    while (committed_.size() > pending) {
        for (const auto& effect : committed_.front()) effect();
        committed_.erase(committed_.begin());
    }
}

void Groups::finish() {
    wait(0);
    for (const auto& effect : open_) effect();
    open_.clear();
}

// A stack for each thread, with a page below it that nobody may touch.
struct Cta::Stacks {
    char* memory = nullptr;
    Stacks() {
        void* const mapped = mmap(nullptr, most_threads * stack_bytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        memory = static_cast<char*>(mapped);
        for (int i = 0; i < most_threads; ++i) mprotect(of(i), page, PROT_NONE);
    }
    ~Stacks() { munmap(memory, most_threads * stack_bytes); }
    char* of(int thread) const { return memory + size_t(thread) * stack_bytes; }
};

Cta::Cta()
    : stacks_(std::make_unique<Stacks>()),
      shared_(static_cast<uint8_t*>(std::aligned_alloc(1024, most_ctas * shared_capacity)), std::free) {}
Cta::~Cta() = default;

std::string Cta::run(const Grid& grid, unsigned block, uint64_t seed, const std::function<void()>& kernel) {
    grid_ = &grid, block_ = block, kernel_ = &kernel;
    random_.seed(unsigned(seed ^ seed >> 32));
    failure_.clear(), events_.clear();
    const int of_cta = int(grid.threads.x), threads = of_cta * int(grid.cluster);
    if (grid.cluster > most_ctas || threads > most_threads || (grid.cluster > 1 && of_cta % warp_threads))
        return "a cluster of more CTAs or threads than the emulator has, or of parts of warps";
    barriers_.clear(), barriers_.resize(grid.cluster * named_barriers + 1);
    running_.assign(grid.cluster, of_cta);
    threads_.clear(), threads_.resize(size_t(threads));
    warps_.clear(), warps_.resize(size_t(threads + warp_threads - 1) / warp_threads);
    const size_t shared_bytes = (grid.cluster - 1) * shared_capacity + grid.shared_bytes;
    std::memset(shared_.get(), 0xFF, grid.cluster * shared_capacity);  // NaN, and no sensible index
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(shared_.get(), most_ctas * shared_capacity);
    for (size_t rank = 0; rank < grid.cluster; ++rank)
        __asan_poison_memory_region(shared_.get() + rank * shared_capacity + grid.shared_bytes,
                                    shared_capacity - grid.shared_bytes);
    __asan_unpoison_memory_region(stacks_->memory, size_t(threads) * stack_bytes);
#endif
    for (int i = 0; i < threads; ++i) {
        void** const top = reinterpret_cast<void**>(stacks_->of(i) + stack_bytes) - 2;  // as after a call
        *top = reinterpret_cast<void*>(&begin_thread);
        Thread& thread = threads_[size_t(i)];
        thread.cta = this, thread.index = {unsigned(i % of_cta), 0, 0}, thread.rank = i / of_cta;
        thread.warp = i / warp_threads, thread.lane = i % warp_threads;
        thread.stack_pointer = top - kept_registers;
        warps_[size_t(thread.warp)].ready |= 1u << thread.lane;
    }
    races_.begin(int(warps_.size()), shared_bytes);
    for (Warp& warp : warps_) warp.ended = ~warp.ready, warp.priority = unsigned(random_());
    has_favourites_ = chance(2), lateness_ = 1u << random_() % 7;
    while (step()) {
    }
    here = nullptr;
    // Nobody waited for these: they happen all the same, unless the CTA is given up.
    if (failure_.empty())
        for (Thread& thread : threads_) thread.copies.finish(), thread.bulk_stores.finish();
    return failure_;
}

// One warp goes on as far as it can. False where the CTA has ended.
bool Cta::step() {
    const bool is_running = std::any_of(running_.begin(), running_.end(), [](int threads) { return threads > 0; });
    if (!failure_.empty() || !(is_running || !events_.empty())) return false;
    struct Candidate {
        Warp* warp;
        uint32_t lanes;
    };
    Candidate candidates[most_threads / warp_threads];
    unsigned count = 0;
    bool someone_sleeps = false;
    ++turns_;
    for (size_t w = 0; w < warps_.size(); ++w) {
        Warp& warp = warps_[w];
        if (warp.wakes <= turns_) warp.asleep = 0;
        someone_sleeps |= warp.asleep != 0;
        uint32_t lanes = warp.ready & ~warp.asleep;
        if (!warp.ready)  // those who wait let the others of their warp come to rest first, see wait
            for (uint32_t left = warp.waiting; left; left &= left - 1) {
                const int lane = __builtin_ctz(left);
                const Thread& thread = threads_[w * warp_threads + size_t(lane)];
                if (is_past(*thread.barrier, thread.phase)) lanes |= 1u << lane;
            }
        if (lanes) candidates[count++] = {&warp, lanes};
    }
    if (!events_.empty() && (!count || chance(lateness_))) {
        deliver();
        return true;
    }
    if (!count && someone_sleeps) {
        std::this_thread::yield();
        return true;
    }
    if (!count) {
        failure_ = describe_hang();
        return false;
    }
    const auto later = [](const Candidate& a, const Candidate& b) { return a.warp->priority < b.warp->priority; };
    const Candidate chosen =
        has_favourites_ ? *std::max_element(candidates, candidates + count, later) : candidates[random_() % count];
    if (chance(64)) chosen.warp->priority = unsigned(random_());
    const bool backwards = random_() & 1;
    Thread* const first = &threads_[size_t(chosen.warp - warps_.data()) * warp_threads];
    for (uint32_t left = chosen.lanes; left && failure_.empty();) {
        const int lane = backwards ? 31 - __builtin_clz(left) : __builtin_ctz(left);
        left &= ~(1u << lane);
        chosen.warp->ready &= ~(1u << lane), chosen.warp->waiting &= ~(1u << lane);
        resume(first[lane]);
    }
    return true;
}

void Cta::deliver() {
    std::swap(events_[random_() % events_.size()], events_.back());
    const auto effect = std::move(events_.back());
    events_.pop_back();
    effect();
}

// ---- fibers ----
void Cta::resume(Thread& thread) {
    here = &thread;
    watched = {shared_.get(), (grid_->cluster - 1) * shared_capacity + grid_->shared_bytes};
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&sanitizer_state_, stacks_->of(int(&thread - threads_.data())), stack_bytes);
#endif
    spattn_emulator_switch(&scheduler_, thread.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(sanitizer_state_, nullptr, nullptr);
#endif
    watched = {};
}

void Cta::suspend() {
    Thread& thread = *here;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&thread.sanitizer_state, scheduler_stack_, scheduler_stack_bytes_);
#endif
    spattn_emulator_switch(&thread.stack_pointer, scheduler_);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(thread.sanitizer_state, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
}

void Cta::begin_thread() {
    Cta& cta = *here->cta;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &cta.scheduler_stack_, &cta.scheduler_stack_bytes_);
#endif
    (*cta.kernel_)();
    cta.end_thread();
}

void Cta::end_thread() {
    Warp& warp = warps_[size_t(here->warp)];
    warp.ended |= 1u << here->lane;
    --running_[size_t(here->rank)];
    if (warp.met && (warp.met | warp.ended) == ~0u) do_together(warp);
    for (Barrier& barrier : barriers_)
        if (barrier.arrived && is_complete(barrier)) release(barrier);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(nullptr, scheduler_stack_, scheduler_stack_bytes_);
#endif
    void* nowhere;
    spattn_emulator_switch(&nowhere, scheduler_);
    std::abort();
}

void Cta::fail(const std::string& what) {
    failure_ = "thread " + std::to_string(here->index.x) + " of block " + std::to_string(block().x) + ": " + what;
    suspend();
    std::abort();
}

// ---- waiting for each other ----
void Cta::meet(void* mine, Together together) {
    Warp& warp = warps_[size_t(here->warp)];
    const uint32_t lane = 1u << here->lane;
    if (!warp.met)
        warp.together = together;
    else if (warp.together != together)
        fail("lanes of a warp meet in different operations");
    warp.brought[here->lane] = mine;
    warp.met |= lane;
    if ((warp.met | warp.ended) != ~0u) return suspend();
    do_together(warp);
    warp.ready &= ~lane;
}

void Cta::do_together(Warp& warp) {
    void* all[warp_threads];
    for (int i = 0; i < warp_threads; ++i) all[i] = warp.met >> i & 1 ? warp.brought[i] : nullptr;
    warp.ready |= warp.met;
    warp.met = 0;
    warp.together(all);
}

// Threads that a barrier of all of them waits for.
int Cta::running(const Barrier& barrier) const {
    const size_t rank = size_t(&barrier - barriers_.data()) / named_barriers;
    return rank < running_.size() ? running_[rank] : std::accumulate(running_.begin(), running_.end(), 0);
}

bool Cta::is_complete(const Barrier& barrier) const {
    return barrier.arrived == (barrier.expected ? barrier.expected : running(barrier));
}

void Cta::release(Barrier& barrier) {
    for (Thread* thread : barrier.waiting) {
        thread->answer = barrier.any;
        races_.acquire(thread->warp, barrier.known);
        warps_[size_t(thread->warp)].ready |= 1u << thread->lane;
    }
    barrier = {};
}

void Cta::arrive_at(Barrier& barrier, int threads, bool yes) {
    if (barrier.arrived && barrier.expected != threads)
        fail("a barrier of " + std::to_string(barrier.expected) + " threads is one of " + std::to_string(threads));
    barrier.expected = threads;
    races_.release(here->warp, barrier.known);
    ++barrier.arrived;
    barrier.any |= yes;
}

bool Cta::sync(int id, int threads, bool yes) { return sync(named_barrier(id), threads, yes); }

void Cta::sync_cluster() { sync(barriers_.back(), 0, false); }

bool Cta::sync(Barrier& barrier, int threads, bool yes) {
    arrive_at(barrier, threads, yes);
    if (is_complete(barrier)) {
        const bool any = barrier.any;
        races_.acquire(here->warp, barrier.known);
        release(barrier);
        return any;
    }
    barrier.waiting.push_back(here);
    suspend();
    return here->answer;
}

void Cta::arrive(int id, int threads) {
    Barrier& barrier = named_barrier(id);
    arrive_at(barrier, threads, false);
    if (is_complete(barrier)) release(barrier);
}

void Cta::wait(const uint64_t* barrier, uint32_t phase) {
    // Others may go first even where nobody would have to wait: they may not count on haste. A warp's lanes go on
    // together, as they do on a chip, though no rule says so: a lane that the others leave behind may be overtaken by a
    // whole turn of the barrier, and wait for ever.
    here->barrier = barrier, here->phase = phase;
    warps_[size_t(here->warp)].waiting |= 1u << here->lane;
    suspend();
    races_.wait(here->warp, offset_of(barrier));
}

void Cta::pause() {
    Warp& warp = warps_[size_t(here->warp)];
    warp.ready |= 1u << here->lane, warp.asleep |= 1u << here->lane;
    warp.wakes = turns_ + 1 + random_() % 64;
    suspend();
}

std::string Cta::describe_hang() const {
    std::string text = "block " + std::to_string(block_) + " hangs:";
    for (size_t w = 0; w < warps_.size(); ++w) {
        const Warp& warp = warps_[w];
        if (!~warp.ended) continue;
        text += " warp " + std::to_string(w) + " has";
        if (warp.met) text += " " + std::to_string(__builtin_popcount(warp.met)) + " lanes that wait for the others,";
        for (uint32_t left = warp.waiting; left; left &= left - 1) {
            const Thread& thread = threads_[w * warp_threads + size_t(__builtin_ctz(left))];
            const auto* at = reinterpret_cast<const uint8_t*>(thread.barrier);
            text += " lane " + std::to_string(thread.lane) + " at the barrier at byte " +
                    std::to_string(at - shared_.get()) + ", phase " + std::to_string(thread.phase) + ",";
        }
        for (size_t id = 0; id < barriers_.size(); ++id)
            for (const Thread* thread : barriers_[id].waiting)
                if (thread->warp == int(w) && !thread->lane)
                    text += " named barrier " + std::to_string(id % named_barriers) + ",";
        text.back() = ';';
    }
    return text;
}

// ---- shared memory ----
uint8_t* Cta::shared(uint32_t address, size_t bytes) {
    const uint32_t rank = address / shared_window, place = address % shared_window;
    if (rank >= grid_->cluster || place < shared_base || place - shared_base + bytes > grid_->shared_bytes)
        fail("shared memory at byte " + std::to_string(int64_t(place) - shared_base) + " of CTA " +
             std::to_string(rank) + ", " + std::to_string(bytes) + " bytes; the launch has " +
             std::to_string(grid_->shared_bytes));
    return shared_.get() + rank * shared_capacity + (place - shared_base);
}

uint32_t Cta::address_of(const void* shared) {
    const ptrdiff_t at = static_cast<const uint8_t*>(shared) - shared_.get();
    if (at < 0 || size_t(at) > grid_->cluster * shared_capacity) fail("an address outside dynamic shared memory");
    return address_in(shared_base + uint32_t(size_t(at) % shared_capacity), uint32_t(size_t(at) / shared_capacity));
}

}  // namespace emulator
