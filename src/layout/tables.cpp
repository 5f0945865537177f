// SPDX-License-Identifier: MIT
#include "layout/tables.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/cancel.h"

namespace spattn {

namespace {

// Brings a table into more memory, piece by piece, so that the call can be cancelled: gigabytes take a second.
template <class T>
void move_to(size_t capacity, std::vector<T>& table) {
    constexpr size_t piece = 1 << 16;
    std::vector<T> larger;
    larger.reserve(capacity);
    for (size_t at = 0; at < table.size(); at = larger.size()) {
        check_cancelled();
        larger.insert(larger.end(), table.begin() + at, table.begin() + std::min(at + piece, table.size()));
    }
    table.swap(larger);
}

// A table that outgrows `small` jumps in size, up to `large`: memory that is only reserved costs nothing, memory that
// moves is paid page by page.
template <class T>
void reserve_ahead(std::vector<T>& table, size_t more, size_t large) {
    constexpr size_t least = 64, small = 1024, jump = 16;
    const size_t known = table.capacity();
    if (table.size() + more <= known) return;
    const size_t ahead = known < small ? 0 : std::min(jump * known, large);
    move_to(std::max({table.size() + more, least, 2 * known, ahead}), table);
}

// The multiplications of one run do not wait for those of the run before.
uint64_t hash_runs(const Run* runs, size_t count) {
    uint64_t hash = count;
    for (size_t i = 0; i < count; ++i) {
        const uint64_t places = uint64_t(uint32_t(runs[i].first)) << 32 | uint32_t(runs[i].count);
        hash = std::rotl(hash, 23) + places * 0x9E3779B97F4A7C15u + uint32_t(runs[i].mask) * 0xD1B54A32D192ED03u;
    }
    return finish_hash(hash);
}

}  // namespace

void set_bits(uint64_t* words, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const int64_t first = begin >> 6, last = (end - 1) >> 6;
    const uint64_t from = ~uint64_t(0) << (begin & 63), upto = ~uint64_t(0) >> (63 - ((end - 1) & 63));
    if (first == last) {
        words[first] |= from & upto;
        return;
    }
    words[first] |= from;
    for (int64_t word = first + 1; word < last; ++word) words[word] = ~uint64_t(0);
    words[last] |= upto;
}

int32_t MaskTable::intern(const uint64_t* bits) {
    const int32_t words = layout_.mask_words;
    const int64_t size = int64_t(layout_.block_q) * layout_.block_k;
    uint64_t any = 0, all = ~uint64_t(0);
    for (int32_t w = 0; w + 1 < words; ++w) {
        any |= bits[w];
        all &= bits[w];
    }
    const uint64_t last = ~uint64_t(0) >> (64 * words - size);
    any |= bits[words - 1];
    if (any == 0) return absent_block;
    if (all == ~uint64_t(0) && bits[words - 1] == last) return full_block;

    const uint64_t hash = hash_words(bits, size_t(words));
    const int32_t found = index_.find(hash, [&](int32_t id) {
        return !std::memcmp(&layout_.masks[size_t(id) * words], bits, size_t(words) * sizeof *bits);
    });
    if (found != HashIndex::missing) return found;
    constexpr size_t large = 1024 * 1024;  // words
    std::vector<uint64_t>& masks = layout_.masks;
    reserve_ahead(masks, size_t(words), large);
    const int32_t id = layout_.num_masks++;
    masks.insert(masks.end(), bits, bits + words);
    index_.insert(hash, id);
    return id;
}

void SliceTable::grow() {
    constexpr size_t large = 512 * 1024;  // runs
    reserve_ahead(lists_.runs, 1, large);
}

bool SliceTable::is_row(Slice slice) const {
    const std::vector<Run>& runs = lists_.runs;
    const size_t count = runs.size() - begin_;
    return size_t(slice.end - slice.begin) == count &&
           !std::memcmp(&runs[size_t(slice.begin)], &runs[begin_], count * sizeof(Run));
}

Slice SliceTable::end_row() {
    last_ = {int32_t(begin_), int32_t(lists_.runs.size())};
    begin_ = lists_.runs.size();
    return last_;
}

Slice SliceTable::finish() {
    check_cancelled();
    std::vector<Run>& runs = lists_.runs;
    const size_t count = runs.size() - begin_;
    if (count == 0) return {0, 0};  // all empty rows look the same
    const uint64_t hash = hash_runs(&runs[begin_], count);
    const int32_t found = index_.find(hash, [&](int32_t id) { return is_row(known_[id]); });
    if (found != HashIndex::missing) {
        runs.resize(begin_);
        return known_[found];
    }
    const Slice slice = end_row();
    index_.insert(hash, int32_t(known_.size()));
    known_.push_back(slice);
    return slice;
}

Slice SliceTable::finish_beside() {
    check_cancelled();
    if (lists_.runs.size() == begin_) return {0, 0};
    if (!is_row(last_)) return end_row();
    lists_.runs.resize(begin_);
    return last_;
}

}  // namespace spattn
