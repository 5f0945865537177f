// SPDX-License-Identifier: MIT
// operator new of the whole program, the library's included: counted, and failing on demand. One source of a program
// includes this.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>

namespace memory {

inline std::atomic<long> live = 0;               // allocations that are not given back
inline std::atomic<long> calls = 0;              // since the last arm()
inline std::atomic<long> first = 0, last = -1;   // the calls that fail

enum class Fault { once, from_then_on };

inline void arm(long n, Fault fault) {
    calls = 0;
    first = n;
    last = fault == Fault::once ? n : std::numeric_limits<long>::max();
}

// Ends the faults; whether there was one.
inline bool disarm() {
    last = -1;
    return calls >= first;
}

inline void* take(size_t bytes, size_t align) noexcept {
    const long call = ++calls;
    if (call >= first && call <= last) return nullptr;
    ++live;
    const size_t whole = (bytes + align) / align * align;
    return align > alignof(std::max_align_t) ? std::aligned_alloc(align, whole) : std::malloc(whole);
}

inline void* take_or_throw(size_t bytes, size_t align) {
    if (void* start = take(bytes, align)) return start;
    throw std::bad_alloc();
}

inline void give_back(void* start) noexcept {
    live -= start != nullptr;
    std::free(start);
}

}  // namespace memory

void* operator new(size_t bytes) { return memory::take_or_throw(bytes, 1); }
void* operator new[](size_t bytes) { return memory::take_or_throw(bytes, 1); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return memory::take(bytes, 1); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return memory::take(bytes, 1); }
void* operator new(size_t bytes, std::align_val_t align) { return memory::take_or_throw(bytes, size_t(align)); }
void* operator new[](size_t bytes, std::align_val_t align) { return memory::take_or_throw(bytes, size_t(align)); }
void operator delete(void* start) noexcept { memory::give_back(start); }
void operator delete[](void* start) noexcept { memory::give_back(start); }
void operator delete(void* start, size_t) noexcept { memory::give_back(start); }
void operator delete[](void* start, size_t) noexcept { memory::give_back(start); }
void operator delete(void* start, std::align_val_t) noexcept { memory::give_back(start); }
void operator delete[](void* start, std::align_val_t) noexcept { memory::give_back(start); }
void operator delete(void* start, size_t, std::align_val_t) noexcept { memory::give_back(start); }
void operator delete[](void* start, size_t, std::align_val_t) noexcept { memory::give_back(start); }
