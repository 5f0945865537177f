// SPDX-License-Identifier: MIT
// Rows of a boolean mask, packed to bits or as the bytes of a caller.
#pragma once

#include <map>
#include <memory>

#include "pattern/index_array.h"
#include "pattern/pattern.h"

namespace spattn {

struct MaskSizes {
    int64_t batch = 1, heads = 1, seq_q, seq_k;
    int64_t planes() const { return batch * heads; }
};

// Fails where a size is not one of a mask.
void check_mask_sizes(const MaskSizes& sizes, const char* argument);

class MaskRows {
public:
    virtual ~MaskRows() = default;
    // The first key of the range that has this value, or its end. plane = batch * heads + head.
    virtual int64_t find(int64_t plane, int64_t row, Interval range, bool value) const = 0;
    // Keys [64 * at, 64 * at + 64) of a row, the first in the lowest bit; 0 beyond the last key.
    virtual uint64_t word(int64_t plane, int64_t row, int64_t at) const = 0;
    virtual bool borrows() const = 0;
    virtual size_t bytes() const = 0;  // of its own
};

// Up to 64 bytes as bits: 1 where they are not 0.
inline uint64_t pack_bits(const uint8_t* bytes, int64_t stride, int64_t count) {
    uint64_t bits = 0;
    for (int64_t i = 0; i < count; ++i) bits |= uint64_t(bytes[i * stride] != 0) << i;
    return bits;
}

class BitRows : public MaskRows {
public:
    explicit BitRows(const MaskSizes& sizes);  // all 0
    int64_t find(int64_t plane, int64_t row, Interval range, bool value) const override;
    uint64_t word(int64_t plane, int64_t row, int64_t at) const override {
        return bits_[size_t((plane * seq_q_ + row) * words_ + at)];
    }
    bool borrows() const override { return false; }
    size_t bytes() const override { return bits_.size() * sizeof(uint64_t); }
    void set_word(int64_t plane, int64_t row, int64_t at, uint64_t word) {
        bits_[size_t((plane * seq_q_ + row) * words_ + at)] = word;
    }
    void set(int64_t plane, int64_t row, int64_t key) {
        bits_[size_t((plane * seq_q_ + row) * words_ + key / 64)] |= uint64_t(1) << (key % 64);
    }

private:
    int64_t seq_q_, words_;
    std::vector<uint64_t> bits_;  // [planes, seq_q, words]
};

// The caller's bytes: keys lie side by side, the other axes have strides.
class ByteRows : public MaskRows {
public:
    ByteRows(const uint8_t* bytes, const MaskSizes& sizes, int64_t stride_batch, int64_t stride_head,
             int64_t stride_row)
        : bytes_(bytes),
          heads_(sizes.heads),
          seq_k_(sizes.seq_k),
          stride_batch_(stride_batch),
          stride_head_(stride_head),
          stride_row_(stride_row) {}
    int64_t find(int64_t plane, int64_t row, Interval range, bool value) const override;
    uint64_t word(int64_t plane, int64_t row, int64_t at) const override {
        return pack_bits(this->row(plane, row) + 64 * at, 1, std::min<int64_t>(64, seq_k_ - 64 * at));
    }
    bool borrows() const override { return true; }
    size_t bytes() const override { return 0; }

private:
    const uint8_t* row(int64_t plane, int64_t row) const {
        return bytes_ + plane / heads_ * stride_batch_ + plane % heads_ * stride_head_ + row * stride_row_;
    }

    const uint8_t* bytes_;
    int64_t heads_, seq_k_, stride_batch_, stride_head_, stride_row_;
};

PatternRef make_mask(std::unique_ptr<const MaskRows> rows, const MaskSizes& sizes);

}  // namespace spattn
