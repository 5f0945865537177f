// SPDX-License-Identifier: MIT
#include "runtime/tensor_map.h"

#include <cudaTypedefs.h>

#include "runtime/check.h"

namespace spattn::runtime {

namespace {

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

CUtensorMapDataType element_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::f32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
        case Dtype::f16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        case Dtype::f64: return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
        default: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    }
}

}  // namespace

void prepare_tensor_maps() { encoder(); }

CUtensorMap make_tensor_map(const TensorView& operand, const Sizes& sizes, Dtype dtype, int rows) {
    constexpr int64_t panel_bytes = 128;
    CUtensorMap map;
    const cuuint64_t size[4] = {cuuint64_t(sizes.head_dim), cuuint64_t(sizes.heads), cuuint64_t(sizes.seq),
                                cuuint64_t(sizes.batch)};
    const cuuint64_t stride[3] = {cuuint64_t(stride_bytes(operand.head, sizes.heads, sizes.element)),
                                  cuuint64_t(stride_bytes(operand.row, sizes.seq, sizes.element)),
                                  cuuint64_t(stride_bytes(operand.batch, sizes.batch, sizes.element))};
    const cuuint32_t box[4] = {cuuint32_t(panel_bytes / sizes.element), 1, cuuint32_t(rows), 1}, step[4] = {1, 1, 1, 1};
    const CUresult result =
        encoder()(&map, element_of(dtype), 4, operand.data, size, stride, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw Error(SPATTN_E_CUDA, "", text("cuTensorMapEncodeTiled: CUresult ", int(result)), int(result), __LINE__);
    return map;
}

}  // namespace spattn::runtime
