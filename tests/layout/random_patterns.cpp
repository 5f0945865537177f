// SPDX-License-Identifier: MIT
#include "layout/random_patterns.h"

namespace spattn {

drawn::Builder builder(Random& random, const Extent& e) {
    return {random, {e.batch, e.heads, e.seq_q, e.seq_k, e.q_offset}, 4};
}

PatternRef take(drawn::Model model) { return PatternRef::adopt(model.pattern.release()); }

PatternRef random_pattern(Random& random, const Extent& e) {
    return take(builder(random, e).build(int(random.in(0, 4))));
}

PatternRef random_leaf(Random& random, const Extent& e) { return take(builder(random, e).leaf()); }

PatternRef random_lists(Random& random, const Extent& e) { return take(builder(random, e).lists()); }

Extent random_extent(Random& random) {
    Extent extent;
    extent.batch = random.one_in(3) ? 2 : 1;
    extent.heads = random.one_in(3) ? 3 : 1;
    extent.seq_q = random.one_in(4) ? random.in(1, 5) : random.in(1, 200);
    extent.seq_k = random.one_in(4) ? 64 * random.in(1, 3) : random.in(1, 200);
    extent.q_offset = random.one_in(2) ? extent.seq_k - extent.seq_q : random.in(-60, 250);
    return extent;
}

}  // namespace spattn
