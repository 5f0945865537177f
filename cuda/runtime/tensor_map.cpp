// SPDX-License-Identifier: MIT
#include "runtime/tensor_map.h"

#include "runtime/driver.h"

namespace spattn::runtime {

namespace {

PFN_cuTensorMapEncodeTiled_v12000 encoder() {
    static const auto encode = driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
    return encode;
}

// bytes: of an element, which is one where a cache has float8, whatever the dtype of queries.
CUtensorMapDataType element_of(Dtype dtype, int64_t bytes) {
    if (bytes == 1) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    switch (dtype) {
        case Dtype::f32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
        case Dtype::f16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        case Dtype::f64: return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
        default: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    }
}

// A tensor whose axes have these sizes and, from the second on, strides in bytes.
template <int Rank>
CUtensorMap encode(void* data, CUtensorMapDataType element, const cuuint64_t (&size)[Rank],
                   const cuuint64_t (&stride)[Rank - 1], const cuuint32_t (&box)[Rank],
                   CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_128B) {
    CUtensorMap map;
    cuuint32_t step[Rank];
    for (cuuint32_t& one : step) one = 1;
    const CUresult result =
        encoder()(&map, element, Rank, data, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, fetched, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw Error(SPATTN_E_CUDA, "", text("cuTensorMapEncodeTiled: CUresult ", int(result)), int(result), __LINE__);
    return map;
}

cuuint32_t panel_columns(const Sizes& sizes) {
    constexpr int64_t panel_bytes = 128;
    return cuuint32_t(panel_bytes / sizes.element);
}

}  // namespace

void prepare_tensor_maps() { encoder(); }

CUtensorMap make_tensor_map(const TensorView& operand, const Sizes& sizes, Dtype dtype, int rows, int heads) {
    const cuuint64_t size[] = {cuuint64_t(sizes.head_dim), cuuint64_t(sizes.heads), cuuint64_t(sizes.seq),
                               cuuint64_t(sizes.batch)};
    const cuuint64_t stride[] = {cuuint64_t(stride_bytes(operand.head, sizes.heads, sizes.element)),
                                 cuuint64_t(stride_bytes(operand.row, sizes.seq, sizes.element)),
                                 cuuint64_t(stride_bytes(operand.batch, sizes.batch, sizes.element))};
    const cuuint32_t box[] = {panel_columns(sizes), cuuint32_t(heads), cuuint32_t(rows), 1};
    return encode<4>(operand.data, element_of(dtype, sizes.element), size, stride, box);
}

ResidueMaps make_residue_maps(const TensorView& operand, const Sizes& sizes, Dtype dtype, int rows, int64_t modulus) {
    ResidueMaps maps{};
    const int64_t tokens = sizes.seq / modulus, longer = sizes.seq % modulus;  // of a shorter class; how many have more
    const int64_t row = stride_bytes(operand.row, sizes.seq, sizes.element);
    const auto classes = [&](int64_t first, int64_t count, int64_t length) {
        const cuuint64_t size[] = {cuuint64_t(sizes.head_dim), cuuint64_t(sizes.heads), cuuint64_t(count),
                                   cuuint64_t(length), cuuint64_t(sizes.batch)};
        const cuuint64_t stride[] = {cuuint64_t(stride_bytes(operand.head, sizes.heads, sizes.element)),
                                     cuuint64_t(row), cuuint64_t(row * modulus),
                                     cuuint64_t(stride_bytes(operand.batch, sizes.batch, sizes.element))};
        const cuuint32_t box[] = {panel_columns(sizes), 1, 1, cuuint32_t(rows), 1};
        // A row's second panel, too: what stands beside it belongs to other classes. An earlier kernel ran no faster by
        // it (dilated and strided patterns at 16K, H200), the one of today was not timed without.
        return encode<5>(static_cast<char*>(operand.data) + first * row, element_of(dtype, sizes.element), size, stride,
                         box, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
    };
    maps.longer_classes = int32_t(longer);
    if (longer) maps.longer = classes(0, longer, tokens + 1);
    if (tokens) maps.shorter = classes(longer, modulus - longer, tokens);
    return maps;
}

}  // namespace spattn::runtime
