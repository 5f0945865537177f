// SPDX-License-Identifier: MIT
// The plane of queries and keys is cut into squares of 2^level by 2^level blocks, each of which falls into four of the
// level below. A closed form says of a square, as of a block, that it is empty or full, or names its content by a key:
// squares with equal keys are counted once. A causal plane of any length has one square that is neither empty nor full
// on each level, a window a few.
//
//     level 2, causal        the same, one level below
//     X .                    x . . .
//     f X                    f x . .
//                            f f x .
//                            f f f x
//
// How many keys a query keeps, the shortest and the longest row, is found the same way: rows that meet the same squares
// in the same numbers keep the same number of keys. Squares in which every row keeps as many (of landmarks, of strides)
// only add a number, however many there are. Those are squares of whole periods: where a pattern's period does not divide
// the blocks that are asked about, kept keys are counted in blocks of their own.
#include "layout/quadrants.h"

#include <algorithm>
#include <array>
#include <map>

#include "core/cancel.h"
#include "layout/index.h"

namespace spattn {
namespace {

constexpr int64_t most_steps = int64_t(1) << 21;  // about a second: then a layout is made instead

// What a square is: one of these two, or the index of what was counted of it.
using SquareId = int32_t;
constexpr SquareId empty_square = -1, full_square = -2, unknown_square = -3;

struct Square {
    int64_t blocks_full = 0, blocks_partial = 0, pairs = 0;
    std::array<SquareId, 4> quarters{};  // upper left, upper right, lower left, lower right; not on level 0
    std::vector<int32_t> kept;           // keys of each row, on level 0
    int64_t each = uneven;               // keys of every row, if all of them keep as many
    static constexpr int64_t uneven = -1;
};

// Kept keys of some rows.
struct Rows {
    int64_t least, most, empty;
};

struct TooManySteps {};

class QuadrantCounter {
public:
    QuadrantCounter(const Pattern& pattern, const Plane& plane, int32_t block_q, int32_t block_k)
        : pattern_(pattern), plane_(plane), block_q_(block_q), block_k_(block_k) {}

    // Adds the plane's blocks, for `heads` equal ones.
    void count_blocks(int64_t heads, Counts& total) {
        find_squares();
        const Extent& extent = plane_.extent;
        const int64_t blocks = ceil_div(extent.seq_q, block_q_) * ceil_div(extent.seq_k, block_k_);
        total.blocks_full += sum_.blocks_full * heads;
        total.blocks_partial += sum_.blocks_partial * heads;
        total.blocks_empty += (blocks - sum_.blocks_full - sum_.blocks_partial) * heads;
    }

    // Likewise what the plane keeps.
    void count_kept(int64_t heads, Counts& total) {
        find_squares();
        const Rows rows = count_rows(level_, plane_.extent.seq_q, strip_);
        total.pairs += double(sum_.pairs) * double(heads);
        total.row_min = std::min(total.row_min, rows.least);
        total.row_max = std::max(total.row_max, rows.most);
        total.rows_empty += rows.empty * heads;
    }

private:
    // What some rows meet: keys that each of them keeps, and the squares that tell rows apart, with how often they are
    // met.
    struct Strip {
        int64_t base = 0;
        std::map<SquareId, int64_t> uneven;
    };

    // The squares of the level on which one row of them is all of the plane.
    void find_squares() {
        if (level_ >= 0) return;
        const Extent& extent = plane_.extent;
        for (level_ = 0; height(level_) < extent.seq_q;) ++level_;
        for (int64_t key = 0; key < extent.seq_k;) {
            int64_t repeat = 1;
            const SquareId square = look(level_, 0, key, &repeat);
            // A square that sticks out is another kind of square: never a repetition of those before it.
            const int64_t whole = (extent.seq_k - key) / width(level_);
            repeat = std::clamp<int64_t>(repeat, 1, std::max<int64_t>(whole, 1));
            add(square, level_, repeat, sum_);
            add(square, level_, repeat, strip_);
            key += repeat * width(level_);
        }
    }

    void add(SquareId id, int level, int64_t times, Strip& strip) const {
        if (id == empty_square) return;
        const int64_t each = id == full_square ? width(level) : squares_[size_t(id)].each;
        if (each == Square::uneven) strip.uneven[id] += times;
        else strip.base += times * each;
    }

    int64_t height(int level) const { return int64_t(block_q_) << level; }
    int64_t width(int level) const { return int64_t(block_k_) << level; }

    void step(int64_t steps = 1) {
        check_cancelled();
        steps_ += steps;
        if (steps_ > most_steps) throw TooManySteps();
    }

    // What the square from (row, key) on is, as far as the extent reaches.
    SquareId look(int level, int64_t row, int64_t key, int64_t* repeat = nullptr) {
        step();
        const Extent& extent = plane_.extent;
        if (row >= extent.seq_q || key >= extent.seq_k) return empty_square;
        const int64_t rows = std::min(height(level), extent.seq_q - row);
        const int64_t keys = std::min(width(level), extent.seq_k - key);
        const bool is_cut = rows < height(level) || keys < width(level);
        key_.clear();
        bool known = true;
        const Coverage coverage = pattern_.classify(plane_, {row, height(level), key, width(level)}, key_, known);
        if (!known) throw TooManySteps();
        if (repeat) *repeat = coverage.repeat;
        if (coverage.kind == Coverage::empty) return empty_square;
        if (coverage.kind == Coverage::full && !is_cut) return full_square;
        key_.insert(key_.end(), {level, int64_t(coverage.kind), rows, keys});
        const int32_t place = squares_of_.at(key_, unknown_square);
        if (squares_of_.values[size_t(place)] == unknown_square) {
            const SquareId found = level == 0 ? count_block(row, key, rows, keys) : count_square(level, row, key, rows);
            squares_of_.values[size_t(place)] = found;
        }
        return squares_of_.values[size_t(place)];
    }

    SquareId count_square(int level, int64_t row, int64_t key, int64_t rows) {
        const int64_t half = height(level - 1), keys = width(level - 1);
        Square square;
        for (size_t i = 0; i < 4; ++i) {
            square.quarters[i] = look(level - 1, row + int64_t(i / 2) * half, key + int64_t(i % 2) * keys);
            add(square.quarters[i], level - 1, 1, square);
        }
        const auto all = [&](SquareId id) {
            return std::all_of(square.quarters.begin(), square.quarters.end(), [&](SquareId q) { return q == id; });
        };
        if (all(empty_square)) return empty_square;
        if (all(full_square)) return full_square;
        const auto [upper, lower] = halve(square, level);
        const bool is_even = upper.uneven.empty() && lower.uneven.empty();
        if (is_even && (rows <= half || upper.base == lower.base)) square.each = upper.base;
        return keep(std::move(square));
    }

    // A block of the layout, of which `rows` and `keys` lie within the extent.
    SquareId count_block(int64_t row, int64_t key, int64_t rows, int64_t keys) {
        Square square;
        square.kept.resize(size_t(block_q_));
        step(rows);
        for (int64_t r = 0; r < rows; ++r) {
            intervals_.clear();
            pattern_.keys(plane_, row + r, {key, key + keys}, intervals_);
            for (const Interval& i : intervals_) square.kept[size_t(r)] += int32_t(i.end - i.begin);
            square.pairs += square.kept[size_t(r)];
        }
        if (square.pairs == 0) return empty_square;
        if (square.pairs == int64_t(block_q_) * block_k_) return full_square;
        square.blocks_partial = 1;
        const auto kept = square.kept.begin();
        if (std::all_of(kept, kept + rows, [&](int32_t keys) { return keys == *kept; })) square.each = *kept;
        return keep(std::move(square));
    }

    SquareId keep(Square square) {
        squares_.push_back(std::move(square));
        return SquareId(squares_.size()) - 1;
    }

    void add(SquareId id, int level, int64_t times, Square& sum) const {
        if (id == empty_square) return;
        if (id == full_square) {
            sum.blocks_full += times << 2 * level;
            sum.pairs += times * height(level) * width(level);
            return;
        }
        const Square& square = squares_[size_t(id)];
        sum.blocks_full += times * square.blocks_full;
        sum.blocks_partial += times * square.blocks_partial;
        sum.pairs += times * square.pairs;
    }

    std::pair<Strip, Strip> halve(const Square& square, int level) const {
        std::pair<Strip, Strip> halves;
        for (size_t i = 0; i < 4; ++i) add(square.quarters[i], level - 1, 1, i < 2 ? halves.first : halves.second);
        return halves;
    }

    // The first `rows` rows of a strip.
    Rows count_rows(int level, int64_t rows, const Strip& strip) {
        if (strip.uneven.empty()) return {strip.base, strip.base, strip.base ? 0 : rows};
        const Rows uneven = count_uneven_rows(level, rows, strip);
        return {strip.base + uneven.least, strip.base + uneven.most, strip.base ? 0 : uneven.empty};
    }

    // The same, without the strip's base.
    Rows count_uneven_rows(int level, int64_t rows, const Strip& strip) {
        step(int64_t(strip.uneven.size()));
        Key key{level, rows};
        for (const auto& [square, times] : strip.uneven) key.insert(key.end(), {square, times});
        const int32_t place = rows_of_.at(key, {-1, -1, -1});
        if (rows_of_.values[size_t(place)].least < 0) {
            const Rows counted = level == 0 ? add_blocks(rows, strip) : count_halves(level, rows, strip);
            rows_of_.values[size_t(place)] = counted;
        }
        return rows_of_.values[size_t(place)];
    }

    Rows add_blocks(int64_t rows, const Strip& strip) {
        step(rows * int64_t(strip.uneven.size()));
        std::vector<int64_t> kept(static_cast<size_t>(rows));
        for (const auto& [square, times] : strip.uneven)
            for (size_t r = 0; r < kept.size(); ++r) kept[r] += times * squares_[size_t(square)].kept[r];
        const auto [least, most] = std::minmax_element(kept.begin(), kept.end());
        return {*least, *most, std::count(kept.begin(), kept.end(), 0)};
    }

    Rows count_halves(int level, int64_t rows, const Strip& strip) {
        Strip upper, lower;
        for (const auto& [square, times] : strip.uneven)
            for (size_t i = 0; i < 4; ++i)
                add(squares_[size_t(square)].quarters[i], level - 1, times, i < 2 ? upper : lower);
        const int64_t half = height(level - 1);
        const Rows first = count_rows(level - 1, std::min(rows, half), upper);
        if (rows <= half) return first;
        const Rows second = count_rows(level - 1, rows - half, lower);
        return {std::min(first.least, second.least), std::max(first.most, second.most), first.empty + second.empty};
    }

    const Pattern& pattern_;
    const Plane plane_;
    const int32_t block_q_, block_k_;
    int64_t steps_ = 0;
    Key key_;
    Intervals intervals_;
    std::vector<Square> squares_;
    KeyMemo<SquareId> squares_of_;
    KeyMemo<Rows> rows_of_;
    int level_ = -1;  // of the two that follow, once they are found
    Square sum_;
    Strip strip_;
};

// A block of whole periods in place of one that is none, or the same: about as large as it, or of one period.
int32_t of_periods(int32_t block, int64_t period) {
    constexpr int64_t most_period = int64_t(1) << 14;  // keeps blocks small enough to be counted row by row
    return period > most_period ? block : int32_t(round_up(block, period));
}

// One plane for each choice of parts that per_head and per_batch make, and how many planes see the same.
std::vector<std::pair<Plane, int64_t>> find_planes(const Pattern& pattern, const Extent& extent) {
    KeyMemo<int32_t> known;
    std::vector<std::pair<Plane, int64_t>> planes;
    Key key;
    for (Plane plane{extent}; plane.batch < extent.batch; ++plane.batch)
        for (plane.head = 0; plane.head < extent.heads; ++plane.head) {
            check_cancelled();
            key.clear();
            pattern.selection(plane, key);
            const int32_t place = known.at(key, int32_t(planes.size()));
            const size_t id = size_t(known.values[size_t(place)]);
            if (id == planes.size()) planes.push_back({plane, 0});
            ++planes[id].second;
        }
    return planes;
}

}  // namespace

std::optional<Counts> count_quadrants(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k) {
    Counts total;
    total.row_min = extent.seq_k;
    try {
        const int32_t rows = of_periods(block_q, pattern.period()), keys = of_periods(block_k, pattern.period());
        for (const auto& [plane, heads] : find_planes(pattern, extent)) {
            QuadrantCounter blocks(pattern, plane, block_q, block_k);
            blocks.count_blocks(heads, total);
            if (keys == block_k)
                blocks.count_kept(heads, total);
            else
                QuadrantCounter(pattern, plane, rows, keys).count_kept(heads, total);
        }
    } catch (const TooManySteps&) {
        return {};
    }
    total.visited = double(total.blocks_full + total.blocks_partial) * block_q * block_k;
    return total;
}

}  // namespace spattn
