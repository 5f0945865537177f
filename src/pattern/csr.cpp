// SPDX-License-Identifier: MIT
// csr([row_ptr],[col_idx],seq_k): row i sees the keys that row i lists. Rows are rows, not positions.
#include "core/error.h"
#include "pattern/composite.h"
#include "pattern/index_pattern.h"
#include "pattern/sparse_rows.h"

namespace spattn {
namespace {

// For each column the rows that list it. Columns outside of [0, columns), which nobody has checked, are left out.
SparseRows transpose(const SparseRows& rows, int64_t columns) {
    const auto visit = [&](auto see) {
        for (int64_t row = 0; row < rows.rows(); ++row)
            for (int64_t i = rows.row_ptr()[row]; i < rows.row_ptr()[row + 1]; ++i)
                if (const int64_t column = rows.col_idx()[i]; column >= 0 && column < columns) see(row, column);
    };
    std::vector<int64_t> begin(size_t(columns) + 2);
    visit([&](int64_t, int64_t column) { ++begin[size_t(column) + 2]; });
    for (size_t i = 2; i < begin.size(); ++i) begin[i] += begin[i - 1];
    std::vector<int32_t> found(size_t(begin.back()));
    // begin[column + 1] moves from the start of the column to its end.
    visit([&](int64_t row, int64_t column) { found[size_t(begin[size_t(column) + 1]++)] = int32_t(row); });
    begin.pop_back();
    return SparseRows(std::move(begin), std::move(found), rows.rows(), true);
}

// transpose(csr): position p sees the keys whose rows list it. Key k stands where row k - q_offset does.
class TransposedCsr : public Composite {
public:
    TransposedCsr(PatternRef csr, SparseRows rows) : Composite({std::move(csr)}), rows_(std::move(rows)) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        const int64_t p = plane.position(row), offset = plane.extent.q_offset;
        if (p < 0 || p >= rows_.rows()) return;
        const size_t first = out.size();
        rows_.keys(p, 1, {clip.begin - offset, clip.end - offset}, out);
        for (size_t i = first; i < out.size(); ++i) out[i] = {out[i].begin + offset, out[i].end + offset};
    }
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override {
        const Block swapped{block.key - plane.extent.q_offset, block.keys, plane.position(block.row), block.rows};
        return {parts()[0]->classify(plane, swapped, key, known).kind, 1};
    }
    std::string print() const override { return "transpose(" + parts()[0]->print() + ')'; }
    std::string identity() const override { return "transpose(" + parts()[0]->identity() + ')'; }
    void save(ByteWriter& out) const override { save_parts(Node::transpose, out); }
    PatternRef transposed() const override { return parts()[0]; }
    size_t bytes() const override { return Composite::bytes() + rows_.bytes(); }

private:
    SparseRows rows_;
};

class Csr : public IndexPattern {
public:
    Csr(SparseRows rows, int64_t seq_k)
        : IndexPattern("csr", rows.rows(), seq_k, rows.inline_text(), text(',', seq_k), rows.digest()),
          rows_(std::move(rows)) {}

    void keys(const Plane&, int64_t row, Interval clip, Intervals& out) const override {
        if (has_row(row)) rows_.keys(row, 1, cut(clip), out);
    }

    bool borrows() const override { return rows_.borrows(); }
    size_t bytes() const override { return rows_.bytes(); }

    // Not where far more keys than pairs would take memory.
    PatternRef transposed() const override {
        if (seq_k() > rows_.row_ptr().size() + rows_.col_idx().size()) return {};
        return make_ref<TransposedCsr>(PatternRef::share(this), transpose(rows_, seq_k()));
    }

    void save(ByteWriter& out) const override {
        out.node(Node::csr);
        out.number(seq_k());
        out.array(rows_.row_ptr());
        out.array(rows_.col_idx());
    }

private:
    SparseRows rows_;
};

}  // namespace

PatternRef make_csr(IndexArray row_ptr, IndexArray col_idx, int64_t seq_k, bool is_trusted) {
    require_range(seq_k, 1, most_tokens, "seq_k");
    SparseRows rows(std::move(row_ptr), std::move(col_idx), seq_k, is_trusted);
    require_range(rows.rows(), 1, most_tokens, "row_ptr");
    return make_ref<Csr>(std::move(rows), seq_k);
}

}  // namespace spattn
