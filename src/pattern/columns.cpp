// SPDX-License-Identifier: MIT
// columns([begin,end,...],seq_k,P): keys of P's own extent, which has seq_k of them, as those of a shorter one: ranges of
// them, one after the other. What a cache keeps of a sequence, or a device of what others hold, is written so.
#include "core/error.h"
#include "pattern/cut.h"

namespace spattn {
namespace {

class Columns : public Cut {
public:
    Columns(PatternRef inner, Ranges ranges, bool is_from_zero)
        : Cut(Node::columns, "columns", std::move(inner), std::move(ranges), is_from_zero, 0) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override;
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        return inner().row_key(of_inner(plane), row, rows, key);
    }
    void check(const Extent& extent) const override;
    std::optional<HotTokens> hot(const Extent& extent) const override {
        return hot_of(of_inner({extent}).extent, &HotTokens::keys);
    }

private:
    PatternRef make(PatternRef inner, Ranges ranges) const override {
        return make_ref<Columns>(std::move(inner), std::move(ranges), is_from_zero());
    }
    // Queries stand as far from the end of all keys as they do from the end of these.
    Plane of_inner(const Plane& plane) const {
        const Extent& e = plane.extent;
        const int64_t seq_k = ranges().tokens(), q_offset = is_from_zero() ? 0 : e.q_offset + seq_k - e.seq_k;
        return {{e.batch, e.heads, e.seq_q, seq_k, q_offset}, plane.batch, plane.head};
    }
};

void Columns::keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const {
    const Plane own = of_inner(plane);
    const int64_t end = std::min(clip.end, ranges().count());
    const size_t first = out.size();
    for (int64_t key = std::max<int64_t>(clip.begin, 0), next; key < end; key = next) {
        const size_t range = ranges().range_of(key), before = out.size();
        const int64_t shift = ranges().shift(range);
        next = std::min(end, ranges().end(range));
        inner().keys(own, row, {key + shift, next + shift}, out);
        for (size_t i = before; i < out.size(); ++i) out[i] = {out[i].begin - shift, out[i].end - shift};
        if (before > first && before < out.size() && out[before - 1].end == out[before].begin) {
            out[before].begin = out[before - 1].begin;
            out.erase(out.begin() + int64_t(before) - 1);
        }
    }
}

// A block repeats as long as those that follow lie in its range, too.
Coverage Columns::classify(const Plane& plane, const Block& block, Key& key, bool& known) const {
    if (block.key + block.keys <= 0) return {Coverage::empty, 1};
    return join(block.key, block.keys, key, known,
                [&](int64_t first, int64_t keys, size_t range, Key& of_part, bool& sure) {
                    const Block part{block.row, block.rows, first + ranges().shift(range), keys};
                    Coverage coverage = inner().classify(of_inner(plane), part, of_part, sure);
                    const int64_t in_range = (ranges().end(range) - first) / block.keys;
                    coverage.repeat = keys == block.keys ? std::min(coverage.repeat, in_range) : 1;
                    return coverage;
                });
}

void Columns::check(const Extent& extent) const {
    if (extent.seq_k != ranges().count()) {
        fail(SPATTN_E_SHAPE, "pattern",
             text("columns has ", ranges().count(), " keys where the extent has ", extent.seq_k,
                  "; accepted: equal numbers"));
    }
    require(!is_from_zero() || extent.q_offset == 0, SPATTN_E_INTERNAL, "pattern",
            "columns from zero, on an extent that is not");
    inner().check(of_inner({extent}).extent);
}

PatternRef make_columns_of(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_k, bool is_from_zero) {
    return make_ref<Columns>(std::move(inner), Ranges(std::move(bounds), seq_k, "seq_k"), is_from_zero);
}

}  // namespace

PatternRef make_columns(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_k) {
    return make_columns_of(std::move(inner), std::move(bounds), seq_k, false);
}

PatternRef make_columns_from_zero(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_k) {
    return make_columns_of(std::move(inner), std::move(bounds), seq_k, true);
}

}  // namespace spattn
