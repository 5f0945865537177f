// SPDX-License-Identifier: MIT
// The tensors of a call, as its problem wants them.
#pragma once

#include <array>
#include <initializer_list>
#include <span>

#include "core/overlap.h"
#include "core/tensor.h"
#include "plan/call.h"

namespace spattn {

// Reads one tensor after the other: checks it, and remembers where it lies, to find outputs that overlap.
class Operands {
public:
    enum class Use { input, output };

    Operands(spattn_device device, spattn_enum axes, const Problem& problem)
        : device_(device), axes_(axes), p_(problem) {}

    // Memory that is no tensor.
    void add_memory(const char* argument, void* memory, size_t bytes, Use use);

    // [batch, heads, seq, dim] in the call's axes and the problem's dtype: THD has no batch.
    TensorView matrix(const spattn_tensor* t, const char* argument, Use use, int64_t heads, int64_t seq, int64_t dim);
    // The same in another dtype.
    TensorView matrix(const spattn_tensor* t, const char* argument, Use use, int64_t heads, int64_t seq, int64_t dim,
                      spattn_dtype dtype);
    // [batch, heads_q, seq_q, head_dim] likewise, in the dtype that queries have: q.
    TensorView queries(const spattn_tensor* t, const char* argument, Use use);
    // [batch, heads_kv, seq_k, dim] likewise, in the dtype that keys have: k or v.
    TensorView keys(const spattn_tensor* t, const char* argument, Use use, int64_t dim);
    // [batch, heads_q, seq_q] float32. Absent where it has no element.
    TensorView rows(const spattn_tensor* t, const char* argument, Use use);
    // [heads_q] float32.
    TensorView heads(const spattn_tensor* t, const char* argument, Use use);

    // The lists that come with a call are [batch, rows, heads_kv, most]; their counts lack the last axis.
    IndexView lists(const spattn_tensor* t, const char* argument);
    IndexView list_counts(const spattn_tensor* t, const char* argument);

    // The parents of a cache's queries, [batch, seq_q].
    IndexView parents(const spattn_tensor* t, const char* argument);
    // Numbers of a call on a cache, one for each sequence.
    IndexView of_sequences(const spattn_tensor* t, const char* argument) {
        return integers(t, argument, p_.sequences());
    }
    // Where rows of the call begin in their sequences, which are whose, and which pages keys lie in. Fails where the
    // problem has no use for one that is given.
    CallCache cache(const spattn_tensor* starts, const spattn_tensor* page_table, const spattn_tensor* query_offsets);

    // Keys and values that lie in pages, as rows one after the other: all entries have the same. Without keys, or with
    // values in them, v is k.
    struct Pools {
        TensorView k, v;
        int64_t pages, page_rows;  // page_rows: from the first row of a page to that of the next
    };
    Pools pools(const spattn_tensor* k, const spattn_tensor* v, Use use);

    // float32, of each row of float8 keys or values: [batch, heads_kv, seq_k] in the call's axes, or as the pools have
    // rows; or of each row of float8 queries, [batch, heads_q, seq_q] likewise. Absent where none are given, or there is
    // no row.
    TensorView scales(const spattn_tensor* t, const char* argument, Use use, const Pools& pools);
    TensorView query_scales(const spattn_tensor* t, const char* argument);
    // float32, [batch, heads, rows] in the call's axes, whatever the problem. Absent where it has no element.
    TensorView scales_of_rows(const spattn_tensor* t, const char* argument, Use use, int64_t heads, int64_t rows);

    // Whether the tensor that was read last has no element: its data may be null.
    bool is_absent() const { return is_absent_; }

    // An output overlaps nothing, itself included; inputs may overlap each other. The first to blame is named: scratch,
    // which comes first, because it is large and what it lies over is innocent.
    void check_overlaps() const;

private:
    struct Placed {
        const char* argument = "";
        StridedBytes bytes{};
        bool is_output = false;
    };

    bool has_no_tokens() const { return p_.sequences() == 0 || p_.seq_k == 0; }
    void check_output(size_t output) const;
    void check_device(const spattn_tensor& t, const char* argument) const;
    struct Pool {
        TensorView rows;
        int64_t pages, page_rows;
    };
    Pool pool(const spattn_tensor* t, const char* argument, Use use, int64_t dim);
    IndexView integers(const spattn_tensor* t, const char* argument, int64_t count);
    IndexView index(const spattn_tensor* t, const char* argument, std::span<const int64_t> shape);
    // Its strides, in elements.
    std::array<int64_t, max_axes> place(const spattn_tensor* tensor, const char* argument, Use use,
                                        std::span<const int64_t> shape, std::initializer_list<spattn_dtype> accepted);

    const spattn_device device_;
    const spattn_enum axes_;
    const Problem& p_;
    std::array<Placed, 18> placed_;  // as many as backward has operands
    int count_ = 0;
    void* data_ = nullptr;     // what place() has found of the last tensor,
    bool is_absent_ = false;   // and whether it has no element
};

// Fails where a tensor is given that the call has no use for.
void refuse_operand(const spattn_tensor* t, const char* argument, const char* why);

constexpr const char* values_are_in_keys = "SPATTN_PLAN_VALUE_IN_KEY says that k holds the values";

}  // namespace spattn
