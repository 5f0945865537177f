// SPDX-License-Identifier: MIT
// GPUs of this machine and their memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spattn {
struct Machine;  // plan/kernel.h
}

namespace spattn::runtime {

// Makes a device the thread's current one, and the former current again when it goes.
class CurrentDevice {
public:
    explicit CurrentDevice(int index);
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;

private:
    int before_ = -1;
};

int count_devices();                           // 0 without a driver
int capability(int index);                     // 10 * major + minor: 90 is Hopper; 0 where there is no such device
int shared_bytes(int index);                  // that one CTA may have; 0 where there is no such device
int count_processors(int index);

// Plan memory and the copies into it, as a Backend (plan/backends.h) offers them.
void* allocate(int index, size_t bytes, void* stream);
void release(int index, void* memory, size_t bytes, void* stream) noexcept;
void copy_in(int index, void* to, const void* from, size_t bytes, void* stream);
void clear(int index, void* memory, size_t bytes, void* stream);
Machine make_machine(int index, int lanes);

}  // namespace spattn::runtime
