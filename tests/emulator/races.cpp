// SPDX-License-Identifier: MIT
#include "emulator/races.h"

#include <algorithm>
#include <string>

#include "emulator/cta.h"

namespace emulator {

namespace {

constexpr int place_of(int kind, int index) { return kind * Races::most_of_a_kind + index; }

std::string name_of(int place) {
    const int kind = std::min(place / Races::most_of_a_kind, int(Races::loads));
    const std::string index = std::to_string(place - place_of(kind, 0));
    switch (kind) {
        case Races::warps:
            return "warp " + index;
        case Races::copies:
            return "a copy of warp " + index;
        case Races::products:
            return "a product of warp " + index;
        case Races::stores:
            return "the copy engine, for a store of warp " + index;
        default:
            return "the copy engine, for the load barrier initialised as number " + index;
    }
}

}  // namespace

void Races::Knowledge::join(const Knowledge& other) {
    for (size_t i = 0; i < time.size(); ++i) {
        time[i] = std::max(time[i], other.time[i]);
        fenced[i] = std::max(fenced[i], other.fenced[i]);
    }
}

void Races::begin(int num_warps, size_t shared_bytes) {
    num_warps_ = num_warps, width_ = reading_kinds * num_warps;
    cells_.assign((shared_bytes + cell_bytes - 1) / cell_bytes, {});
    readers_.resize(cells_.size() * size_t(width_));  // a cell's are cleared when the first one reads
    of_warp_.assign(size_t(num_warps), {});
    barriers_.clear();
    for (int i = 0; i < num_warps; ++i) of_warp_[size_t(i)].knows.time[size_t(place_of(warps, i))] = 1;
}

template <class Visit>
void Races::each_cell(size_t at, size_t bytes, Visit visit) {
    const size_t end = std::min(cells_.size(), (at + bytes + cell_bytes - 1) / cell_bytes);
    for (size_t i = at / cell_bytes; i < end; ++i)
        if (!cells_[i].is_barrier) visit(cells_[i], i * cell_bytes);
}

void Races::complain(int warp, size_t at, const char* what, int place, const char* before, const char* why) {
    here->cta->fail("warp " + std::to_string(warp) + what + " byte " + std::to_string(at) +
                    " of shared memory, which " + name_of(place) + " " + before + ", and " + why);
}

void Races::check_written(const Knowledge& who, int warp, const Cell& cell, size_t at, bool by_proxy,
                          const char* what) {
    if (!cell.when) return;
    if (who.time[cell.writer] < cell.when) complain(warp, at, what, cell.writer, "wrote", "nothing orders the two");
    const bool by_thread = cell.writer < place_of(products, 0);  // a warp's own, or cp.async
    if (by_proxy && by_thread && who.fenced[cell.writer] < cell.when)
        complain(warp, at, what, cell.writer, "wrote", "no fence of the async proxy stands between the two");
}

void Races::check_readers(const Knowledge& who, int warp, Cell& cell, size_t at, const char* what) {
    if (!cell.has_readers) return;
    const uint32_t* const when = readers(cell);
    for (int i = 0; i < width_; ++i) {
        const int place = place_of(i / num_warps_, i % num_warps_);
        if (who.time[size_t(place)] < when[i]) complain(warp, at, what, place, "reads", "nothing orders the two");
    }
}

void Races::note_reader(Cell& cell, int place, uint32_t when) {
    uint32_t* const all = readers(cell);
    if (!cell.has_readers) std::fill_n(all, width_, 0), cell.has_readers = true;
    all[place / most_of_a_kind * num_warps_ + place % most_of_a_kind] = when;
}

void Races::overwrite(int warp, Cell& cell, size_t at, int writer, uint32_t when, bool by_proxy, const char* what) {
    const Knowledge& who = of_warp_[size_t(warp)].knows;
    check_written(who, warp, cell, at, by_proxy, what);
    check_readers(who, warp, cell, at, what);
    cell.writer = uint16_t(writer), cell.when = when, cell.has_readers = false;
}

// ---- what a warp does ----
void Races::read(int warp, size_t at, size_t bytes) {
    const Knowledge& who = of_warp_[size_t(warp)].knows;
    const int place = place_of(warps, warp);
    each_cell(at, bytes, [&](Cell& cell, size_t byte) {
        check_written(who, warp, cell, byte, false, " reads");
        note_reader(cell, place, who.time[size_t(place)]);
    });
}

void Races::write(int warp, size_t at, size_t bytes) {
    const int place = place_of(warps, warp);
    const uint32_t now = of_warp_[size_t(warp)].knows.time[size_t(place)];
    each_cell(at, bytes, [&](Cell& cell, size_t byte) { overwrite(warp, cell, byte, place, now, false, " writes"); });
}

void Races::begin_copy(int warp, uint32_t group, size_t at, size_t bytes) {
    each_cell(at, bytes, [&](Cell& cell, size_t byte) {
        overwrite(warp, cell, byte, place_of(copies, warp), group, false, " copies to");
    });
}

void Races::begin_product(int warp, size_t at, size_t bytes) {
    const Warp& who = of_warp_[size_t(warp)];
    each_cell(at, bytes, [&](Cell& cell, size_t byte) {
        check_written(who.knows, warp, cell, byte, true, " multiplies");
        note_reader(cell, place_of(products, warp), who.product_groups);
    });
}

void Races::begin_store(int warp, uint32_t group, size_t at, size_t bytes) {
    const Knowledge& who = of_warp_[size_t(warp)].knows;
    each_cell(at, bytes, [&](Cell& cell, size_t byte) {
        check_written(who, warp, cell, byte, true, " stores");
        note_reader(cell, place_of(stores, warp), group);
    });
}

void Races::begin_load(int warp, size_t barrier, size_t at, size_t bytes) {
    const MemoryBarrier& of = barriers_.at(barrier);
    each_cell(at, bytes, [&](Cell& cell, size_t byte) {
        overwrite(warp, cell, byte, place_of(loads, of.index), of.phase, true, " loads to");
    });
}

void Races::begin_send(int warp, size_t at, size_t bytes) {
    const Knowledge& who = of_warp_[size_t(warp)].knows;
    each_cell(at, bytes, [&](Cell& cell, size_t byte) { check_written(who, warp, cell, byte, true, " sends"); });
}

void Races::end(Kind kind, int warp, uint32_t group) {
    uint32_t& time = of_warp_[size_t(warp)].knows.time[size_t(place_of(kind, warp))];
    time = std::max(time, group);
}

void Races::end_products(int warp, uint32_t pending) {
    const uint32_t committed = of_warp_[size_t(warp)].product_groups - 1;
    if (committed > pending) end(products, warp, committed - pending);
}

void Races::fence(int warp) {
    Knowledge& knows = of_warp_[size_t(warp)].knows;
    knows.fenced = knows.time;
}

// ---- who meets whom ----
void Races::release(int warp, Knowledge& to, Loads loads) {
    Knowledge& knows = of_warp_[size_t(warp)].knows;
    uint32_t& time = knows.time[size_t(place_of(warps, warp))];
    const uint32_t now = time;
    if (loads == Loads::may_follow) time = now - 1;  // it tells of what was before the warp's last release
    to.join(knows);
    time = now + 1;
}

void Races::init_barrier(int warp, size_t at) {
    write(warp, at, sizeof(uint64_t));
    each_cell(at, sizeof(uint64_t), [](Cell& cell, size_t) { cell.is_barrier = true; });
    const int index = int(barriers_.size());
    barriers_[at].index = index;
    if (index >= most_barriers) here->cta->fail("more barriers in shared memory than the emulator has clocks for");
}

void Races::use_barrier(int warp, size_t at) {
    if (!barriers_.contains(at)) here->cta->fail("a barrier that nobody has initialised");
    check_written(of_warp_[size_t(warp)].knows, warp, cells_[at / cell_bytes], at, false, " meets others at");
}

void Races::arrive_copies(int warp, size_t barrier, uint32_t copies_group) {
    uint32_t& time = barriers_.at(barrier).arriving.time[size_t(place_of(copies, warp))];
    time = std::max(time, copies_group);
}

void Races::complete(size_t barrier) {
    MemoryBarrier& of = barriers_.at(barrier);
    of.arriving.time[size_t(place_of(loads, of.index))] = of.phase++;
    of.arrived.join(of.arriving);
}

}  // namespace emulator
