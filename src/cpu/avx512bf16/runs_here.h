// SPDX-License-Identifier: MIT
#pragma once

#include "cpu/avx512/runs_here.h"

namespace spattn::cpu::avx512bf16 {
namespace {

inline bool runs_here(int device) { return avx512::runs_here(device) && __builtin_cpu_supports("avx512bf16"); }

}  // namespace
}  // namespace spattn::cpu::avx512bf16
