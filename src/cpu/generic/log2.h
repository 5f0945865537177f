// SPDX-License-Identifier: MIT
#pragma once

namespace spattn::cpu {
namespace {

// Scores are kept in units of log2, where exp2 is one power of two and one short series.
constexpr double log2_e = 1.4426950408889634, ln_2 = 0.6931471805599453;

}  // namespace
}  // namespace spattn::cpu
