// SPDX-License-Identifier: MIT
// What matrix instructions call their elements.
#pragma once

namespace spattn::ptx {

enum class MatrixElement { bf16, f16, tf32, e4m3 };
template <MatrixElement>
struct ElementTag {};

}  // namespace spattn::ptx
