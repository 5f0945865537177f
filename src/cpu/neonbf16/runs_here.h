// SPDX-License-Identifier: MIT
#pragma once

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace spattn::cpu::neonbf16 {
namespace {

// FEAT_BF16: optional in Armv8.2, required from Armv8.6 on.
inline bool runs_here(int) {
#if defined(__linux__)
    constexpr unsigned long has_bf16 = 1ul << 14;  // HWCAP2_BF16, which old headers do not have
    return getauxval(AT_HWCAP2) & has_bf16;
#elif defined(__APPLE__)
    int found = 0;
    size_t bytes = sizeof found;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &bytes, nullptr, 0) == 0 && found;
#else
    return false;
#endif
}

}  // namespace
}  // namespace spattn::cpu::neonbf16
