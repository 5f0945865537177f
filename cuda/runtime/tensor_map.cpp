// SPDX-License-Identifier: MIT
#include "runtime/tensor_map.h"

#include <cudaTypedefs.h>

#include "runtime/check.h"

namespace spattn::runtime {

namespace {

constexpr int64_t element = 2;  // bytes

// The encoder lives in the driver, which may be absent where the library is loaded: no link, a look-up at first use.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
    static const auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
              "cudaGetDriverEntryPointByVersion");
        require(found == cudaDriverEntryPointSuccess, SPATTN_E_DRIVER_TOO_OLD, "",
                "driver without cuTensorMapEncodeTiled");
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    }();
    return encode;
}

// A stride that no coordinate but 0 uses may be anything: the engine wants a multiple of 16 all the same.
int64_t stride_bytes(int64_t stride, int64_t size) { return size == 1 ? 16 : stride * element; }

}  // namespace

void prepare_tensor_maps() { encoder(); }

bool has_tensor_map(const TensorView& operand, const Sizes& sizes) {
    const int64_t limit = int64_t(1) << 40;
    for (const int64_t bytes : {stride_bytes(operand.head, sizes.heads), stride_bytes(operand.row, sizes.seq),
                                stride_bytes(operand.batch, sizes.batch)})
        if (bytes % 16 || bytes < 0 || bytes >= limit) return false;
    return (operand.column == 1 || sizes.head_dim == 1) && reinterpret_cast<uintptr_t>(operand.data) % 16 == 0;
}

CUtensorMap make_tensor_map(const TensorView& operand, const Sizes& sizes, int rows) {
    CUtensorMap map;
    const cuuint64_t size[4] = {cuuint64_t(sizes.head_dim), cuuint64_t(sizes.heads), cuuint64_t(sizes.seq),
                                cuuint64_t(sizes.batch)};
    const cuuint64_t stride[3] = {cuuint64_t(stride_bytes(operand.head, sizes.heads)),
                                  cuuint64_t(stride_bytes(operand.row, sizes.seq)),
                                  cuuint64_t(stride_bytes(operand.batch, sizes.batch))};
    const cuuint32_t box[4] = {64, 1, cuuint32_t(rows), 1}, step[4] = {1, 1, 1, 1};
    const CUresult result =
        encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, operand.data, size, stride, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw Error(SPATTN_E_CUDA, "", text("cuTensorMapEncodeTiled: CUresult ", int(result)), int(result), __LINE__);
    return map;
}

}  // namespace spattn::runtime
