// SPDX-License-Identifier: MIT
// tree(parents): the keys before the tree, and every node(k) that is an ancestor of node(p) or node(p) itself, with
// node(x) = x - (seq_k - T). SpecInfer (https://arxiv.org/abs/2305.09781).
#include "core/error.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

class Tree : public ListLeaf {
public:
    explicit Tree(const std::vector<int64_t>& parents) : ListLeaf("tree", parents) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        const int64_t base = plane.extent.seq_k - size(), node = plane.position(row) - base;
        const size_t mark = out.size();
        Cutter(clip, out).add(lowest, base);
        if (node < 0 || node >= size()) return;
        const size_t first = out.size();
        bool is_falling = true;  // parents mostly come before children
        for (int64_t n = node, child = size(); n >= 0; child = n, n = given()[n]) {
            is_falling &= n < child;
            if (clip.begin <= base + n && base + n < clip.end) out.push_back({base + n, base + n + 1});
        }
        std::reverse(out.begin() + int64_t(first), out.end());
        if (!is_falling)
            std::sort(out.begin() + int64_t(first), out.end(), is_earlier);
        join_touching(out, mark);
    }

    // Nodes of the tree are few: their blocks are left to keys().
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override {
        const int64_t base = plane.extent.seq_k - size();
        if (block.key <= base - block.keys) return {Coverage::full, blocks_until(base, block.key, block.keys)};
        if (block.key >= plane.extent.seq_k) return {Coverage::empty, forever};
        const bool has_node = !is_outside(plane, block.row, block.rows);
        if (!has_node && block.key >= base) return {Coverage::empty, forever};
        if (has_node) {
            known = false;
        } else {
            key.push_back(base - block.key);
        }
        return {Coverage::partial, 1};
    }

    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key&) const override {
        return is_outside(plane, row, rows);
    }

    void check(const Extent& extent) const override {
        if (size() > extent.seq_k) {
            fail(SPATTN_E_SHAPE, "pattern",
                 text("tree has ", size(), " nodes for seq_k ", extent.seq_k, "; accepted: at most seq_k nodes"));
        }
        if (extent.seq_q > size()) {
            fail(SPATTN_E_SHAPE, "pattern",
                 text("tree has ", size(), " nodes for seq_q ", extent.seq_q, "; accepted: at least seq_q nodes"));
        }
    }

private:
    int64_t size() const { return int64_t(given().size()); }

    bool is_outside(const Plane& plane, int64_t row, int64_t rows) const {  // no row is a node
        const int64_t p = plane.position(row);
        return p + rows <= plane.extent.seq_k - size() || p >= plane.extent.seq_k;
    }
};

// Each node's way to its root is walked once: a node met again on the same walk closes a cycle.
void check_parents(const std::vector<int64_t>& parents) {
    const int64_t size = int64_t(parents.size());
    if (size == 0) fail(SPATTN_E_SHAPE, "parents", "has no node; accepted: 1 and more");
    for (int64_t parent : parents) {
        if (parent >= -1 && parent < size) continue;
        fail(SPATTN_E_RANGE, "parents", text("has ", parent, "; accepted: -1 for a root, or 0 to ", size - 1));
    }
    std::vector<int64_t> walk_of(parents.size(), -1);
    for (int64_t start = 0; start < size; ++start) {
        int64_t n = start;
        for (; n >= 0 && walk_of[n] < 0; n = parents[n]) walk_of[n] = start;
        if (n < 0 || walk_of[n] != start) continue;
        fail(SPATTN_E_ARGUMENT, "parents", text("has a cycle through node ", n, "; accepted: a forest"));
    }
}

}  // namespace

PatternRef make_tree(std::vector<int64_t> parents) {
    check_parents(parents);
    return make_ref<Tree>(parents);
}

}  // namespace spattn
