// SPDX-License-Identifier: MIT
// Where the bits of a mask lie in a row's order, for calls that make masks of their own. C++17-clean.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/kernel.h"

namespace spattn {

// For each bit of a mask in a row's order, which row-major bit it is; or one that is always 0, or always 1.
constexpr uint16_t bit_of_none = 0xFFFF, bit_of_all = 0xFFFE;

// [mask_words * 64]
std::vector<uint16_t> make_bit_places(const Kernel& kernel);

}  // namespace spattn
