// SPDX-License-Identifier: MIT
// Barriers in shared memory (mbarrier): a phase ends when all arrivals and all announced bytes are in.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulator {

struct BarrierState {
    int32_t bytes;  // announced and not there, or there and not announced
    uint16_t left;  // arrivals
    uint16_t expected : 15, phase : 1;
};
static_assert(sizeof(BarrierState) == sizeof(uint64_t), "a barrier is a word of 64 bits");

inline BarrierState read_barrier(const uint64_t& word) {
    BarrierState state;
    std::memcpy(&state, &word, sizeof state);
    return state;
}
inline void write_barrier(uint64_t& word, BarrierState state) {
    if (!state.left && !state.bytes) state.left = state.expected, state.phase ^= 1;
    std::memcpy(&word, &state, sizeof state);
}

// A fresh barrier is in phase 0, and past phase 1.
inline bool is_past(const uint64_t& word, uint32_t phase) { return read_barrier(word).phase != (phase & 1); }

}  // namespace emulator
