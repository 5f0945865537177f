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

// Who has what: some threads have a row with all its heads, and go through its parts, some rows at a time, so that these
// are on their way together.
struct ExchangeWork {
    Divisor threads_of_row, parts;  // parts: of a head
    int heads, batch;
    int64_t rows;

    ExchangeWork() = default;
    ExchangeWork(const Problem& p, int64_t rows, int parts)
        : threads_of_row(std::min<int64_t>(p.heads_kv * parts, exchange_threads)), parts(parts), heads(int(p.heads_kv)),
          batch(int(p.batch)), rows(rows) {}

    SPATTN_HOST_DEVICE int rows_of_cta() const { return exchange_threads / int(threads_of_row); }

    // One thread's: a part of some rows.
    template <int Ahead>
    struct Place {
        int64_t first, step, rows;  // row i is first + i step, where there is one
        int batch, head, part;

        // body(i, row) for each row.
        template <class Body>
        __device__ __forceinline__ void each(Body body) const {
#pragma unroll
            for (int i = 0; i < Ahead; ++i)
                if (first + i * step < rows) body(i, first + i * step);
        }
    };

    // body(place) for all that a thread of this CTA, of so many, has.
    template <int Ahead, class Body>
    __device__ __forceinline__ void each(int cta, int ctas, Body body) const {
        const int of_cta = int(threadIdx.x) / threads_of_row, first = int(threadIdx.x) - of_cta * threads_of_row;
        if (of_cta >= rows_of_cta()) return;
        const int64_t step = int64_t(ctas) * rows_of_cta();
        for (int at = first; at < heads * parts; at += threads_of_row) {
            const int head = at / parts, part = at - head * parts;
            for (int in = 0; in < batch; ++in)
                for (int64_t row = int64_t(cta) * rows_of_cta() + of_cta; row < rows; row += Ahead * step)
                    body(Place<Ahead>{row, step, rows, in, head, part});
        }
    }
};

// What one launch does: each item has as many CTAs.
template <class Item>
struct ExchangeParams {
    Item items[RowsCopies::most];
    int count, ctas;

    void add(const Item& item) { items[count++] = item; }
    __device__ __forceinline__ const Item& item() const { return items[blockIdx.x / unsigned(ctas)]; }
    __device__ __forceinline__ int cta() const { return int(blockIdx.x % unsigned(ctas)); }
};

// ---- copies ----

struct CopyItem {
    static constexpr int ahead = 4;
    ExchangeWork work;
    CopiedRows x;  // call: from; copy: to
    const int32_t *from_rows, *to_rows;
};

template <class Unit>
static __global__ void __launch_bounds__(exchange_threads)
    copy_rows(const __grid_constant__ ExchangeParams<CopyItem> params) {
    const CopyItem& item = params.item();
    const TensorView &from = item.x.call, &to = item.x.copy;
    item.work.each<CopyItem::ahead>(params.cta(), params.ctas, [&](const auto& place) {
        Unit units[CopyItem::ahead];
        int64_t put[CopyItem::ahead];
        place.each([&](int i, int64_t row) {
            put[i] = item.to_rows ? item.to_rows[row] : row;
            const int64_t taken = item.from_rows ? item.from_rows[row] : row;
            units[i] = row_of<Unit>(from, place.batch, place.head, taken)[place.part * from.column];
        });
        place.each([&](int i, int64_t) {
            row_of<Unit>(to, place.batch, place.head, put[i])[place.part * to.column] = units[i];
        });
    });
}

// body(bytes, kernel) for each of them.
template <class Body>
void each_copy_kernel(Body body) {
    body(16, copy_rows<uint4>);
    body(8, copy_rows<uint64_t>);
    body(4, copy_rows<uint32_t>);
    body(2, copy_rows<uint16_t>);
    body(1, copy_rows<uint8_t>);
}

// ---- sums ----

struct SumItem {
    static constexpr int ahead = 2;
    ExchangeWork work;
    RowsSum x;
};

template <Dtype D, int Width>
static __global__ void __launch_bounds__(exchange_threads)
    sum_rows(const __grid_constant__ ExchangeParams<SumItem> params) {
    using T = ElementOf<D>;
    using Unit = Columns<T, Width>;
    const SumItem& item = params.item();
    const RowsSum& x = item.x;
    item.work.each<SumItem::ahead>(params.cta(), params.ctas, [&](const auto& place) {
        const auto unit_of = [&](const TensorView& of, int64_t row) -> Unit& {
            return *reinterpret_cast<Unit*>(row_of<T>(of, place.batch, place.head, row) +
                                            int64_t(place.part) * Width * of.column);
        };
        Unit own[SumItem::ahead];
        place.each([&](int i, int64_t row) { own[i] = unit_of(x.own, x.own_rows[row]); });
        place.each([&](int i, int64_t row) {
            decltype(to_real(T())) sums[Width];
#pragma unroll
            for (int column = 0; column < Width; ++column) sums[column] = to_real(own[i].x[column]);
            for (int n = x.first_place[row]; n < x.first_place[row + 1]; ++n) {
                const Unit more = unit_of(x.parts, x.places[n]);
#pragma unroll
                for (int column = 0; column < Width; ++column) sums[column] += to_real(more.x[column]);
            }
#pragma unroll
            for (int column = 0; column < Width; ++column) from_real(sums[column], own[i].x[column]);
            unit_of(x.to, x.to_rows[row]) = own[i];
        });
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

template <class Item>
void launch_exchange(void (*kernel)(ExchangeParams<Item>), const ExchangeCall& call, ExchangeParams<Item>& params) {
    if (!params.count) return;
    int64_t most = 1;
    for (int i = 0; i < params.count; ++i) {
        const ExchangeWork& work = params.items[i].work;
        most = std::max(most, ceil_div(work.rows, int64_t(Item::ahead) * work.rows_of_cta()));
    }
    params.ctas = int(std::min(most, most_exchange_ctas));
    const runtime::CurrentDevice current(call.device);
    runtime::launch(kernel, {unsigned(params.count * params.ctas), unsigned(exchange_threads), 0}, call.stream, params);
}

inline void copy_exchanged(const ExchangeCall& call, const RowsCopies& copies) {
    const Problem& p = *call.problem;
    each_copy_kernel([&](int bytes, auto kernel) {
        ExchangeParams<CopyItem> params{};
        for (const RowsCopy& rows : copies) {
            const CopiedRows x = CopiedRows::of(rows.from, rows.to, rows.columns, rows.element);
            if (bytes == x.unit) params.add({ExchangeWork(p, rows.rows, x.units), x, rows.from_rows, rows.to_rows});
        }
        launch_exchange(kernel, call, params);
    });
}

inline void add_exchanged(const ExchangeCall& call, const RowsSums& sums) {
    const Problem& p = *call.problem;
    const int bytes = dtype_row(p.dtype).bytes;
    each_sum_kernel([&](Dtype dtype, int width, auto kernel) {
        if (dtype != p.dtype) return;
        ExchangeParams<SumItem> params{};
        for (const RowsSum& rows : sums) {
            const bool are_wide = rows.columns * bytes % 16 == 0 && is_wide(rows.own, bytes) &&
                                  is_wide(rows.parts, bytes) && is_wide(rows.to, bytes);
            if (width == (are_wide ? 16 / bytes : 1))
                params.add({ExchangeWork(p, rows.rows, int(rows.columns) / width), rows});
        }
        launch_exchange(kernel, call, params);
    });
}

inline void prepare_exchange(int32_t device) {
    const runtime::CurrentDevice current(device);
    each_copy_kernel([](int, auto kernel) { runtime::prepare(kernel, 0); });
    each_sum_kernel([](Dtype, int, auto kernel) { runtime::prepare(kernel, 0); });
}

ExchangeSteps exchange_steps() { return {copy_exchanged, add_exchanged, prepare_exchange}; }

}  // namespace spattn::any
