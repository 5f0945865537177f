// SPDX-License-Identifier: MIT
// Where masks and runs go while a layout is built. Equal masks get one id, and rows with equal runs one slice.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/cancel.h"
#include "layout/index.h"
#include "layout/layout.h"

namespace spattn {

constexpr int32_t max_block = 1024;  // tokens a side

// Beside full_block and the ids of masks: no pair of the block is kept.
constexpr int32_t absent_block = -2;

// Sets bits [begin, end).
void set_bits(uint64_t* words, int64_t begin, int64_t end);
// Bits [begin, begin + count), count <= 64.
inline uint64_t get_bits(const uint64_t* words, int64_t begin, int count) {
    const int64_t word = begin >> 6;
    const int shift = int(begin & 63);
    uint64_t bits = words[word] >> shift;
    if (shift + count > 64) bits |= words[word + 1] << (64 - shift);
    return count == 64 ? bits : bits & ((uint64_t(1) << count) - 1);
}
// Sets those of bits [begin, begin + count) that `bits` has, count <= 64.
inline void put_bits(uint64_t* words, int64_t begin, int count, uint64_t bits) {
    const int64_t word = begin >> 6;
    const int shift = int(begin & 63);
    words[word] |= bits << shift;
    if (shift + count > 64) words[word + 1] |= bits >> (64 - shift);
}
constexpr int32_t words_for(int64_t bits) { return int32_t((bits + 63) / 64); }

// Appends to layout.masks.
class MaskTable {
public:
    explicit MaskTable(Layout& layout) : layout_(layout) {}
    // The id of this mask; full_block where every bit is set, absent_block where none is.
    int32_t intern(const uint64_t* bits);

private:
    Layout& layout_;
    HashIndex index_;
};

// Makes a table of equal values, piece by piece, so that the call can be cancelled: to touch gigabytes for the first time
// takes a second.
template <class T>
std::vector<T> make_table(size_t size, const T& value = T()) {
    constexpr size_t piece = 1 << 16;
    std::vector<T> table;
    table.reserve(size);
    while (table.size() < size) {
        check_cancelled();
        table.resize(std::min(table.size() + piece, size), value);
    }
    return table;
}

// Appends to lists.runs, a row at a time: add() joins a run to the one before where it can, finish() ends the row and
// returns its slice. finish_beside() compares it with the last slice alone: of rows that are hardly ever equal, but to
// their neighbours, to remember each takes longer than to build it.
class SliceTable {
public:
    explicit SliceTable(Lists& lists) : lists_(lists) { known_.reserve(size_t(lists.rows)); }
    void add(Run run) {
        std::vector<Run>& runs = lists_.runs;
        if (runs.size() > begin_) {
            Run& last = runs.back();
            if (last.mask == run.mask && last.first + last.count == run.first) {
                last.count += run.count;
                return;
            }
        }
        if (runs.size() == runs.capacity()) grow();
        runs.push_back(run);
    }
    Slice finish();
    Slice finish_beside();

private:
    void grow();
    bool is_row(Slice slice) const;  // whether it has the runs of the row being built
    Slice end_row();

    Lists& lists_;
    HashIndex index_;
    std::vector<Slice> known_;
    Slice last_{0, 0};
    size_t begin_ = 0;  // of the row being built
};

}  // namespace spattn
