// SPDX-License-Identifier: MIT
#pragma once

#include "any/partials.h"

namespace spattn::any {

// Puts the parts of each join together, in their order. Nothing is launched where there are none.
template <Dtype D>
struct Combine {
    static void run(const ForwardArgs& args, const Partials<RealOf<D>>& parts);
    static void prepare(int32_t device);
};

}  // namespace spattn::any
