// SPDX-License-Identifier: MIT
// The rows every vector arch has, with what the plan asks of them. An arch includes its vec.h and elements.h, or
// vec_f64.h for rows of doubles, then this.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/bit_square.h"
#include "plan/kernel.h"
#include "cpu/generic/gemm.h"
#include "cpu/generic/operand.h"
#include "cpu/generic/held.h"
#include "cpu/generic/walk.h"
#include "cpu/generic/log2.h"
#include "cpu/generic/softcap.h"
#include "cpu/generic/sink.h"
#include "cpu/generic/block_forward.h"
#include "cpu/generic/block_backward.h"
#include "cpu/generic/cost.h"
#include "cpu/generic/few_forward.h"
#include "cpu/generic/gather_forward_heads.h"
#include "cpu/generic/gather_forward_dims.h"
#include "cpu/generic/gather_backward_heads.h"
#include "cpu/generic/gather_backward_dims.h"
#include "cpu/generic/gather_cost.h"

namespace spattn::cpu {
namespace {

// Forward holds scores as [key][query].
template <int bq, int bk>
void permute_to_key_major(const uint64_t* bits, int, int, uint64_t* out) {
    if (bq == 64 && bk == 64) {
        uint64_t square[64];
        for (int r = 0; r < 64; ++r) square[r] = bits[r];
        transpose_bits(square);
        for (int k = 0; k < 64; ++k) out[k] = square[k];
        return;
    }
    for (int w = 0; w < bq * bk / 64; ++w) out[w] = 0;
    for (int r = 0; r < bq; ++r)
        for (int k = 0; k < bk; ++k) {
            const int from = r * bk + k, to = k * bq + r;
            out[to / 64] |= (bits[from / 64] >> (from % 64) & 1) << (to % 64);
        }
}

inline const char* fits_all(const Problem&) { return nullptr; }
// With learned sinks lse does not say whether a query sees a key, and the plan's layout knows nothing of a call's lists.
inline const char* block_backward_fits(const Problem& p) {
    const bool is_unknown = p.has_sink_logits && p.call_lists.at_run_time();
    return is_unknown ? "learned sinks, and the call's lists say which queries see a key" : nullptr;
}

template <auto workspace>
size_t workspace_of(const Sizing& s) {
    return workspace(s.problem, s.layout, s.tasks, s.lanes);
}

// Backward by key: orders over all heads, enough to keep that many lanes busy with equal work.
constexpr SchedulePolicy equal_shares{.equal_shares = true, .workers = 32};
// Forward.
constexpr SchedulePolicy each_row{};
inline bool takes_spans(const ForwardArgs&) { return true; }

}  // namespace
}  // namespace spattn::cpu

// Rows of blocks. What depends on the algorithm comes in parentheses, for its commas.
#define SPATTN_CPU_BLOCK_FORWARD(arch, dtype_name, bq, bk, cost_of, bytes_of, run, schedule, reads_float8) \
    {.name = #arch "_block_forward_" #dtype_name "_" #bq "x" #bk,                 \
     .device = SPATTN_CPU,                                                        \
     .pass = Pass::forward,                                                       \
     .dtype = Dtype::dtype_name,                                                  \
     .block_q = bq,                                                               \
     .block_k = bk,                                                               \
     .mask_words = bq * bk / 64,                                                  \
     .permute = permute_to_key_major<bq, bk>,                                     \
     .walks = {{Owner::queries, schedule}},                                       \
     .num_walks = 1,                                                              \
     .runs_here = runs_here,                                                      \
     .fits = fits_all,                                                            \
     .cost = cost_of,                                                             \
     .workspace = bytes_of,                                                       \
     .forward = run,                                                              \
     .orders = true,                                                              \
     .max_logits = true,                                                          \
     .float8_cache = reads_float8,                                                \
     .carries = forward_carries}
// Tiles of few queries, which so many heads of a group share.
#define SPATTN_CPU_FEW_ROW(arch, T, dtype_name, heads)                            \
    {.name = #arch "_few_forward_" #dtype_name "_heads" #heads,                   \
     .device = SPATTN_CPU,                                                        \
     .pass = Pass::forward,                                                       \
     .dtype = Dtype::dtype_name,                                                  \
     .block_q = few_rows / heads,                                                 \
     .block_k = few_keys,                                                         \
     .mask_words = few_rows / heads,                                              \
     .walks = {{Owner::queries, each_row, heads}},                                \
     .num_walks = 1,                                                              \
     .runs_here = runs_here,                                                      \
     .fits = few_forward_fits<heads>,                                             \
     .cost = few_cost<T, heads>,                                                  \
     .workspace = workspace_of<few_workspace>,                                    \
     .forward = few_forward<T>,                                                   \
     .orders = true,                                                              \
     .takes_spans = takes_spans,                                                  \
     .max_logits = true,                                                          \
     .float8_cache = true,                                                        \
     .shares_lists = heads > 1}
#define SPATTN_CPU_FEW_ROWS(arch, T, dtype)                                                     \
    SPATTN_CPU_FEW_ROW(arch, T, dtype, 1), SPATTN_CPU_FEW_ROW(arch, T, dtype, 2),               \
    SPATTN_CPU_FEW_ROW(arch, T, dtype, 3), SPATTN_CPU_FEW_ROW(arch, T, dtype, 4),               \
    SPATTN_CPU_FEW_ROW(arch, T, dtype, 5), SPATTN_CPU_FEW_ROW(arch, T, dtype, 6),               \
    SPATTN_CPU_FEW_ROW(arch, T, dtype, 7), SPATTN_CPU_FEW_ROW(arch, T, dtype, 8),               \
    SPATTN_CPU_FEW_ROW(arch, T, dtype, 16)
#define SPATTN_CPU_FEW(arch) \
    SPATTN_CPU_FEW_ROWS(arch, float, f32), SPATTN_CPU_FEW_ROWS(arch, F16, f16), SPATTN_CPU_FEW_ROWS(arch, Bf16, bf16)
#define SPATTN_CPU_BLOCK_BACKWARD(arch, dtype_name, bq, bk, cost_of, bytes_of, run, num_sweeps) \
    {.name = #arch "_block_backward_" #dtype_name "_" #bq "x" #bk,                             \
     .device = SPATTN_CPU,                                                                     \
     .pass = Pass::backward,                                                                   \
     .dtype = Dtype::dtype_name,                                                               \
     .block_q = bq,                                                                            \
     .block_k = bk,                                                                            \
     .mask_words = bq * bk / 64,                                                               \
     .walks = {{Owner::keys, equal_shares}},                                                   \
     .num_walks = 1,                                                                           \
     .runs_here = runs_here,                                                                   \
     .fits = block_backward_fits,                                                              \
     .cost = cost_of,                                                                          \
     .workspace = bytes_of,                                                                    \
     .backward = run,                                                                          \
     .orders = true,                                                                           \
     .carries = backward_carries,                                                              \
     .goes_in_rounds = true,                                                                   \
     .sweeps = num_sweeps}
#define SPATTN_CPU_PAIR_OF(arch, T, dtype, bq, bk, run_backward, num_sweeps)                       \
    SPATTN_CPU_BLOCK_FORWARD(arch, dtype, bq, bk, (cost<T, bq, bk, Pass::forward>),                \
                             (workspace_of<forward_workspace<bq, bk>>), (block_forward<T, bq, bk>), each_row, true), \
    SPATTN_CPU_BLOCK_BACKWARD(arch, dtype, bq, bk, (cost<T, bq, bk, Pass::backward>),              \
                              (workspace_of<backward_workspace<bq, bk>>), (run_backward<T, bq, bk>), num_sweeps)
#define SPATTN_CPU_PAIR(arch, T, dtype, bq, bk) SPATTN_CPU_PAIR_OF(arch, T, dtype, bq, bk, block_backward, 1)
// form: what lies in vector lanes, heads or dims; heads need lists that a group shares.
#define SPATTN_CPU_GATHER_ROWS(arch, T, dtype_name, form, Forward, Backward, cost_of, shared) \
    {.name = #arch "_gather_forward_" #dtype_name "_" #form,                                  \
     .device = SPATTN_CPU,                                                                    \
     .pass = Pass::forward,                                                                   \
     .dtype = Dtype::dtype_name,                                                              \
     .runs_here = runs_here,                                                                  \
     .fits = fits_all,                                                                        \
     .cost = cost_of<T, Pass::forward>,                                                       \
     .workspace = workspace_of<gather_forward_workspace<Forward>>,                            \
     .forward = gather_forward<T, Forward>,                                                   \
     .family = Family::gather,                                                                \
     .max_logits = true,                                                                      \
     .float8_cache = Forward::reads_float8,                                                   \
     .shares_lists = shared},                                                                 \
    {.name = #arch "_gather_backward_" #dtype_name "_" #form,                                 \
     .device = SPATTN_CPU,                                                                    \
     .pass = Pass::backward,                                                                  \
     .dtype = Dtype::dtype_name,                                                              \
     .runs_here = runs_here,                                                                  \
     .fits = fits_all,                                                                        \
     .cost = cost_of<T, Pass::backward>,                                                      \
     .workspace = workspace_of<gather_backward_workspace<Backward>>,                          \
     .backward = gather_backward<T, Backward>,                                                \
     .family = Family::gather,                                                                \
     .shares_lists = shared}
#define SPATTN_CPU_GATHERS(arch, T, dtype)                                                             \
    SPATTN_CPU_GATHER_ROWS(arch, T, dtype, heads, HeadsForward, HeadsBackward, heads_cost, true), \
    SPATTN_CPU_GATHER_ROWS(arch, T, dtype, dims, DimsForward, DimsBackward, dims_cost, false)
#define SPATTN_CPU_BLOCK(arch, bq, bk)                                                                        \
    SPATTN_CPU_PAIR(arch, float, f32, bq, bk), SPATTN_CPU_PAIR(arch, F16, f16, bq, bk),                       \
    SPATTN_CPU_PAIR(arch, Bf16, bf16, bq, bk)
