// SPDX-License-Identifier: MIT
#pragma once

#include "plan/dispatch.h"

namespace spattn::any {

// Steps around the rows that queries are dispatched to, as DispatchSteps has them. D: f16 or bf16, for results of
// copies are elements.
template <Dtype D>
struct Dispatch {
    static void send(const ForwardArgs& args, const DispatchRound& to);
    static void combine(const ForwardArgs& args, const DispatchRound& from);
    static void sum_rows(const BackwardArgs& args);
    static void send_back(const BackwardArgs& args, const DispatchRound& to);
    static void combine_back(const BackwardArgs& args, const DispatchRound& from);
    static void prepare(int32_t device);
};

template <Dtype D>
inline constexpr DispatchSteps dispatch_steps{Dispatch<D>::send,      Dispatch<D>::combine,      Dispatch<D>::sum_rows,
                                              Dispatch<D>::send_back, Dispatch<D>::combine_back, Dispatch<D>::prepare};
template <Dtype D>
constexpr const DispatchSteps* dispatch_of() {
    if constexpr (D == Dtype::f16 || D == Dtype::bf16) return &dispatch_steps<D>;
    else return nullptr;
}

}  // namespace spattn::any
