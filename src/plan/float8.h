// SPDX-License-Identifier: MIT
// Operands of float8, each row with a scale. Nearly all rows of kernels are given copies as elements of bfloat16, the
// products of bytes and scales: what that takes grows with the number of tokens, and attention mostly with its square.
// Rows that multiply q and k as they are get a copy of v alone, and what scores are to be multiplied by. C++17-clean.
#pragma once

#include <algorithm>

#include "core/math.h"
#include "plan/call_lists.h"

namespace spattn {

// What a call's rows read in place of its operands, in memory. Without a workspace only `bytes` means something.
struct Float8Copies {
    TensorView q{}, k{}, v{};  // elements of the problem's dtype; no data: the operand stays. v is k where that holds it
    // Rows that read q and k as they are: floats [batch][heads_q][seq_q] that scores of a query are multiplied by, with
    // the scale of keys where a head has one; else factors of keys, [batch][heads_kv][rows_k], rows_k a multiple of
    // key_multiple. Places behind the last key are not written.
    TensorView q_factors{}, k_factors{};
    size_t bytes = 0;

    static constexpr int64_t key_multiple = 128;

    Float8Copies(const Problem& p, bool keeps_q_and_k, void* workspace) {
        CallRoom room(workspace);
        const auto elements = [&](int64_t heads, int64_t seq, int64_t columns) {
            constexpr int64_t row_bytes = 16;  // rows begin at multiples of them
            const int64_t element = dtype_row(p.dtype).bytes, row = round_up(columns, row_bytes / element);
            return TensorView{room.take<char>(p.batch * heads * seq * row * element), heads * seq * row, row, heads * row, 1};
        };
        const auto floats = [&](int64_t heads, int64_t seq) {
            return TensorView{room.take<float>(p.batch * heads * seq), heads * seq, seq, 1, 0};
        };
        if (keeps_q_and_k) {
            q_factors = floats(p.heads_q, p.seq_q);
            k_factors = floats(p.heads_kv, round_up(p.seq_k, key_multiple));
        } else {
            q = elements(p.heads_q, p.seq_q, p.head_dim), k = elements(p.heads_kv, p.seq_k, p.head_dim);
        }
        v = p.value_in_key ? k : elements(p.heads_kv, p.seq_k, p.head_dim_v);
        bytes = room.bytes();
    }

    // Which of both a forward needs, its operands say. A backward needs all copies.
    static size_t most_bytes(const Problem& p, Pass pass) {
        const size_t all = Float8Copies(p, false, nullptr).bytes;
        return pass == Pass::forward ? std::max(Float8Copies(p, true, nullptr).bytes, all) : all;
    }
};

// Whether keys of a head have one scale, which is a factor of all scores then.
inline bool have_one_scale(const TensorView& scales) { return !scales.data || scales.row == 0; }

// What a backend does for such operands.
struct Float8Steps {
    void (*widen)(const CallArgs& args, const Float8Copies& to);
    void (*prepare)(int32_t device);  // as Kernel::prepare
};

}  // namespace spattn
