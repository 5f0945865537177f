// SPDX-License-Identifier: MIT
// What the compiler calls at each access to memory in sources of kernels, which are compiled with -fsanitize=thread and
// linked with this in place of ThreadSanitizer. Shared memory is watched; atomic operations are in order with all.
#include <cstddef>
#include <cstdint>

#include "emulator/cta.h"

namespace {

using emulator::here, emulator::watched;

void read(const void* at, size_t bytes) {
    const size_t offset = watched.offset_of(at);
    if (offset < watched.bytes) here->cta->races().read(here->warp, offset, bytes);
}
void write(const void* at, size_t bytes) {
    const size_t offset = watched.offset_of(at);
    if (offset < watched.bytes) here->cta->races().write(here->warp, offset, bytes);
}

}  // namespace

extern "C" {

#define SPATTN_ACCESS(bytes)                                          \
    void __tsan_read##bytes(void* at) { read(at, bytes); }            \
    void __tsan_write##bytes(void* at) { write(at, bytes); }          \
    void __tsan_volatile_read##bytes(void* at) { read(at, bytes); }   \
    void __tsan_volatile_write##bytes(void* at) { write(at, bytes); } \
    void __tsan_unaligned_read##bytes(void* at) { read(at, bytes); }  \
    void __tsan_unaligned_write##bytes(void* at) { write(at, bytes); }
SPATTN_ACCESS(1)
SPATTN_ACCESS(2)
SPATTN_ACCESS(4)
SPATTN_ACCESS(8)
SPATTN_ACCESS(16)
#undef SPATTN_ACCESS
void __tsan_read_range(void* at, unsigned long bytes) { read(at, bytes); }
void __tsan_write_range(void* at, unsigned long bytes) { write(at, bytes); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_init() {}

#define SPATTN_ATOMIC(bits, Word)                                                                                     \
    Word __tsan_atomic##bits##_load(const Word* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }            \
    void __tsan_atomic##bits##_store(Word* at, Word x, int) { __atomic_store_n(at, x, __ATOMIC_SEQ_CST); }            \
    Word __tsan_atomic##bits##_exchange(Word* at, Word x, int) {                                                      \
        return __atomic_exchange_n(at, x, __ATOMIC_SEQ_CST);                                                          \
    }                                                                                                                 \
    Word __tsan_atomic##bits##_fetch_add(Word* at, Word x, int) {                                                     \
        return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST);                                                           \
    }                                                                                                                 \
    Word __tsan_atomic##bits##_fetch_sub(Word* at, Word x, int) {                                                     \
        return __atomic_fetch_sub(at, x, __ATOMIC_SEQ_CST);                                                           \
    }                                                                                                                 \
    Word __tsan_atomic##bits##_fetch_or(Word* at, Word x, int) { return __atomic_fetch_or(at, x, __ATOMIC_SEQ_CST); } \
    bool __tsan_atomic##bits##_compare_exchange_strong(Word* at, Word* expected, Word x, int, int) {                  \
        return __atomic_compare_exchange_n(at, expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);               \
    }                                                                                                                 \
    bool __tsan_atomic##bits##_compare_exchange_weak(Word* at, Word* expected, Word x, int, int) {                    \
        return __atomic_compare_exchange_n(at, expected, x, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
    }
SPATTN_ATOMIC(8, uint8_t)
SPATTN_ATOMIC(32, uint32_t)
SPATTN_ATOMIC(64, uint64_t)
#undef SPATTN_ATOMIC

}  // extern "C"
