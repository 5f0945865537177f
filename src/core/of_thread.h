// SPDX-License-Identifier: MIT
// What each thread keeps for itself.
#pragma once

#include <new>

namespace spattn {

// The T of this thread. C++ destroys it when the thread ends, before the thread's older objects and before static ones,
// whose destructors may still call the library. They find a T that is new, and that nobody destroys.
template <class T>
T& of_thread() {
    struct Place {  // it has no destructor, and so is there as long as the thread
        alignas(T) unsigned char bytes[sizeof(T)];
        T* object;
    };
    struct End {
        Place& place;
        ~End() {
            place.object->~T();
            new (place.object) T;
        }
    };
    thread_local Place place;
    if (!place.object) {
        place.object = new (place.bytes) T;
        thread_local End end{place};
    }
    return *place.object;
}

}  // namespace spattn
