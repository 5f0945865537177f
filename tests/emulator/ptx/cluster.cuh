// SPDX-License-Identifier: MIT
// cuda/ptx/cluster.cuh for the emulator.
#pragma once

#include <cstdint>
#include <cstring>

#include "ptx/mbarrier.cuh"

namespace spattn::ptx {

inline uint32_t cluster_rank() { return uint32_t(emulator::here->rank); }
inline void cluster_sync() { emulator::here->cta->sync_cluster(); }
inline uint32_t cluster_address(const void* shared, uint32_t rank) {
    return emulator::here->cta->address_in(shared_address(shared), rank);
}

inline uint64_t* barrier_at(uint32_t address) {
    return reinterpret_cast<uint64_t*>(emulator::here->cta->shared(address, sizeof(uint64_t)));
}
inline void cluster_arrive(uint32_t bar) {
    check_and_arrive(barrier_at(bar), 1, 0, emulator::Races::Loads::may_follow);
}
inline void cluster_arrive_after(uint32_t bar, float) { check_and_arrive(barrier_at(bar), 1, 0); }

// `effect` brings the bytes at some time.
template <class Effect>
inline void begin_transfer(uint32_t to, uint32_t bytes, uint32_t bar, Effect effect) {
    emulator::Cta& cta = *emulator::here->cta;
    if (to % 16 || bytes % 16) cta.fail("a transfer to another CTA of what is no multiple of 16");
    uint8_t* const base = cta.shared(to, bytes);
    uint64_t* const barrier = barrier_at(bar);
    check_barrier(barrier);
    cta.races().begin_load(emulator::here->warp, offset_of(barrier), offset_of(base), bytes);
    cta.begin([=, &cta] {
        effect(base);
        arrive(cta, barrier, 0, -int32_t(bytes));
    });
}
inline void cluster_store(uint32_t to, const float (&x)[4], uint32_t bar) {
    const float4 words{x[0], x[1], x[2], x[3]};
    begin_transfer(to, sizeof words, bar, [words](uint8_t* at) { std::memcpy(at, &words, sizeof words); });
}
inline void cluster_copy(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar) {
    emulator::Cta& cta = *emulator::here->cta;
    if (from % 16) cta.fail("a copy to another CTA from what is no multiple of 16");
    const uint8_t* const source = cta.shared(from, bytes);
    cta.races().begin_send(emulator::here->warp, cta.offset_of(source), bytes);
    begin_transfer(to, bytes, bar, [=](uint8_t* at) { std::memcpy(at, source, bytes); });
}

}  // namespace spattn::ptx
