// SPDX-License-Identifier: MIT
// cuda/ptx/tma.cuh for the emulator.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "emulator/tensor_map.h"
#include "ptx/mbarrier.cuh"

namespace spattn::ptx {

inline void prefetch_tensor_map(const CUtensorMap*) {}

template <class... Places>
inline void begin_load(void* shared, const CUtensorMap* map, uint64_t* bar, Places... places) {
    emulator::Cta& cta = *emulator::here->cta;
    const emulator::TensorMap tensor = emulator::read_map(*map);
    if (tensor.rank != sizeof...(places)) cta.fail("a box of another rank than its tensor map");
    const uint32_t address = shared_address(shared);
    if (address % 128) cta.fail("a box at an address in shared memory that is no multiple of 128");
    uint8_t* const base = cta.shared(address, tensor.box_bytes());
    check_barrier(bar);
    cta.begin([=] {
        tensor.load(base, address, {places...});
        arrive(bar, 0, -int32_t(tensor.box_bytes()));
    });
}
inline void tma_load_4d(void* shared, const CUtensorMap* map, int x, int y, int z, int w, uint64_t* bar) {
    begin_load(shared, map, bar, x, y, z, w);
}
inline void tma_load_5d(void* shared, const CUtensorMap* map, int x, int y, int z, int w, int u, uint64_t* bar) {
    begin_load(shared, map, bar, x, y, z, w, u);
}

inline void tma_store_4d(const CUtensorMap* map, int x, int y, int z, int w, const void* shared) {
    emulator::Cta& cta = *emulator::here->cta;
    const emulator::TensorMap tensor = emulator::read_map(*map);
    const uint32_t address = shared_address(shared);
    if (tensor.rank != 4 || address % 128) cta.fail("a box of another rank, or at no multiple of 128");
    const uint8_t* const base = cta.shared(address, tensor.box_bytes());
    emulator::here->bulk_stores.add([=] { tensor.store(base, address, {x, y, z, w}); });
}

inline void bulk_add(float* to, const float* shared, uint32_t bytes) {
    emulator::Cta& cta = *emulator::here->cta;
    const uint32_t address = shared_address(shared);
    if (address % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16)
        cta.fail("bulk addition of what is no multiple of 16");
    cta.shared(address, bytes);
    emulator::here->bulk_stores.add([=] {
        for (uint32_t i = 0; i < bytes / 4; ++i) atomicAdd(to + i, shared[i]);
    });
}
inline void bulk_commit() {
    emulator::here->bulk_stores.commit();
    if (emulator::here->cta->chance(2)) emulator::here->bulk_stores.wait(0);
}
inline void bulk_wait_read() { emulator::here->bulk_stores.wait(0); }
inline void bulk_wait() { emulator::here->bulk_stores.wait(0); }
inline void fence_async_shared() {}

}  // namespace spattn::ptx
