// SPDX-License-Identifier: MIT
#pragma once

namespace spattn::any {

// Which bit of a mask is (query, key): row-major, or as tensor core kernels hold a tile of scores whose rows are keys
// (tile/fragment.h).
enum class MaskOrder { rows, key_fragments };

}  // namespace spattn::any
