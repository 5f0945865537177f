// SPDX-License-Identifier: MIT
// Rows that ranks exchange. A thread has 16 bytes of a row, or an element where rows are not made of such.
#pragma once

#include <algorithm>

#include "any/cache_rows.cuh"
#include "any/divisor.h"
#include "any/element.cuh"
#include "any/exchange.h"
#include "core/dtype.h"
#include "core/math.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace spattn::any {

constexpr int exchange_threads = 256;
constexpr int64_t most_exchange_ctas = 8192;

// Who has what: some threads have a row of one batch entry, with all its heads, and go through its parts.
struct ExchangeWork {
    Divisor threads_of_row, parts;  // parts: of a head
    int heads, batch;
    int64_t rows;

    ExchangeWork(const Problem& p, int64_t rows, int parts)
        : threads_of_row(std::min<int64_t>(p.heads_kv * parts, exchange_threads)), parts(parts), heads(int(p.heads_kv)),
          batch(int(p.batch)), rows(rows) {}

    SPATTN_HOST_DEVICE int rows_of_cta() const { return exchange_threads / int(threads_of_row); }

    // body(row, batch, head, part) for all that this thread has.
    template <class Body>
    __device__ void each(Body body) const {
        const int of_cta = int(threadIdx.x) / threads_of_row, first = int(threadIdx.x) - of_cta * threads_of_row;
        if (of_cta >= rows_of_cta()) return;
        const int64_t step = int64_t(gridDim.x) * rows_of_cta();
        for (int64_t n = int64_t(blockIdx.x) * rows_of_cta() + of_cta; n < rows * batch; n += step) {
            const int64_t row = n / batch;
            for (int at = first; at < heads * parts; at += threads_of_row) {
                const int head = at / parts;
                body(row, int(n - row * batch), head, at - head * parts);
            }
        }
    }
};

// ---- copies ----

struct CopyParams {
    ExchangeWork work;
    CopiedRows x;  // call: from; copy: to
    const int32_t *from_rows, *to_rows;
};

template <class Unit>
static __global__ void __launch_bounds__(exchange_threads) copy_rows(const __grid_constant__ CopyParams params) {
    const TensorView &from = params.x.call, &to = params.x.copy;
    params.work.each([&](int64_t row, int batch, int head, int part) {
        const int64_t taken = params.from_rows ? params.from_rows[row] : row;
        const int64_t put = params.to_rows ? params.to_rows[row] : row;
        const Unit* const source = row_of<Unit>(from, batch, head, taken);
        row_of<Unit>(to, batch, head, put)[part * to.column] = source[part * from.column];
    });
}

// body(bytes, kernel) for each of them.
template <class Body>
void each_copy_kernel(Body body) {
    body(16, copy_rows<uint4>);
    body(8, copy_rows<uint64_t>);
    body(4, copy_rows<uint32_t>);
    body(2, copy_rows<uint16_t>);
}

// ---- sums ----

struct SumParams {
    ExchangeWork work;
    RowsSum x;
};

template <Dtype D, int Width>
static __global__ void __launch_bounds__(exchange_threads) sum_rows(const __grid_constant__ SumParams params) {
    using T = ElementOf<D>;
    using Unit = Columns<T, Width>;
    const RowsSum& x = params.x;
    params.work.each([&](int64_t row, int batch, int head, int part) {
        const auto unit_of = [&](const TensorView& of, int64_t at) -> Unit& {
            return *reinterpret_cast<Unit*>(row_of<T>(of, batch, head, at) + int64_t(part) * Width * of.column);
        };
        Unit own = unit_of(x.own, x.own_rows[row]);
        decltype(to_real(T())) sums[Width];
#pragma unroll
        for (int i = 0; i < Width; ++i) sums[i] = to_real(own.x[i]);
        for (int n = x.first_place[row]; n < x.first_place[row + 1]; ++n) {
            const Unit more = unit_of(x.parts, x.places[n]);
#pragma unroll
            for (int i = 0; i < Width; ++i) sums[i] += to_real(more.x[i]);
        }
#pragma unroll
        for (int i = 0; i < Width; ++i) from_real(sums[i], own.x[i]);
        unit_of(x.to, x.to_rows[row]) = own;
    });
}

// body(dtype, width, kernel) for each of them.
template <class Body>
void each_sum_kernel(Body body) {
    each_dtype([&]<Dtype D>() {
        constexpr int width = int(16 / sizeof(ElementOf<D>));
        body(D, width, sum_rows<D, width>);
        body(D, 1, sum_rows<D, 1>);
    });
}

// ---- launch ----

template <class Params>
void launch_exchange(void (*kernel)(Params), const ExchangeCall& call, const Params& params) {
    const runtime::CurrentDevice current(call.device);
    const ExchangeWork& work = params.work;
    const int64_t ctas = std::min(ceil_div(work.rows * work.batch, int64_t(work.rows_of_cta())), most_exchange_ctas);
    runtime::launch(kernel, {unsigned(ctas), unsigned(exchange_threads), 0}, call.stream, params);
}

inline void copy_exchanged(const ExchangeCall& call, const RowsCopy& rows) {
    const Problem& p = *call.problem;
    const CopiedRows x = CopiedRows::of(rows.from, rows.to, rows.columns, dtype_row(p.dtype).bytes);
    const CopyParams params{ExchangeWork(p, rows.rows, x.units), x, rows.from_rows, rows.to_rows};
    each_copy_kernel([&](int bytes, auto kernel) {
        if (bytes == x.unit) launch_exchange(kernel, call, params);
    });
}

inline void add_exchanged(const ExchangeCall& call, const RowsSum& rows) {
    const Problem& p = *call.problem;
    const int bytes = dtype_row(p.dtype).bytes;
    const bool are_wide = rows.columns * bytes % 16 == 0 && is_wide(rows.own, bytes) && is_wide(rows.parts, bytes) &&
                          is_wide(rows.to, bytes);
    const int width = are_wide ? 16 / bytes : 1;
    const SumParams params{ExchangeWork(p, rows.rows, int(rows.columns) / width), rows};
    each_sum_kernel([&](Dtype dtype, int of, auto kernel) {
        if (dtype == p.dtype && of == width) launch_exchange(kernel, call, params);
    });
}

inline void prepare_exchange(int32_t device) {
    const runtime::CurrentDevice current(device);
    each_copy_kernel([](int, auto kernel) { runtime::prepare(kernel, 0); });
    each_sum_kernel([](Dtype, int, auto kernel) { runtime::prepare(kernel, 0); });
}

ExchangeSteps exchange_steps() { return {copy_exchanged, add_exchanged, prepare_exchange}; }

}  // namespace spattn::any
