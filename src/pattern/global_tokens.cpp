// SPDX-License-Identifier: MIT
// global_tokens(positions): k in positions, or p in positions. Longformer (https://arxiv.org/abs/2004.05150).
#include "pattern/hot.h"
#include "pattern/leaf.h"
#include "pattern/positions.h"

namespace spattn {
namespace {

class GlobalTokens : public ListLeaf {
public:
    explicit GlobalTokens(const std::vector<int64_t>& given) : ListLeaf("global_tokens", given), positions_(given) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        if (positions_.contains(plane.position(row))) {
            Cutter(clip, out).add(lowest, forever);
        } else {
            positions_.keys(clip, out);
        }
    }

    // The mask is the members among the rows, then the members among the keys, each with its count.
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool&) const override {
        const size_t mark = key.size();
        const Coverage rows = positions_.classify(plane.position(block.row), block.rows, key);
        if (rows.kind == Coverage::full) return {Coverage::full, forever};
        if (rows.kind == Coverage::empty) key.push_back(0);
        const Coverage columns = positions_.classify(block.key, block.keys, key);
        if (columns.kind == Coverage::full || (columns.kind == Coverage::empty && rows.kind == Coverage::empty)) {
            key.resize(mark);
            return columns;
        }
        if (columns.kind == Coverage::empty) key.push_back(0);
        return {Coverage::partial, columns.repeat};
    }

    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        const Coverage members = positions_.classify(plane.position(row), rows, key);
        if (members.kind != Coverage::partial) key.push_back(members.kind == Coverage::full ? -1 : 0);
        return true;
    }
    PatternRef transposed() const override { return PatternRef::share(this); }
    std::optional<HotTokens> hot(const Extent& extent) const override {
        const PatternRef keys = make_global_keys(positions_.sorted());
        std::optional<HotTokens> hot = hot_keys(*keys, extent), rows = hot_queries(*keys, *this, extent);
        if (hot && rows) {
            hot->queries = std::move(rows->queries);
            hot->marks = std::move(rows->marks);
        } else if (hot) {
            hot->apart = make_query_side(keys);
        }
        return hot;
    }
    int64_t modulus() const override { return positions_.sorted().empty() ? 0 : 1; }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        return make_global_tokens(positions_.in_residue(modulus, residue));
    }

protected:
    std::vector<int64_t> canonical() const override { return positions_.sorted(); }

private:
    Positions positions_;
};

}  // namespace

PatternRef make_global_tokens(std::vector<int64_t> positions) { return make_ref<GlobalTokens>(positions); }

}  // namespace spattn
