// SPDX-License-Identifier: MIT
// Rows that ranks exchange: lanes share them, some at a time.
#include <algorithm>

#include "core/math.h"
#include "cpu/copied_row.h"
#include "cpu/generic/elements.h"
#include "cpu/share.h"
#include "plan/exchange.h"

namespace spattn::cpu {
namespace {

double to_real(double x) { return x; }
void from_real(double x, double& out) { out = x; }

template <class Rows>
class RowsWork {
public:
    RowsWork(const ExchangeCall& call, const Rows& rows)
        : rows_(rows), p_(*call.problem), element_(element_of(rows)) {
        stretch_ = tokens_of_stretch(p_.batch * p_.heads_kv * rows.columns * element_);
        share(*call.parallel, *this, ceil_div(rows.rows, stretch_), &RowsWork::make_stretch);
    }

private:
    int64_t element_of(const RowsCopy& copy) const { return copy.element; }
    int64_t element_of(const RowsSum&) const { return dtype_row(p_.dtype).bytes; }

    void make_stretch(int64_t number) {
        const int64_t end = std::min((number + 1) * stretch_, rows_.rows);
        for (int64_t row = number * stretch_; row < end; ++row)
            for (int64_t batch = 0; batch < p_.batch; ++batch)
                for (int64_t head = 0; head < p_.heads_kv; ++head) make(row, batch, head);
    }
    void make(int64_t row, int64_t batch, int64_t head);

    const char* from(const TensorView& x, int64_t batch, int64_t head, int64_t row) const {
        return static_cast<const char*>(x.data) + (batch * x.batch + head * x.head + row * x.row) * element_;
    }
    char* to(int64_t batch, int64_t head, int64_t row) const {
        return const_cast<char*>(from(rows_.to, batch, head, row));
    }
    template <class T>
    void add(int64_t row, int64_t batch, int64_t head) const {
        const TensorView &own = rows_.own, &parts = rows_.parts;
        const auto* const mine = reinterpret_cast<const T*>(from(own, batch, head, rows_.own_rows[row]));
        auto* const out = reinterpret_cast<T*>(to(batch, head, rows_.to_rows[row]));
        for (int64_t column = 0; column < rows_.columns; ++column) {
            auto sum = to_real(mine[column * own.column]);
            for (int32_t n = rows_.first_place[row]; n < rows_.first_place[row + 1]; ++n) {
                const char* const part = from(parts, batch, head, rows_.places[n]);
                sum += to_real(reinterpret_cast<const T*>(part)[column * parts.column]);
            }
            from_real(sum, out[column * rows_.to.column]);
        }
    }

    const Rows& rows_;
    const Problem& p_;
    const int64_t element_;
    int64_t stretch_;
};

template <>
void RowsWork<RowsCopy>::make(int64_t row, int64_t batch, int64_t head) {
    const int64_t taken = rows_.from_rows ? rows_.from_rows[row] : row, put = rows_.to_rows ? rows_.to_rows[row] : row;
    copy_row({from(rows_.from, batch, head, taken), rows_.from.column, to(batch, head, put), rows_.to.column,
              rows_.columns, element_});
}

template <>
void RowsWork<RowsSum>::make(int64_t row, int64_t batch, int64_t head) {
    switch (p_.dtype) {
        case Dtype::f32: return add<float>(row, batch, head);
        case Dtype::f64: return add<double>(row, batch, head);
        case Dtype::f16: return add<F16>(row, batch, head);
        case Dtype::bf16: return add<Bf16>(row, batch, head);
    }
}

}  // namespace

ExchangeSteps exchange_steps() {
    return {[](const ExchangeCall& call, const RowsCopies& copies) {
                for (const RowsCopy& rows : copies) RowsWork<RowsCopy>(call, rows);
            },
            [](const ExchangeCall& call, const RowsSums& sums) {
                for (const RowsSum& rows : sums) RowsWork<RowsSum>(call, rows);
            },
            [](int32_t) {}};
}

}  // namespace spattn::cpu
