// SPDX-License-Identifier: MIT
// What the ABI tests share: owned handles, tensors with memory of their own, and demands on failures. They see the
// public header and the shared library only.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "sparseattn/sparseattn.h"

namespace abi {

constexpr int64_t huge = int64_t(1) << 62;
constexpr int64_t most = std::numeric_limits<int64_t>::max(), least = std::numeric_limits<int64_t>::min();
constexpr spattn_dtype f32{SPATTN_FLOAT, 32, 1}, bf16{SPATTN_BFLOAT, 16, 1}, f64{SPATTN_FLOAT, 64, 1},
    i32{SPATTN_INT, 32, 1}, i64{SPATTN_INT, 64, 1}, u8{SPATTN_UINT, 8, 1}, boolean{SPATTN_BOOL, 8, 1},
    float8{SPATTN_FLOAT8_E4M3FN, 8, 1};

// What a code of float8_e4m3fn stands for, but for its sign: 127 is NaN.
inline double float8_size(int code) {
    if (code == 127) return std::nan("");
    return code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10);
}

struct Releaser {
    void operator()(spattn_pattern* p) const { spattn_pattern_release(p); }
    void operator()(spattn_context* c) const { spattn_context_release(c); }
    void operator()(spattn_plan* p) const { spattn_plan_release(p); }
    void operator()(spattn_sharding* s) const { spattn_sharding_release(s); }
};
using Pattern = std::unique_ptr<spattn_pattern, Releaser>;
using Context = std::unique_ptr<spattn_context, Releaser>;
using Plan = std::unique_ptr<spattn_plan, Releaser>;
using Sharding = std::unique_ptr<spattn_sharding, Releaser>;

// A struct of the header with its size filled in.
template <class S>
S sized() {
    S s{};
    s.struct_size = sizeof s;
    return s;
}

void succeed(spattn_status status, const char* what);

Pattern parse(const char* text);

spattn_context_options cpu_options();

Context make_context(const spattn_context_options& options = cpu_options());

// Structs are accepted as they were in the first release that had them, however much they have grown since: numbers and
// not sizeof, which grows with the struct.
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

spattn_extent make_extent(int64_t seq_q, int64_t seq_k);

spattn_problem make_problem();

Context make_context(int32_t threads, int64_t plan_cache);

Plan make_plan(const spattn_context* context, const spattn_pattern* pattern, const spattn_problem& problem);

std::string explain(const spattn_plan* plan);

// A tensor with memory, whose view a test may spoil. Memory starts as `poison` bytes.
struct Tensor {
    static constexpr unsigned char poison = 0x5a;

    Tensor(std::vector<int64_t> sizes, spattn_dtype dtype, size_t spare = 0);
    Tensor(const Tensor&) = delete;

    template <class T>
    T* as() {
        return reinterpret_cast<T*>(data);
    }
    void fill(uint32_t seed);  // floats in [-1, 1)
    std::vector<unsigned char> content() const { return {data, data + bytes}; }
    bool is_poison() const;

    std::vector<int64_t> shape, strides;
    std::vector<unsigned char> memory;
    unsigned char* data;
    size_t bytes;
    spattn_tensor view;
};

// A host tensor [count] of int64.
struct Numbers : Tensor {
    explicit Numbers(const std::vector<int64_t>& values);
};

// A host tensor [count / 2, 2] of int64.
struct Pairs : Tensor {
    explicit Pairs(const std::vector<int64_t>& values);
};

// The call failed with `status`, and the last error names this function and this argument.
void demand(const std::string& what, const char* function, spattn_status got, spattn_status status,
            const std::string& argument);

// One misuse of a function that makes a T.
template <class T>
struct BadCall {
    const char* what;
    std::function<spattn_status(T**)> call;
    spattn_status status;
    const char* argument;
};

template <class T>
void demand_no_handle(const char* function, const std::vector<BadCall<T>>& calls) {
    for (const auto& bad : calls) {
        T* result = reinterpret_cast<T*>(&result);  // not NULL, so that the library must write it
        demand(bad.what, function, bad.call(&result), bad.status, bad.argument);
        CHECK_EQ(result, static_cast<T*>(nullptr));
    }
    demand("result NULL", function, calls.front().call(nullptr), SPATTN_E_NULL, "result");
}

}  // namespace abi
