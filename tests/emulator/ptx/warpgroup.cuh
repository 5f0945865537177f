// SPDX-License-Identifier: MIT
// cuda/ptx/warpgroup.cuh for the emulator.
#pragma once

#include <bit>
#include <cstdint>

namespace spattn::ptx {

template <int Count>
inline void take_registers() {}
template <int Count>
inline void give_registers() {}

inline void named_barrier_sync(int id, int threads) { emulator::here->cta->sync(id, threads, false); }
inline bool named_barrier_any(int id, int threads, bool yes) { return emulator::here->cta->sync(id, threads, yes); }
inline void named_barrier_arrive(int id, int threads) { emulator::here->cta->arrive(id, threads); }

inline bool elect() { return std::countr_zero(emulator::ballot(true)) == emulator::here->lane; }

}  // namespace spattn::ptx
