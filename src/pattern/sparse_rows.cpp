// SPDX-License-Identifier: MIT
#include "pattern/sparse_rows.h"

#include "core/error.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

void check_row_ptr(const IndexArray& row_ptr, int64_t columns) {
    if (row_ptr.size() < 2)
        fail(SPATTN_E_SHAPE, "row_ptr", text("has ", row_ptr.size(), " numbers; accepted: rows + 1, at least 2"));
    if (row_ptr[0] != 0) fail(SPATTN_E_RANGE, "row_ptr", text("starts with ", row_ptr[0], "; accepted: 0"));
    for (int64_t r = 1; r < row_ptr.size(); ++r) {
        if (row_ptr[r] >= row_ptr[r - 1]) continue;
        fail(SPATTN_E_RANGE, "row_ptr",
             text("falls from ", row_ptr[r - 1], " to ", row_ptr[r], " at index ", r,
                  "; accepted: numbers that do not decrease"));
    }
    const int64_t last = row_ptr[row_ptr.size() - 1];
    if (last == columns) return;
    fail(SPATTN_E_SHAPE, "col_idx",
         text("has ", columns, " numbers where row_ptr ends with ", last, "; accepted: equal numbers"));
}

}  // namespace

SparseRows::SparseRows(IndexArray row_ptr, IndexArray col_idx, int64_t limit, bool is_trusted)
    : row_ptr_(std::move(row_ptr)), col_idx_(std::move(col_idx)) {
    check_row_ptr(row_ptr_, col_idx_.size());
    for (int64_t row = 0; row < rows() && !is_trusted; ++row) check_row(row, limit);
}

void SparseRows::check_row(int64_t row, int64_t limit) const {
    int64_t previous = -1;
    for (int64_t i = row_ptr_[row]; i < row_ptr_[row + 1]; ++i) {
        const int64_t column = col_idx_[i];
        if (column > previous && column < limit) {
            previous = column;
            continue;
        }
        if (column < 0 || column >= limit) {
            fail(SPATTN_E_RANGE, "col_idx", text("has ", column, " in row ", row, "; accepted: 0 to ", limit - 1));
        }
        fail(SPATTN_E_RANGE, "col_idx",
             text("has ", column, " after ", previous, " in row ", row, "; accepted: columns that increase in a row"));
    }
}

int64_t SparseRows::find(int64_t row, int64_t column) const {
    int64_t low = row_ptr_[row], high = row_ptr_[row + 1];
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (col_idx_[middle] < column) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

void SparseRows::keys(int64_t row, int64_t unit, Interval cut, Intervals& out) const {
    Cutter cutter(cut, out);
    const int64_t end = row_ptr_[row + 1];
    for (int64_t i = find(row, floor_div(cut.begin, unit)); i < end; ++i) {
        const int64_t begin = multiply_saturated(col_idx_[i], unit);
        if (begin >= cut.end) return;
        cutter.add(begin, add_saturated(begin, unit));
    }
}

Stretch SparseRows::stretch(int64_t row, int64_t column) const {
    int64_t low = find(row, column);
    const int64_t end = row_ptr_[row + 1];
    if (low == end) return {false, forever};
    const int64_t first = low, found = col_idx_[first];
    if (found != column) return {false, found};
    // Columns increase strictly, so a run of neighbours ends where column - place first grows.
    int64_t high = end;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (col_idx_[middle] - found > middle - first) {
            high = middle;
        } else {
            low = middle;
        }
    }
    return {true, col_idx_[low] + 1};
}

std::string SparseRows::inline_text() const {
    if (uint64_t(row_ptr_.size()) + uint64_t(col_idx_.size()) > printed_numbers) return {};
    return '[' + list(row_ptr_) + "],[" + list(col_idx_) + ']';
}

std::string SparseRows::digest() const {
    Digest digest;
    digest.add(row_ptr_);
    digest.add(col_idx_);
    return digest.hex();
}

}  // namespace spattn
