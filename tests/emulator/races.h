// SPDX-License-Identifier: MIT
// Finds accesses to a CTA's shared memory that nothing orders, whatever order they happened to come in.
//
// Everybody who accesses it counts time for himself, and barriers carry what their visitors know of each other's time
// (vector clocks; Flanagan and Freund, FastTrack, 2009). Those who access it are warps, whose lanes are taken as one,
// and what goes on beside a warp: its copies (cp.async), its matrix products, its stores by the copy engine, and what
// that engine loads for a barrier. These end when somebody has waited for them, and not before.
//
// Products and the copy engine see memory through a proxy of their own: what threads wrote is there only after a fence
// (fence.proxy.async), by who wrote or by who begins the operation.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#proxies
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace emulator {

class Races {
public:
    // Places of clocks, by warp, and of loads by barrier.
    enum Kind { warps, copies, products, stores, loads };
    static constexpr int most_of_a_kind = 32, most_barriers = 96;
    using Clock = std::array<uint32_t, loads * most_of_a_kind + most_barriers>;

    // What is known of everybody's time; and of accesses that the other proxy sees.
    struct Knowledge {
        Clock time{}, fenced{};
        void join(const Knowledge& other);
    };

    // A CTA begins.
    void begin(int num_warps, size_t shared_bytes);

    // ---- what a warp does; bytes count from the begin of shared memory ----
    void read(int warp, size_t at, size_t bytes);
    void write(int warp, size_t at, size_t bytes);
    // Parts of operations that go on: an operation is named by its number among those of its kind and warp, from 1 on.
    void begin_copy(int warp, uint32_t group, size_t at, size_t bytes);
    void begin_product(int warp, size_t at, size_t bytes);
    void begin_store(int warp, uint32_t group, size_t at, size_t bytes);
    void begin_load(int warp, size_t barrier, size_t at, size_t bytes);
    // The copy engine reads for another CTA, whose barrier alone tells when it has: that nobody writes there before is
    // not watched.
    void begin_send(int warp, size_t at, size_t bytes);
    // Operations up to that number have ended.
    void end(Kind kind, int warp, uint32_t group);
    void commit_products(int warp) { ++of_warp_[size_t(warp)].product_groups; }
    void end_products(int warp, uint32_t pending);
    void fence(int warp);

    // ---- who meets whom ----
    // An arrival at another CTA's barrier may overtake loads from shared memory whose values nobody has waited for.
    enum class Loads { have_come, may_follow };
    void release(int warp, Knowledge& to, Loads loads = Loads::have_come);
    void acquire(int warp, const Knowledge& from) { of_warp_[size_t(warp)].knows.join(from); }
    // Barriers in shared memory. `copies_group`: the warp's copies up to that one, which arrive by themselves.
    void init_barrier(int warp, size_t at);
    void use_barrier(int warp, size_t at);
    void arrive(int warp, size_t barrier, Loads loads) { release(warp, barriers_.at(barrier).arriving, loads); }
    void arrive_copies(int warp, size_t barrier, uint32_t copies_group);
    void complete(size_t barrier);  // its phase ends
    void wait(int warp, size_t barrier) { acquire(warp, barriers_.at(barrier).arrived); }

private:
    struct Warp {
        Knowledge knows;
        uint32_t product_groups = 1;  // the number of the open one
    };
    struct MemoryBarrier {
        Knowledge arriving, arrived;
        int index;  // among loads
        uint32_t phase = 1;
    };
    struct Cell {
        uint32_t when = 0;  // it was written last, by `writer`, a place of clocks
        uint16_t writer = 0;
        bool has_readers = false, is_barrier = false;
    };
    static constexpr size_t cell_bytes = 2;
    static constexpr int reading_kinds = loads;  // these read no shared memory

    template <class Visit>
    void each_cell(size_t at, size_t bytes, Visit visit);
    void check_written(const Knowledge& who, int warp, const Cell& cell, size_t at, bool by_proxy, const char* what);
    void check_readers(const Knowledge& who, int warp, Cell& cell, size_t at, const char* what);
    void note_reader(Cell& cell, int place, uint32_t when);
    uint32_t* readers(const Cell& cell) { return &readers_[size_t(&cell - cells_.data()) * size_t(width_)]; }
    void complain(int warp, size_t at, const char* what, int place, const char* before, const char* why);
    void overwrite(int warp, Cell& cell, size_t at, int writer, uint32_t when, bool by_proxy, const char* what);

    int num_warps_ = 0, width_ = 0;  // places of readers of a cell
    std::vector<Cell> cells_;
    std::vector<uint32_t> readers_;  // [cell][place]: when each read it last, since it was written
    std::vector<Warp> of_warp_;
    std::map<size_t, MemoryBarrier> barriers_;
};

}  // namespace emulator
