// SPDX-License-Identifier: MIT
// A task as the walker of a block forward tells consumers of it.
#pragma once

#include "sm90/pipeline.cuh"

namespace spattn::sm90 {

struct PlacedMessage : ForwardMessage {
    int32_t first;  // where tokens are consecutive: the query at the first place of the tile, below 0 before all queries
};

}  // namespace spattn::sm90
