// SPDX-License-Identifier: MIT
#include "gpu/gpu.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

namespace gpu {

namespace {

constexpr int guard_byte = 0x5a;
constexpr size_t guard_elements = 512;  // before and behind

// out of 16 bits is a rounded average of rounded values; fp32 sums differ from double ones in their order alone.
double error_bound(const Case& c) {
    if (c.dtype.bits == 32) return 1e-4;
    return c.dtype.code == SPATTN_BFLOAT ? 1.6e-2 : 2e-3;
}

float round_to(const Case& c, float x) {
    return c.dtype.bits == 16 ? from_16_bits(to_16_bits(x, c.dtype), c.dtype) : x;
}

std::vector<float> normal(const Case& c, int64_t count, std::mt19937& random) {
    std::normal_distribution<float> distribution;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values) x = round_to(c, distribution(random));
    return values;
}

// [batch, heads_q, seq_q, seq_k]
std::vector<uint8_t> make_mask(const Case& c, const Pattern& pattern) {
    auto extent = abi::make_extent(c.seq_q, c.seq_k);
    extent.batch = c.batch, extent.heads = c.heads_q;
    std::vector<uint8_t> mask(size_t(c.batch * c.heads_q * c.seq_q * c.seq_k));
    const int64_t shape[4] = {c.batch, c.heads_q, c.seq_q, c.seq_k};
    spattn_tensor view{};
    view.data = mask.data(), view.device = {SPATTN_CPU, 0}, view.ndim = 4, view.dtype = abi::u8, view.shape = shape;
    succeed(spattn_pattern_to_mask(pattern.get(), &extent, &view), "mask");
    return mask;
}

// NaN where the pattern lets nobody look.
void poison(const Case& c, const std::vector<uint8_t>& mask, Truth& t) {
    const float nan = std::nanf("");
    const int64_t group = c.heads_q / c.heads_kv;
    std::vector<uint8_t> seen(size_t(c.batch * c.heads_kv * c.seq_k));
    for (int64_t plane = 0; plane < c.batch * c.heads_q; ++plane) {
        const int64_t head_kv = plane / c.heads_q * c.heads_kv + plane % c.heads_q / group;
        for (int64_t row = 0; row < c.seq_q; ++row) {
            const uint8_t* kept = &mask[size_t((plane * c.seq_q + row) * c.seq_k)];
            bool sees = false;
            for (int64_t key = 0; key < c.seq_k; ++key)
                if (kept[key]) sees = seen[size_t(head_kv * c.seq_k + key)] = 1;
            if (!sees) std::fill_n(&t.q[size_t((plane * c.seq_q + row) * c.head_dim)], c.head_dim, nan);
        }
    }
    for (size_t key = 0; key < seen.size(); ++key) {
        if (seen[key]) continue;
        std::fill_n(&t.k[key * size_t(c.head_dim)], c.head_dim, nan);
        std::fill_n(&t.v[key * size_t(c.head_dim_v)], c.head_dim_v, nan);
    }
}

// A compact BHSD tensor on the host.
struct HostTensor {
    HostTensor(std::vector<float>& values, std::vector<int64_t> sizes) : shape(std::move(sizes)) {
        view.data = values.data(), view.device = {SPATTN_CPU, 0}, view.ndim = int32_t(shape.size());
        view.dtype = abi::f32, view.shape = shape.data();
    }
    std::vector<int64_t> shape;
    spattn_tensor view{};
};

void run_reference(const Case& c, Truth& t) {
    auto problem = c.problem();
    problem.flags |= SPATTN_PLAN_REFERENCE;
    problem.dtype = abi::f32, problem.axes = SPATTN_BHSD;
    const Context context = abi::make_context();
    const Pattern pattern = abi::parse(c.pattern.c_str());
    spattn_plan* result = nullptr;
    succeed(spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, &result), "reference plan");
    const Plan plan(result);
    HostTensor q(t.q, {c.batch, c.heads_q, c.seq_q, c.head_dim}), k(t.k, {c.batch, c.heads_kv, c.seq_k, c.head_dim});
    HostTensor v(t.v, {c.batch, c.heads_kv, c.seq_k, c.head_dim_v}),
        out(t.out, {c.batch, c.heads_q, c.seq_q, c.head_dim_v});
    HostTensor lse(t.lse, {c.batch, c.heads_q, c.seq_q});
    auto args = abi::sized<spattn_forward_args>();
    args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view, args.lse = &lse.view;
    std::vector<char> workspace;
    succeed(spattn_plan_workspace(plan.get(), SPATTN_OP_FORWARD, &args.workspace_bytes, nullptr),
            "reference workspace");
    workspace.resize(args.workspace_bytes + 64);
    args.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64);
    succeed(spattn_forward(plan.get(), &args), "reference");
}

}  // namespace

void cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error));
}

uint16_t to_16_bits(float x, spattn_dtype dtype) {
    if (dtype.code == SPATTN_FLOAT) return __half_as_ushort(__float2half_rn(x));
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

float from_16_bits(uint16_t x, spattn_dtype dtype) {
    if (dtype.code == SPATTN_FLOAT) return __half2float(__ushort_as_half(x));
    return __bfloat162float(__ushort_as_bfloat16(x));
}

std::string Case::name() const {
    std::string text = pattern;
    for (int64_t n : {batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v, padding, column, shift})
        text += " " + std::to_string(n);
    constexpr const char* axes_names[] = {" bshd", " bhsd", " thd"};
    return text + (dtype.code == SPATTN_BFLOAT ? " bf16" : dtype.bits == 16 ? " f16" : " f32") + axes_names[axes];
}

spattn_problem Case::problem() const {
    auto p = abi::sized<spattn_problem>();
    p.batch = batch, p.heads_q = heads_q, p.heads_kv = heads_kv, p.seq_q = seq_q, p.seq_k = seq_k;
    p.head_dim = head_dim, p.head_dim_v = head_dim_v, p.dtype = dtype, p.axes = axes;
    if (scale != 0) p.flags |= SPATTN_PLAN_SCALE, p.scale = scale;
    return p;
}

DeviceTensor::DeviceTensor(const Case& c, int64_t heads, int64_t seq, int64_t columns, bool is_row)
    : shape_{c.batch, heads, seq, columns}, count_(size_t(c.batch * heads * seq * columns)),
      element_bytes_(is_row ? 4 : c.dtype.bits / 8), dtype_(is_row ? abi::f32 : c.dtype) {
    const bool bhsd = is_row || c.axes == SPATTN_BHSD;
    const int64_t column = is_row ? 1 : c.column, row = columns * column + c.padding;
    const int64_t inner = bhsd ? seq : heads, outer = bhsd ? heads : seq;
    strides_[3] = column, strides_[bhsd ? 2 : 1] = row, strides_[bhsd ? 1 : 2] = row * inner;
    strides_[0] = row * inner * outer;
    const int order[4] = {0, bhsd ? 1 : 2, bhsd ? 2 : 1, 3};
    for (int i = 0; i < 4; ++i) tensor_shape_[i] = shape_[order[i]], tensor_strides_[i] = strides_[order[i]];
    memory_elements_ = size_t(strides_[0] * c.batch) + 2 * guard_elements;
    cuda(cudaMalloc(&memory_, memory_elements_ * element_bytes_), "cudaMalloc");
    const size_t start = guard_elements + size_t(is_row ? 0 : c.shift);
    view_.data = static_cast<char*>(memory_) + start * element_bytes_;
    const int skipped = c.axes == SPATTN_THD;  // such tensors have no batch axis
    view_.device = {SPATTN_CUDA, 0}, view_.ndim = (is_row ? 3 : 4) - skipped;
    view_.dtype = is_row ? abi::f32 : c.dtype;
    view_.shape = tensor_shape_ + skipped, view_.strides = tensor_strides_ + skipped;
    spoil();
}

DeviceTensor::~DeviceTensor() { cudaFree(memory_); }

void DeviceTensor::spoil() { cuda(cudaMemset(memory_, guard_byte, memory_elements_ * element_bytes_), "cudaMemset"); }

size_t DeviceTensor::offset(size_t element) const {
    const size_t start = size_t(static_cast<char*>(view_.data) - static_cast<char*>(memory_)) / element_bytes_;
    int64_t rest = int64_t(element), at = 0;
    for (int axis = 3; axis >= 0; --axis) at += rest % shape_[axis] * strides_[axis], rest /= shape_[axis];
    return start + size_t(at);
}

void DeviceTensor::write(const std::vector<float>& values) {
    std::vector<char> bytes(memory_elements_ * element_bytes_, char(guard_byte));
    for (size_t i = 0; i < count_; ++i) {
        const uint16_t half = to_16_bits(values[i], dtype_);
        std::memcpy(&bytes[offset(i) * element_bytes_],
                    element_bytes_ == 2 ? static_cast<const void*>(&half) : &values[i], element_bytes_);
    }
    cuda(cudaMemcpy(memory_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
}

std::vector<float> DeviceTensor::read() const {
    std::vector<char> bytes(memory_elements_ * element_bytes_);
    cuda(cudaMemcpy(bytes.data(), memory_, bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    std::vector<float> values(count_);
    for (size_t i = 0; i < count_; ++i) {
        uint16_t half;
        std::memcpy(&half, &bytes[offset(i) * element_bytes_], 2);
        if (element_bytes_ == 2) values[i] = from_16_bits(half, dtype_);
        else std::memcpy(&values[i], &bytes[offset(i) * element_bytes_], 4);
    }
    return values;
}

bool DeviceTensor::guards_hold() const {
    std::vector<char> bytes(memory_elements_ * element_bytes_);
    cuda(cudaMemcpy(bytes.data(), memory_, bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (size_t i = 0; i < count_; ++i) std::memset(&bytes[offset(i) * element_bytes_], guard_byte, element_bytes_);
    for (char byte : bytes)
        if (byte != char(guard_byte)) return false;
    return true;
}

Truth make_truth(const Case& c, unsigned seed) {
    std::mt19937 random(seed);
    Truth t;
    t.q = normal(c, c.batch * c.heads_q * c.seq_q * c.head_dim, random);
    t.k = normal(c, c.batch * c.heads_kv * c.seq_k * c.head_dim, random);
    t.v = normal(c, c.batch * c.heads_kv * c.seq_k * c.head_dim_v, random);
    t.out.resize(size_t(c.batch * c.heads_q * c.seq_q * c.head_dim_v));
    t.lse.resize(size_t(c.batch * c.heads_q * c.seq_q));
    poison(c, make_mask(c, abi::parse(c.pattern.c_str())), t);
    run_reference(c, t);
    return t;
}

Context make_context() {
    auto options = abi::sized<spattn_context_options>();
    options.device = {SPATTN_CUDA, 0};
    options.plan_cache = -1;
    return abi::make_context(options);
}

Plan make_plan(const Context& context, const Case& c, cudaStream_t stream) {
    const Pattern pattern = abi::parse(c.pattern.c_str());
    const auto problem = c.problem();
    spattn_plan* result = nullptr;
    succeed(spattn_plan_create(context.get(), pattern.get(), &problem, stream, &result), "plan");
    return Plan(result);
}

Run::Run(const Plan& plan, const Case& c, const Truth& truth)
    : plan(plan),
      q(c, c.heads_q, c.seq_q, c.head_dim),
      k(c, c.heads_kv, c.seq_k, c.head_dim),
      v(c, c.heads_kv, c.seq_k, c.head_dim_v),
      out(c, c.heads_q, c.seq_q, c.head_dim_v),
      lse(c, c.heads_q, c.seq_q, 1, true) {
    q.write(truth.q), k.write(truth.k), v.write(truth.v);
    succeed(spattn_plan_workspace(plan.get(), SPATTN_OP_FORWARD, &workspace_bytes, nullptr), "workspace");
    if (!workspace_bytes) return;
    cuda(cudaMalloc(&workspace, workspace_bytes), "cudaMalloc");
    cuda(cudaMemset(workspace, 0xff, workspace_bytes), "cudaMemset");  // its content means nothing
}

Run::~Run() { cudaFree(workspace); }

spattn_status Run::forward(cudaStream_t stream) {
    auto args = abi::sized<spattn_forward_args>();
    args.stream = stream;
    args.q = q.view(), args.k = k.view(), args.v = v.view(), args.out = out.view(), args.lse = lse.view();
    args.workspace = workspace, args.workspace_bytes = workspace_bytes;
    return spattn_forward(plan.get(), &args);
}

void Run::demand_truth(const Case& c, const Truth& truth) const {
    const std::vector<float> out_values = out.read(), lse_values = lse.read();
    double worst = 0, worst_lse = 0;
    bool empty_rows_hold = true;
    for (size_t row = 0; row < lse_values.size(); ++row) {
        const bool is_empty = truth.lse[row] == -INFINITY;
        if (is_empty) empty_rows_hold &= lse_values[row] == -INFINITY;
        else
            worst_lse = std::fmax(worst_lse,
                                  std::isnan(lse_values[row]) ? INFINITY : std::fabs(lse_values[row] - truth.lse[row]));
        for (size_t i = row * size_t(c.head_dim_v); i < (row + 1) * size_t(c.head_dim_v); ++i) {
            if (is_empty) empty_rows_hold &= out_values[i] == 0;
            const double error =
                std::fabs(double(out_values[i]) - truth.out[i]) / std::fmax(1, std::fabs(truth.out[i]));
            worst = std::fmax(worst, std::isnan(error) ? INFINITY : error);
        }
    }
    check::context = c.name() + ": out off by " + std::to_string(worst) + ", lse by " + std::to_string(worst_lse);
    CHECK(worst <= error_bound(c));
    CHECK(worst_lse <= 1e-4);
    CHECK(empty_rows_hold);
    CHECK(out.guards_hold());
    CHECK(lse.guards_hold());
}

}  // namespace gpu
