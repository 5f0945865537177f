// SPDX-License-Identifier: MIT
// What the host may know of sums of keys' rows (key_sums.cuh).
#pragma once

#include <cstdint>

namespace spattn::sm90 {

// What a kernel does about such sums.
enum class Adding { floats, bounds, integers };

// The sums of all keys, [batch, heads_kv, seq_k]. Integers alone have bounds and quanta.
struct KeySums {
    float* sums;       // a row each, of so many columns; its integers have 32 bits, too
    int columns;
    uint64_t* bounds;  // bound_words each
    float* quanta;     // what terms are multiplied by before they become integers
};
constexpr int bound_words = 8;

}  // namespace spattn::sm90
