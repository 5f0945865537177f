// SPDX-License-Identifier: MIT
// The elements of tiles: bf16. CPUs with AMX have these instructions, too.
#pragma once

#include "cpu/avx512/vec.h"
#include "cpu/generic/elements.h"

namespace spattn::cpu {
namespace {

using Element = Bf16;
constexpr short element_exponent = 0x7f80;  // all ones in infinities and NaN

// Numbers to elements, to nearest, ties to even; NaN stays NaN, and denormals become zero. Lanes of a first.
inline __m512i narrow(Vec a, Vec b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }

}  // namespace
}  // namespace spattn::cpu
