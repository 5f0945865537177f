// SPDX-License-Identifier: MIT
#include "cpu/cache_append.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/float8.h"
#include "cpu/copied_row.h"
#include "cpu/generic/f16.h"
#include "cpu/share.h"

namespace spattn::cpu {
namespace {

// An element as a float.
template <class T>
T element_at(const char* at) {
    T x;
    std::memcpy(&x, at, sizeof x);
    return x;
}
float read_element(const char* at, Dtype dtype) {
    switch (dtype) {
        case Dtype::f32: return element_at<float>(at);
        case Dtype::f16: return widen_f16(element_at<uint16_t>(at));
        case Dtype::f64: return float(element_at<double>(at));
        case Dtype::bf16: return float_of(uint32_t(element_at<uint16_t>(at)) << 16);
    }
    return 0;
}

class NewTokens {
public:
    explicit NewTokens(const CacheAppend& args)
        : args_(args), p_(*args.problem), element_(dtype_row(p_.dtype).bytes) {}

    void append() {
        const int64_t dims = p_.head_dim + (args_.v.data ? p_.head_dim_v : 0);
        stretch_ = tokens_of_stretch(p_.heads_kv * dims * element_);
        share(*args_.parallel, *this, ceil_div(p_.batch * p_.seq_q, stretch_), &NewTokens::write_stretch);
    }

private:
    void write_stretch(int64_t number) {
        const int64_t end = std::min((number + 1) * stretch_, p_.batch * p_.seq_q);
        for (int64_t token = number * stretch_; token < end; ++token)
            p_.ragged ? write_ragged(token) : write_padded(token / p_.seq_q, token % p_.seq_q);
    }

    void write_ragged(int64_t row) const {
        const int64_t sequence = args_.cache.sequence_of(row, p_.ragged, p_.seq_q);
        if (sequence >= 0) write(0, sequence, row, row - args_.cache.queries_of(sequence, p_.seq_q).begin);
    }
    // What stands before an entry's new rows is padding.
    void write_padded(int64_t entry, int64_t row) const {
        const int64_t new_rows = args_.counts.data ? args_.counts.at(entry, 0, 0, 0) : p_.seq_q;
        if (p_.seq_q - row <= new_rows) write(entry, entry, row, row);
    }

    // A row of the call, whose place in its sequence is `order` behind where the call begins.
    void write(int64_t batch, int64_t sequence, int64_t row, int64_t order) const {
        const int64_t start = std::clamp<int64_t>(args_.cache.starts.at(sequence, 0, 0, 0), -p_.seq_q, p_.seq_k);
        const int64_t token = start + order;
        if (token < 0 || token >= p_.seq_k) return;
        if (p_.page_size && args_.cache.page_of(sequence, token, p_.page_size) < 0) return;
        const int64_t to_batch = p_.page_size ? 0 : sequence;
        const int64_t to_row = p_.page_size ? args_.cache.place_of(sequence, token, p_.page_size) : token;
        for (int64_t head = 0; head < p_.heads_kv; ++head) {
            bring({args_.k_new, args_.k, args_.k_scales, p_.head_dim}, head, batch, row, to_batch, to_row);
            if (args_.v.data)
                bring({args_.v_new, args_.v, args_.v_scales, p_.head_dim_v}, head, batch, row, to_batch, to_row);
        }
    }

    struct Operand {
        const TensorView &from, &to, &scales;
        int64_t columns;
    };
    void bring(const Operand& x, int64_t head, int64_t batch, int64_t row, int64_t to_batch, int64_t to_row) const {
        const char* const from = address(x.from, batch, head, row, element_);
        char* const to = address(x.to, to_batch, head, to_row, p_.key_bytes());
        if (!p_.float8_cache) return copy_row({from, x.from.column, to, x.to.column, x.columns, element_});
        auto* const scale = x.scales.data ? reinterpret_cast<float*>(
                                address(x.scales, to_batch, head, to_row, sizeof(float))) : nullptr;
        if (args_.writes_scales) *scale = scale_for(largest(x, from));
        narrow(x, from, scale ? *scale : 1, reinterpret_cast<uint8_t*>(to));
    }
    float read(const Operand& x, const char* from, int64_t column) const {
        return read_element(from + column * x.from.column * element_, p_.dtype);
    }
    // Infinite where an element is not finite.
    float largest(const Operand& x, const char* from) const {
        float most = 0;
        for (int64_t column = 0; column < x.columns; ++column) {
            const float magnitude = std::fabs(read(x, from, column));
            most = magnitude <= most ? most : std::isnan(magnitude) ? INFINITY : magnitude;
        }
        return most;
    }
    void narrow(const Operand& x, const char* from, float scale, uint8_t* to) const {
        for (int64_t column = 0; column < x.columns; ++column)
            to[column * x.to.column] = narrow_float8(read(x, from, column) / scale);
    }
    static char* address(const TensorView& x, int64_t batch, int64_t head, int64_t row, int64_t element) {
        return static_cast<char*>(x.data) + (batch * x.batch + head * x.head + row * x.row) * element;
    }

    const CacheAppend& args_;
    const Problem& p_;
    const int64_t element_;
    int64_t stretch_ = 1;  // tokens
};

}  // namespace

void append_to_cache(const CacheAppend& args) { NewTokens(args).append(); }

}  // namespace spattn::cpu
