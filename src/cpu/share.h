// SPDX-License-Identifier: MIT
// Work of a call that is no kernel's, shared by the lanes.
#pragma once

#include "core/parallel.h"

namespace spattn::cpu {

// (self.*make)(n) for each n below count, by one lane or another.
template <class Self>
void share(Parallel& parallel, Self& self, int64_t count, void (Self::*make)(int64_t)) {
    struct Shared {
        Self& self;
        int64_t count, lanes;
        void (Self::*make)(int64_t);
    } shared{self, count, parallel.lanes(), make};
    const auto body = [](void* argument, int64_t lane) {
        const Shared& s = *static_cast<Shared*>(argument);
        for (int64_t n = lane; n < s.count; n += s.lanes) (s.self.*s.make)(n);
    };
    if (count == 1) (self.*make)(0);
    else if (count > 1) parallel.run(body, &shared);
}

}  // namespace spattn::cpu
