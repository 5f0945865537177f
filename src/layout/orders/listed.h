// SPDX-License-Identifier: MIT
// Listed tiles: where the tokens that a block sees are scattered over many blocks that are mostly empty, they are
// gathered into few tiles that list them.
#pragma once

#include "layout/layout.h"

namespace spattn {

// Says a layout of plain blocks again with listed tiles on the axis that `owner` does not own. A block stays as it is
// where more than half of its tokens are alive. Hot tokens of the owning axis get listed tiles of their own (see
// hot_axis.h).
Layout list_tiles(const Layout& plain, Owner owner);

}  // namespace spattn
