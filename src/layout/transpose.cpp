// SPDX-License-Identifier: MIT
// Transposes lists without looking at single blocks. A sweep over the rows compares each list with the one before and
// cuts the plane into rectangles of one mask; a sweep over the columns turns rectangles into runs:
//
//     causal, rows down      m . . .      a rectangle ends where a list changes:
//                            f m . .      3 of `f` (columns 0, 1, 2), 4 of `m`, whatever lies between changes
//                            f f m .
//                            f f f m
#include <algorithm>
#include <bit>

#include "core/cancel.h"
#include "layout/columns.h"
#include "layout/tables.h"

namespace spattn {
namespace {

// Blocks [column, column_end) x [row, row_end) that share a mask.
struct Rectangle {
    int32_t column, column_end, row, row_end, mask;
};

// Cuts the columns into segments: those of one segment have had their present mask since the same row.
class Segments {
public:
    Segments(int32_t columns)
        : columns_(columns), starts_(size_t(columns) / 64 + 1), since_(make_table<int32_t>(columns)) {
        begin(0, 0);
    }

    int32_t since(int32_t start) const { return since_[start]; }
    bool begins(int32_t column) const { return starts_[column >> 6] >> (column & 63) & 1; }
    void begin(int32_t column, int32_t row) {
        starts_[column >> 6] |= uint64_t(1) << (column & 63);
        since_[column] = row;
    }
    // Makes `column` a start without changing what it says.
    void split(int32_t column) {
        if (column < columns_ && !begins(column)) begin(column, since_[start_of(column)]);
    }
    // The first start after `column`, or `end`.
    int32_t next(int32_t column, int32_t end) const {
        if (++column >= end) return end;
        uint64_t word = starts_[column >> 6] & (~uint64_t(0) << (column & 63));
        for (size_t at = column >> 6;; word = starts_[++at]) {
            if (word) return std::min(int32_t(at * 64) + std::countr_zero(word), end);
            if (int64_t(at + 1) * 64 >= end) return end;
        }
    }
    // All of [column, end) becomes one segment of this row.
    void join(int32_t column, int32_t end, int32_t row) {
        for (int32_t at = next(column, end); at < end; at = next(at, end))
            starts_[at >> 6] &= ~(uint64_t(1) << (at & 63));
        begin(column, row);
    }

private:
    int32_t start_of(int32_t column) const {
        size_t at = column >> 6;
        uint64_t word = starts_[at] & (~uint64_t(0) >> (63 - (column & 63)));
        while (!word) word = starts_[--at];  // column 0 is always a start
        return int32_t(at * 64) + 63 - std::countl_zero(word);
    }

    int32_t columns_;
    std::vector<uint64_t> starts_;  // bit per column
    std::vector<int32_t> since_;    // [columns], of starts
};

// Reads a list as pieces of one mask each, which together fill [0, columns): gaps are pieces, too.
struct Pieces {
    const Run* run;
    const Run* last;
    int32_t columns;
    int32_t end = 0, mask = absent_block;

    void advance() {
        if (run == last) {
            end = columns;
            mask = absent_block;
        } else if (run->first > end) {
            end = run->first;
            mask = absent_block;
        } else {
            end = run->first + run->count;
            mask = run->mask;
            ++run;
        }
    }
};

// Emits the rectangles that end at `row`, where the list changes from `before` to `after`.
void close_changes(Pieces before, Pieces after, int32_t row, Segments& segments, std::vector<Rectangle>& out) {
    for (int32_t column = 0; column < before.columns;) {
        if (before.end == column) before.advance();
        if (after.end == column) after.advance();
        const int32_t end = std::min(before.end, after.end);
        if (before.mask != after.mask) {
            segments.split(column);
            segments.split(end);
            if (before.mask != absent_block)
                for (int32_t start = column; start < end;) {
                    const int32_t stop = segments.next(start, end);
                    out.push_back({start, stop, segments.since(start), row, before.mask});
                    start = stop;
                }
            segments.join(column, end, row);
        }
        column = end;
    }
}

std::vector<Rectangle> find_rectangles(const Slice* slices, const std::vector<Run>& runs, int32_t rows,
                                       int32_t columns) {
    const auto pieces = [&](Slice s) { return Pieces{runs.data() + s.begin, runs.data() + s.end, columns}; };
    std::vector<Rectangle> out;
    out.reserve(runs.size());  // more or less: growing would touch the memory twice
    Segments segments(columns);
    Slice before{0, 0};
    Pace pace;
    for (int32_t row = 0; row <= rows; ++row) {
        const Slice after = row < rows ? slices[row] : Slice{0, 0};
        pace.step();
        if (before.begin == after.begin && before.end == after.end) continue;  // the same list: nothing ends
        check_cancelled();
        close_changes(pieces(before), pieces(after), row, segments, out);
        before = after;
    }
    return out;
}

// The sort is stable: rectangles that begin at one column stay in the order of their rows.
std::vector<Rectangle> sort_by_column(const std::vector<Rectangle>& rectangles, int32_t columns) {
    Pace pace;
    std::vector<int32_t> at = make_table<int32_t>(size_t(columns) + 1);
    for (const Rectangle& r : rectangles) {
        pace.step();
        ++at[r.column + 1];
    }
    for (int32_t c = 0; c < columns; ++c) {
        pace.step();
        at[c + 1] += at[c];
    }
    std::vector<Rectangle> sorted = make_table<Rectangle>(rectangles.size());
    for (const Rectangle& r : rectangles) {
        pace.step();
        sorted[at[r.column]++] = r;
    }
    return sorted;
}

// Makes a slice for each column. `active` holds the rectangles that cross it, in the order of their rows.
std::vector<Slice> sweep_columns(const std::vector<Rectangle>& rectangles, int32_t columns, SliceTable& table) {
    std::vector<Slice> out = make_table<Slice>(columns);
    std::vector<Rectangle> active, before;
    auto next = rectangles.begin();
    Pace pace;
    for (int32_t column = 0, end = 0; column < columns; ++column) {
        pace.step();
        const bool begins = next != rectangles.end() && next->column == column;
        if (column < end && !begins) {
            out[column] = out[column - 1];
            continue;
        }
        end = columns;  // of the first that ends
        const auto cross = [&](const Rectangle& r) {
            active.push_back(r);
            end = std::min(end, r.column_end);
            table.add({r.row, r.row_end - r.row, r.mask});
        };
        active.swap(before);
        active.clear();
        for (const Rectangle& r : before) {
            if (r.column_end == column) continue;
            for (; next != rectangles.end() && next->column == column && next->row < r.row; ++next) cross(*next);
            cross(r);
        }
        for (; next != rectangles.end() && next->column == column; ++next) cross(*next);
        out[column] = table.finish();
    }
    return out;
}

}  // namespace

Lists transpose_lists(const Lists& lists, int32_t head_kinds, int32_t other_rows) {
    Lists out;
    out.rows = other_rows;
    out.slices.reserve(size_t(head_kinds) * other_rows);
    SliceTable table(out);
    const auto sweep = [&](const Slice* slices, const std::vector<Run>& runs, int32_t columns) {
        const auto rectangles = find_rectangles(slices, runs, lists.rows, columns);
        return sweep_columns(sort_by_column(rectangles, columns), columns, table);
    };
    for (int32_t c = 0; c < head_kinds; ++c) {
        const Slice* slices = lists.slices.data() + size_t(c) * lists.rows;
        if (const auto columns = find_column_kinds(slices, lists.rows, lists.runs, other_rows)) {
            const std::vector<Slice> of_kind = sweep(columns->lists.slices.data(), columns->lists.runs, columns->kinds);
            for (int32_t kind : columns->kind_of) out.slices.push_back(of_kind[kind]);
        } else {
            const std::vector<Slice> of_column = sweep(slices, lists.runs, other_rows);
            out.slices.insert(out.slices.end(), of_column.begin(), of_column.end());
        }
    }
    return out;
}

}  // namespace spattn
