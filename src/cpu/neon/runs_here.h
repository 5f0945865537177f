// SPDX-License-Identifier: MIT
#pragma once

namespace spattn::cpu::neon {
namespace {

// Every AArch64 has these instructions: no flag in archs.inc, nothing to ask.
inline bool runs_here(int) { return true; }

}  // namespace
}  // namespace spattn::cpu::neon
