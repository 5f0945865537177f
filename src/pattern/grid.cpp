// SPDX-License-Identifier: MIT
// grid([sizes],[tile],A,B,...): tokens on a grid, with a pattern for each axis. Neighborhood Attention
// (https://arxiv.org/abs/2204.07143) is a window on each axis, axial attention (https://arxiv.org/abs/1912.12180) a union
// of grids whose axes are full but for one that sees its own place, and Sliding Tile Attention
// (https://arxiv.org/abs/2502.04507) a grid of tiles, window on each axis, with one more axis, full, for what is in a tile.
//
// A token is a number of mixed radix: first the place of its tile on each axis, then its own place in the tile. Digits
// that can only be 0 are left out.
//
//     sizes 4, 6, tile 2, 3       0  1  2 |  6  7  8         token  9 = 0 1 | 1 0     place 1 on the first axis,
//                                 3  4  5 |  9 10 11                    tile  token         3 on the second
//                                ---------+---------
//                                12 13 14 | 18 19 20
//                                15 16 17 | 21 22 23
#include <array>

#include "core/cancel.h"
#include "core/error.h"
#include "pattern/composite.h"
#include "pattern/index_pattern.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

constexpr size_t most_axes = 8;
// The key of a block is where its tokens lie, the number and key of each axis that is partial, then this.
constexpr int64_t end_of_axes = -1;
// A part of more levels is asked once about an empty block, and not again how far that goes: of grids in grids, each would
// double the questions.
constexpr int32_t most_levels_asked_again = 8;

struct Digit {
    size_t axis;
    int64_t radix, tokens;  // so many tokens further on, it is one more
    int64_t places;         // so many places of its axis further on
};

// What some tokens in a row have on each axis: every token has its place there.
struct Box {
    std::array<Interval, most_axes> axes;
    bool is_exact = true;         // and every token with such places is one of them
    int64_t step = 0, steps = 0;  // tokens of exact boxes lie alike where these are equal
};

class Grid : public Composite {
public:
    Grid(std::vector<int64_t> sizes, std::vector<int64_t> tile, Patterns parts)
        : Composite(std::move(parts)), sizes_(std::move(sizes)), tile_(std::move(tile)) {
        for (int64_t size : sizes_) tokens_ *= size;
        int64_t left = tokens_;
        const auto add = [&](size_t axis, int64_t radix, int64_t places) {
            left /= radix;
            if (radix > 1) digits_.push_back({axis, radix, left, places});
        };
        for (size_t axis = 0; axis < sizes_.size(); ++axis) add(axis, sizes_[axis] / tile_[axis], tile_[axis]);
        for (size_t axis = 0; axis < sizes_.size(); ++axis) add(axis, tile_[axis], 1);
    }

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override;
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;

    void check(const Extent& extent) const override {
        for (size_t axis = 0; axis < sizes_.size(); ++axis) parts()[axis]->check(along({extent}, axis).extent);
    }
    // Each part has an extent of its own, whose rows are the places on its axis.
    bool counts_rows() const override { return false; }
    // None is known, though parts may have one: so many places further on, an axis looks alike, but tokens leave its row,
    // or its tile, before. And parts list no more keys than their axes have places.
    int64_t period() const override { return 1; }
    PatternRef transposed() const override { return make_ref<Grid>(sizes_, tile_, transposed_parts()); }

    int64_t modulus() const override { return own_places(forever).tokens; }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override;

    std::string print() const override {
        std::string out = "grid([" + list(sizes_) + ']';
        if (tile_ != sizes_) out += ", [" + list(tile_) + ']';
        for (const PatternRef& part : parts()) out += ", " + part->print();
        return out + ')';
    }
    std::string identity() const override {
        std::string out = "grid([" + list(sizes_) + "],[" + list(tile_) + ']';
        for (const PatternRef& part : parts()) out += ',' + part->identity();
        return out + ')';
    }
    void save(ByteWriter& out) const override {
        save_parts(Node::grid, out);
        out.array(sizes_);
        out.array(tile_);
    }

private:
    // The plane that the part of an axis is meant on.
    Plane along(const Plane& plane, size_t axis) const {
        return {{plane.extent.batch, plane.extent.heads, sizes_[axis], sizes_[axis], 0}, plane.batch, plane.head};
    }
    // The last axes, on which tokens see their own place alone, and how many tokens have the same place on all others.
    struct OwnPlaces {
        size_t first;
        int64_t tokens;
    };
    OwnPlaces own_places(int64_t multiple) const;
    Box box(int64_t first, int64_t last) const;
    int64_t empty_until(const Plane& plane, size_t axis, Interval queries, int64_t key) const;

    std::vector<int64_t> sizes_, tile_;
    int64_t tokens_ = 1;
    std::vector<Digit> digits_;
};

// Appends the keys whose place is seen on every axis, those of the first digits first.
class Walk {
public:
    Walk(const std::vector<Digit>& digits, std::vector<Intervals> seen, Interval clip, Intervals& out)
        : digits_(digits), seen_(std::move(seen)), in_tile_(seen_), clip_(clip), cutter_(clip, out) {}

    // `token` has the digits before this one.
    void from(size_t at, int64_t token) {
        check_cancelled();
        if (at == digits_.size()) return cutter_.add(token, token + 1);
        const Digit& digit = digits_[at];
        const Interval values{std::max<int64_t>(floor_div(clip_.begin - token, digit.tokens), 0),
                              std::min(ceil_div(clip_.end - token, digit.tokens), digit.radix)};
        digit.places > 1 ? tiles(at, token, values) : places(at, token, values);
    }

private:
    void places(size_t at, int64_t token, Interval values) {
        const Digit& digit = digits_[at];
        for (const Interval& seen : in_tile_[digit.axis]) {
            const int64_t begin = std::max(seen.begin, values.begin), end = std::min(seen.end, values.end);
            if (digit.tokens == 1)
                cutter_.add(token + begin, token + end);
            else
                for (int64_t value = begin; value < end; ++value) from(at + 1, token + value * digit.tokens);
        }
    }

    // The axis has one more digit, to which this one leaves what is seen within the tile.
    void tiles(size_t at, int64_t token, Interval values) {
        const Digit& digit = digits_[at];
        const Intervals& seen = seen_[digit.axis];
        int64_t value = values.begin;
        for (auto i = first_ending_after(seen, value * digit.places); i != seen.end();) {
            value = std::max(value, i->begin / digit.places);
            if (value >= values.end) return;
            const int64_t begin = value * digit.places, end = begin + digit.places;
            Intervals& inside = in_tile_[digit.axis];
            inside.clear();
            for (auto part = i; part != seen.end() && part->begin < end; ++part)
                inside.push_back({std::max(part->begin, begin) - begin, std::min(part->end, end) - begin});
            from(at + 1, token + value * digit.tokens);
            ++value;
            while (i != seen.end() && i->end <= end) ++i;
        }
    }

    const std::vector<Digit>& digits_;
    std::vector<Intervals> seen_, in_tile_;  // of each axis
    Interval clip_;
    Cutter cutter_;
};

void Grid::keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const {
    const int64_t query = plane.position(row);
    clip = {std::max<int64_t>(clip.begin, 0), std::min(clip.end, tokens_)};
    if (query < 0 || query >= tokens_ || clip.begin >= clip.end) return;
    const Box here = box(query, query), there = box(clip.begin, clip.end - 1);
    std::vector<Intervals> seen(sizes_.size());
    for (size_t axis = 0; axis < sizes_.size(); ++axis) {
        parts()[axis]->keys(along(plane, axis), here.axes[axis].begin, there.axes[axis], seen[axis]);
        if (seen[axis].empty()) return;
    }
    Walk(digits_, std::move(seen), clip, out).from(0, 0);
}

// So many of them that their tokens divide `multiple`, or all of them where that is `forever`.
Grid::OwnPlaces Grid::own_places(int64_t multiple) const {
    OwnPlaces own{sizes_.size(), 1};
    if (tile_ != sizes_) return own;
    for (const std::string own_place = make_window(0, 0)->identity(); own.first > 0; --own.first) {
        const int64_t tokens = own.tokens * sizes_[own.first - 1];
        if (parts()[own.first - 1]->identity() != own_place || (multiple != forever && multiple % tokens)) break;
        own.tokens = tokens;
    }
    return own;
}

// Tokens that share their places on the last axes are a grid of the others.
PatternRef Grid::in_residue(int64_t modulus, int64_t residue) const {
    const OwnPlaces own = own_places(modulus);
    if (own.tokens == 1) return {};
    const auto last = std::ptrdiff_t(own.first);
    const PatternRef others =
        last == 0 ? make_grid({1}, {}, {make_full()})
                  : make_grid({sizes_.begin(), sizes_.begin() + last}, {}, {parts().begin(), parts().begin() + last});
    return own.tokens == modulus ? others : others->in_residue(modulus / own.tokens, residue / own.tokens);
}

// The box that the tokens [first, last] lie in.
Box Grid::box(int64_t first, int64_t last) const {
    Box box;
    box.axes.fill({0, 1});
    bool is_fixed = true;  // both tokens have the digits so far
    for (const Digit& digit : digits_) {
        const int64_t low = first / digit.tokens % digit.radix, high = last / digit.tokens % digit.radix;
        Interval& places = box.axes[digit.axis];
        if (is_fixed) {
            places.begin += low * digit.places;
            places.end = places.begin + (high - low) * digit.places + 1;
            is_fixed = low == high;
            if (!is_fixed) box.step = digit.tokens, box.steps = high - low;
        } else {
            places.end += (digit.radix - 1) * digit.places;
            box.is_exact &= low == 0 && high == digit.radix - 1;
        }
    }
    return box;
}

// Where tokens from `key` on, which these queries do not see for what they have on this axis, end: before the next key
// that has a place there which they may see, or where digits before those of this axis change.
int64_t Grid::empty_until(const Plane& plane, size_t axis, Interval queries, int64_t key) const {
    const auto digit = std::find_if(digits_.begin(), digits_.end(), [&](const Digit& d) { return d.axis == axis; });
    if (digit == digits_.end()) return forever;
    if (parts()[axis]->levels > most_levels_asked_again) return key;
    const int64_t value = key / digit->tokens % digit->radix, unit = digit->places;
    const Block column{queries.begin, queries.end - queries.begin, value * unit, unit};
    Key unused;
    bool known = true;
    const Coverage coverage = parts()[axis]->classify(along(plane, axis), column, unused, known);
    if (coverage.kind != Coverage::empty) return key;
    const int64_t end = std::min(digit->radix, add_saturated(value, coverage.repeat));
    if (end == digit->radix && digit == digits_.begin()) return forever;
    return key - key % digit->tokens + (end - value) * digit->tokens;
}

// Each part looks at the box's places on its axis. Where tokens are not the box exactly, its answers are certain, but
// those of a box that is seen in part.
Coverage Grid::classify(const Plane& plane, const Block& block, Key& key, bool& known) const {
    const int64_t row = plane.position(block.row);
    const Interval queries{std::max<int64_t>(row, 0), std::min(row + block.rows, tokens_)};
    const Interval keys{std::max<int64_t>(block.key, 0), std::min(block.key + block.keys, tokens_)};
    if (queries.begin >= queries.end || block.key >= tokens_) return {Coverage::empty, forever};
    if (keys.begin >= keys.end) return {Coverage::empty, blocks_until(0, block.key, block.keys)};
    const Box box_q = box(queries.begin, queries.end - 1), box_k = box(keys.begin, keys.end - 1);
    const bool is_cut = queries.end - queries.begin < block.rows || keys.end - keys.begin < block.keys;

    const size_t mark = key.size();
    bool sure = box_q.is_exact && box_k.is_exact && !is_cut;
    key.insert(key.end(), {box_q.step, box_q.steps, box_k.step, box_k.steps});
    const size_t first = key.size();
    for (size_t axis = 0; axis < sizes_.size(); ++axis) {
        const Interval q = box_q.axes[axis], k = box_k.axes[axis];
        const size_t before = key.size();
        key.push_back(int64_t(axis));
        const Block part{q.begin, q.end - q.begin, k.begin, k.end - k.begin};
        const Coverage coverage = parts()[axis]->classify(along(plane, axis), part, key, sure);
        if (coverage.kind == Coverage::partial) continue;
        key.resize(before);
        if (coverage.kind == Coverage::full) continue;
        key.resize(mark);
        return {Coverage::empty, blocks_until(empty_until(plane, axis, q, keys.begin), block.key, block.keys)};
    }
    if (key.size() == first && !is_cut) {
        key.resize(mark);
        return {Coverage::full, 1};
    }
    key.push_back(end_of_axes);
    known &= sure;
    return {Coverage::partial, 1};
}

void check_places(const std::vector<int64_t>& sizes, const std::vector<int64_t>& tile) {
    int64_t tokens = 1;
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
        const int64_t size = sizes[axis], part = tile[axis];
        if (size < 1) fail(SPATTN_E_RANGE, text("sizes[", axis, "]"), text("is ", size, "; accepted: 1 and more"));
        tokens = multiply_saturated(tokens, size);
        if (tokens > most_tokens)
            fail(SPATTN_E_RANGE, "sizes", text("have a product above ", most_tokens, "; accepted: up to that"));
        if (part < 1 || size % part)
            fail(SPATTN_E_RANGE, text("tile[", axis, "]"), text("is ", part, "; accepted: divisors of ", size));
    }
}

}  // namespace

void check_axes(size_t axes) {
    if (axes < 1 || axes > most_axes) fail(SPATTN_E_RANGE, "axes", text("is ", axes, "; accepted: 1 to ", most_axes));
}

PatternRef make_grid(std::vector<int64_t> sizes, std::vector<int64_t> tile, Patterns parts) {
    check_axes(sizes.size());
    if (tile.empty()) tile = sizes;
    const auto check_count = [&](const char* argument, size_t count) {
        if (count == sizes.size()) return;
        fail(SPATTN_E_SHAPE, argument, text("has ", count, " entries; accepted: ", sizes.size(), ", as sizes has"));
    };
    check_count("tile", tile.size());
    check_count("parts", parts.size());
    check_parts(parts);
    check_places(sizes, tile);
    return make_ref<Grid>(std::move(sizes), std::move(tile), std::move(parts));
}

}  // namespace spattn
