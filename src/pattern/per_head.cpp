// SPDX-License-Identifier: MIT
// per_head([0,1,0], A, B): head h sees the pattern of that number, by QUERY head.
#include "pattern/choice.h"

namespace spattn {
namespace {

class PerHead : public Choice {
public:
    PerHead(Patterns parts, std::vector<int32_t> map)
        : Choice("per_head", "part_of_head", std::move(parts), std::move(map)) {}

    void check(const Extent& extent) const override {
        check_count(extent.heads, "heads");
        Choice::check(extent);
    }

protected:
    Node node() const override { return Node::per_head; }
    int64_t index(const Plane& plane) const override { return plane.head; }
    PatternRef with(Patterns parts) const override { return make_ref<PerHead>(std::move(parts), map()); }
};

}  // namespace

PatternRef make_per_head(Patterns parts, std::vector<int32_t> part_of_head) {
    check_parts(parts);
    return make_ref<PerHead>(std::move(parts), std::move(part_of_head));
}

}  // namespace spattn
