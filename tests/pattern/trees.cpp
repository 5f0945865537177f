// SPDX-License-Identifier: MIT
#include "pattern/trees.h"

namespace trees {

Tree tree_of(drawn::Model model) {
    const auto sees = [of = std::move(model.sees)](const Plane& s, int64_t p, int64_t k) {
        const Extent& e = s.extent;
        return of({{e.batch, e.heads, e.seq_q, e.seq_k, e.q_offset}, s.batch, s.head}, p, k);
    };
    return {PatternRef::adopt(model.pattern.release()), sees};
}

Tree Source::leaf() { return tree_of(any().leaf()); }

Tree Source::tree(int depth) { return tree_of(any().build(depth)); }

Tree Source::lists(const Extent& e) { return tree_of(on(e).lists()); }

Tree Source::per_document(const Extent& e, int depth) { return tree_of(on(e).per_document(depth)); }

Tree Source::rows(const Extent& e, int depth) { return tree_of(on(e).rows(depth)); }

Tree Source::columns(const Extent& e, int depth) { return tree_of(on(e).columns(depth)); }

Tree Source::mixed(const Extent& e, int depth) { return tree_of(on(e).build(depth)); }

Plane Source::plane() {
    Plane plane;
    plane.extent = {2, 3, number(1, 40), number(1, 40), 0};
    const int64_t aligned = plane.extent.seq_k - plane.extent.seq_q;
    plane.extent.q_offset = number(0, 2) ? aligned : number(-30, 30);
    plane.batch = number(0, 1);
    plane.head = number(0, 2);
    return plane;
}

drawn::Builder Source::any() { return {random_, {2, 3, 0, 0, 0}, 1, false}; }

drawn::Builder Source::on(const Extent& e) { return {random_, {e.batch, e.heads, e.seq_q, e.seq_k, e.q_offset}}; }

std::string describe(const Tree& tree, const Plane& plane, uint32_t seed) {
    const Extent& e = plane.extent;
    return "seed " + std::to_string(seed) + ": " + tree.pattern->print() + " on " + std::to_string(e.seq_q) + " x " +
           std::to_string(e.seq_k) + " offset " + std::to_string(e.q_offset) + " batch " + std::to_string(plane.batch) +
           " head " + std::to_string(plane.head);
}

}  // namespace trees
