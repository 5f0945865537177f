// SPDX-License-Identifier: MIT
// cuda/ptx/mbarrier.cuh for the emulator.
#pragma once

#include <cstdint>

#include "emulator/barrier.h"

namespace spattn::ptx {

inline uint32_t shared_address(const void* p) { return emulator::here->cta->address_of(p); }

inline size_t offset_of(const void* shared) { return emulator::here->cta->offset_of(shared); }

inline void check_barrier(const uint64_t* bar) {
    emulator::here->cta->shared(shared_address(bar), sizeof *bar);
    emulator::here->cta->races().use_barrier(emulator::here->warp, offset_of(bar));
}

// `bytes`: announced if positive, come if negative. Called while no thread runs, too.
inline void arrive(emulator::Cta& cta, uint64_t* bar, uint32_t arrivals, int32_t bytes) {
    emulator::BarrierState state = emulator::read_barrier(*bar);
    const bool phase = state.phase;
    state.left = uint16_t(state.left - arrivals), state.bytes += bytes;
    emulator::write_barrier(*bar, state);
    if (emulator::read_barrier(*bar).phase != phase) cta.races().complete(cta.offset_of(bar));
}
inline void check_and_arrive(uint64_t* bar, uint32_t arrivals, int32_t bytes,
                             emulator::Races::Loads loads = emulator::Races::Loads::have_come) {
    check_barrier(bar);
    emulator::Cta& cta = *emulator::here->cta;
    if (emulator::read_barrier(*bar).left < arrivals) cta.fail("more arrivals than a barrier expects");
    cta.races().arrive(emulator::here->warp, offset_of(bar), loads);
    arrive(cta, bar, arrivals, bytes);
}

inline void mbarrier_init(uint64_t* bar, uint32_t arrivals) {
    emulator::here->cta->shared(shared_address(bar), sizeof *bar);
    emulator::here->cta->races().init_barrier(emulator::here->warp, offset_of(bar));
    emulator::write_barrier(*bar, {0, uint16_t(arrivals), uint16_t(arrivals & 0x7FFF), 0});
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint64_t* bar) { check_and_arrive(bar, 1, 0); }
inline void mbarrier_arrive(uint64_t* bar, uint32_t arrivals) { check_and_arrive(bar, arrivals, 0); }
inline void mbarrier_arrive_expect(uint64_t* bar, uint32_t bytes) { check_and_arrive(bar, 1, int32_t(bytes)); }
inline bool mbarrier_try_wait(uint64_t* bar, uint32_t phase) {
    check_barrier(bar);
    const bool is_past = emulator::is_past(*bar, phase);
    if (is_past) emulator::here->cta->races().wait(emulator::here->warp, offset_of(bar));
    return is_past;
}
inline bool mbarrier_test(uint64_t* bar, uint32_t phase) { return mbarrier_try_wait(bar, phase); }
inline void mbarrier_wait(uint64_t* bar, uint32_t phase) {
    check_barrier(bar);
    emulator::here->cta->wait(bar, phase);
}

}  // namespace spattn::ptx
