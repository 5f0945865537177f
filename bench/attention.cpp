// SPDX-License-Identifier: MIT
#include "attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

#include "measure.h"

namespace bench {

namespace {

// Steele, Lea and Flood's generator (https://doi.org/10.1145/2660193.2660195): the same inputs on every machine.
uint64_t splitmix(uint64_t& state) {
    uint64_t x = state += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

spattn_dtype wire_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::f32: return {SPATTN_FLOAT, 32, 1};
        case Dtype::f16: return {SPATTN_FLOAT, 16, 1};
        case Dtype::f64: return {SPATTN_FLOAT, 64, 1};
        case Dtype::bf16: return {SPATTN_BFLOAT, 16, 1};
    }
    return {};
}

uint16_t to_bf16(float value) {  // round to nearest even; the inputs are finite
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

uint16_t to_f16(float value) {  // round to nearest even; the inputs are far below the largest float16
    const int exponent = value == 0 ? -14 : std::max(std::ilogb(value), -14);
    const auto units = uint16_t(std::nearbyint(std::ldexp(std::fabs(value), 10 - exponent)));
    return uint16_t((std::signbit(value) ? 0x8000 : 0) | (((exponent + 14) << 10) + units));
}

double from_f16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return bits & 0x8000 ? -size : size;
}

}  // namespace

Handle<spattn_context> make_context(int threads) {
    spattn_context_options options{};
    options.struct_size = sizeof options;
    options.device.type = SPATTN_CPU;
    options.cpu_threads = threads;
    options.plan_cache = -1;
    spattn_context* result = nullptr;
    require(spattn_context_create(&options, &result));
    return Handle<spattn_context>(result);
}

spattn_problem make_problem(const Case& shape, Dtype dtype, bool backward) {
    spattn_problem problem{};
    problem.struct_size = sizeof problem;
    problem.flags = (backward ? SPATTN_PLAN_BACKWARD : 0) | (shape.top ? SPATTN_PLAN_VALUE_IN_KEY : 0);
    problem.batch = shape.batch;
    problem.heads_q = shape.heads_q;
    problem.heads_kv = shape.heads_kv;
    problem.seq_q = shape.seq;
    problem.seq_k = shape.keys();
    problem.head_dim = shape.head_dim;
    problem.head_dim_v = shape.values();
    problem.dtype = wire_of(dtype);
    problem.axes = SPATTN_BHSD;
    return problem;
}

TimedPlan make_plan(const spattn_context* context, const spattn_pattern* pattern, const spattn_problem& problem) {
    Handle<spattn_plan> plan;
    const Timing timing = measure({.seconds = 0.05, .fewest = 3, .patience = 1.0}, [&] {
        spattn_plan* result = nullptr;
        require(spattn_plan_create(context, pattern, &problem, nullptr, &result));
        plan.reset(result);
    });
    return {std::move(plan), timing.us};
}

Memory allocate(size_t bytes, size_t align) {
    align = std::max<size_t>(align, 64);
    void* memory = std::aligned_alloc(align, (bytes + align - 1) / align * align);
    if (!memory) throw std::bad_alloc();
    return Memory(memory);
}

Tensor::Tensor(std::vector<int64_t> shape, Dtype dtype) : shape_(std::move(shape)), dtype_(dtype) {
    for (int64_t size : shape_) count_ *= size;
    const int bytes = wire_of(dtype).bits / 8;
    memory_ = allocate(std::max<size_t>(count_ * bytes, 1), 64);
    // Touched once here, so that no timed call pays for the first use of a page.
    std::memset(memory_.get(), 0, count_ * bytes);
    view_.data = memory_.get();
    view_.device = {SPATTN_CPU, 0};
    view_.ndim = int32_t(shape_.size());
    view_.dtype = wire_of(dtype);
    view_.shape = shape_.data();
}

void Tensor::fill_normal(uint64_t seed) {
    for (int64_t i = 0; i < count_; ++i) {  // Box and Muller; one of the two values is enough here
        const float u = float((splitmix(seed) >> 40) + 1) * 0x1p-24f, angle = float(splitmix(seed) >> 40) * 0x1p-24f;
        const float value = std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi_v<float> * angle);
        switch (dtype_) {
            case Dtype::f32: static_cast<float*>(memory_.get())[i] = value; break;
            case Dtype::f16: static_cast<uint16_t*>(memory_.get())[i] = to_f16(value); break;
            case Dtype::f64: static_cast<double*>(memory_.get())[i] = value; break;
            case Dtype::bf16: static_cast<uint16_t*>(memory_.get())[i] = to_bf16(value); break;
        }
    }
}

double Tensor::at(int64_t batch, int64_t head, int64_t row, int64_t column) const {
    const int64_t columns = shape_.size() == 4 ? shape_[3] : 1;
    const int64_t i = ((batch * shape_[1] + head) * shape_[2] + row) * columns + column;
    if (dtype_ == Dtype::f32) return static_cast<const float*>(memory_.get())[i];
    if (dtype_ == Dtype::f64) return static_cast<const double*>(memory_.get())[i];
    if (dtype_ == Dtype::f16) return from_f16(static_cast<const uint16_t*>(memory_.get())[i]);
    return std::bit_cast<float>(uint32_t(static_cast<const uint16_t*>(memory_.get())[i]) << 16);
}

Attention::Attention(const spattn_context* context, const Case& shape, Dtype dtype, bool with_backward)
    : shape(shape), dtype(dtype), pattern(make_pattern(shape.pattern, shape.seq)),
      q({shape.batch, shape.heads_q, shape.seq, shape.head_dim}, dtype),
      k({shape.batch, shape.heads_kv, shape.keys(), shape.head_dim}, dtype),
      v({shape.batch, shape.heads_kv, shape.top ? 0 : shape.keys(), shape.values()}, dtype),
      out({shape.batch, shape.heads_q, shape.seq, shape.values()}, dtype),
      lse({shape.batch, shape.heads_q, shape.seq}, Dtype::f32),
      dout({shape.batch, shape.heads_q, with_backward ? shape.seq : 0, shape.values()}, dtype),
      dq({shape.batch, shape.heads_q, with_backward ? shape.seq : 0, shape.head_dim}, dtype),
      dk({shape.batch, shape.heads_kv, with_backward ? shape.keys() : 0, shape.head_dim}, dtype),
      dv({shape.batch, shape.heads_kv, with_backward && !shape.top ? shape.keys() : 0, shape.values()}, dtype) {
    auto [plan, us] = make_plan(context, pattern.get(), make_problem(shape, dtype, with_backward));
    plan_ = std::move(plan);
    plan_us = us;
    uint64_t state = 5;
    for (int64_t i = 0; i < shape.seq * shape.top; ++i)
        lists_.push_back(int32_t(splitmix(state) % uint64_t(shape.keys())));
    q.fill_normal(1);
    k.fill_normal(2);
    v.fill_normal(3);
    dout.fill_normal(4);
    forward_ = make_workspace(SPATTN_OP_FORWARD);
    if (with_backward) backward_ = make_workspace(SPATTN_OP_BACKWARD);
}

Attention::Workspace Attention::make_workspace(spattn_enum op) const {
    Workspace workspace;
    size_t align = 1;
    require(spattn_plan_workspace(plan_.get(), op, &workspace.bytes, &align));
    workspace.memory = allocate(std::max<size_t>(workspace.bytes, 1), align);
    return workspace;
}

const spattn_tensor* Attention::indices() {
    if (!shape.top) return nullptr;
    const int64_t sizes[4] = {1, shape.seq, 1, shape.top};
    std::copy(sizes, sizes + 4, lists_shape_);
    lists_view_.data = lists_.data();
    lists_view_.device = {SPATTN_CPU, 0};
    lists_view_.ndim = 4;
    lists_view_.dtype = {SPATTN_INT, 32, 1};
    lists_view_.shape = lists_shape_;
    return &lists_view_;
}

void Attention::forward() {
    spattn_forward_args args{};
    args.struct_size = sizeof args;
    args.q = q.view();
    args.k = k.view();
    args.v = shape.top ? nullptr : v.view();
    args.indices = indices();
    args.out = out.view();
    args.lse = lse.view();
    args.workspace = forward_.memory.get();
    args.workspace_bytes = forward_.bytes;
    require(spattn_forward(plan_.get(), &args));
}

void Attention::backward() {
    spattn_backward_args args{};
    args.struct_size = sizeof args;
    args.q = q.view();
    args.k = k.view();
    args.v = shape.top ? nullptr : v.view();
    args.indices = indices();
    args.out = out.view();
    args.lse = lse.view();
    args.dout = dout.view();
    args.dq = dq.view();
    args.dk = dk.view();
    args.dv = shape.top ? nullptr : dv.view();
    args.workspace = backward_.memory.get();
    args.workspace_bytes = backward_.bytes;
    require(spattn_backward(plan_.get(), &args));
}

std::string Attention::kernel(Pass pass) const {
    return spattn_plan_kernel(plan_.get(), pass == Pass::forward ? SPATTN_OP_FORWARD : SPATTN_OP_BACKWARD);
}

spattn_stats Attention::stats() const {
    spattn_stats result{};
    result.struct_size = sizeof result;
    require(spattn_plan_stats(plan_.get(), &result));
    return result;
}

}  // namespace bench
