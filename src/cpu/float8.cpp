// SPDX-License-Identifier: MIT
// Operands of float8 as elements, for rows of kernels that read no float8: all rows of a CPU. Lanes share stretches of
// rows of a head.
#include "plan/float8.h"

#include <algorithm>

#include "core/math.h"
#include "cpu/copied_row.h"
#include "cpu/share.h"
#include "cpu/widened_row.h"

namespace spattn::cpu {
namespace {

class Widening {
public:
    Widening(const CallArgs& args, const Float8Copies& to)
        : args_(args), p_(*args.problem), to_(to), element_(dtype_row(p_.dtype).bytes),
          stretch_(tokens_of_stretch(p_.head_dim * element_)) {}

    void widen() {
        share(*args_.parallel, *this, p_.batch * p_.heads_q * stretches_of(p_.seq_q), &Widening::widen_queries);
        share(*args_.parallel, *this, p_.batch * p_.heads_kv * stretches_of(p_.seq_k), &Widening::widen_keys);
    }

private:
    int64_t stretches_of(int64_t rows) const { return ceil_div(rows, stretch_); }

    // Rows [begin, end) of a head of an entry.
    struct Rows {
        int64_t batch, head, begin, end;
    };
    Rows rows_of(int64_t number, int64_t heads, int64_t rows) const {
        const int64_t stretches = stretches_of(rows), plane = number / stretches, begin = number % stretches * stretch_;
        return {plane / heads, plane % heads, begin, std::min(begin + stretch_, rows)};
    }

    void widen_queries(int64_t number) {
        widen(args_.q, args_.q_scales, to_.q, rows_of(number, p_.heads_q, p_.seq_q), p_.head_dim);
    }
    void widen_keys(int64_t number) {
        const Rows rows = rows_of(number, p_.heads_kv, p_.seq_k);
        widen(args_.k, args_.k_scales, to_.k, rows, p_.head_dim);
        if (!p_.value_in_key) widen(args_.v, args_.v_scales, to_.v, rows, p_.head_dim_v);
    }
    void widen(const TensorView& from, const TensorView& scales, const TensorView& to, const Rows& rows,
               int64_t columns) const {
        const auto place = [&](const TensorView& x, int64_t row) {
            return rows.batch * x.batch + rows.head * x.head + row * x.row;
        };
        for (int64_t row = rows.begin; row < rows.end; ++row)
            widen_row(static_cast<const uint8_t*>(from.data) + place(from, row), from.column,
                      scales.data ? static_cast<const float*>(scales.data)[place(scales, row)] : 1, columns, p_.dtype,
                      static_cast<char*>(to.data) + place(to, row) * element_);
    }

    const CallArgs& args_;
    const Problem& p_;
    const Float8Copies& to_;
    const int64_t element_, stretch_;  // bytes; rows of a head
};

}  // namespace

Float8Steps float8_steps() {
    return {[](const CallArgs& args, const Float8Copies& to) { Widening(args, to).widen(); }, [](int32_t) {}};
}

}  // namespace spattn::cpu
