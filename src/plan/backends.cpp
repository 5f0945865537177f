// SPDX-License-Identifier: MIT
#include "plan/backends.h"

#include <cstring>
#include <new>

namespace spattn {

namespace cpu {
void add_kernels(std::vector<Kernel>& all);
void make_call_layout(const CallArgs& args, const CallLayout& to);
CacheSteps cache_steps();
Float8Steps float8_steps();
ExchangeSteps exchange_steps();
}  // namespace cpu
#ifdef SPATTN_WITH_CUDA
namespace cuda {
void add_kernels(std::vector<Kernel>& all);
Backend backend();
}
#endif

namespace {

constexpr std::align_val_t host_alignment{256};

Backend cpu_backend() {
    return {
        "cpu",
        SPATTN_CPU,
        [] { return 1; },
        [](int, size_t bytes, void*) { return ::operator new(bytes, host_alignment); },
        [](int, void* memory, size_t, void*) { ::operator delete(memory, host_alignment); },
        [](int, void* to, const void* from, size_t bytes, void*) { std::memcpy(to, from, bytes); },
        [](int, void* memory, size_t bytes, void*) { std::memset(memory, 0, bytes); },
        [](int, int lanes) { return this_machine(lanes); },
        cpu::make_call_layout,
        [](int) {},
        cpu::cache_steps(),
        cpu::float8_steps(),
        cpu::exchange_steps(),
    };
}

}  // namespace

// Both tables are made at the first use, which may come from a static object of the program before those of the library
// are made, and never destroyed: destructors of such objects, which may run passes, come after theirs.
const std::vector<Kernel>& all_kernels() {
    static const auto& all = *new std::vector<Kernel>([] {
        std::vector<Kernel> rows;
#ifdef SPATTN_WITH_CUDA
        cuda::add_kernels(rows);
#endif
        cpu::add_kernels(rows);
        return rows;
    }());
    return all;
}

const std::vector<Backend>& all_backends() {
    static const auto& all = *new std::vector<Backend>{
#ifdef SPATTN_WITH_CUDA
        cuda::backend(),
#endif
        cpu_backend(),
    };
    return all;
}

}  // namespace spattn
