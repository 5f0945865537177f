// SPDX-License-Identifier: MIT
#include "api/operands.h"

#include <algorithm>

#include "api/args.h"
#include "core/dtype.h"
#include "core/math.h"

namespace spattn {

void Operands::add_memory(const char* argument, void* memory, size_t bytes, Use use) {
    placed_[size_t(count_++)] = {argument, {reinterpret_cast<uintptr_t>(memory), int64_t(bytes)}, use == Use::output};
}

TensorView Operands::matrix(const spattn_tensor* t, const char* argument, Use use, int64_t heads, int64_t seq,
                            int64_t dim) {
    return matrix(t, argument, use, heads, seq, dim, dtype_row(p_.dtype).wire);
}

TensorView Operands::queries(const spattn_tensor* t, const char* argument, Use use) {
    const spattn_dtype dtype = p_.float8_operands ? dtype_float8 : dtype_row(p_.dtype).wire;
    return matrix(t, argument, use, p_.heads_q, p_.seq_q, p_.head_dim, dtype);
}

TensorView Operands::keys(const spattn_tensor* t, const char* argument, Use use, int64_t dim) {
    return matrix(t, argument, use, p_.heads_kv, p_.seq_k, dim, p_.float8_operands ? dtype_float8 : p_.key_dtype());
}

TensorView Operands::matrix(const spattn_tensor* t, const char* argument, Use use, int64_t heads, int64_t seq,
                            int64_t dim, spattn_dtype dtype) {
    if (axes_ == SPATTN_THD) {
        const auto s = place(t, argument, use, std::array{seq, heads, dim}, {dtype});
        return {data_, 0, s[1], s[0], s[2]};
    }
    const bool is_bhsd = axes_ == SPATTN_BHSD;
    const auto shape = is_bhsd ? std::array{p_.batch, heads, seq, dim} : std::array{p_.batch, seq, heads, dim};
    const auto s = place(t, argument, use, shape, {dtype});
    return {data_, s[0], is_bhsd ? s[1] : s[2], is_bhsd ? s[2] : s[1], s[3]};
}

TensorView Operands::rows(const spattn_tensor* t, const char* argument, Use use) {
    if (axes_ == SPATTN_THD) {
        const auto s = place(t, argument, use, std::array{p_.heads_q, p_.seq_q}, {dtype_f32});
        return is_absent_ ? TensorView{} : TensorView{data_, 0, s[0], s[1], 0};
    }
    const auto s = place(t, argument, use, std::array{p_.batch, p_.heads_q, p_.seq_q}, {dtype_f32});
    return is_absent_ ? TensorView{} : TensorView{data_, s[0], s[1], s[2], 0};
}

TensorView Operands::heads(const spattn_tensor* t, const char* argument, Use use) {
    const auto s = place(t, argument, use, std::array{p_.heads_q}, {dtype_f32});
    return {data_, 0, s[0], 0, 0};
}

IndexView Operands::lists(const spattn_tensor* t, const char* argument) {
    const int64_t rows = ceil_div(p_.seq_q, p_.call_lists.block_q);
    return index(t, argument, std::array{p_.batch, rows, p_.heads_kv, p_.call_lists.most});
}

IndexView Operands::list_counts(const spattn_tensor* t, const char* argument) {
    return index(t, argument, std::array{p_.batch, ceil_div(p_.seq_q, p_.call_lists.block_q), p_.heads_kv});
}

IndexView Operands::parents(const spattn_tensor* t, const char* argument) {
    if (axes_ == SPATTN_THD) {
        const auto s = place(t, argument, Use::input, std::array{p_.seq_q}, {dtype_i32, dtype_i64});
        return {data_, 0, 0, 0, s[0], t->dtype.bits == 64};
    }
    const auto s = place(t, argument, Use::input, std::array{p_.batch, p_.seq_q}, {dtype_i32, dtype_i64});
    return {data_, s[0], 0, 0, s[1], t->dtype.bits == 64};
}

CallCache Operands::cache(const spattn_tensor* starts, const spattn_tensor* page_table,
                          const spattn_tensor* query_offsets) {
    CallCache found{};
    if (!p_.ragged)
        refuse_operand(query_offsets, "query_offsets",
                       "the problem is not one of SPATTN_THD with SPATTN_PLAN_STARTS");
    if (!p_.has_starts) refuse_operand(starts, "starts", "the problem is not one with SPATTN_PLAN_STARTS");
    if (!p_.page_size) refuse_operand(page_table, "page_table", "the problem has no page_size");
    if (p_.has_starts) found.starts = of_sequences(starts, "starts");
    if (p_.ragged) found.query_offsets = integers(query_offsets, "query_offsets", p_.sequences() + 1);
    if (p_.page_size) {
        const std::array shape{p_.sequences(), p_.seq_k / p_.page_size};
        const auto s = place(page_table, "page_table", Use::input, shape, {dtype_i32, dtype_i64});
        found.page_table = {data_, s[0], 0, 0, s[1], page_table->dtype.bits == 64};
    }
    return found;
}

Operands::Pools Operands::pools(const spattn_tensor* given_k, const spattn_tensor* given_v, Use use) {
    const Pool k = pool(given_k, "k", use, p_.head_dim);
    if (p_.value_in_key) {
        refuse_operand(given_v, "v", values_are_in_keys);
        return {k.rows, k.rows, k.pages, k.page_rows};
    }
    const Pool v = pool(given_v, "v", use, p_.head_dim_v);
    if (v.pages != k.pages)
        fail(SPATTN_E_SHAPE, "v", text("has ", v.pages, " pages; accepted: as many as k, ", k.pages));
    if (v.page_rows != k.page_rows)
        fail(SPATTN_E_LAYOUT, "v",
             text("has pages ", v.page_rows, " rows apart; accepted: as many as those of k, ", k.page_rows));
    return {k.rows, v.rows, k.pages, k.page_rows};
}

Operands::Pool Operands::pool(const spattn_tensor* t, const char* argument, Use use, int64_t dim) {
    const bool is_bhsd = axes_ == SPATTN_BHSD;
    const int64_t size = p_.page_size, pages = required(t, argument).ndim == 4 && t->shape ? t->shape[0] : 1;
    const auto shape = is_bhsd ? std::array{pages, p_.heads_kv, size, dim} : std::array{pages, size, p_.heads_kv, dim};
    const auto s = place(t, argument, use, shape, {p_.key_dtype()});
    is_absent_ = has_no_tokens();  // then nobody has a page
    if (is_absent_) return {{}, pages, size};
    if (pages < 1) fail(SPATTN_E_SHAPE, argument, text("has ", pages, " pages; accepted: 1 or more"));
    const int64_t head = is_bhsd ? s[1] : s[2], row = size == 1 ? s[0] : is_bhsd ? s[2] : s[1];
    if (pages == 1) return {{data_, 0, head, row, s[3]}, pages, size};
    const int64_t page = s[0], page_rows = row ? page / row : 0;
    if (!row || page % row || page_rows < size)
        fail(SPATTN_E_LAYOUT, argument,
             text("has pages ", page, " elements apart, and rows ", row,
                  "; accepted: pages a whole number of rows apart, at least page_size"));
    if (pages - 1 > (longest_sequence - size) / page_rows)
        fail(SPATTN_E_RANGE, argument,
             text("has ", pages, " pages ", page_rows, " rows apart; accepted: up to ", longest_sequence, " rows"));
    return {{data_, 0, head, row, s[3]}, pages, page_rows};
}

TensorView Operands::scales(const spattn_tensor* t, const char* argument, Use use, const Pools& pools) {
    if (!p_.float8_cache && !p_.float8_operands) refuse_operand(t, argument, "neither dtype nor cache_dtype is of float8");
    if (!t) return {};
    if (!p_.page_size) return scales_of_rows(t, argument, use, p_.heads_kv, p_.seq_k);
    const bool is_bhsd = axes_ == SPATTN_BHSD;
    const int64_t rows = p_.page_size;
    const auto shape = is_bhsd ? std::array{pools.pages, p_.heads_kv, rows} : std::array{pools.pages, rows, p_.heads_kv};
    const auto s = place(t, argument, use, shape, {dtype_f32});
    if (is_absent_ || has_no_tokens()) return {};
    const int64_t head = is_bhsd ? s[1] : s[2];
    const int64_t row = rows == 1 && pools.pages > 1 ? s[0] / pools.page_rows : is_bhsd ? s[2] : s[1];
    if (pools.pages > 1 && s[0] != row * pools.page_rows)
        fail(SPATTN_E_LAYOUT, argument,
             text("has pages ", s[0], " elements apart, and rows ", row, "; accepted: pages as many rows apart as k, ",
                  pools.page_rows));
    return {data_, 0, head, row, 0};
}

TensorView Operands::query_scales(const spattn_tensor* t, const char* argument) {
    if (!p_.float8_operands) refuse_operand(t, argument, "the problem's dtype is not of float8");
    return t ? scales_of_rows(t, argument, Use::input, p_.heads_q, p_.seq_q) : TensorView{};
}

TensorView Operands::scales_of_rows(const spattn_tensor* t, const char* argument, Use use, int64_t heads, int64_t rows) {
    if (axes_ == SPATTN_THD) {
        const auto s = place(t, argument, use, std::array{rows, heads}, {dtype_f32});
        return is_absent_ ? TensorView{} : TensorView{data_, 0, s[1], s[0], 0};
    }
    const bool is_bhsd = axes_ == SPATTN_BHSD;
    const auto shape = is_bhsd ? std::array{p_.batch, heads, rows} : std::array{p_.batch, rows, heads};
    const auto s = place(t, argument, use, shape, {dtype_f32});
    return is_absent_ ? TensorView{} : TensorView{data_, s[0], is_bhsd ? s[1] : s[2], is_bhsd ? s[2] : s[1], 0};
}

void Operands::check_overlaps() const {
    for (size_t i = 0; i < size_t(count_); ++i)
        if (placed_[i].is_output) check_output(i);
}

void Operands::check_output(size_t output) const {
    const Placed& o = placed_[output];
    if (overlaps_itself(o.bytes))
        fail(SPATTN_E_LAYOUT, o.argument,
             "has strides by which its own elements overlap; accepted: outputs without overlap");
    for (size_t other = 0; other < size_t(count_); ++other)
        if (other != output && overlaps(o.bytes, placed_[other].bytes))
            fail(SPATTN_E_LAYOUT, o.argument,
                 text("overlaps ", placed_[other].argument,
                      "; accepted: outputs that share no byte with another operand"));
}

void Operands::check_device(const spattn_tensor& t, const char* argument) const {
    const bool is_host = t.device.type == SPATTN_CPU || t.device.type == SPATTN_CUDA_HOST;
    const bool is_there = (t.device.type == device_.type || t.device.type == SPATTN_CUDA_MANAGED) &&
                          t.device.index == device_.index;
    if (!(device_.type == SPATTN_CPU ? is_host : is_there))
        fail(SPATTN_E_DEVICE, argument,
             text("is on ", describe_device(t.device), "; accepted: where the call runs, ", describe_device(device_)));
}

IndexView Operands::integers(const spattn_tensor* t, const char* argument, int64_t count) {
    const auto s = place(t, argument, Use::input, std::array{count}, {dtype_i32, dtype_i64});
    return {data_, s[0], 0, 0, 0, t->dtype.bits == 64};
}

// THD has no batch.
IndexView Operands::index(const spattn_tensor* t, const char* argument, std::span<const int64_t> shape) {
    const bool is_packed = axes_ == SPATTN_THD;
    const auto strides = place(t, argument, Use::input, shape.subspan(is_packed), {dtype_i32, dtype_i64});
    const int64_t* s = strides.data() - is_packed;
    return {data_, is_packed ? 0 : s[0], s[1], s[2], shape.size() == 4 ? s[3] : 0, t->dtype.bits == 64};
}

std::array<int64_t, max_axes> Operands::place(const spattn_tensor* tensor, const char* argument, Use use,
                                              std::span<const int64_t> shape,
                                              std::initializer_list<spattn_dtype> accepted) {
    const spattn_tensor& t = required(tensor, argument);
    check_device(t, argument);
    check_dtype(t, argument, accepted);
    check_shape(t, argument, shape);
    const auto strides = tensor_strides(t, argument);
    data_ = tensor_data(t, argument, strides);
    is_absent_ = std::find(shape.begin(), shape.end(), 0) != shape.end();
    StridedBytes bytes{reinterpret_cast<uintptr_t>(data_), t.dtype.bits / 8};
    for (size_t i = 0; i < shape.size(); ++i) bytes.axes[i] = {shape[i], strides[i] * bytes.element};
    placed_[size_t(count_++)] = {argument, bytes, use == Use::output};
    return strides;
}

void refuse_operand(const spattn_tensor* t, const char* argument, const char* why) {
    if (t) fail(SPATTN_E_STATE, argument, text("is given where ", why, "; accepted: NULL"));
}

}  // namespace spattn
