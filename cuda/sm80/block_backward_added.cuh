// SPDX-License-Identifier: MIT
//
//     by key     as block_backward.cuh, and  dq += ds k  in memory
//     by query   sums of dq become elements
//
// for five products where block_backward.cuh makes seven. dsT of a step goes through shared memory, where each warp reads
// those of 16 queries and of all its CTA's keys. What comes of them is added to sums of floats, which stand as fragments do:
// a warp's addition fills whole sectors. A kernel before clears the sums. Which CTA adds first is chance, so last bits of dq
// differ between calls.
//
// Measured (H200, bf16, L2 cold, TFLOP/s of 10 pairs d, 2026-12, in brackets block_backward.cuh in the same run): head_dim
// 128 full_16k 251 (195), causal_16k 258 (198), window1k_16k 192 (155), landmark_64k 168 (118), dilated_16k 38 (34); head_dim
// 64 full_16k 214 (163), window1k_16k 161 (129). Without q of the next step beside that of this one, as A100 has it, which
// has room for two CTAs then, full_16k takes 4 % longer, window1k_16k 1 %.
//
// Tried and dropped: a CTA of eight warps that owns 128 keys, and adds half as often (245 on full_16k, 177 on window1k_16k;
// at head_dim 64 187 and 133); four floats an addition, as Hopper has them (as fast).
#pragma once

#include "sm80/block_backward.cuh"
#include "sm80/block_backward_added.h"

namespace spattn::sm80 {

template <class C>
__global__ void __launch_bounds__(threads) added_queries_kernel(const __grid_constant__ GradientParams params) {
    if constexpr (!is_turing || runs_on_turing<C::dtype, C::shared_bytes>)
        Backward<C>(params, ptx::shared_address(ptx::swizzled_shared<uint8_t>())).finish_added();
}

template <Dtype D, int HeadDim, int HeadDimV, bool IsRoomy>
struct AddedLaunch : BackwardLaunch<D, HeadDim, HeadDimV, IsRoomy, false> {
    using Base = BackwardLaunch<D, HeadDim, HeadDimV, IsRoomy, false>;
    using Base::args, Base::params;
    using ByKey = typename Base::template Config<Sums::all>;
    using ByQuery = BackwardConfig<D, HeadDim, HeadDimV, Sums::dq, true, false>;
    static_assert(ByKey::shared_bytes <= ByKey::Added::shared_bytes(IsRoomy), "what the host was told");

    explicit AddedLaunch(const BackwardArgs& args) : Base(args) {
        const BlockBackwardAddedSpace space(*args.problem, args.layout, args.tasks, args.second_tasks, HeadDim);
        params.added = reinterpret_cast<float*>(static_cast<char*>(args.workspace) + space.sums);
        runtime::clear(params.added, space.bytes - space.sums, args.stream);
    }

    void run_all() {
        any::BlockBackward<D>::rows(args);
        this->template run<Sums::all>();
        any::BlockBackward<D>::join_keys(args);
        if (args.layout.queries.listed && !args.layout.queries.away)
            any::BlockBackward<D>::by_query(args);
        else
            this->template launch<ByQuery>(added_queries_kernel<ByQuery>, ByQuery::sums_bytes);
        any::BlockBackward<D>::sinks(args);
    }
    static void prepare_all() {
        runtime::prepare(block_backward_kernel<ByKey>, ByKey::shared_bytes);
        runtime::prepare(added_queries_kernel<ByQuery>, ByQuery::sums_bytes);
    }
};

// act(launch's type), roomy where an SM has shared memory for two such CTAs.
template <Dtype D, int HeadDim, int HeadDimV, int Block, class Act>
void choose_added(int32_t device, Act act) {
    using Added = BlockBackwardAdded<D, HeadDim, HeadDimV, Block>;
    constexpr int most = Added::shared_bytes(true);
    if (most == Added::shared_bytes(false) || runtime::shared_bytes(device) >= 2 * most)
        act(std::type_identity<AddedLaunch<D, HeadDim, HeadDimV, true>>{});
    else
        act(std::type_identity<AddedLaunch<D, HeadDim, HeadDimV, most == Added::shared_bytes(false)>>{});
}

template <Dtype D, int HeadDim, int HeadDimV, int Block>
void BlockBackwardAdded<D, HeadDim, HeadDimV, Block>::run(const BackwardArgs& args) {
    choose_added<D, HeadDim, HeadDimV, Block>(args.device, RunAll{args});
}
template <Dtype D, int HeadDim, int HeadDimV, int Block>
void BlockBackwardAdded<D, HeadDim, HeadDimV, Block>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    choose_added<D, HeadDim, HeadDimV, Block>(device, PrepareAll{});
    any::BlockBackward<D>::prepare(device);
}

}  // namespace spattn::sm80
