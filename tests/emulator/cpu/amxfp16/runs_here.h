// SPDX-License-Identifier: MIT
// In place of cpu/amxfp16/runs_here.h: emulated registers are everywhere, AVX-512 is not.
#pragma once

#include "cpu/avx512/runs_here.h"

namespace spattn::cpu::amxfp16 {
namespace {

inline bool runs_here(int device) { return avx512::runs_here(device); }

}  // namespace
}  // namespace spattn::cpu::amxfp16
