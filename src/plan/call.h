// SPDX-License-Identifier: MIT
// What a row is called with. Kernels see this of the seam and no more: how rows are chosen and their work is cut
// (plan/kernel.h) changes without compiling one of them again. C++17-clean, no CUDA header: a stream is a void*.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/parallel.h"
#include "layout/token_view.h"
#include "layout/view.h"

namespace spattn {

// spattn_problem with defaults resolved.
struct Problem {
    int64_t batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v;
    Dtype dtype;
    double scale;
    int64_t q_offset;
    bool deterministic;
    double softcap = 0;            // 0: scores as they are
    bool has_sink_logits = false;  // each call brings them
    bool value_in_key = false;     // v is k's first head_dim_v columns: v and dv are absent, dk receives the sum
    bool tf32 = false;             // float32 alone: products may round their operands to TF32
    ListShape call_lists{};        // of lists that come with each call
    bool has_starts = false;       // keys are a cache, and each call says where its queries begin: plan/cache.h
    int64_t page_size = 0;         // of the cache; 0: an entry's keys lie one after the other
    bool float8_cache = false;     // k and v have float8 elements, each row with a scale
    bool float8_operands = false;  // q, k and v come so, of no cache, and dtype is what most rows are given instead:
                                   // plan/float8.h
    int64_t ragged = 0;            // of a cache: so many sequences share the queries of the one batch entry, and each
                                   // call says which are whose; 0: a batch entry is a sequence
    bool has_parents = false;      // of a cache: each call says which trees the queries of its sequences are
    // Whether the pattern is one of whole sequences, whose rows the queries of a call are some of.
    bool is_of_sequences() const { return has_starts && !call_lists.at_run_time(); }
    int64_t group() const { return heads_q / heads_kv; }
    int64_t sequences() const { return ragged ? ragged : batch; }
    spattn_dtype key_dtype() const { return float8_cache ? dtype_float8 : dtype_row(dtype).wire; }  // as rows see them
    int key_bytes() const { return key_dtype().bits / 8; }  // of an element of k or v
};

// An operand, whatever its axes in the ABI: strides of [batch, head, row, column] in elements. lse-like tensors have no
// column. data is null where an optional operand is absent.
struct TensorView {
    void* data;
    int64_t batch, head, row, column;
};

// Token rows straight from the pattern, for the reference rows alone: the truth must not share the layout's mistakes.
class TokenRows {
public:
    virtual ~TokenRows() = default;
    // Sorted disjoint [begin, end) key intervals of one query row, flattened: begin0, end0, begin1, end1, ... Of lists
    // that a call brings: in the order of the list, and a key as often as it is listed.
    virtual void keys(int64_t batch, int64_t head, int64_t row, std::vector<int64_t>& out) const = 0;
};

// A pass may be cut into pieces: patterns that share no pair, each with a row and a layout of its own, which run one
// after the other. What they leave for the next lies in `carried`.
struct PieceView {
    void* carried = nullptr;  // as large as the rows' carries() said, aligned as the workspace
    bool is_first = true, is_last = true;
    int32_t sweep = 0;        // of the row's so many over all pieces
    bool is_whole() const { return is_first && is_last; }
};

// What every pass sees.
struct CallArgs {
    const Problem* problem;
    TensorView q, k, v;
    TensorView q_scales, k_scales, v_scales;  // floats, of each row of float8, or factors (plan/float8.h); absent: 1
    LayoutView layout;      // block rows; for gather rows what else a call's listed key must satisfy, or no lists
    TasksView tasks;        // of the row's first walk
    TasksView second_tasks; // of its second, where it has one
    TokenListsView tokens;  // gather rows, where the plan made the lists
    CallLists call_lists;   // gather rows, where the call brings them; block rows find them in their layout
    CallCache cache;        // read before rows are called
    const TokenRows* rows;  // read by reference rows only
    Parallel* parallel;     // CPU rows
    void* stream;           // CUDA rows
    int32_t device;         // CUDA rows: index among the devices of this kind
    void* workspace;        // as large as the row's workspace() said, aligned to 64 bytes (CPU) or 256 (CUDA)
    PieceView piece;        // rows that carry
};

struct ForwardArgs : CallArgs {
    TensorView out, lse, max_logits;  // lse and max_logits may be absent
    TensorView sink_logits;           // a head, other axes mean nothing; absent unless the problem has them
    bool has_layout;  // of a call on a cache: its layout stands in the workspace, as an earlier call has left it
};

struct BackwardArgs : CallArgs {
    TensorView out, lse, dout, dlse, dq, dk, dv;  // dlse may be absent
    TensorView sink_logits, dsink_logits;         // as in forward; dsink_logits may be absent
    // CUDA block rows of 16 bits: lse and delta of all queries, [batch, heads_q, seq_q] floats each, lie at the start of
    // the workspace; out, lse and dlse are not read.
    bool has_rows = false;
    // CPU block rows: sums over the batch entries before are in dsink_logits.
    bool adds_dsink = false;
    // CPU block rows, where portions share a group: sums of dk and dv over the heads before are carried, and are left so
    // for those after.
    bool has_keys_before = false, has_keys_after = false;
};

}  // namespace spattn
