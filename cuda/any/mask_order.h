// SPDX-License-Identifier: MIT
#pragma once

namespace spattn::any {

// Which bit of a mask is (row, key): row-major, or as the tensor core kernels hold a tile (tile/fragment.h).
enum class MaskOrder { rows, fragments };

}  // namespace spattn::any
