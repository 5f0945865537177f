// SPDX-License-Identifier: MIT
#include "abi/abi.h"

namespace abi {

void succeed(spattn_status status, const char* what) {
    const std::string why = status ? spattn_last_error_text() : "";
    check::report(status == SPATTN_OK, __FILE__, __LINE__, std::string(what) + ": " + why);
}

Pattern parse(const char* text) {
    spattn_pattern* result = nullptr;
    succeed(spattn_pattern_parse(text, &result), text);
    return Pattern(result);
}

spattn_context_options cpu_options() {
    auto options = sized<spattn_context_options>();
    options.device = {SPATTN_CPU, 0};
    return options;
}

Context make_context(const spattn_context_options& options) {
    spattn_context* result = nullptr;
    succeed(spattn_context_create(&options, &result), "context");
    return Context(result);
}

spattn_extent make_extent(int64_t seq_q, int64_t seq_k) {
    auto extent = sized<spattn_extent>();
    extent.seq_q = seq_q;
    extent.seq_k = seq_k;
    return extent;
}

spattn_problem make_problem() {
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

Context make_context(int32_t threads, int64_t plan_cache) {
    auto options = cpu_options();
    options.cpu_threads = threads;
    options.plan_cache = plan_cache;
    return make_context(options);
}

Plan make_plan(const spattn_context* context, const spattn_pattern* pattern, const spattn_problem& problem) {
    spattn_plan* result = nullptr;
    succeed(spattn_plan_create(context, pattern, &problem, nullptr, &result), "plan");
    return Plan(result);
}

std::string explain(const spattn_plan* plan) {
    size_t needed = 0;
    succeed(spattn_plan_explain(plan, nullptr, 0, &needed), "explain");
    std::string text(needed, ' ');
    succeed(spattn_plan_explain(plan, text.data(), needed, nullptr), "explain");
    return text;
}

Tensor::Tensor(std::vector<int64_t> sizes, spattn_dtype dtype, size_t spare) : shape(std::move(sizes)) {
    int64_t count = 1;
    strides.resize(shape.size());
    for (size_t i = shape.size(); i-- > 0; count *= shape[i]) strides[i] = count;
    bytes = size_t(count) * (dtype.bits / 8);
    memory.assign(bytes + spare + 64, poison);
    data = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    view = {data, {SPATTN_CPU, 0}, int32_t(shape.size()), dtype, shape.data(), strides.data(), 0};
}

void Tensor::fill(uint32_t seed) {
    for (size_t i = 0; i < bytes / 4; ++i) {
        seed = seed * 1664525u + 1013904223u;
        as<float>()[i] = float(seed >> 8) / float(1 << 23) - 1;
    }
}

bool Tensor::is_poison() const {
    for (unsigned char byte : memory)
        if (byte != poison) return false;
    return true;
}

Numbers::Numbers(const std::vector<int64_t>& values) : Tensor({int64_t(values.size())}, i64) {
    std::copy(values.begin(), values.end(), as<int64_t>());
}

Pairs::Pairs(const std::vector<int64_t>& values) : Tensor({int64_t(values.size()) / 2, 2}, i64) {
    std::copy(values.begin(), values.end(), as<int64_t>());
}

void demand(const std::string& what, const char* function, spattn_status got, spattn_status status,
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
        if (got == SPATTN_E_NULL) CHECK(std::string(error.message).find("; accepted: ") != std::string::npos);
        CHECK(error.line > 0);
    }
    check::context.clear();
}

}  // namespace abi
