// SPDX-License-Identifier: MIT
// csr([row_ptr],[col_idx],seq_k): row i sees the keys that row i lists. Rows are rows, not positions.
#include "core/error.h"
#include "pattern/bytes.h"
#include "pattern/index_pattern.h"
#include "pattern/sparse_rows.h"

namespace spattn {
namespace {

class Csr : public IndexPattern {
public:
    Csr(SparseRows rows, int64_t seq_k)
        : IndexPattern("csr", rows.rows(), seq_k, rows.inline_text(), text(',', seq_k), rows.digest()),
          rows_(std::move(rows)) {}

    void keys(const Plane&, int64_t row, Interval clip, Intervals& out) const override {
        if (has_row(row)) rows_.keys(row, 1, cut(clip), out);
    }

    bool borrows() const override { return rows_.borrows(); }

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
