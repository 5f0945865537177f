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
    i32{SPATTN_INT, 32, 1}, i64{SPATTN_INT, 64, 1}, u8{SPATTN_UINT, 8, 1}, boolean{SPATTN_BOOL, 8, 1};

struct Releaser {
    void operator()(spattn_pattern* p) const { spattn_pattern_release(p); }
    void operator()(spattn_context* c) const { spattn_context_release(c); }
    void operator()(spattn_plan* p) const { spattn_plan_release(p); }
};
using Pattern = std::unique_ptr<spattn_pattern, Releaser>;
using Context = std::unique_ptr<spattn_context, Releaser>;
using Plan = std::unique_ptr<spattn_plan, Releaser>;

// A struct of the header with its size filled in.
template <class S>
S sized() {
    S s{};
    s.struct_size = sizeof s;
    return s;
}

inline void succeed(spattn_status status, const char* what) {
    const std::string why = status ? spattn_last_error_text() : "";
    check::report(status == SPATTN_OK, __FILE__, __LINE__, std::string(what) + ": " + why);
}

inline Pattern parse(const char* text) {
    spattn_pattern* result = nullptr;
    succeed(spattn_pattern_parse(text, &result), text);
    return Pattern(result);
}

inline spattn_context_options cpu_options() {
    auto options = sized<spattn_context_options>();
    options.device = {SPATTN_CPU, 0};
    return options;
}

inline Context make_context(const spattn_context_options& options = cpu_options()) {
    spattn_context* result = nullptr;
    succeed(spattn_context_create(&options, &result), "context");
    return Context(result);
}

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

inline spattn_extent make_extent(int64_t seq_q, int64_t seq_k) {
    auto extent = sized<spattn_extent>();
    extent.seq_q = seq_q;
    extent.seq_k = seq_k;
    return extent;
}

inline spattn_problem make_problem() {
    auto problem = sized<spattn_problem>();
    problem.flags = SPATTN_PLAN_BACKWARD;
    problem.batch = 2;
    problem.heads_q = 4;
    problem.heads_kv = 2;
    problem.seq_q = problem.seq_k = 40;
    problem.head_dim = 16;
    problem.head_dim_v = 8;
    problem.dtype = f32;
    problem.axes = SPATTN_BHSD;
    return problem;
}

inline Context make_context(int32_t threads, int64_t plan_cache) {
    auto options = cpu_options();
    options.cpu_threads = threads;
    options.plan_cache = plan_cache;
    return make_context(options);
}

inline Plan make_plan(const spattn_context* context, const spattn_pattern* pattern, const spattn_problem& problem) {
    spattn_plan* result = nullptr;
    succeed(spattn_plan_create(context, pattern, &problem, nullptr, &result), "plan");
    return Plan(result);
}

inline std::string explain(const spattn_plan* plan) {
    size_t needed = 0;
    succeed(spattn_plan_explain(plan, nullptr, 0, &needed), "explain");
    std::string text(needed, ' ');
    succeed(spattn_plan_explain(plan, text.data(), needed, nullptr), "explain");
    return text;
}

// A tensor with memory, whose view a test may spoil. Memory starts as `poison` bytes.
struct Tensor {
    static constexpr unsigned char poison = 0x5a;

    Tensor(std::vector<int64_t> sizes, spattn_dtype dtype, size_t spare = 0) : shape(std::move(sizes)) {
        int64_t count = 1;
        strides.resize(shape.size());
        for (size_t i = shape.size(); i-- > 0; count *= shape[i]) strides[i] = count;
        bytes = size_t(count) * (dtype.bits / 8);
        memory.assign(bytes + spare + 64, poison);
        data = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        view = {data, {SPATTN_CPU, 0}, int32_t(shape.size()), dtype, shape.data(), strides.data(), 0};
    }
    Tensor(const Tensor&) = delete;

    template <class T>
    T* as() {
        return reinterpret_cast<T*>(data);
    }
    void fill(uint32_t seed) {  // floats in [-1, 1)
        for (size_t i = 0; i < bytes / 4; ++i) {
            seed = seed * 1664525u + 1013904223u;
            as<float>()[i] = float(seed >> 8) / float(1 << 23) - 1;
        }
    }
    std::vector<unsigned char> content() const { return {data, data + bytes}; }
    bool is_poison() const {
        for (unsigned char byte : memory)
            if (byte != poison) return false;
        return true;
    }

    std::vector<int64_t> shape, strides;
    std::vector<unsigned char> memory;
    unsigned char* data;
    size_t bytes;
    spattn_tensor view;
};

// A host tensor [count] of int64.
struct Numbers : Tensor {
    explicit Numbers(const std::vector<int64_t>& values) : Tensor({int64_t(values.size())}, i64) {
        std::copy(values.begin(), values.end(), as<int64_t>());
    }
};

// The call failed with `status`, and the last error names this function and this argument.
inline void demand(const std::string& what, const char* function, spattn_status got, spattn_status status,
                   const std::string& argument) {
    check::context = std::string(function) + ": " + what;
    CHECK_EQ(std::string(spattn_status_name(got)), spattn_status_name(status));
    if (got != SPATTN_OK) {
        auto error = sized<spattn_error>();
        CHECK_EQ(spattn_last_error(&error), SPATTN_OK);
        CHECK_EQ(error.status, got);
        CHECK_EQ(std::string(error.function), function);
        CHECK_EQ(std::string(error.argument), argument);
        CHECK_EQ(std::string(error.message), spattn_last_error_text());
        CHECK(std::string(error.message).find(argument) != std::string::npos);
        CHECK(error.line > 0);
    }
    check::context.clear();
}

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
