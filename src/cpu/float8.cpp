// SPDX-License-Identifier: MIT
// Operands of float8 as elements, for rows of kernels that read no float8: all rows of a CPU. Lanes share heads.
#include "plan/float8.h"

#include "cpu/share.h"
#include "cpu/widened_row.h"

namespace spattn::cpu {
namespace {

class Widening {
public:
    Widening(const ForwardArgs& args, const Float8Copies& to) : args_(args), p_(*args.problem), to_(to) {}

    void widen() {
        share(*args_.parallel, *this, p_.batch * p_.heads_q, &Widening::widen_queries);
        share(*args_.parallel, *this, p_.batch * p_.heads_kv, &Widening::widen_keys);
    }

private:
    void widen_queries(int64_t plane) {
        widen(args_.q, args_.q_scales, to_.q, plane / p_.heads_q, plane % p_.heads_q, p_.seq_q, p_.head_dim);
    }
    void widen_keys(int64_t plane) {
        const int64_t batch = plane / p_.heads_kv, head = plane % p_.heads_kv;
        widen(args_.k, args_.k_scales, to_.k, batch, head, p_.seq_k, p_.head_dim);
        if (!p_.value_in_key) widen(args_.v, args_.v_scales, to_.v, batch, head, p_.seq_k, p_.head_dim_v);
    }
    void widen(const TensorView& from, const TensorView& scales, const TensorView& to, int64_t batch, int64_t head,
               int64_t rows, int64_t columns) const {
        const auto place = [&](const TensorView& x, int64_t row) { return batch * x.batch + head * x.head + row * x.row; };
        for (int64_t row = 0; row < rows; ++row)
            widen_row(static_cast<const uint8_t*>(from.data) + place(from, row), from.column,
                      scales.data ? static_cast<const float*>(scales.data)[place(scales, row)] : 1, columns, p_.dtype,
                      static_cast<char*>(to.data) + place(to, row) * dtype_row(p_.dtype).bytes);
    }

    const ForwardArgs& args_;
    const Problem& p_;
    const Float8Copies& to_;
};

}  // namespace

Float8Steps float8_steps() {
    return {[](const ForwardArgs& args, const Float8Copies& to) { Widening(args, to).widen(); }, [](int32_t) {}};
}

}  // namespace spattn::cpu
