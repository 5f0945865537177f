// SPDX-License-Identifier: MIT
#include "layout/orders/hot_axis.h"

#include <algorithm>

#include "core/cancel.h"

namespace spattn {
namespace {

// A token is hot if it sees this many times what the token in the middle of its block sees, and a block more.
constexpr int64_t far_more = 4;
// Where more than one token in so many would be hot, none stands out.
constexpr int64_t least_apart = 8;

// The slice lists what the tokens of one owning block see.
std::vector<int32_t> find_in_block(const Side& side, Slice slice) {
    check_cancelled();
    std::vector<int64_t> kept(size_t(side.own_block()));
    for (int32_t r = slice.begin; r < slice.end; ++r) {
        const Run& run = side.lists().runs[r];
        for (size_t i = 0; i < kept.size(); ++i) kept[i] += int64_t(side.kept(run.mask)[i]) * run.count;
    }
    return find_hot_places(kept, side.other_block());
}

}  // namespace

std::vector<int32_t> find_hot_places(const std::vector<int64_t>& kept, int32_t other_block) {
    std::vector<int64_t> sorted = kept;
    const auto middle = sorted.begin() + int64_t(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    const int64_t limit = far_more * *middle + other_block;
    std::vector<int32_t> places;
    for (size_t i = 0; i < kept.size(); ++i)
        if (kept[i] > limit) places.push_back(int32_t(i));
    return places;
}

std::vector<int32_t> find_hot_tokens(const Side& side) {
    const Lists& lists = side.lists();
    std::vector<int32_t> hot, places;
    Pace pace;
    for (size_t at = 0; at < lists.slices.size(); ++at) {
        pace.step();
        const Slice slice = lists.slices[at];
        const Slice before = at ? lists.slices[at - 1] : Slice{-1, -1};
        if (slice.begin != before.begin || slice.end != before.end) places = find_in_block(side, slice);
        const int32_t first = int32_t(at % size_t(lists.rows)) * side.own_block();
        for (int32_t place : places) hot.push_back(first + place);
    }
    std::sort(hot.begin(), hot.end());
    hot.erase(std::unique(hot.begin(), hot.end()), hot.end());
    if (int64_t(hot.size()) * least_apart > side.own_tokens()) hot.clear();
    return hot;
}

Axis make_hot_axis(std::vector<int32_t> tokens, int32_t block, int32_t blocks) {
    Axis axis;
    axis.residue_tiles = blocks;
    if (tokens.empty()) return axis;
    const int32_t words = words_for(block);
    axis.away.resize(size_t(blocks) * words);
    for (int32_t token : tokens) {
        if (token == no_token) continue;
        const int32_t place = token % block;
        axis.away[size_t(token / block) * words + size_t(place / 64)] |= uint64_t(1) << (place % 64);
    }
    tokens.resize((tokens.size() + size_t(block) - 1) / size_t(block) * size_t(block), no_token);
    axis.tokens = std::move(tokens);
    return axis;
}

}  // namespace spattn
