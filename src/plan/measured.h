// SPDX-License-Identifier: MIT
// Remembers the stats of layouts: rows of several archs have equal blocks, and a layout is measured once for all of
// them.
#pragma once

#include <deque>

#include "plan/stats.h"

namespace spattn {

class Measured {
public:
    // Estimates a layout that is not made from one that is, and its stats: see bounds.h.
    using Bound = LayoutStats(const Lowered&, const LayoutStats&, const Kernel&);

    const LayoutStats& at(const Lowered& lowered, bool by_key) {
        for (const Known& known : known_)
            if (!known.bound && known.lowered == &lowered && known.by_key == by_key) return known.stats;
        return known_.emplace_back(nullptr, &lowered, 0, 0, by_key, make_layout_stats(lowered, by_key)).stats;
    }

    const LayoutStats& at(Bound* bound, const Lowered& lowered, const Kernel& kernel) {
        const bool by_key = kernel.owner() == Owner::keys;
        for (const Known& known : known_)
            if (known.bound == bound && known.lowered == &lowered && known.block_q == kernel.block_q &&
                known.block_k == kernel.block_k && known.by_key == by_key)
                return known.stats;
        const LayoutStats stats = bound(lowered, at(lowered, by_key), kernel);
        return known_.emplace_back(bound, &lowered, kernel.block_q, kernel.block_k, by_key, stats).stats;
    }

private:
    struct Known {
        Bound* bound;  // null: the stats of the layout itself
        const Lowered* lowered;
        int32_t block_q, block_k;
        bool by_key;
        LayoutStats stats;
    };
    std::deque<Known> known_;  // references stay good while it grows
};

}  // namespace spattn
