// SPDX-License-Identifier: MIT
#include "emulator/tensor_map.h"

#include <atomic>

#include "emulator/matrix.h"

namespace emulator {

namespace {

int bytes_of(CUtensorMapDataType type) {
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8:
            return 1;
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
            return 2;
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
            return 4;
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
            return 8;
        default:
            return 0;
    }
}

// visit(byte of the tile, element of the tensor or null outside it), in the order of the tile.
template <class Visit>
void each_element(const TensorMap& map, uint32_t address, const Places& places, Visit visit) {
    uint32_t at[most_axes] = {};
    for (uint32_t byte = 0; byte < map.box_bytes(); byte += map.element) {
        int64_t offset = 0;
        bool inside = true;
        for (int axis = 0; axis < map.rank; ++axis) {
            const int64_t place = int64_t(places[size_t(axis)]) + at[axis];
            inside &= place >= 0 && place < map.size[axis];
            offset += place * int64_t(axis ? map.stride[axis - 1] : map.element);
        }
        visit(swizzled(address + byte) - address, inside ? map.data + offset : nullptr);
        for (int axis = 0; axis < map.rank && ++at[axis] == map.box[axis]; ++axis) at[axis] = 0;
    }
}

}  // namespace

uint32_t TensorMap::box_bytes() const {
    uint32_t bytes = element;
    for (int axis = 0; axis < rank; ++axis) bytes *= box[axis];
    return bytes;
}

void TensorMap::load(uint8_t* tile, uint32_t address, const Places& places) const {
    each_element(*this, address, places, [&](uint32_t byte, const uint8_t* from) {
        if (from)
            std::memcpy(tile + byte, from, element);
        else
            std::memset(tile + byte, 0, element);
    });
}

void TensorMap::store(const uint8_t* tile, uint32_t address, const Places& places) const {
    each_element(*this, address, places, [&](uint32_t byte, uint8_t* to) {
        if (to) std::memcpy(to, tile + byte, element);
    });
}

void add_to(float* to, const float* from, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) std::atomic_ref(to[i]).fetch_add(from[i], std::memory_order_relaxed);
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* size,
                const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t* step,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill fill) {
    const int element = bytes_of(type);
    bool accepted = element && rank >= 3 && rank <= most_axes && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
                    interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
                    fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && int(box[0]) * element == 128;
    TensorMap tensor{};
    for (cuuint32_t axis = 0; accepted && axis < rank; ++axis) {
        accepted =
            size[axis] >= 1 && size[axis] <= uint64_t(1) << 32 && box[axis] >= 1 && box[axis] <= 256 && step[axis] == 1;
        tensor.size[axis] = uint32_t(size[axis]), tensor.box[axis] = uint16_t(box[axis]);
        if (!axis) continue;
        accepted = accepted && stride[axis - 1] % 16 == 0 && stride[axis - 1] < uint64_t(1) << 40;
        tensor.stride[axis - 1] = stride[axis - 1];
    }
    if (!accepted) return CUDA_ERROR_INVALID_VALUE;
    tensor.data = static_cast<uint8_t*>(data), tensor.element = uint8_t(element), tensor.rank = uint8_t(rank);
    std::memset(map, 0, sizeof *map);
    std::memcpy(map, &tensor, sizeof tensor);
    return CUDA_SUCCESS;
}

}  // namespace emulator
