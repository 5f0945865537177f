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

inline const char* fits(const Problem&) { return nullptr; }

}  // namespace
}  // namespace spattn::cpu

#define SPATTN_CPU_FORWARD(arch, T, dtype, bq, bk)                                                            \
    {#arch "_block_forward_" #dtype "_" #bq "x" #bk, SPATTN_CPU, Pass::forward, Dtype::dtype, bq, bk,         \
     bq * bk / 64, permute_to_key_major<bq, bk>, false, runs_here, fits, cost<T, bq, bk, Pass::forward>,      \
     forward_workspace<bq, bk>, block_forward<T, bq, bk>, nullptr, nullptr, true, Family::block, true, true,  \
     true, false, forward_carries}
#define SPATTN_CPU_BACKWARD(arch, T, dtype, bq, bk, run, sweeps)                                              \
    {#arch "_block_backward_" #dtype "_" #bq "x" #bk, SPATTN_CPU, Pass::backward, Dtype::dtype, bq, bk,       \
     bq * bk / 64, nullptr, true, runs_here, fits, cost<T, bq, bk, Pass::backward>,                           \
     backward_workspace<bq, bk>, nullptr, run<T, bq, bk>, nullptr, true, Family::block, false, true, true,    \
     false, backward_carries, sweeps}
#define SPATTN_CPU_PAIR(arch, T, dtype, bq, bk)                                                               \
    SPATTN_CPU_FORWARD(arch, T, dtype, bq, bk),                                                               \
    SPATTN_CPU_BACKWARD(arch, T, dtype, bq, bk, block_backward, 1)
// Form: Heads or Dims, what lies in vector lanes; heads need lists that a group shares.
#define SPATTN_CPU_GATHER(arch, T, dtype, Form, form, shared)                                                     \
    {#arch "_gather_forward_" #dtype "_" #form, SPATTN_CPU, Pass::forward, Dtype::dtype, 0, 0, 0, nullptr, false, \
     runs_here, fits, form##_cost<T, Pass::forward>, gather_forward_workspace<Form##Forward<T>>,                  \
     gather_forward<Form##Forward<T>>, nullptr, nullptr, false, Family::gather, true, true, true, shared},        \
    {#arch "_gather_backward_" #dtype "_" #form, SPATTN_CPU, Pass::backward, Dtype::dtype, 0, 0, 0, nullptr,      \
     false, runs_here, fits, form##_cost<T, Pass::backward>, gather_backward_workspace<Form##Backward<T>>,        \
     nullptr, gather_backward<Form##Backward<T>>, nullptr, false, Family::gather, false, true, true, shared}
#define SPATTN_CPU_GATHERS(arch, T, dtype) \
    SPATTN_CPU_GATHER(arch, T, dtype, Heads, heads, true), SPATTN_CPU_GATHER(arch, T, dtype, Dims, dims, false)
#define SPATTN_CPU_BLOCK(arch, bq, bk)                                                                        \
    SPATTN_CPU_PAIR(arch, float, f32, bq, bk), SPATTN_CPU_PAIR(arch, F16, f16, bq, bk),                       \
    SPATTN_CPU_PAIR(arch, Bf16, bf16, bq, bk)
