// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

namespace spattn {

// Floored division and remainder: patterns are defined with them for negative positions too. divisor > 0.
constexpr int64_t floor_div(int64_t a, int64_t divisor) { return a / divisor - (a % divisor < 0); }
constexpr int64_t floor_mod(int64_t a, int64_t divisor) { return a - floor_div(a, divisor) * divisor; }

constexpr int64_t ceil_div(int64_t a, int64_t divisor) { return -floor_div(-a, divisor); }
constexpr int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }

}  // namespace spattn
