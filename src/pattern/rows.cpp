// SPDX-License-Identifier: MIT
// rows([begin,end,...],seq_q,P): rows of P's own extent, which has seq_q of them, as those of a shorter one: ranges of
// them, one after the other. What each of several devices sees of one sequence is written so.
#include "core/error.h"
#include "pattern/cut.h"

namespace spattn {
namespace {

class Rows : public Cut {
public:
    Rows(PatternRef inner, Ranges ranges, bool is_from_zero)
        : Cut(Node::rows, "rows", std::move(inner), std::move(ranges), is_from_zero, 1) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        if (row < 0 || row >= ranges().count()) return;
        inner().keys(of_inner(plane), inner_row(row), clip, out);
    }
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override {
        return join(block.row, block.rows, key, known,
                    [&](int64_t row, int64_t rows, size_t range, Key& of_part, bool& sure) {
                        const Block part{row + ranges().shift(range), rows, block.key, block.keys};
                        return inner().classify(of_inner(plane), part, of_part, sure);
                    });
    }
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        if (row < 0 || row + rows > ranges().count()) return false;
        if (ranges().range_of(row) != ranges().range_of(row + rows - 1)) return false;
        return inner().row_key(of_inner(plane), inner_row(row), rows, key);
    }
    void check(const Extent& extent) const override;
    const RuntimeShape* runtime() const override { return inner().runtime(); }
    PatternRef known_part() const override {
        PatternRef known = inner().known_part();
        return known ? of(std::move(known)) : PatternRef();
    }
    bool counts_rows() const override { return true; }
    std::optional<HotTokens> hot(const Extent& extent) const override {
        return hot_of(of_inner({extent}).extent, &HotTokens::queries);
    }

private:
    PatternRef make(PatternRef inner, Ranges ranges) const override {
        return make_ref<Rows>(std::move(inner), std::move(ranges), is_from_zero());
    }
    int64_t inner_row(int64_t row) const { return row + ranges().shift(ranges().range_of(row)); }
    Plane of_inner(const Plane& plane) const {
        const Extent& e = plane.extent;
        const int64_t seq_q = ranges().tokens();
        return {{e.batch, e.heads, seq_q, e.seq_k, e.seq_k - seq_q}, plane.batch, plane.head};
    }
};

void Rows::check(const Extent& extent) const {
    if (extent.seq_q != ranges().count()) {
        fail(SPATTN_E_SHAPE, "pattern",
             text("rows has ", ranges().count(), " rows where the extent has ", extent.seq_q,
                  " queries; accepted: equal numbers"));
    }
    const Extent whole = of_inner({extent}).extent;
    require(!is_from_zero() || (extent.q_offset == 0 && whole.q_offset == 0), SPATTN_E_INTERNAL, "pattern",
            "rows from zero, on an extent that is not");
    inner().check(whole);
}

PatternRef make_rows_of(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q, bool is_from_zero) {
    return make_ref<Rows>(std::move(inner), Ranges(std::move(bounds), seq_q, "seq_q"), is_from_zero);
}

}  // namespace

PatternRef make_rows(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q) {
    return make_rows_of(std::move(inner), std::move(bounds), seq_q, false);
}

PatternRef make_rows_from_zero(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q) {
    return make_rows_of(std::move(inner), std::move(bounds), seq_q, true);
}

}  // namespace spattn
