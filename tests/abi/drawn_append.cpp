// SPDX-License-Identifier: MIT
#include "abi/drawn_append.h"

#include <algorithm>
#include <array>
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

template <class T>
T bits_at(const unsigned char* at) {
    T x;
    std::memcpy(&x, at, sizeof x);
    return x;
}

// Numbers of moderate size, some of them 0 or NaN, in place of random bytes.
void draw_numbers(AppendOperand& x, std::mt19937& random) {
    const size_t bytes = x.dtype.bits / 8;
    const int most_exponent = int(below(random, 12));
    const bool has_odd = below(random, 3) == 0;
    for (size_t at = x.first; at + bytes <= x.memory.size(); at += bytes) {
        const auto digits = uint32_t(random());
        const int exponent = int(below(random, most_exponent + 1)) - 4;
        const bool is_odd = has_odd && below(random, 200) == 0;
        float value = std::ldexp(1 + float(digits >> 9) * 0x1p-23f, exponent);
        if (is_odd) value = below(random, 2) ? std::nanf("") : HUGE_VALF;
        if (below(random, 20) == 0) value = 0;
        if (digits & 1) value = -value;
        const auto half = uint16_t(is_odd ? 0x7e00 : digits >> 22 | uint32_t(exponent + 15) << 10 | (digits & 1) << 15);
        const auto brain = uint16_t(bits_at<uint32_t>(reinterpret_cast<unsigned char*>(&value)) >> 16);
        const double wide = value;
        unsigned char* const to = x.memory.data() + at;
        if (x.dtype.bits == 64) std::memcpy(to, &wide, 8);
        else if (x.dtype.bits == 32) std::memcpy(to, &value, 4);
        else std::memcpy(to, x.dtype.code == SPATTN_BFLOAT ? &brain : &half, 2);
    }
}

float number_at(const AppendOperand& x, size_t element) {
    const unsigned char* const at = x.memory.data() + x.first + element * x.dtype.bits / 8;
    if (x.dtype.bits == 64) return float(bits_at<double>(at));
    if (x.dtype.bits == 32) return bits_at<float>(at);
    const auto bits = bits_at<uint16_t>(at);
    if (x.dtype.code == SPATTN_BFLOAT) {
        const uint32_t word = uint32_t(bits) << 16;
        return bits_at<float>(reinterpret_cast<const unsigned char*>(&word));
    }
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31 ? (mantissa ? std::nanf("") : HUGE_VALF)
                       : exponent     ? std::ldexp(float(1024 + mantissa), exponent - 25)
                                      : std::ldexp(float(mantissa), -24);
    return bits & 0x8000 ? -size : size;
}

// The float8 that is nearest, of two that are the one whose last bit is 0.
unsigned char nearest_float8(float x) {
    static const std::array<double, 127> sizes = [] {
        std::array<double, 127> made{};
        for (int n = 0; n < 127; ++n) made[size_t(n)] = float8_size(n);
        return made;
    }();
    const int sign = std::signbit(x) ? 128 : 0;
    if (std::isnan(x)) return 127;
    const double size = std::fabs(double(x));
    const int above = int(std::lower_bound(sizes.begin(), sizes.end(), size) - sizes.begin());
    if (above == 127) return static_cast<unsigned char>(sign + 126);
    if (above == 0) return static_cast<unsigned char>(sign);
    const double up = sizes[size_t(above)] - size, down = size - sizes[size_t(above - 1)];
    const bool is_up = up < down || (up == down && above % 2 == 0);
    return static_cast<unsigned char>(sign + (is_up ? above : above - 1));
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
    if (below(random, 3) == 0) {
        p.cache_dtype = float8;
        if (below(random, 2)) flags = SPATTN_APPEND_SCALES;
    }
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
    const spattn_dtype of_cache = is_float8() ? p.cache_dtype : p.dtype;
    const auto cache_of = [&](int64_t columns) {
        const int64_t gap = below(random, 2) ? 0 : below(random, 9);  // elements between rows
        if (!p.page_size) {
            std::vector<int64_t> shape{p.batch, p.seq_k, p.heads_kv, columns};
            if (p.axes == SPATTN_BHSD) std::swap(shape[1], shape[2]);
            return draw_operand(random, shape, of_cache, below(random, 3) == 0, {0, 0, 0, gap});
        }
        if (p.axes == SPATTN_BHSD)
            return draw_operand(random, {pages, p.heads_kv, p.page_size, columns}, of_cache, false,
                                {0, 0, page_gap, gap});
        return draw_operand(random, {pages, p.page_size, p.heads_kv, columns}, of_cache, false, {0, page_gap, 0, gap});
    };
    // Pages of scales are as many rows apart as those of keys. Scales that are read may be those of heads alone.
    const auto scales_of = [&] {
        const int64_t entries = p.page_size ? pages : p.batch, rows = p.page_size ? p.page_size : p.seq_k;
        std::vector<int64_t> shape{entries, rows, p.heads_kv};
        std::vector<int64_t> gaps{0, page_gap, below(random, 3)};
        if (p.axes == SPATTN_BHSD) shape = {entries, p.heads_kv, rows}, gaps = {0, 0, page_gap};
        AppendOperand made = draw_operand(random, shape, f32, !p.page_size && below(random, 3) == 0, gaps);
        if (flags) return made;
        draw_numbers(made, random);
        if (below(random, 3) == 0) made.strides[0] = made.strides[p.axes == SPATTN_BHSD ? 2 : 1] = 0;
        return made;
    };
    k_new = rows_of(p.head_dim), k = cache_of(p.head_dim);
    if (!value_in_key) v_new = rows_of(p.head_dim_v), v = cache_of(p.head_dim_v);
    if (is_float8()) {
        draw_numbers(k_new, random);
        if (!value_in_key) draw_numbers(v_new, random);
        if (flags || below(random, 3)) k_scales = scales_of();
        if (!value_in_key && (flags || below(random, 3))) v_scales = scales_of();
    }

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
           std::to_string(value_in_key ? 0 : p.head_dim_v) + " elements of " + std::to_string(p.dtype.bits) + " bits" +
           (is_float8() ? ", to float8" : "") + (flags ? " with new scales" : "");
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

void DrawnAppend::each_row(const Rows& rows, const std::function<void(size_t, size_t, size_t)>& body) const {
    const bool is_packed = problem.axes == SPATTN_THD, is_bhsd = problem.axes == SPATTN_BHSD;
    const int of_head = is_bhsd ? 1 : 2, of_row = is_bhsd ? 2 : 1;
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
            const auto in_cache = [&](const AppendOperand& x, int64_t head) {
                const auto& s = x.strides;
                if (s.empty()) return size_t(0);
                return size_t(place * s[0] + row_of_place * s[size_t(of_row)] + head * s[size_t(of_head)]);
            };
            for (int64_t head = 0; head < problem.heads_kv; ++head) {
                const auto& f = rows.from.strides;
                const int64_t source = is_packed ? row * f[0] + head * f[1]
                                                 : batch * f[0] + row * f[size_t(of_row)] + head * f[size_t(of_head)];
                body(size_t(source), in_cache(rows.to, head), in_cache(rows.scales, head));
            }
        }
}

void DrawnAppend::expect(const Rows& rows, std::vector<Written>& written) const {
    if (!rows.to.is_given) return;
    std::vector<unsigned char> made = rows.to.memory, scales = rows.scales.memory;
    const auto from_step = size_t(rows.from.strides.back()), to_step = size_t(rows.to.strides.back());
    const size_t element = problem.dtype.bits / 8;
    each_row(rows, [&](size_t from, size_t to, size_t of_scale) {
        unsigned char* const out = made.data() + rows.to.first + to * (is_float8() ? 1 : element);
        const auto columns = size_t(rows.columns);
        for (size_t c = 0; !is_float8() && c < columns; ++c)
            std::memcpy(out + c * to_step * element,
                        rows.from.memory.data() + rows.from.first + (from + c * from_step) * element, element);
        if (!is_float8()) return;
        float scale = rows.scales.is_given && !flags ? number_at(rows.scales, of_scale) : 1, largest = 0;
        for (size_t c = 0; c < columns; ++c) {
            const float size = std::fabs(number_at(rows.from, from + c * from_step));
            largest = size <= largest ? largest : std::isnan(size) ? HUGE_VALF : size;
        }
        if (flags) {
            scale = largest > 0 && std::isfinite(largest) ? largest / 448 : 1;
            std::memcpy(scales.data() + rows.scales.first + of_scale * sizeof scale, &scale, sizeof scale);
        }
        for (size_t c = 0; c < columns; ++c)
            out[c * to_step] = nearest_float8(number_at(rows.from, from + c * from_step) / scale);
    });
    written.push_back({&rows.to, std::move(made)});
    if (rows.scales.is_given) written.push_back({&rows.scales, std::move(scales)});
}

std::vector<DrawnAppend::Written> DrawnAppend::expected() {
    std::vector<Written> written;
    expect({k_new, k, k_scales, problem.head_dim}, written);
    expect({v_new, v, v_scales, problem.head_dim_v}, written);
    return written;
}

spattn_status DrawnAppend::call(const spattn_context* context, spattn_device device,
                                const std::function<void*(AppendOperand&)>& place, spattn_stream stream) {
    auto args = sized<spattn_cache_append_args>();
    args.stream = stream, args.flags = flags;
    spattn_tensor views[10];
    int count = 0;
    const auto view = [&](AppendOperand& x) -> const spattn_tensor* {
        if (!x.is_given) return nullptr;
        views[count] = x.at(place(x), device);
        return &views[count++];
    };
    args.k_new = view(k_new), args.v_new = view(v_new), args.k = view(k), args.v = view(v);
    args.k_scales = view(k_scales), args.v_scales = view(v_scales);
    args.starts = view(starts), args.counts = view(counts), args.page_table = view(page_table);
    args.query_offsets = view(query_offsets);
    return spattn_cache_append(context, &problem, &args);
}

}  // namespace abi
