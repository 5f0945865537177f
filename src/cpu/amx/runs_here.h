// SPDX-License-Identifier: MIT
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/avx512bf16/runs_here.h"

namespace spattn::cpu::amx {
namespace {

// What ask() says, asked once: 0 before, then 1 for no and 2 for yes. Threads that meet here find the same.
template <class Ask>
bool asked_once(Ask ask) {
    static int known = 0;
    int answer = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (answer == 0) {
        answer = ask() ? 2 : 1;
        __atomic_store_n(&known, answer, __ATOMIC_RELAXED);
    }
    return answer == 2;
}

// Tiles are 8 KiB of state that a thread has to be given room for, so Linux wants to be asked before the first use. It
// answers for all threads of the process. https://docs.kernel.org/arch/x86/xstate.html
inline bool is_permitted() {
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

inline bool has_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    return (d & amx_bf16) && (d & amx_tile) && is_permitted();
}

inline bool runs_here(int device) {
    return asked_once([=] { return avx512bf16::runs_here(device) && has_tiles(); });
}

}  // namespace
}  // namespace spattn::cpu::amx
