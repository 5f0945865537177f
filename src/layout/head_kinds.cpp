// SPDX-License-Identifier: MIT
#include "layout/head_kinds.h"

#include "core/cancel.h"
#include "layout/index.h"

namespace spattn {

std::vector<Plane> find_head_kinds(const Pattern& pattern, Layout& layout) {
    KeyMemo<int32_t> known;
    std::vector<Plane> planes;
    Key key;
    layout.kind_of_head.reserve(size_t(layout.extent.batch * layout.extent.heads));
    for (int64_t batch = 0; batch < layout.extent.batch; ++batch) {
        for (int64_t head = 0; head < layout.extent.heads; ++head) {
            check_cancelled();
            const Plane plane{layout.extent, batch, head};
            key.clear();
            pattern.selection(plane, key);
            const int32_t id = known.at(key, 0);
            if (size_t(id) == planes.size()) planes.push_back(plane);
            layout.kind_of_head.push_back(id);
        }
    }
    layout.head_kinds = int32_t(planes.size());
    return planes;
}

}  // namespace spattn
