// SPDX-License-Identifier: MIT
// What each thread keeps for itself.
#pragma once

#include <pthread.h>

#include <new>

namespace spattn {

// The T of this thread, which is made without memory of its own. Destructors of a thread's objects and of static ones may
// still call the library, in any order: so it is not C++ that destroys a T, but POSIX, after all objects of its thread.
// That of a process' first thread stays.
template <class T>
class OfThread {
public:
    static T& get() {
        if (!place_.object) {
            static const Key key;
            place_.object = new (place_.bytes) T;
            pthread_setspecific(key.key, place_.object);
        }
        return *place_.object;
    }

private:
    struct Key {
        pthread_key_t key;
        Key() {
            const auto destroy = [](void*) {
                place_.object->~T();
                place_.object = nullptr;
            };
            if (pthread_key_create(&key, destroy)) key = pthread_key_t(-1);  // there are no more, and no T is destroyed
        }
        ~Key() { pthread_key_delete(key); }  // where the library is unloaded, threads go on
    };
    struct Place {
        alignas(T) unsigned char bytes[sizeof(T)];
        T* object;
    };
    static inline thread_local Place place_;  // it has no destructor, and so is there as long as the thread
};

template <class T>
T& of_thread() {
    return OfThread<T>::get();
}

}  // namespace spattn
