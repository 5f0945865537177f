// SPDX-License-Identifier: MIT
// cuda/ptx/cp_async.cuh for the emulator: copies land when somebody waits for them.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace spattn::ptx {

constexpr bool copies_parts_of_16 = true;

template <int Size>
inline void begin_copy(uint32_t shared, const void* from, int bytes) {
    emulator::Cta& cta = *emulator::here->cta;
    if (shared % Size || bytes < 0 || bytes > Size || (bytes && reinterpret_cast<uintptr_t>(from) % Size))
        cta.fail("cp.async of an address that is not a multiple of its size");
    uint8_t* const to = cta.shared(shared, Size);
    cta.races().begin_copy(emulator::here->warp, emulator::here->copy_group, cta.offset_of(to), Size);
    emulator::here->copies.add([=] {
        if (bytes) std::memcpy(to, from, size_t(bytes));
        std::memset(to + bytes, 0, size_t(Size - bytes));
    });
}
inline void cp_async_16(uint32_t shared, const void* from, int bytes) { begin_copy<16>(shared, from, bytes); }
inline void cp_async_4(uint32_t shared, const void* from, int bytes) { begin_copy<4>(shared, from, bytes); }
// Groups up to this number have come.
inline void end_copies(uint32_t group) {
    emulator::here->cta->races().end(emulator::Races::copies, emulator::here->warp, group);
}
inline void cp_async_commit() {
    emulator::here->copies.commit();
    ++emulator::here->copy_group;
    if (emulator::here->cta->chance(2)) emulator::here->copies.wait(0);
}
template <int Pending>
inline void cp_async_wait() {
    emulator::here->copies.wait(Pending);
    if (emulator::here->copy_group > Pending + 1) end_copies(emulator::here->copy_group - 1 - Pending);
}
inline void cp_async_arrive(uint64_t* bar) {
    emulator::Thread& thread = *emulator::here;
    check_barrier(bar);
    thread.cta->races().arrive_copies(thread.warp, offset_of(bar), thread.copy_group++);
    thread.cta->begin([=, &thread] {
        thread.copies.finish();
        arrive(*thread.cta, bar, 1, 0);
    });
}
inline void cp_async_wait_all() {
    emulator::here->copies.finish();
    end_copies(emulator::here->copy_group++);
}

}  // namespace spattn::ptx
