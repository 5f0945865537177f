// SPDX-License-Identifier: MIT
// cuda/ptx/tma.cuh for the emulator.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstring>

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
    cta.races().begin_load(emulator::here->warp, offset_of(bar), offset_of(base), tensor.box_bytes());
    cta.begin([=, &cta] {
        tensor.load(base, address, {places...});
        arrive(cta, bar, 0, -int32_t(tensor.box_bytes()));
    });
}
inline void tma_load_4d(void* shared, const CUtensorMap* map, int x, int y, int z, int w, uint64_t* bar) {
    begin_load(shared, map, bar, x, y, z, w);
}
inline void tma_load_5d(void* shared, const CUtensorMap* map, int x, int y, int z, int w, int u, uint64_t* bar) {
    begin_load(shared, map, bar, x, y, z, w, u);
}

inline void bulk_load(float* shared, const float* from, uint32_t bytes, uint64_t* bar) {
    emulator::Cta& cta = *emulator::here->cta;
    const uint32_t address = shared_address(shared);
    if (address % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16)
        cta.fail("a bulk copy of what is no multiple of 16");
    uint8_t* const base = cta.shared(address, bytes);
    check_barrier(bar);
    cta.races().begin_load(emulator::here->warp, offset_of(bar), offset_of(base), bytes);
    cta.begin([=, &cta] {
        std::memcpy(base, from, bytes);
        arrive(cta, bar, 0, -int32_t(bytes));
    });
}

inline void begin_bulk_store(const void* shared, uint32_t bytes) {
    emulator::Thread& thread = *emulator::here;
    thread.cta->races().begin_store(thread.warp, thread.store_group, offset_of(shared), bytes);
}
template <class... Places>
inline void begin_box_store(const CUtensorMap* map, const void* shared, Places... places) {
    emulator::Cta& cta = *emulator::here->cta;
    const emulator::TensorMap tensor = emulator::read_map(*map);
    const uint32_t address = shared_address(shared);
    if (tensor.rank != sizeof...(places) || address % 128)
        cta.fail("a box of another rank, or at no multiple of 128");
    // Loads fill such a box with zeros; to store it is an illegal instruction, as an H100 said.
    if (((places < 0) || ...)) cta.fail("a box that is stored from below 0 on");
    const uint8_t* const base = cta.shared(address, tensor.box_bytes());
    begin_bulk_store(base, tensor.box_bytes());
    emulator::here->bulk_stores.add([=] { tensor.store(base, address, {places...}); });
}
inline void tma_store_4d(const CUtensorMap* map, int x, int y, int z, int w, const void* shared) {
    begin_box_store(map, shared, x, y, z, w);
}
inline void tma_store_5d(const CUtensorMap* map, int x, int y, int z, int w, int u, const void* shared) {
    begin_box_store(map, shared, x, y, z, w, u);
}

inline void check_bulk(const float* to, const float* shared, uint32_t bytes) {
    emulator::Cta& cta = *emulator::here->cta;
    const uint32_t address = shared_address(shared);
    if (address % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16)
        cta.fail("a bulk copy or addition of what is no multiple of 16");
    cta.shared(address, bytes);
    begin_bulk_store(shared, bytes);
}
inline void bulk_store(float* to, const float* shared, uint32_t bytes) {
    check_bulk(to, shared, bytes);
    emulator::here->bulk_stores.add([=] { std::memcpy(to, shared, bytes); });
}
inline void bulk_add(float* to, const float* shared, uint32_t bytes) {
    check_bulk(to, shared, bytes);
    emulator::here->bulk_stores.add([=] { emulator::add_to(to, shared, bytes / 4); });
}
inline void bulk_commit() {
    emulator::here->bulk_stores.commit();
    ++emulator::here->store_group;
    if (emulator::here->cta->chance(2)) emulator::here->bulk_stores.wait(0);
}
inline void bulk_wait() {
    emulator::Thread& thread = *emulator::here;
    thread.bulk_stores.wait(0);
    thread.cta->races().end(emulator::Races::stores, thread.warp, thread.store_group - 1);
}
inline void bulk_wait_read() { bulk_wait(); }
inline void fence_async_shared() { emulator::here->cta->races().fence(emulator::here->warp); }

}  // namespace spattn::ptx
