// SPDX-License-Identifier: MIT
// What the public functions share in reading their arguments: NULLs, sized structs, texts, host tensors, extents.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "core/error.h"
#include "core/tensor.h"
#include "pattern/pattern.h"

namespace spattn {

// What is accepted where a pointer may not be NULL.
inline const char* pointee(const spattn_pattern*) { return "a pattern"; }
inline const char* pointee(const spattn_context*) { return "a context"; }
inline const char* pointee(const spattn_plan*) { return "a plan"; }
inline const char* pointee(const spattn_sharding*) { return "a sharding"; }
inline const char* pointee(const spattn_tensor*) { return "a tensor"; }
inline const char* pointee(const char*) { return "a text"; }
inline const char* pointee(char*) { return "room for the text"; }
template <class T>
const char* pointee(T*) {
    if constexpr (!std::is_const_v<T>) return "where to write the result";
    else if constexpr (std::is_class_v<T>) return "a struct with its struct_size";
    else return "an array";
}

template <class T>
T& required(T* pointer, const char* argument, Where where = Where::current()) {
    if (!pointer) fail(SPATTN_E_NULL, argument, text("is NULL; accepted: ", pointee(pointer)), where);
    return *pointer;
}

// Bytes of each sized struct in the first release that had it. Structs grow at their end: these numbers never change,
// or programs built against the first header would be refused.
template <class S>
constexpr size_t first_size = 0;
template <>
inline constexpr size_t first_size<spattn_error> = 40;
template <>
inline constexpr size_t first_size<spattn_context_options> = 88;
template <>
inline constexpr size_t first_size<spattn_bigbird> = 48;
template <>
inline constexpr size_t first_size<spattn_xref> = 80;
template <>
inline constexpr size_t first_size<spattn_extent> = 64;
template <>
inline constexpr size_t first_size<spattn_stats> = 120;
template <>
inline constexpr size_t first_size<spattn_problem> = 88;
template <>
inline constexpr size_t first_size<spattn_forward_args> = 96;
template <>
inline constexpr size_t first_size<spattn_backward_args> = 128;
template <>
inline constexpr size_t first_size<spattn_cache_append_args> = 80;
template <>
inline constexpr size_t first_size<spattn_sharding_options> = 32;
template <>
inline constexpr size_t first_size<spattn_peer> = 56;
template <>
inline constexpr size_t first_size<spattn_exchange_args> = 64;

void check_struct_size(uint32_t struct_size, size_t first_size, const char* argument);
// What lies beyond the fields that are known here must be 0.
void check_tail(const void* given, uint32_t struct_size, size_t known_size, const char* argument);

// A copy of the caller's struct in this library's size; fields that an older caller does not know are 0.
template <class S>
S read_struct(const S* given, const char* argument) {
    static_assert(first_size<S> > 0 && first_size<S> <= sizeof(S), "structs only grow");
    const uint32_t struct_size = required(given, argument).struct_size;
    check_struct_size(struct_size, first_size<S>, argument);
    check_tail(given, struct_size, sizeof(S), argument);
    S copy{};
    std::memcpy(&copy, given, std::min<size_t>(struct_size, sizeof(S)));
    return copy;
}

// Writes as much of `value` as the caller's struct holds; leaves its struct_size.
template <class S>
void write_struct(S* to, const S& value, const char* argument) {
    static_assert(first_size<S> > 0 && first_size<S> <= sizeof(S), "structs only grow");
    const uint32_t struct_size = required(to, argument).struct_size;
    check_struct_size(struct_size, first_size<S>, argument);
    const size_t bytes = std::min<size_t>(struct_size, sizeof(S));
    std::memcpy(reinterpret_cast<char*>(to) + sizeof(uint32_t),
                reinterpret_cast<const char*>(&value) + sizeof(uint32_t), bytes - sizeof(uint32_t));
}

// The two-call form of texts: *needed gets the bytes with the final 0; capacity 0 only asks.
void copy_text(const std::string& from, char* buffer, size_t capacity, size_t* needed);

// A checked tensor in host memory.
struct HostTensor {
    void* data;
    spattn_dtype dtype;
    std::vector<int64_t> shape;
    std::array<int64_t, max_axes> strides;  // elements
};

// Checks device, dtype, shape and alignment. shape: the sizes demanded, -1 where any size >= 0 will do. `accepted` may
// name several dtypes.
HostTensor read_host_tensor(const spattn_tensor* tensor, const char* argument, std::span<const int64_t> shape,
                            std::initializer_list<spattn_dtype> accepted);

// An element of a tensor of int32 or int64, `at` elements from its start.
inline int64_t integer_at(const HostTensor& t, int64_t at) {
    return t.dtype.bits == 32 ? static_cast<const int32_t*>(t.data)[at] : static_cast<const int64_t*>(t.data)[at];
}

// A copy of a host tensor [count] of int32 or int64.
std::vector<int64_t> read_integers(const spattn_tensor* tensor, const char* argument);

inline constexpr spattn_dtype dtype_i32{SPATTN_INT, 32, 1}, dtype_i64{SPATTN_INT, 64, 1}, dtype_u8{SPATTN_UINT, 8, 1},
    dtype_bool{SPATTN_BOOL, 8, 1}, dtype_f32{SPATTN_FLOAT, 32, 1};

// Sizes of sequences and the numbers of blocks are kept in 32 bits by layouts.
constexpr int64_t longest_sequence = (int64_t(1) << 31) - 1;

// spattn_extent with its defaults resolved.
struct Question {
    Extent extent;
    int32_t block_q, block_k;  // unit of block counts
    spattn_cancel_fn cancel;
    void* cancel_user;
};
Question read_extent(const spattn_extent* extent, const char* argument);

// q_offset must keep positions far from the ends of int64, where patterns would overflow.
int64_t read_q_offset(bool given, int64_t q_offset, int64_t seq_q, int64_t seq_k, const char* argument);

}  // namespace spattn
