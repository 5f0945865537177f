// SPDX-License-Identifier: MIT
// The elements of tiles: bf16.
#pragma once

#include "cpu/neonbf16/vec.h"
#include "cpu/generic/elements.h"

namespace spattn::cpu {
namespace {

using Element = Bf16;

}  // namespace
}  // namespace spattn::cpu
