// SPDX-License-Identifier: MIT
#include "core/tensor.h"

#include <algorithm>

#include "core/dtype.h"
#include "core/error.h"

namespace spattn {
namespace {

// Products of sizes and strides beyond this cannot be addresses; below it, sums of a few do not overflow.
constexpr int64_t addressable = int64_t(1) << 58;

int64_t elements(const spattn_tensor& t) {
    int64_t count = 1;
    for (int i = 0; i < t.ndim; ++i) count *= t.shape[i];
    return count;
}

std::array<int64_t, max_axes> compact_strides(const spattn_tensor& t) {
    std::array<int64_t, max_axes> strides{};
    int64_t step = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
        strides[size_t(i)] = step;
        step *= t.shape[i];
    }
    return strides;
}

// From the first byte of a tensor to behind the last; 0 where it has no element.
uint64_t span_bytes(const spattn_tensor& t, std::span<const int64_t> strides) {
    if (elements(t) == 0) return 0;
    uint64_t last = 0;
    for (int i = 0; i < t.ndim; ++i) last += uint64_t(strides[size_t(i)]) * uint64_t(t.shape[i] - 1);
    return (last + 1) * (t.dtype.bits / 8u);
}

}  // namespace

std::string describe_device(spattn_device d) {
    switch (d.type) {
        case SPATTN_CPU: return "cpu";
        case SPATTN_CUDA: return text("cuda:", d.index);
        case SPATTN_CUDA_HOST: return "pinned host memory";
        case SPATTN_CUDA_MANAGED: return text("managed memory of cuda:", d.index);
    }
    return text("device type ", d.type);
}

std::string describe_shape(std::span<const int64_t> shape) {
    std::string out = "[";
    for (size_t i = 0; i < shape.size(); ++i)
        out += (i ? ", " : "") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
    return out + "]";
}

void check_dtype(const spattn_tensor& t, const char* argument, std::initializer_list<spattn_dtype> accepted) {
    std::string names;
    for (const spattn_dtype& d : accepted) {
        if (t.dtype == d) return;
        names += (names.empty() ? "" : " or ") + describe_dtype(d);
    }
    fail(SPATTN_E_DTYPE, argument, text("is ", describe_dtype(t.dtype), "; accepted: ", names));
}

void check_shape(const spattn_tensor& t, const char* argument, std::span<const int64_t> shape) {
    if (t.ndim != int32_t(shape.size()))
        fail(SPATTN_E_SHAPE, argument, text("has ", t.ndim, " axes; accepted: ", describe_shape(shape)));
    if (!t.shape) fail(SPATTN_E_NULL, argument, "has a NULL shape; accepted: the size of each axis");
    const std::span given(t.shape, shape.size());
    int64_t count = 1;
    for (size_t i = 0; i < shape.size(); ++i) {
        if (given[i] < 0 || given[i] > addressable / std::max<int64_t>(count, 1))
            fail(SPATTN_E_SHAPE, argument,
                 text("has size ", given[i], " on axis ", i, "; accepted: ", describe_shape(shape),
                      shape[i] < 0 ? ", where any is 0 or more, and what memory can hold" : ""));
        if (shape[i] >= 0 && given[i] != shape[i])
            fail(SPATTN_E_SHAPE, argument,
                 text("has shape ", describe_shape(given), "; accepted: ", describe_shape(shape)));
        count *= given[i];
    }
}

std::array<int64_t, max_axes> tensor_strides(const spattn_tensor& t, const char* argument) {
    std::array<int64_t, max_axes> strides = compact_strides(t);
    int64_t reach = 0;
    for (int i = 0; i < t.ndim; ++i) {
        int64_t& stride = strides[size_t(i)];
        if (t.strides) stride = t.strides[i];
        if (t.shape[i] <= 1) {
            stride = 0;  // DLPack: meaningless on such an axis, and often arbitrary
        } else if (stride < 0 || stride > addressable / t.shape[i]) {
            fail(SPATTN_E_LAYOUT, argument,
                 text("has stride ", stride, " on axis ", i, "; accepted: 0 to ", addressable / t.shape[i]));
        }
        reach += stride * std::max<int64_t>(t.shape[i] - 1, 0);
    }
    if (reach > addressable)
        fail(SPATTN_E_LAYOUT, argument, text("has strides that reach ", reach, " elements far; accepted: up to ", addressable));
    return strides;
}

void* tensor_data(const spattn_tensor& t, const char* argument, std::span<const int64_t> strides) {
    if (!t.data) {
        if (elements(t) == 0) return nullptr;
        fail(SPATTN_E_NULL, argument, "has NULL data; accepted: memory, or NULL of a tensor without elements");
    }
    const uintptr_t bytes = t.dtype.bits / 8u, room = UINTPTR_MAX - reinterpret_cast<uintptr_t>(t.data);
    if (t.byte_offset > room || span_bytes(t, strides) > room - t.byte_offset)
        fail(SPATTN_E_LAYOUT, argument,
             text("has byte_offset ", t.byte_offset, ", from where it reaches beyond the address space; accepted: ",
                  "data + byte_offset and all elements in it"));
    char* data = static_cast<char*>(t.data) + t.byte_offset;
    if (bytes && reinterpret_cast<uintptr_t>(data) % bytes)
        fail(SPATTN_E_LAYOUT, argument,
             text("starts at an address that is ", reinterpret_cast<uintptr_t>(data) % bytes, " modulo ", bytes,
                  "; accepted: data + byte_offset aligned to the element"));
    return data;
}

}  // namespace spattn
