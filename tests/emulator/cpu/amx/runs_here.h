// SPDX-License-Identifier: MIT
// In place of cpu/amx/runs_here.h: emulated registers are everywhere, what else its rows need is not.
#pragma once

#include "cpu/avx512bf16/runs_here.h"

namespace spattn::cpu::amx {
namespace {

inline bool runs_here(int device) { return avx512bf16::runs_here(device); }

}  // namespace
}  // namespace spattn::cpu::amx
