// SPDX-License-Identifier: MIT
#include "layout/orders/hot_lines.h"

#include <algorithm>
#include <bit>

#include "core/cancel.h"
#include "layout/orders/side.h"

namespace spattn {

HotLines::HotLines(const Pattern& among, Owner owner, const std::vector<int64_t>& hot, const Axis& own,
                   const Layout& whole, MaskTable& masks)
    : among_(among), owner_(owner), hot_(hot), own_(own), whole_(whole), masks_(masks),
      own_block_(owner == Owner::queries ? whole.block_q : whole.block_k),
      other_block_(owner == Owner::queries ? whole.block_k : whole.block_q), words_(words_for(own_block_)),
      own_tokens_(owner == Owner::queries ? whole.extent.seq_q : whole.extent.seq_k),
      kinds_((hot.size() + size_t(other_block_) - 1) / size_t(other_block_), Kind::empty),
      columns_(kinds_.size() * size_t(other_block_) * size_t(words_)), present_(size_t(words_)), slices_(lists_) {
    lists_.rows = own.residue_tiles;
}

void HotLines::add(const Plane& plane) {
    plane_ = plane;
    descend(0, lists_.rows, {{0, int32_t(hot_.size())}});
}

// Decides what of these ranges is undecided for blocks [first, first + count); what is decided stands in kinds_ and
// columns_.
void HotLines::descend(int32_t first, int32_t count, const std::vector<Range>& undecided) {
    std::vector<Range> left;
    for (Range range : undecided) divide(first, count, range, left);
    if (left.empty()) return list(first, count);
    if (count == 1) {
        for (Range range : left) ask_rows(first, range);
        return list(first, 1);
    }
    descend(first, count / 2, left);
    descend(first + count / 2, count - count / 2, left);
}

// Settles the range, or leaves its halves to be asked. Without a closed form, halves would say no more than the whole.
void HotLines::divide(int32_t first, int32_t count, Range range, std::vector<Range>& left) {
    check_cancelled();
    key_.clear();
    bool known = true;
    const Coverage coverage = among_.classify(plane_, block_of(first, count, range), key_, known);
    if (coverage.kind != Coverage::partial) return settle(range, coverage.kind == Coverage::full);
    const int32_t middle = known ? range.begin + (range.end - range.begin + 1) / 2 : range.end;
    left.push_back({range.begin, middle});
    if (middle < range.end) left.push_back({middle, range.end});
}

Block HotLines::block_of(int32_t first, int32_t count, Range range) const {
    const int64_t begin = hot_[size_t(range.begin)], tokens = hot_[size_t(range.end) - 1] + 1 - begin;
    const int64_t own = int64_t(first) * own_block_, own_tokens = int64_t(count) * own_block_;
    return owner_ == Owner::queries ? Block{own, own_tokens, begin, tokens} : Block{begin, tokens, own, own_tokens};
}

void HotLines::settle(Range range, bool is_full) {
    for (int32_t token = range.begin; token < range.end;) {
        const int32_t tile = token / other_block_, begin = tile * other_block_;
        const int32_t tile_end = std::min(begin + other_block_, int32_t(hot_.size()));
        const int32_t end = std::min(tile_end, range.end);
        kinds_[size_t(tile)] = token > begin || end < tile_end ? Kind::mixed : is_full ? Kind::full : Kind::empty;
        if (kinds_[size_t(tile)] == Kind::mixed)
            std::fill(columns_.begin() + int64_t(token) * words_, columns_.begin() + int64_t(end) * words_,
                      is_full ? ~uint64_t(0) : 0);
        token = end;
    }
}

// Fills the columns of the range for one block by asking the pattern for keys() of each query.
void HotLines::ask_rows(int32_t line, Range range) {
    for (int32_t tile = range.begin / other_block_; tile * other_block_ < range.end; ++tile)
        kinds_[size_t(tile)] = Kind::mixed;
    std::fill(columns_.begin() + int64_t(range.begin) * words_, columns_.begin() + int64_t(range.end) * words_, 0);
    const int64_t first = int64_t(line) * own_block_, end = std::min(first + own_block_, own_tokens_);
    const auto begin = hot_.begin() + range.begin, last = hot_.begin() + range.end;
    if (owner_ == Owner::queries) {
        for (int64_t row = first; row < end; ++row) {
            intervals_.clear();
            among_.keys(plane_, row, {*begin, *(last - 1) + 1}, intervals_);
            for (const Interval& i : intervals_)
                for (auto key = std::lower_bound(begin, last, i.begin); key != last && *key < i.end; ++key)
                    columns_[size_t(key - hot_.begin()) * words_ + size_t(row - first) / 64] |=
                        uint64_t(1) << ((row - first) % 64);
        }
    } else {
        for (auto query = begin; query != last; ++query) {
            intervals_.clear();
            among_.keys(plane_, *query, {first, end}, intervals_);
            for (const Interval& i : intervals_)
                set_bits(&columns_[size_t(query - hot_.begin()) * words_], i.begin - first, i.end - first);
        }
    }
}

// Appends the lists of these blocks. They are equal, but for blocks with tokens that are away or beyond the sequence
// end.
void HotLines::list(int32_t first, int32_t count) {
    Slice whole{-1, -1};
    Pace pace;
    for (int32_t line = first; line < first + count; ++line) {
        pace.step();
        const bool is_whole = find_present(line);
        const Slice slice = is_whole && whole.begin >= 0 ? whole : list(line);
        if (is_whole) whole = slice;
        lists_.slices.push_back(slice);
    }
}

// Finds the tokens that are at home in the block; true where they fill it.
bool HotLines::find_present(int32_t line) {
    const int64_t rows = std::min<int64_t>(own_block_, own_tokens_ - int64_t(line) * own_block_);
    int64_t present = 0;
    std::fill(present_.begin(), present_.end(), 0);
    set_bits(present_.data(), 0, rows);
    for (size_t w = 0; w < present_.size(); ++w) {
        if (!own_.away.empty()) present_[w] &= ~own_.away[size_t(line) * present_.size() + w];
        present += std::popcount(present_[w]);
    }
    return present == own_block_;
}

Slice HotLines::list(int32_t line) {
    const bool is_whole = find_present(line);
    for (int32_t tile = 0; tile < int32_t(kinds_.size()); ++tile) {
        if (kinds_[size_t(tile)] == Kind::empty) continue;
        const bool is_filled = (size_t(tile) + 1) * size_t(other_block_) <= hot_.size();
        const bool is_full = kinds_[size_t(tile)] == Kind::full && is_whole && is_filled;
        const int32_t mask = is_full ? full_block : intern(tile);
        if (mask != absent_block) slices_.add({tile, 1, mask});
    }
    return slices_.finish();
}

int32_t HotLines::intern(int32_t tile) {
    filled_.assign(size_t(other_block_) * words_, 0);
    const size_t first = size_t(tile) * size_t(other_block_);
    const size_t tokens = std::min(size_t(other_block_), hot_.size() - first);
    for (size_t i = 0; i < tokens * size_t(words_); ++i) {
        const uint64_t seen = kinds_[size_t(tile)] == Kind::full ? ~uint64_t(0) : columns_[first * size_t(words_) + i];
        filled_[i] = seen & present_[i % size_t(words_)];
    }
    pack_columns(filled_.data(), owner_, whole_, bits_);
    return masks_.intern(bits_.data());
}

}  // namespace spattn
