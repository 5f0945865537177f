// SPDX-License-Identifier: MIT
// Listed tiles: where each block of rows sees its own scattered tokens, it gets them as tiles of listed tokens instead
// of many blocks that are mostly empty.
#pragma once

#include "layout/layout.h"

namespace spattn {

// A layout of plain blocks, said again with listed tiles on the other axis. Blocks that more than half of their tokens
// matter in stay as they are. Tokens of the owning axis that see far more than their neighbours (global tokens) move
// into listed tiles of their own, so that their blocks are not everybody's.
Layout list_tiles(const Layout& plain, Owner owner);

}  // namespace spattn
