// SPDX-License-Identifier: MIT
#include "abi/drawn_append.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace abi {
namespace {

int64_t below(std::mt19937& random, int64_t end) { return int64_t(random() % uint64_t(end)); }

// Axes as they stand, innermost last, or in any order; with gaps, and off the alignment of 16 bytes.
AppendOperand draw_operand(std::mt19937& random, std::vector<int64_t> shape, spattn_dtype dtype, bool any_order,
                           const std::vector<int64_t>& gaps) {
    AppendOperand made;
    made.is_given = true, made.dtype = dtype, made.shape = shape, made.strides.resize(shape.size());
    std::vector<size_t> order(shape.size());
    std::iota(order.begin(), order.end(), size_t(0));
    if (any_order) std::shuffle(order.begin(), order.end(), random);
    int64_t step = 1;
    for (size_t i = shape.size(); i-- > 0;) {
        made.strides[order[i]] = step;
        step = step * shape[order[i]] + gaps[i] * (i + 1 == shape.size() ? 1 : step);
    }
    const size_t element = dtype.bits / 8;
    made.first = element * size_t(below(random, 2) ? 64 / element : below(random, 9));
    made.memory.resize(made.first + size_t(step) * element + 64);
    for (unsigned char& byte : made.memory) byte = static_cast<unsigned char>(random());
    return made;
}

AppendOperand draw_integers(std::mt19937& random, std::vector<int64_t> shape, const std::vector<int64_t>& values) {
    AppendOperand made = draw_operand(random, shape, below(random, 2) ? i32 : i64, shape.size() > 1, {0, 0});
    const int64_t columns = shape.back(), row_step = shape.size() == 1 ? 0 : made.strides[0];
    for (size_t n = 0; n < values.size(); ++n) {
        const int64_t at = int64_t(n) / columns * row_step + int64_t(n) % columns * made.strides.back();
        unsigned char* const to = made.memory.data() + made.first + size_t(at) * made.dtype.bits / 8;
        const int32_t narrow = int32_t(std::clamp<int64_t>(values[n], INT32_MIN, INT32_MAX));
        made.dtype.bits == 64 ? std::memcpy(to, &values[n], 8) : std::memcpy(to, &narrow, 4);
    }
    return made;
}

int64_t integer_of(const AppendOperand& x, int64_t at) {
    const unsigned char* const from = x.memory.data() + x.first + size_t(at) * x.dtype.bits / 8;
    int64_t wide;
    int32_t narrow;
    return x.dtype.bits == 64 ? (std::memcpy(&wide, from, 8), wide) : (std::memcpy(&narrow, from, 4), int64_t(narrow));
}

}  // namespace

spattn_tensor AppendOperand::at(void* place, spattn_device device) const {
    spattn_tensor t{};
    t.data = place, t.byte_offset = first, t.device = device, t.dtype = dtype;
    t.ndim = int32_t(shape.size()), t.shape = shape.data(), t.strides = strides.data();
    return t;
}

DrawnAppend::DrawnAppend(std::mt19937& random) {
    spattn_problem& p = problem;
    p.flags = SPATTN_PLAN_STARTS;
    p.axes = spattn_enum(below(random, 3));
    p.batch = 1 + below(random, 5), p.heads_kv = 1 + below(random, 3), p.heads_q = p.heads_kv * (1 + below(random, 2));
    p.seq_q = below(random, 4) ? 1 + below(random, 9) : below(random, 300);
    p.head_dim = below(random, 2) ? 8 * (1 + below(random, 20)) : 1 + below(random, 70);
    p.head_dim_v = below(random, 2) ? p.head_dim : 1 + below(random, p.head_dim);
    p.dtype = std::array{f32, bf16, f64, spattn_dtype{SPATTN_FLOAT, 16, 1}}[size_t(below(random, 4))];
    const bool is_ragged = p.axes == SPATTN_THD;
    p.page_size = is_ragged || below(random, 2) ? 1 + below(random, 20) : 0;
    p.seq_k = p.page_size ? p.page_size * below(random, 9) : below(random, 90);
    const bool value_in_key = below(random, 4) == 0;
    if (value_in_key) p.flags |= SPATTN_PLAN_VALUE_IN_KEY;

    const auto rows_of = [&](int64_t columns) {
        std::vector<int64_t> shape{p.seq_q, p.heads_kv, columns};
        if (p.axes == SPATTN_BSHD) shape = {p.batch, p.seq_q, p.heads_kv, columns};
        if (p.axes == SPATTN_BHSD) shape = {p.batch, p.heads_kv, p.seq_q, columns};
        std::vector<int64_t> gaps(shape.size());
        for (int64_t& gap : gaps) gap = below(random, 3) ? 0 : below(random, 4);
        return draw_operand(random, shape, p.dtype, below(random, 3) == 0, gaps);
    };
    const int64_t of_entry = p.page_size ? p.seq_k / p.page_size : 0;
    pages = p.batch * of_entry + 1 + below(random, 3);
    const int64_t page_gap = below(random, 3);  // rows between pages: as many in k and v
    const auto cache_of = [&](int64_t columns) {
        const int64_t gap = below(random, 2) ? 0 : below(random, 9);  // elements between rows
        if (!p.page_size) {
            std::vector<int64_t> shape{p.batch, p.seq_k, p.heads_kv, columns};
            if (p.axes == SPATTN_BHSD) std::swap(shape[1], shape[2]);
            return draw_operand(random, shape, p.dtype, below(random, 3) == 0, {0, 0, 0, gap});
        }
        if (p.axes == SPATTN_BHSD)
            return draw_operand(random, {pages, p.heads_kv, p.page_size, columns}, p.dtype, false,
                                {0, 0, page_gap, gap});
        return draw_operand(random, {pages, p.page_size, p.heads_kv, columns}, p.dtype, false, {0, page_gap, 0, gap});
    };
    k_new = rows_of(p.head_dim), k = cache_of(p.head_dim);
    if (!value_in_key) v_new = rows_of(p.head_dim_v), v = cache_of(p.head_dim_v);

    std::vector<int64_t> begins, bounds, new_rows, table(size_t(p.batch * of_entry));
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t ends[] = {0, -p.seq_q, p.seq_k, most, least, p.seq_k - 1};
        begins.push_back(below(random, 3) ? below(random, p.seq_k + 2) - 1 : ends[below(random, 6)]);
        new_rows.push_back(below(random, p.seq_q + 3) - 1);
    }
    for (int64_t b = 0; b <= p.batch; ++b) bounds.push_back(below(random, p.seq_q + 1));
    std::sort(bounds.begin(), bounds.end());
    std::vector<int64_t> free(size_t(pages), 0);
    std::iota(free.begin(), free.end(), int64_t(0));
    std::shuffle(free.begin(), free.end(), random);
    const int64_t missing[] = {-1, pages, most, least};
    for (size_t n = 0; n < table.size(); ++n) table[n] = below(random, 6) ? free[n] : missing[below(random, 4)];

    starts = draw_integers(random, {p.batch}, begins);
    if (is_ragged) query_offsets = draw_integers(random, {p.batch + 1}, bounds);
    if (!is_ragged && below(random, 2)) counts = draw_integers(random, {p.batch}, new_rows);
    if (p.page_size) page_table = draw_integers(random, {p.batch, of_entry}, table);
    name = "axes " + std::to_string(p.axes) + ", batch " + std::to_string(p.batch) + ", " + std::to_string(p.seq_q) +
           " rows, " + std::to_string(p.seq_k) + " tokens in pages of " + std::to_string(p.page_size) + ", " +
           std::to_string(p.heads_kv) + " heads of " + std::to_string(p.head_dim) + " and " +
           std::to_string(value_in_key ? 0 : p.head_dim_v) + " elements of " + std::to_string(p.dtype.bits) + " bits";
}

DrawnAppend::Owner DrawnAppend::owner_of(int64_t batch, int64_t row) const {
    if (problem.axes != SPATTN_THD) {
        const bool is_padding = counts.is_given && problem.seq_q - row > integer_of(counts, batch);
        return is_padding ? Owner{-1, 0} : Owner{batch, row};
    }
    for (int64_t entry = 0; entry < problem.batch; ++entry) {
        const int64_t begin = integer_of(query_offsets, entry);
        if (row >= begin && row < integer_of(query_offsets, entry + 1)) return {entry, row - begin};
    }
    return {-1, 0};
}

std::vector<unsigned char> DrawnAppend::expected(const AppendOperand& from, const AppendOperand& to,
                                                 int64_t columns) const {
    std::vector<unsigned char> made = to.memory;
    if (!to.is_given) return made;
    const bool is_packed = problem.axes == SPATTN_THD, is_bhsd = problem.axes == SPATTN_BHSD;
    const size_t element = problem.dtype.bits / 8;
    for (int64_t batch = 0; batch < (is_packed ? 1 : problem.batch); ++batch)
        for (int64_t row = 0; row < problem.seq_q; ++row) {
            const Owner owner = owner_of(batch, row);
            if (owner.entry < 0) continue;
            const int64_t start = integer_of(starts, owner.entry);
            if (start < -problem.seq_q || start >= problem.seq_k) continue;
            const int64_t token = start + owner.order;
            if (token < 0 || token >= problem.seq_k) continue;
            int64_t place = owner.entry, row_of_place = token;
            if (problem.page_size) {
                place = integer_of(page_table, owner.entry * page_table.strides[0] +
                                                   token / problem.page_size * page_table.strides[1]);
                row_of_place = token % problem.page_size;
            }
            if (problem.page_size && (place < 0 || place >= pages)) continue;
            for (int64_t head = 0; head < problem.heads_kv; ++head)
                for (int64_t column = 0; column < columns; ++column) {
                    const auto& f = from.strides;
                    const auto& t = to.strides;
                    const int64_t source = is_packed ? row * f[0] + head * f[1] + column * f[2]
                                                     : batch * f[0] + row * f[is_bhsd ? 2 : 1] +
                                                           head * f[is_bhsd ? 1 : 2] + column * f[3];
                    const int64_t target = place * t[0] + row_of_place * t[is_bhsd ? 2 : 1] +
                                           head * t[is_bhsd ? 1 : 2] + column * t[3];
                    std::memcpy(made.data() + to.first + size_t(target) * element,
                                from.memory.data() + from.first + size_t(source) * element, element);
                }
        }
    return made;
}

spattn_status DrawnAppend::call(const spattn_context* context, spattn_device device,
                                const std::function<void*(AppendOperand&)>& place, spattn_stream stream) {
    auto args = sized<spattn_cache_append_args>();
    args.stream = stream;
    spattn_tensor views[8];
    int count = 0;
    const auto view = [&](AppendOperand& x) -> const spattn_tensor* {
        if (!x.is_given) return nullptr;
        views[count] = x.at(place(x), device);
        return &views[count++];
    };
    args.k_new = view(k_new), args.v_new = view(v_new), args.k = view(k), args.v = view(v);
    args.starts = view(starts), args.counts = view(counts), args.page_table = view(page_table);
    args.query_offsets = view(query_offsets);
    return spattn_cache_append(context, &problem, &args);
}

}  // namespace abi
