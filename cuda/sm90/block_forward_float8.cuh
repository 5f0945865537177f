// SPDX-License-Identifier: MIT
//
//     block_forward.cuh for operands of float8: q kT is a product of their bytes
//
// The tensor unit makes it in half the time, and keys are half as long. v is widened before (plan/float8.h), and p v is
// a product of 16-bit elements: of probabilities float8 would keep four bits, and v would have to be transposed on its
// way, for of float8 the unit takes columns along k alone.
//
//   scales    of a query, and of a head's keys where these have one, are a factor of all its scores: of the exponents'
//             scale, or of what goes into the cap. Factors of single keys come with their block, and go into each
//             exponent's scale; under a mask or a cap scores are multiplied before. Where a query's factor is negative
//             its scores change their sign
//
// What binds is a warpgroup's own chain. Products of a block take 1,540 cycles of the tensor unit for both warpgroups;
// full_16k takes 2,400 a block with a scale a key (by bfloat16 2,240, of which products are 2,060), and 0.87 of that time
// with a scale a head (H200). The mask of a block is read before its products begin, for reads of shared memory wait
// behind these. While scores were multiplied by factors of keys between products and exponentials, a block took 2,450.
#pragma once

#include "sm90/block_forward.cuh"
#include "sm90/block_forward_float8.h"

namespace spattn::sm90 {

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
using Float8ProductsConfig = Config<D, HeadDim, HeadDimV, BlockQ, BlockK, Variant::float8_products>;

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockForwardFloat8<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const ForwardArgs& args) {
    launch_either<Float8ProductsConfig<D, HeadDim, HeadDimV, BlockQ, BlockK>>(args);
    const auto parts = any::Partials<float>::at(args.workspace, *args.problem, args.layout, args.tasks);
    any::launch_combine<D, true>(args, parts);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockForwardFloat8<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(clear_counter_kernel, 0);
    any::prepare_combine<D, true>();
    prepare_either<Float8ProductsConfig<D, HeadDim, HeadDimV, BlockQ, BlockK>>();
    runtime::prepare_tensor_maps();
}

}  // namespace spattn::sm90
