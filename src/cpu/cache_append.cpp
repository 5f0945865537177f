// SPDX-License-Identifier: MIT
#include "cpu/cache_append.h"

#include <algorithm>
#include <cstring>

#include "cpu/share.h"

namespace spattn::cpu {
namespace {

class NewTokens {
public:
    explicit NewTokens(const CacheAppend& args)
        : args_(args), p_(*args.problem), element_(dtype_row(p_.dtype).bytes) {}

    void append() {
        // A stretch of less is written before another thread has woken up.
        constexpr int64_t least_bytes = 1 << 16;
        const int64_t dims = p_.head_dim + (args_.v.data ? p_.head_dim_v : 0);
        stretch_ = std::max<int64_t>(least_bytes / (p_.heads_kv * dims * element_), 1);
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
            copy(args_.k_new, args_.k, p_.head_dim, head, batch, row, to_batch, to_row);
            if (args_.v.data) copy(args_.v_new, args_.v, p_.head_dim_v, head, batch, row, to_batch, to_row);
        }
    }
    void copy(const TensorView& from, const TensorView& to, int64_t columns, int64_t head, int64_t batch, int64_t row,
              int64_t to_batch, int64_t to_row) const {
        const char* const x = address(from, batch, head, row);
        char* const y = address(to, to_batch, head, to_row);
        if (columns == 1 || (from.column == 1 && to.column == 1)) {
            std::memcpy(y, x, size_t(columns * element_));
            return;
        }
        for (int64_t column = 0; column < columns; ++column)
            std::memcpy(y + column * to.column * element_, x + column * from.column * element_, size_t(element_));
    }
    char* address(const TensorView& x, int64_t batch, int64_t head, int64_t row) const {
        return static_cast<char*>(x.data) + (batch * x.batch + head * x.head + row * x.row) * element_;
    }

    const CacheAppend& args_;
    const Problem& p_;
    const int64_t element_;
    int64_t stretch_ = 1;  // tokens that a lane writes one after the other
};

}  // namespace

void append_to_cache(const CacheAppend& args) { NewTokens(args).append(); }

}  // namespace spattn::cpu
