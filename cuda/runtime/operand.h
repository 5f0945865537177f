// SPDX-License-Identifier: MIT
// Which operands the bulk tensor copy engine can read and write. No CUDA header: rows ask before they launch.
#pragma once

#include <cstdint>

#include "plan/call.h"

namespace spattn::runtime {

// Sizes of an operand [batch, heads, seq, head_dim], and of its elements.
struct Sizes {
    int64_t batch, heads, seq, head_dim;
    int64_t element;  // bytes
};

inline Sizes q_sizes(const Problem& p) {
    return {p.batch, p.heads_q, p.seq_q, p.head_dim, dtype_row(p.dtype).bytes};
}
inline Sizes k_sizes(const Problem& p) {
    return {p.batch, p.heads_kv, p.seq_k, p.head_dim, p.key_bytes()};
}
inline Sizes v_sizes(const Problem& p) {
    return {p.batch, p.heads_kv, p.seq_k, p.head_dim_v, p.key_bytes()};
}
inline Sizes out_sizes(const Problem& p) {
    return {p.batch, p.heads_q, p.seq_q, p.head_dim_v, dtype_row(p.dtype).bytes};
}

// A stride that no coordinate but 0 uses may be anything: the engine wants a multiple of 16 all the same.
inline int64_t stride_bytes(int64_t stride, int64_t size, int64_t element) { return size == 1 ? 16 : stride * element; }

// True where the engine can address the operand: column stride 1, address and other strides multiples of 16 bytes.
inline bool has_tensor_map(const TensorView& operand, const Sizes& sizes) {
    constexpr int64_t limit = int64_t(1) << 40;  // of a stride, bytes
    const int64_t strides[] = {stride_bytes(operand.head, sizes.heads, sizes.element),
                               stride_bytes(operand.row, sizes.seq, sizes.element),
                               stride_bytes(operand.batch, sizes.batch, sizes.element)};
    for (const int64_t bytes : strides)
        if (bytes % 16 || bytes < 0 || bytes >= limit) return false;
    return (operand.column == 1 || sizes.head_dim == 1) && reinterpret_cast<uintptr_t>(operand.data) % 16 == 0;
}

}  // namespace spattn::runtime
