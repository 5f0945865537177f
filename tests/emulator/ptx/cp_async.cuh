// SPDX-License-Identifier: MIT
// cuda/ptx/cp_async.cuh for the emulator: copies land when somebody waits for them.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace spattn::ptx {

template <int Size>
inline void begin_copy(uint32_t shared, const void* from, int bytes) {
    emulator::Cta& cta = *emulator::here->cta;
    if (shared % Size || bytes < 0 || bytes > Size || (bytes && reinterpret_cast<uintptr_t>(from) % Size))
        cta.fail("cp.async of an address that is not a multiple of its size");
    uint8_t* const to = cta.shared(shared, Size);
    emulator::here->copies.add([=] {
        if (bytes) std::memcpy(to, from, size_t(bytes));
        std::memset(to + bytes, 0, size_t(Size - bytes));
    });
}
inline void cp_async_16(uint32_t shared, const void* from, int bytes) { begin_copy<16>(shared, from, bytes); }
inline void cp_async_4(uint32_t shared, const void* from, int bytes) { begin_copy<4>(shared, from, bytes); }
inline void cp_async_commit() {
    emulator::here->copies.commit();
    if (emulator::here->cta->chance(2)) emulator::here->copies.wait(0);
}
template <int Pending>
inline void cp_async_wait() {
    emulator::here->copies.wait(Pending);
}
inline void cp_async_arrive(uint64_t* bar) {
    emulator::Groups* const copies = &emulator::here->copies;
    check_barrier(bar);
    emulator::here->cta->begin([=] {
        copies->finish();
        arrive(bar, 1, 0);
    });
}
inline void cp_async_wait_all() { emulator::here->copies.finish(); }

}  // namespace spattn::ptx
