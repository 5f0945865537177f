// SPDX-License-Identifier: MIT
#pragma once

namespace spattn::any {

// Which bit of a mask is (query, key): row-major, or as tensor core kernels hold a tile of scores (tile/fragment.h),
// whose rows are queries, or keys.
enum class MaskOrder { rows, fragments, key_fragments };

}  // namespace spattn::any
