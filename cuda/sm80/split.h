// SPDX-License-Identifier: MIT
#pragma once

namespace spattn::sm80 {

// What rows of float32 that no plan lets round say beside their sizes: products of theirs are of two numbers in TF32 for
// each one (sm80/tile.cuh).
constexpr bool split = true;

}  // namespace spattn::sm80
