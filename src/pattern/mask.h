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
    virtual bool borrows() const = 0;
};

class BitRows : public MaskRows {
public:
    explicit BitRows(const MaskSizes& sizes);  // all 0
    int64_t find(int64_t plane, int64_t row, Interval range, bool value) const override;
    bool borrows() const override { return false; }
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
    ByteRows(const uint8_t* bytes, int64_t heads, int64_t stride_batch, int64_t stride_head, int64_t stride_row)
        : bytes_(bytes),
          heads_(heads),
          stride_batch_(stride_batch),
          stride_head_(stride_head),
          stride_row_(stride_row) {}
    int64_t find(int64_t plane, int64_t row, Interval range, bool value) const override;
    bool borrows() const override { return true; }

private:
    const uint8_t* bytes_;
    int64_t heads_, stride_batch_, stride_head_, stride_row_;
};

PatternRef make_mask(std::unique_ptr<const MaskRows> rows, const MaskSizes& sizes);

}  // namespace spattn
