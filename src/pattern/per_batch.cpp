// SPDX-License-Identifier: MIT
// per_batch([0,1,0], A, B): batch entry b sees the pattern of that number; padding masks are written so.
#include "pattern/choice.h"

namespace spattn {
namespace {

class PerBatch : public Choice {
public:
    PerBatch(Patterns parts, std::vector<int32_t> map)
        : Choice("per_batch", "part_of_batch", std::move(parts), std::move(map)) {}

    void check(const Extent& extent) const override {
        check_count(extent.batch, "batch entries");
        Choice::check(extent);
    }

protected:
    Node node() const override { return Node::per_batch; }
    int64_t index(const Plane& plane) const override { return plane.batch; }
    PatternRef with(Patterns parts) const override { return make_ref<PerBatch>(std::move(parts), map()); }
};

}  // namespace

PatternRef make_per_batch(Patterns parts, std::vector<int32_t> part_of_batch) {
    check_parts(parts);
    return make_ref<PerBatch>(std::move(parts), std::move(part_of_batch));
}

}  // namespace spattn
