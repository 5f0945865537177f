// SPDX-License-Identifier: MIT
#include "layout/moved.h"

#include <algorithm>

namespace spattn {
namespace {

// A token moves if it sees this many times what the token in the middle of its block sees, and a block more.
constexpr int64_t far_more = 4;
// With more tokens than this share of the axis on the move, they are no exception.
constexpr int64_t most_moved = 8;

// Of a block: the list says which blocks it has.
std::vector<int32_t> exceptions_of(const Side& side, Slice slice) {
    std::vector<int64_t> kept(size_t(side.own_block()));
    for (int32_t r = slice.begin; r < slice.end; ++r) {
        const Run& run = side.lists().runs[r];
        for (size_t i = 0; i < kept.size(); ++i) kept[i] += int64_t(side.kept(run.mask)[i]) * run.count;
    }
    return find_exceptions(kept, side.other_block());
}

}  // namespace

std::vector<int32_t> find_exceptions(const std::vector<int64_t>& kept, int32_t other_block) {
    std::vector<int64_t> sorted = kept;
    const auto middle = sorted.begin() + int64_t(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    const int64_t limit = far_more * *middle + other_block;
    std::vector<int32_t> places;
    for (size_t i = 0; i < kept.size(); ++i)
        if (kept[i] > limit) places.push_back(int32_t(i));
    return places;
}

std::vector<int32_t> find_moved(const Side& side) {
    const Lists& lists = side.lists();
    std::vector<int32_t> moved, places;
    for (size_t at = 0; at < lists.slices.size(); ++at) {
        const Slice slice = lists.slices[at];
        const Slice before = at ? lists.slices[at - 1] : Slice{-1, -1};
        if (slice.begin != before.begin || slice.end != before.end) places = exceptions_of(side, slice);
        const int32_t first = int32_t(at % size_t(lists.rows)) * side.own_block();
        for (int32_t place : places) moved.push_back(first + place);
    }
    std::sort(moved.begin(), moved.end());
    moved.erase(std::unique(moved.begin(), moved.end()), moved.end());
    if (int64_t(moved.size()) * most_moved > side.own_tokens()) moved.clear();
    return moved;
}

Axis move_tokens(std::vector<int32_t> moved, int32_t block, int32_t blocks) {
    Axis axis;
    axis.class_tiles = blocks;
    if (moved.empty()) return axis;
    const int32_t words = words_for(block);
    axis.away.resize(size_t(blocks) * words);
    for (int32_t token : moved)
        axis.away[size_t(token / block) * words + size_t(token % block / 64)] |= uint64_t(1) << (token % block % 64);
    moved.resize((moved.size() + size_t(block) - 1) / size_t(block) * size_t(block), no_token);
    axis.tokens = std::move(moved);
    return axis;
}

}  // namespace spattn
