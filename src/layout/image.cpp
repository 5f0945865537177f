// SPDX-License-Identifier: MIT
#include "layout/image.h"

#include "layout/index.h"
#include "pattern/key_walk.h"

namespace spattn {
namespace {

// Counts the kept pairs of rectangles. A rectangle that the closed form does not settle is cut in halves, because most
// of a large one is empty, and rectangles with the same key are counted once.
class Counter {
public:
    Counter(const Pattern& pattern, const Plane& plane) : pattern_(pattern), plane_(plane) {}

    struct Answer {
        Coverage coverage;
        double pairs;
    };

    Answer ask(const Block& block) {
        check_cancelled();
        Key key{block.rows, block.keys};
        bool known = true;
        const Coverage coverage = pattern_.classify(plane_, block, key, known);
        if (coverage.kind == Coverage::empty) return {coverage, 0};
        if (coverage.kind == Coverage::full) return {coverage, double(block.rows) * double(block.keys)};
        if (!known) return {{coverage.kind, 1}, split(block)};
        const int32_t id = memo_.at(key, unknown);
        if (memo_.values[id] == unknown) {
            const double pairs = split(block);  // may add to the memo and move its values
            memo_.values[id] = pairs;
        }
        return {coverage, memo_.values[id]};
    }

private:
    static constexpr double unknown = -1;
    static constexpr int64_t small = 4096;  // pairs: below this, walking the rows costs less than asking about parts

    double split(const Block& b) {
        if (b.rows * b.keys <= small || b.rows == 1) return walk(b);
        if (b.rows >= b.keys) {
            const int64_t half = b.rows / 2;
            return ask({b.row, half, b.key, b.keys}).pairs + ask({b.row + half, b.rows - half, b.key, b.keys}).pairs;
        }
        const int64_t half = b.keys / 2;
        return ask({b.row, b.rows, b.key, half}).pairs + ask({b.row, b.rows, b.key + half, b.keys - half}).pairs;
    }

    double walk(const Block& b) {
        double pairs = 0;
        for (int64_t row = b.row; row < b.row + b.rows; ++row) {
            for (KeyWalk walk(pattern_, plane_, row, {b.key, b.key + b.keys}, kept_); walk.next();)
                for (const Interval& i : kept_) pairs += double(i.end - i.begin);
        }
        return pairs;
    }

    const Pattern& pattern_;
    const Plane& plane_;
    KeyMemo<double> memo_;
    Intervals kept_;
};

}  // namespace

void draw_image(const Pattern& pattern, const Plane& plane, int64_t height, int64_t width, const DrawCells& draw) {
    const auto edge_q = [&](int64_t y) { return y * plane.extent.seq_q / height; };
    const auto edge_k = [&](int64_t x) { return x * plane.extent.seq_k / width; };
    Counter counter(pattern, plane);
    for (int64_t y = 0; y < height; ++y) {
        for (int64_t x = 0; x < width;) {
            const Block cell{edge_q(y), edge_q(y + 1) - edge_q(y), edge_k(x), edge_k(x + 1) - edge_k(x)};
            const auto [coverage, pairs] = counter.ask(cell);
            // What is full or empty stays so for cells of any width; a mask repeats for cells of this width only.
            const int64_t end = add_saturated(cell.key, multiply_saturated(coverage.repeat, cell.keys));
            const auto is_alike = [&](int64_t next) {
                const bool is_even = coverage.kind != Coverage::partial || edge_k(next + 1) - edge_k(next) == cell.keys;
                return is_even && edge_k(next + 1) <= end;
            };
            int64_t next = x + 1;
            while (next < width && is_alike(next)) ++next;
            draw(y, x, next - x, float(pairs / (double(cell.rows) * double(cell.keys))));
            x = next;
        }
    }
}

}  // namespace spattn
