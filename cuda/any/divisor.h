// SPDX-License-Identifier: MIT
// Division of numbers from 0 on: by one that stays the same, and in as few bits as do.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "ptx/host_device.h"

namespace spattn::any {

// A number by which others from 0 on are divided: by a product and shifts, as compilers do it for constants. Of a
// number that they do not know they make 30 instructions, each of which waits for the one before. Who has nothing to
// divide may have 0, which counts as 1. https://gmplib.org/~tege/divcnst-pldi94.pdf
class Divisor {
public:
    Divisor() = default;
    explicit Divisor(int64_t number)
        : number_(std::max(int32_t(number), 1)), bits_(std::bit_width(uint32_t(number_) - 1)),
          factor_(uint32_t(((uint64_t(1) << (31 + bits_)) + uint64_t(number_) - 1) / uint64_t(number_))) {}

    SPATTN_HOST_DEVICE operator int() const { return number_; }
    friend SPATTN_HOST_DEVICE int operator/(int x, const Divisor& by) {
        return int(uint32_t(uint64_t(uint32_t(x)) * by.factor_ >> 31) >> by.bits_);
    }

private:
    int32_t number_ = 1, bits_ = 0;  // number_ <= 2^bits_
    uint32_t factor_ = 1u << 31;     // 2^(31 + bits_) / number_, rounded up
};

// x / by. In 64 bits a division takes ten times as long as in 32, which most numbers do with.
SPATTN_HOST_DEVICE inline int64_t divide(int64_t x, int64_t by) {
    return uint64_t(x | by) >> 32 ? x / by : int64_t(uint32_t(x) / uint32_t(by));
}

}  // namespace spattn::any
