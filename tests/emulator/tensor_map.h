// SPDX-License-Identifier: MIT
// What the copy engine is told of a tensor, in the emulator's own words inside CUDA's opaque 128 bytes.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace emulator {

constexpr int most_axes = 5;
using Places = std::array<int, most_axes>;

struct TensorMap {
    uint8_t* data;
    uint64_t stride[most_axes - 1];  // bytes, from the second axis on
    uint32_t size[most_axes];
    uint16_t box[most_axes];
    uint8_t element, rank;

    uint32_t box_bytes() const;
    // Between the box at `places` and the tile at `tile`, whose address says how it is swizzled.
    void load(uint8_t* tile, uint32_t address, const Places& places) const;
    void store(const uint8_t* tile, uint32_t address, const Places& places) const;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap) && std::is_trivially_copyable_v<TensorMap>);

inline TensorMap read_map(const CUtensorMap& map) {
    TensorMap tensor;
    std::memcpy(&tensor, &map, sizeof tensor);
    return tensor;
}

// to[i] += from[i], each by itself: others may add there, too.
void add_to(float* to, const float* from, uint32_t count);

// cuTensorMapEncodeTiled, with the driver's conditions for what the library asks: tiles of swizzled rows of 128 bytes.
CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* size,
                const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t* step,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                CUtensorMapFloatOOBfill fill);

}  // namespace emulator
