// SPDX-License-Identifier: MIT
// The CUDA backend: its devices, and the rows of every arch folder, best first. Only here do arch folders meet.
#include <cuda_bf16.h>

#include "any/block_forward.h"
#include "plan/backends.h"
#include "runtime/device.h"
#include "sm90/block_forward.h"

namespace spattn::cuda {

namespace {

using any::MaskOrder;
using bf16 = __nv_bfloat16;

// The copy engine wants multiples of 16 bytes; other views are read by the plain kernel, through the same layout.
template <int BlockQ>
void sm90_forward(const ForwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    if (sm90::block_forward_takes(args)) sm90::block_forward<BlockQ>(args);
    else any::block_forward<bf16, MaskOrder::fragments>(args);
    any::combine<bf16>(args);
}

template <int BlockQ>
void prepare_sm90(int32_t device) {
    sm90::prepare_block_forward<BlockQ>(device);
    any::prepare_block_forward<bf16, MaskOrder::fragments>(device);
    any::prepare_combine<bf16>(device);
}

template <class T>
void any_forward(const ForwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    any::block_forward<T, MaskOrder::rows>(args);
    any::combine<T>(args);
}

template <class T>
void prepare_any(int32_t device) {
    any::prepare_block_forward<T, MaskOrder::rows>(device);
    any::prepare_combine<T>(device);
}

template <int BlockQ>
Kernel sm90_row(const char* name) {
    static_assert(sizeof(uint64_t) * tile::fragment_words(BlockQ) % 128 == 0, "masks start at lines of the cache");
    return {name, SPATTN_CUDA, Pass::forward, Dtype::bf16, BlockQ, 128, tile::fragment_words(BlockQ),
            tile::permute_to_fragments, false, [] { return runtime::every_device_is(9, 0); }, sm90::block_forward_fits,
            sm90::block_forward_cost<BlockQ>, sm90::block_forward_workspace, sm90_forward<BlockQ>, nullptr,
            prepare_sm90<BlockQ>};
}

template <class T>
Kernel any_row(const char* name, Dtype dtype, int block) {
    return {name, SPATTN_CUDA, Pass::forward, dtype, block, block, (block * block + 63) / 64, nullptr, false,
            [] { return runtime::every_device_has(8); }, any::block_forward_fits, any::block_forward_cost,
            any::block_forward_workspace, any_forward<T>, nullptr, prepare_any<T>};
}

}  // namespace

void add_kernels(std::vector<Kernel>& all) {
#define SPATTN_BLOCK_FORWARD(dtype, head_dim, block_q) \
    all.push_back(sm90_row<block_q>("sm90_block_forward_" #dtype "_d" #head_dim "_" #block_q "x128"));
#include "sm90/kernels.inc"
#undef SPATTN_BLOCK_FORWARD
#define SPATTN_ANY_FORWARD(type, dtype, block) \
    all.push_back(any_row<type>("any_block_forward_" #dtype "_" #block "x" #block, Dtype::dtype, block));
#include "any/kernels.inc"
#undef SPATTN_ANY_FORWARD
}

Backend backend() {
    return {"cuda", SPATTN_CUDA, runtime::count_devices, runtime::allocate, runtime::release, runtime::copy_in,
            runtime::make_machine};
}

}  // namespace spattn::cuda
