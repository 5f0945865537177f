// SPDX-License-Identifier: MIT
// Rows of sorted columns, as csr and bsr have them: row r is columns[row_ptr[r]] .. columns[row_ptr[r + 1] - 1].
#pragma once

#include "pattern/index_array.h"
#include "pattern/intervals.h"

namespace spattn {

// Whether a column is listed, and the first column from there on where that changes.
struct Stretch {
    bool is_seen;
    int64_t end;
};

class SparseRows {
public:
    // row_ptr is always checked, since memory safety hangs on it: [rows + 1], from 0, not decreasing, up to the number
    // of columns. Unless trusted, the columns of a row must increase strictly and lie in [0, limit).
    SparseRows(IndexArray row_ptr, IndexArray col_idx, int64_t limit, bool is_trusted);

    int64_t rows() const { return row_ptr_.size() - 1; }
    const IndexArray& row_ptr() const { return row_ptr_; }
    const IndexArray& col_idx() const { return col_idx_; }
    bool borrows() const { return row_ptr_.is_borrowed() || col_idx_.is_borrowed(); }
    size_t bytes() const { return row_ptr_.bytes() + col_idx_.bytes(); }

    // Appends the columns of `row` within `clip` as intervals of `unit` tokens a column, cut to `cut`.
    void keys(int64_t row, int64_t unit, Interval cut, Intervals& out) const;
    Stretch stretch(int64_t row, int64_t column) const;

    // "[row_ptr],[col_idx]" where that is short, else nothing.
    std::string inline_text() const;
    std::string digest() const;

private:
    int64_t find(int64_t row, int64_t column) const;  // the first place of the row with this column or a later one
    void check_row(int64_t row, int64_t limit) const;

    IndexArray row_ptr_, col_idx_;
};

}  // namespace spattn
