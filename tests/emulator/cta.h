// SPDX-License-Identifier: MIT
// The threads of a cluster of CTAs, of one mostly, as fibers of one thread of the host, which switch only where they
// wait for each other.
//
// What a GPU may do in any order is done in an order that is drawn: which warp goes on, which of its lanes comes first,
// when the copy engine brings what was asked for, and whether a matrix instruction runs at once or when somebody waits
// for it. So a missing barrier gives a wrong result soon (races.h tells it in any order), and waiting that never ends
// is seen when nobody can go on. In half of the CTAs some warps go first whenever they can, until priorities change: a
// warp that runs far ahead meets what a fair order hides (Burckhardt et al., A randomized scheduler with probabilistic
// guarantees of finding bugs, 2010).
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulator/races.h"

namespace emulator {

constexpr int warp_threads = 32;
constexpr size_t shared_capacity = 227 * 1024;  // what a CTA of Hopper may have
constexpr uint32_t shared_base = 1024;          // the address of its first byte; those before belong to the system
constexpr uint32_t shared_window = 256 * 1024;  // addresses of a CTA, of which descriptors know no more

class Cta;

// What an operation that all lanes of a warp do together does, once the last lane has come: `all` has what each lane
// brought, null for lanes that have ended.
using Together = void (*)(void* const (&all)[warp_threads]);

// Effects that happen in their order, a committed group at a time, when somebody waits for the group or sooner.
class Groups {
public:
    void add(std::function<void()> effect) { open_.push_back(std::move(effect)); }
    void commit() { committed_.push_back(std::move(open_)), open_.clear(); }
    // Until so many groups are left.
    void wait(size_t pending);
    // All of it, committed or not.
    void finish();
    bool empty() const { return open_.empty() && committed_.empty(); }

private:
    std::vector<std::vector<std::function<void()>>> committed_;
    std::vector<std::function<void()>> open_;
};

struct Thread {
    Cta* cta;
    uint3 index;
    int rank;        // of its CTA in the cluster
    int warp, lane;  // warp: of the cluster's
    void* stack_pointer;                       // where it stands while it does not run
    void* sanitizer_state;                     // of AddressSanitizer, for this stack
    const uint64_t* barrier;                   // in shared memory, that it waits for
    uint32_t phase;                            // of that barrier
    bool answer;                               // of the barrier that it waited for last
    Groups copies, bulk_stores;                // of cp.async, and of the copy engine
    uint32_t copy_group = 1, store_group = 1;  // the numbers of the open ones, for Races
};

// The thread that runs.
extern constinit thread_local Thread* here;

// The shared memory of its cluster; nothing while no thread runs.
struct Watched {
    const uint8_t* data;
    size_t bytes;
    size_t offset_of(const void* at) const { return size_t(static_cast<const uint8_t*>(at) - data); }
};
extern constinit thread_local Watched watched;

struct Grid {
    uint3 blocks, threads;
    size_t shared_bytes;
    unsigned cluster = 1;  // blocks that run together
};

class Cta {
public:
    Cta();
    ~Cta();
    Cta(const Cta&) = delete;
    Cta& operator=(const Cta&) = delete;

    // Runs `kernel` in all threads of the cluster whose first block this is. What went wrong, or nothing.
    std::string run(const Grid& grid, unsigned block, uint64_t seed, const std::function<void()>& kernel);

    // ---- for the thread that runs ----
    const Grid& grid() const { return *grid_; }
    uint3 block() const { return {block_ + unsigned(here->rank), 0, 0}; }
    // All lanes of the warp; the last that comes does it for all.
    void meet(void* mine, Together together);
    // bar.sync: so many threads, 0 for all. True where one of them said yes.
    bool sync(int barrier, int threads, bool yes);
    void arrive(int barrier, int threads);
    void sync_cluster();
    void wait(const uint64_t* barrier, uint32_t phase);
    // For a while others go on, of other CTAs, too: of a thread that looks at memory again and again.
    void pause();
    [[noreturn]] void fail(const std::string& what);

    uint8_t* shared(uint32_t address, size_t bytes);  // fails where the launch asked for less
    uint32_t address_of(const void* shared);
    uint8_t* dynamic_shared() { return shared_.get() + size_t(here->rank) * shared_capacity; }
    // The address of the same place in the CTA of that rank.
    uint32_t address_in(uint32_t address, uint32_t rank) const {
        return address % shared_window + rank * shared_window;
    }
    // A descriptor leaves out the window: that of the CTA of the thread that runs.
    uint32_t own_address(uint32_t address) const { return address_in(address, uint32_t(here->rank)); }

    // Becomes true at some time from now on.
    void begin(std::function<void()> effect) { events_.push_back(std::move(effect)); }
    bool chance(unsigned one_of) { return random_() % one_of == 0; }
    Groups& products() { return warps_[size_t(here->warp)].products; }

    Races& races() { return races_; }
    size_t offset_of(const void* shared) const { return size_t(static_cast<const uint8_t*>(shared) - shared_.get()); }

private:
    struct Warp {
        uint32_t ready, waiting, ended;  // lanes; waiting: for barriers in shared memory
        uint32_t asleep;                 // of the ready ones, until `wakes`
        uint64_t wakes;
        uint32_t met;                    // lanes that wait for the others of the warp
        uint32_t priority;               // drawn
        Together together;
        void* brought[warp_threads];
        Groups products;  // of wgmma
    };
    struct Barrier {
        int arrived, expected;
        bool any;
        std::vector<Thread*> waiting;
        Races::Knowledge known;  // to who arrived
    };
    struct Stacks;

    static void begin_thread();
    void resume(Thread& thread);
    void suspend();
    void end_thread();
    void do_together(Warp& warp);
    void arrive_at(Barrier& barrier, int threads, bool yes);
    Barrier& named_barrier(int id) { return barriers_[size_t(here->rank) * named_barriers + size_t(id)]; }
    bool sync(Barrier& barrier, int threads, bool yes);
    int running(const Barrier& barrier) const;
    bool is_complete(const Barrier& barrier) const;
    void release(Barrier& barrier);
    void deliver();
    bool step();
    std::string describe_hang() const;

    const Grid* grid_ = nullptr;
    unsigned block_ = 0;
    const std::function<void()>* kernel_ = nullptr;
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    static constexpr size_t named_barriers = 16;
    std::vector<Barrier> barriers_;  // those of each CTA, and at the end the cluster's
    std::vector<std::function<void()>> events_;
    std::vector<int> running_;  // threads of each CTA that have not ended
    uint64_t turns_ = 0;   // in which some warp went on
    std::string failure_;
    Races races_;
    std::mt19937 random_;
    bool has_favourites_ = false;  // among warps
    unsigned lateness_ = 1;        // of events: one turn of so many brings one, if anybody can go on without
    void* scheduler_ = nullptr;    // its stack pointer while a thread runs
    void* sanitizer_state_ = nullptr;
    const void* scheduler_stack_ = nullptr;
    size_t scheduler_stack_bytes_ = 0;
    std::unique_ptr<Stacks> stacks_;
    std::unique_ptr<uint8_t[], void (*)(void*)> shared_;  // of each CTA of the largest cluster
};

}  // namespace emulator
