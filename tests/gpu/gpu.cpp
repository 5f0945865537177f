// SPDX-License-Identifier: MIT
#include "gpu/gpu.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <map>
#include <random>
#include <sstream>
#include <thread>

namespace gpu {

namespace {

constexpr char guard_byte = 0x5a;
constexpr int64_t guard_elements = 512;  // before and behind

bool operator==(const spattn_dtype& a, const spattn_dtype& b) { return a.code == b.code && a.bits == b.bits; }

// ---- elements ----

// To nearest, ties to even. Steps are 2^-9 below 2^-6, and an 8th of the power of two below it from there on.
char to_float8(double x) {
    if (std::isnan(x)) return 0x7f;
    const double size = std::fmin(std::fabs(x), 448);
    const int exponent = size < 0x1p-6 ? -6 : std::ilogb(size);
    const int steps = int(std::nearbyint(std::ldexp(size, 3 - exponent)));
    return char(8 * (exponent + 6) + steps + (std::signbit(x) ? 128 : 0));
}
double from_float8(char code) { return (code & 0x80 ? -1 : 1) * abi::float8_size(code & 0x7f); }

void store(double x, spattn_dtype dtype, char* at) {
    if (dtype == abi::float8) return void(*at = to_float8(x));
    const float narrow = float(x);
    const uint16_t bits = dtype == abi::bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(narrow))
                                             : __half_as_ushort(__float2half_rn(narrow));
    if (dtype == abi::f64)
        std::memcpy(at, &x, 8);
    else if (dtype == abi::f32)
        std::memcpy(at, &narrow, 4);
    else
        std::memcpy(at, &bits, 2);
}

double load(spattn_dtype dtype, const char* at) {
    double x;
    float narrow;
    uint16_t bits;
    if (dtype == abi::float8) return from_float8(*at);
    if (dtype == abi::f64) return std::memcpy(&x, at, 8), x;
    if (dtype == abi::f32) return std::memcpy(&narrow, at, 4), narrow;
    std::memcpy(&bits, at, 2);
    return dtype == abi::bf16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}

double rounded(double x, spattn_dtype dtype) {
    char element[8];
    store(x, dtype, element);
    return load(dtype, element);
}

// ---- truths, which are made on many threads, where a CHECK would race: what fails throws ----

void demand(spattn_status status, const char* what) {
    if (status != SPATTN_OK) throw std::runtime_error(std::string(what) + ": " + spattn_last_error_text());
}

Pattern parse(const std::string& text) {
    spattn_pattern* result = nullptr;
    demand(spattn_pattern_parse(text.c_str(), &result), text.c_str());
    return Pattern(result);
}

// The scale of a row of an operand, of 4 bits, so that bfloat16 has its products with numbers of float8.
double scale_of(const Case& c, int64_t row, int64_t seq) {
    if (c.float8 == Float8::unscaled) return 1;
    const int64_t n = c.float8 == Float8::of_heads ? row / seq : row;
    return std::ldexp(double(8 + n * 5 % 8) * (n % 4 == 1 ? -1 : 1), int(n % 3) - 10);
}

void draw_inputs(const Case& c, unsigned seed, Truth& t) {
    std::mt19937 random(seed);
    const auto normal = [&](int64_t count, spattn_dtype dtype) {
        std::normal_distribution<double> distribution;
        Values values(static_cast<size_t>(count));
        for (double& x : values) x = rounded(distribution(random), dtype);
        return values;
    };
    const auto operand = [&](int64_t rows, int64_t seq, int64_t columns) {
        Values values = normal(rows * columns, c.dtype);
        for (size_t i = 0; c.float8 != Float8::no && i < values.size(); ++i) {
            const double scale = scale_of(c, int64_t(i) / columns, seq);
            values[i] = rounded(values[i] / scale, abi::float8) * scale;
        }
        return values;
    };
    const int64_t queries = c.batch * c.heads_q * c.seq_q, keys = c.batch * c.heads_kv * c.seq_k;
    t.q = operand(queries, c.seq_q, c.head_dim), t.k = operand(keys, c.seq_k, c.head_dim);
    t.v = operand(keys, c.seq_k, c.head_dim_v), t.dout = normal(queries * c.head_dim_v, c.dtype);
    t.dlse = normal(queries, abi::f32), t.sinks = normal(c.heads_q, abi::f32);
    if (c.heads_q > 1) t.sinks.back() = -INFINITY;
}

// [batch, heads_q, seq_q, seq_k]
std::vector<uint8_t> make_mask(const Case& c) {
    auto extent = abi::make_extent(c.seq_q, c.seq_k);
    extent.batch = c.batch, extent.heads = c.heads_q;
    abi::Tensor mask({c.batch, c.heads_q, c.seq_q, c.seq_k}, abi::u8);
    demand(spattn_pattern_to_mask(parse(c.pattern).get(), &extent, &mask.view), "mask");
    return mask.content();
}

// NaN and infinity where the pattern lets nobody look.
void poison(const Case& c, Truth& t) {
    const std::vector<uint8_t> mask = make_mask(c);
    std::vector<uint8_t> seen(size_t(c.batch * c.heads_kv * c.seq_k));
    int n = 0;
    const auto spoil = [&](Values& x, int64_t row, int64_t columns) {
        std::fill_n(x.begin() + row * columns, columns, n++ % 2 ? NAN : INFINITY);
    };
    for (int64_t plane = 0; plane < c.batch * c.heads_q; ++plane) {
        const int64_t head_kv = plane / c.heads_q * c.heads_kv + plane % c.heads_q / (c.heads_q / c.heads_kv);
        for (int64_t row = plane * c.seq_q; row < (plane + 1) * c.seq_q; ++row) {
            bool sees = false;
            for (int64_t key = 0; key < c.seq_k; ++key)
                if (mask[size_t(row * c.seq_k + key)]) sees = true, seen[size_t(head_kv * c.seq_k + key)] = 1;
            if (!sees) spoil(t.q, row, c.head_dim), spoil(t.dout, row, c.head_dim_v);
        }
    }
    for (int64_t key = 0; key < int64_t(seen.size()); ++key)
        if (!seen[size_t(key)]) spoil(t.k, key, c.head_dim), spoil(t.v, key, c.head_dim_v);
}

void copy_values_into_keys(const Case& c, Truth& t) {
    for (int64_t row = 0; row < c.batch * c.heads_kv * c.seq_k; ++row)
        std::copy_n(&t.k[size_t(row * c.head_dim)], c.head_dim_v, &t.v[size_t(row * c.head_dim_v)]);
}

// ---- calls ----

bool has_max_logits(const Case& c) { return c.backward || c.float8 != Float8::no; }

// The operands of a case, wherever they are, as arguments of the two passes.
template <class Operands>
spattn_forward_args forward_args(const Case& c, Operands& x) {
    auto args = abi::sized<spattn_forward_args>();
    args.q = x.q.view(), args.k = x.k.view(), args.v = c.value_in_key ? nullptr : x.v.view();
    args.out = x.out.view(), args.lse = x.lse.view(), args.max_logits = has_max_logits(c) ? x.max_logits.view() : nullptr;
    args.sink_logits = c.sinks ? x.sinks.view() : nullptr;
    return args;
}

template <class Operands>
spattn_backward_args backward_args(const Case& c, Operands& x) {
    auto args = abi::sized<spattn_backward_args>();
    args.q = x.q.view(), args.k = x.k.view(), args.v = c.value_in_key ? nullptr : x.v.view();
    args.out = x.out.view(), args.lse = x.lse.view();
    args.dout = x.dout.view(), args.dlse = c.dlse ? x.dlse.view() : nullptr;
    args.dq = x.dq.view(), args.dk = x.dk.view(), args.dv = c.value_in_key ? nullptr : x.dv.view();
    args.sink_logits = c.sinks ? x.sinks.view() : nullptr, args.dsink_logits = c.sinks ? x.dsinks.view() : nullptr;
    return args;
}

// A compact tensor on the host.
class HostTensor {
public:
    HostTensor(spattn_dtype dtype, std::vector<int64_t> sizes, const Values& values = {})
        : tensor_(std::move(sizes), dtype) {
        for (size_t i = 0; i < values.size(); ++i) store(values[i], dtype, at(i));
    }
    Values read() {
        Values values(tensor_.bytes / width());
        for (size_t i = 0; i < values.size(); ++i) values[i] = load(tensor_.view.dtype, at(i));
        return values;
    }
    const std::vector<int64_t>& shape() const { return tensor_.shape; }
    const spattn_tensor* view() const { return &tensor_.view; }

private:
    size_t width() const { return tensor_.view.dtype.bits / 8; }
    char* at(size_t i) { return reinterpret_cast<char*>(tensor_.data) + i * width(); }
    abi::Tensor tensor_;
};

struct HostOperands {
    HostOperands(const Case& c, const Truth& t)
        : q(abi::f64, {c.batch, c.heads_q, c.seq_q, c.head_dim}, t.q),
          k(abi::f64, {c.batch, c.heads_kv, c.seq_k, c.head_dim}, t.k),
          v(abi::f64, {c.batch, c.heads_kv, c.seq_k, c.head_dim_v}, t.v),
          dout(abi::f64, {c.batch, c.heads_q, c.seq_q, c.head_dim_v}, t.dout),
          dlse(abi::f32, {c.batch, c.heads_q, c.seq_q}, t.dlse),
          sinks(abi::f32, {c.heads_q}, t.sinks),
          out(abi::f64, dout.shape()),
          lse(abi::f32, dlse.shape()),
          max_logits(abi::f32, dlse.shape()),
          dq(abi::f64, q.shape()),
          dk(abi::f64, k.shape()),
          dv(abi::f64, v.shape()),
          dsinks(abi::f32, sinks.shape()) {}
    HostTensor q, k, v, dout, dlse, sinks, out, lse, max_logits, dq, dk, dv, dsinks;
};

template <class Args>
void run_on_host(spattn_status (*pass)(const spattn_plan*, const Args*), const Plan& plan, spattn_enum op, Args args) {
    demand(spattn_plan_workspace(plan.get(), op, &args.workspace_bytes, nullptr), "workspace of reference");
    abi::Tensor workspace({int64_t(args.workspace_bytes)}, abi::u8);
    args.workspace = workspace.data;
    demand(pass(plan.get(), &args), "reference");
}

Plan make_reference_plan(const Case& c, int threads) {
    auto options = abi::cpu_options();
    options.cpu_threads = threads;
    spattn_context* context = nullptr;
    demand(spattn_context_create(&options, &context), "context of reference");
    const Context owned(context);
    auto problem = c.problem();
    problem.flags |= SPATTN_PLAN_REFERENCE;
    problem.dtype = abi::f64, problem.axes = SPATTN_BHSD;
    spattn_plan* result = nullptr;
    demand(spattn_plan_create(context, parse(c.pattern).get(), &problem, nullptr, &result), "plan of reference");
    return Plan(result);
}

void run_reference(const Case& c, Truth& t, int threads) {
    const Plan plan = make_reference_plan(c, threads);
    HostOperands x(c, t);
    run_on_host(spattn_forward, plan, SPATTN_OP_FORWARD, forward_args(c, x));
    t.out = x.out.read(), t.lse = x.lse.read();
    if (has_max_logits(c)) t.max_logits = x.max_logits.read();
    if (!c.backward) return;
    run_on_host(spattn_backward, plan, SPATTN_OP_BACKWARD, backward_args(c, x));
    t.dq = x.dq.read(), t.dk = x.dk.read();
    if (!c.value_in_key) t.dv = x.dv.read();
    if (c.sinks) t.dsinks = x.dsinks.read();
}

Truth compute_truth(const Case& c, unsigned seed, int threads) {
    Truth t = make_inputs(c, seed);
    run_reference(c, t, threads);
    return t;
}

// Rows of several archs meet the same cases, and the truth of a long one takes the CPU seconds.
std::map<std::string, Truth> known_truths;

std::string exact_name(const Case& c, unsigned seed) {
    std::ostringstream name;
    name << c.name() << std::hexfloat << " " << c.scale << (c.backward ? " backward " : " forward ") << seed;
    return name.str();
}

// ---- comparisons ----

// Each operand of a product is rounded by up to 2^-11 of itself. Over a row of q and k that adds up as a random walk.
constexpr double tf32_bound = 4e-3;

double row_bound(const Case& c) { return c.tf32 ? std::fmax(c.row_bound, tf32_bound) : c.row_bound; }

// out of 16 bits is a rounded average of rounded values; fp32 sums differ from double ones in their order alone.
double element_bound(const Case& c) {
    if (c.bound != 0) return c.bound;
    if (c.tf32) return tf32_bound;
    if (c.dtype.bits == 32) return 1e-4;
    return c.dtype == abi::bf16 ? 1.6e-2 : 2e-3;
}

enum class Unit { element, largest };  // an error is measured in units of the true element, or of the tensor's largest

void compare(const std::string& what, const Values& got, const Values& truth, double bound, Unit unit) {
    double largest = 0, worst = 0;
    for (double x : truth)
        if (std::isfinite(x)) largest = std::fmax(largest, std::fabs(x));
    for (size_t i = 0; i < truth.size() && i < got.size(); ++i) {
        if (got[i] == truth[i]) continue;
        const double size = unit == Unit::largest ? largest : std::fabs(truth[i]);
        const double error = std::fabs(got[i] - truth[i]) / std::fmax(1, size);
        worst = std::fmax(worst, std::isnan(error) ? INFINITY : error);
    }
    const std::string before = check::context;
    check::context += ": " + what + " off by " + std::to_string(worst / bound) + " bounds";
    CHECK_EQ(got.size(), truth.size());
    CHECK(worst <= bound);
    check::context = before;
}

}  // namespace

void cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error));
}

void copy(void* to, const void* from, size_t bytes) {
    cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copy");
    cuda(cudaStreamSynchronize(nullptr), "copy");
}

bool is_wanted(int n) { return size_t(n) % check::every() == 0; }

std::string Case::name() const {
    std::string text = pattern;
    for (int64_t n : {batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v, padding, column, shift})
        text += " " + std::to_string(n);
    constexpr const char* axes_names[] = {" bshd", " bhsd", " thd"};
    text += (dtype.code == SPATTN_BFLOAT ? " bf" : " f") + std::to_string(dtype.bits) + axes_names[axes];
    if (softcap != 0) text += " softcap " + std::to_string(softcap);
    constexpr const char* float8_names[] = {"", " float8", " float8 with scales of heads", " float8 without scales"};
    text += float8_names[int(float8)];
    return text + (sinks ? " sinks" : "") + (dlse ? " dlse" : "") + (value_in_key ? " value_in_key" : "") +
           (deterministic ? " deterministic" : "") + (tf32 ? " tf32" : "");
}

spattn_problem Case::problem() const {
    auto p = abi::sized<spattn_problem>();
    p.batch = batch, p.heads_q = heads_q, p.heads_kv = heads_kv, p.seq_q = seq_q, p.seq_k = seq_k;
    p.head_dim = head_dim, p.head_dim_v = head_dim_v, p.axes = axes, p.softcap = softcap;
    p.dtype = float8 == Float8::no ? dtype : abi::float8;
    p.flags = (backward ? SPATTN_PLAN_BACKWARD : 0) | (sinks ? SPATTN_PLAN_SINK_LOGITS : 0) |
              (value_in_key ? SPATTN_PLAN_VALUE_IN_KEY : 0) | (deterministic ? SPATTN_PLAN_DETERMINISTIC : 0) |
              (tf32 ? SPATTN_PLAN_TF32 : 0);
    if (scale != 0) p.flags |= SPATTN_PLAN_SCALE, p.scale = scale;
    return p;
}

// ---- tensors ----

DeviceTensor::DeviceTensor(spattn_dtype dtype, Sizes sizes, Sizes strides, const std::vector<int>& axes, int64_t shift)
    : sizes_(std::move(sizes)), strides_(std::move(strides)), first_(guard_elements + shift) {
    view_.dtype = dtype;
    for (int axis : axes) shape_.push_back(sizes_[size_t(axis)]), steps_.push_back(strides_[size_t(axis)]);
    for (int64_t size : sizes_) count_ *= size_t(size);
    memory_bytes_ = size_t(sizes_[0] * strides_[0] + 2 * guard_elements) * element_bytes();
    cuda(cudaMalloc(&memory_, memory_bytes_), "cudaMalloc");
    view_.data = static_cast<char*>(memory_) + size_t(first_) * element_bytes();
    view_.device = {SPATTN_CUDA, 0}, view_.ndim = int32_t(shape_.size());
    view_.shape = shape_.data(), view_.strides = steps_.data();
    spoil();
}

namespace {

// Rows of a tensor lie in the order [batch, heads, seq] or [batch, seq, heads].
std::vector<int64_t> strides_of(const Case& c, int64_t heads, int64_t seq, int64_t columns) {
    const int64_t row = columns * c.column + c.padding;
    if (c.axes == SPATTN_BHSD) return {heads * seq * row, seq * row, row, c.column};
    return {heads * seq * row, row, heads * row, c.column};
}

std::vector<int> axes_of(const Case& c) {
    if (c.axes == SPATTN_THD) return {2, 1, 3};
    return c.axes == SPATTN_BHSD ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0, 2, 1, 3};
}

}  // namespace

DeviceTensor::DeviceTensor(const Case& c, int64_t heads, int64_t seq, int64_t columns)
    : DeviceTensor(c.dtype, {c.batch, heads, seq, columns}, strides_of(c, heads, seq, columns), axes_of(c), c.shift) {}

DeviceTensor DeviceTensor::of_operand(const Case& c, int64_t heads, int64_t seq, int64_t columns) {
    Case of_elements = c;
    if (c.float8 != Float8::no) of_elements.dtype = abi::float8;
    return {of_elements, heads, seq, columns};
}

DeviceTensor DeviceTensor::of_scales(const Case& c, int64_t heads, int64_t seq) {
    std::vector<int> axes = axes_of(c);
    axes.pop_back();
    const bool of_heads = c.float8 == Float8::of_heads;
    const Sizes strides = of_heads ? Sizes{heads, 1, 0} : Sizes{heads * seq, seq, 1};
    return {abi::f32, {c.batch, heads, seq}, strides, axes, 0};
}

DeviceTensor DeviceTensor::of_rows(const Case& c) {
    const std::vector<int> axes = c.axes == SPATTN_THD ? std::vector<int>{1, 2} : std::vector<int>{0, 1, 2};
    return {abi::f32, {c.batch, c.heads_q, c.seq_q}, {c.heads_q * c.seq_q, c.seq_q, 1}, axes, 0};
}

DeviceTensor DeviceTensor::of_heads(const Case& c) { return {abi::f32, {c.heads_q}, {1}, {0}, 0}; }

DeviceTensor::~DeviceTensor() { cudaFree(memory_); }

// Streams of their own do not wait for cudaMemset, which returns before it is done.
void DeviceTensor::spoil() {
    cuda(cudaMemset(memory_, guard_byte, memory_bytes_), "cudaMemset");
    cuda(cudaDeviceSynchronize(), "cudaMemset");
}

template <class Body>
void DeviceTensor::each_element(std::vector<char>& bytes, Body body) const {
    const size_t columns = size_t(sizes_.back()), step = size_t(strides_.back()) * element_bytes();
    for (size_t n = 0; n < count_;) {
        int64_t rest = int64_t(n / columns), first = first_;
        for (size_t axis = sizes_.size() - 1; axis-- > 0; rest /= sizes_[axis])
            first += rest % sizes_[axis] * strides_[axis];
        char* element = bytes.data() + size_t(first) * element_bytes();
        for (size_t column = 0; column < columns; ++column) body(n++, element + column * step);
    }
}

void DeviceTensor::write(const Values& values) {
    std::vector<char> bytes(memory_bytes_, guard_byte);
    each_element(bytes, [&](size_t n, char* element) { store(values[n], view_.dtype, element); });
    copy(memory_, bytes.data(), bytes.size());
}

Values DeviceTensor::read() const {
    std::vector<char> bytes(memory_bytes_);
    copy(bytes.data(), memory_, bytes.size());
    Values values(count_);
    each_element(bytes, [&](size_t n, const char* element) { values[n] = load(view_.dtype, element); });
    return values;
}

bool DeviceTensor::guards_hold() const {
    std::vector<char> bytes(memory_bytes_);
    copy(bytes.data(), memory_, bytes.size());
    each_element(bytes, [&](size_t, char* element) { std::memset(element, guard_byte, element_bytes()); });
    return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == guard_byte; });
}

// ---- runs ----

Truth make_inputs(const Case& c, unsigned seed) {
    Truth t;
    draw_inputs(c, seed, t);
    poison(c, t);
    if (c.value_in_key) copy_values_into_keys(c, t);
    return t;
}

unsigned seed_of(const Case& c) { return unsigned(c.seq_q * 131 + c.seq_k); }

const Truth& make_truth(const Case& c, unsigned seed) {
    const std::string name = exact_name(c, seed);
    const auto found = known_truths.find(name);
    if (found != known_truths.end()) return found->second;
    constexpr int all_cores = 0;
    return known_truths[name] = compute_truth(c, seed, all_cores);
}

void prepare_truths(const std::vector<Case>& cases) {
    struct Wanted {
        const Case* c;
        Truth truth;
    };
    std::map<std::string, Wanted> by_name;
    for (const Case& c : cases)
        if (const std::string name = exact_name(c, seed_of(c)); !known_truths.count(name)) by_name[name].c = &c;
    std::vector<Wanted*> wanted;
    for (auto& [name, truth] : by_name) wanted.push_back(&truth);
    std::atomic<size_t> next = 0;
    const auto work = [&] {
        for (size_t i; (i = next++) < wanted.size();)
            wanted[i]->truth = compute_truth(*wanted[i]->c, seed_of(*wanted[i]->c), 1);
    };
    std::vector<std::future<void>> workers;
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i)
        workers.push_back(std::async(std::launch::async, work));
    for (std::future<void>& worker : workers) worker.get();
    for (auto& [name, made] : by_name) known_truths[name] = std::move(made.truth);
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

Workspace::Workspace(const Plan& plan, spattn_enum op) {
    succeed(spattn_plan_workspace(plan.get(), op, &bytes, nullptr), "workspace");
    if (!bytes) return;
    cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
    cuda(cudaMemset(memory, 0xff, bytes), "cudaMemset");
}

Run::Run(const Plan& plan, const Case& c, const Truth& truth)
    : plan(plan),
      c(c),
      q(DeviceTensor::of_operand(c, c.heads_q, c.seq_q, c.head_dim)),
      k(DeviceTensor::of_operand(c, c.heads_kv, c.seq_k, c.head_dim)),
      v(DeviceTensor::of_operand(c, c.heads_kv, c.seq_k, c.head_dim_v)),
      dout(c, c.heads_q, c.seq_q, c.head_dim_v),
      dlse(DeviceTensor::of_rows(c)),
      sinks(DeviceTensor::of_heads(c)),
      out(c, c.heads_q, c.seq_q, c.head_dim_v),
      lse(DeviceTensor::of_rows(c)),
      max_logits(DeviceTensor::of_rows(c)),
      dq(c, c.heads_q, c.seq_q, c.head_dim),
      dk(c, c.heads_kv, c.seq_k, c.head_dim),
      dv(c, c.heads_kv, c.seq_k, c.head_dim_v),
      dsinks(DeviceTensor::of_heads(c)),
      q_scales(DeviceTensor::of_scales(c, c.heads_q, c.seq_q)),
      k_scales(DeviceTensor::of_scales(c, c.heads_kv, c.seq_k)),
      v_scales(DeviceTensor::of_scales(c, c.heads_kv, c.seq_k)),
      forward_workspace(plan, SPATTN_OP_FORWARD) {
    if (c.backward) backward_workspace.emplace(plan, SPATTN_OP_BACKWARD);
    write_operand(q, q_scales, truth.q, c.seq_q, c.head_dim);
    write_operand(k, k_scales, truth.k, c.seq_k, c.head_dim);
    write_operand(v, v_scales, truth.v, c.seq_k, c.head_dim_v);
    dout.write(truth.dout), dlse.write(truth.dlse), sinks.write(truth.sinks);
}

// float8 has no infinity: a row of them has such a scale, or NaN where it has none of its own.
void Run::write_operand(DeviceTensor& to, DeviceTensor& scales, const Values& values, int64_t seq, int64_t columns) {
    if (c.float8 == Float8::no) return to.write(values);
    Values codes(values), of_rows(values.size() / size_t(columns));
    for (size_t row = 0; row < of_rows.size(); ++row) {
        const bool is_infinite = std::isinf(values[row * size_t(columns)]);
        const bool has_own = c.float8 == Float8::of_rows;
        const double scale = is_infinite && has_own ? INFINITY : scale_of(c, int64_t(row), seq);
        of_rows[row] = scale;
        for (size_t i = row * size_t(columns); i < (row + 1) * size_t(columns); ++i)
            codes[i] = !is_infinite ? values[i] / scale : has_own ? std::copysign(1, values[i]) : NAN;
    }
    to.write(codes), scales.write(of_rows);
}

template <class Args>
void Run::bring_scales(Args& args) {
    if (c.float8 != Float8::of_rows && c.float8 != Float8::of_heads) return;
    args.q_scales = q_scales.view(), args.k_scales = k_scales.view();
    args.v_scales = c.value_in_key ? nullptr : v_scales.view();
}

spattn_status Run::forward(cudaStream_t stream, const spattn_tensor* indices) {
    auto args = forward_args(c, *this);
    args.indices = indices;
    bring_scales(args);
    args.stream = stream, args.workspace = forward_workspace.memory, args.workspace_bytes = forward_workspace.bytes;
    return spattn_forward(plan.get(), &args);
}

spattn_status Run::backward(cudaStream_t stream, const spattn_tensor* indices) {
    auto args = backward_args(c, *this);
    args.indices = indices;
    bring_scales(args);
    args.stream = stream, args.workspace = backward_workspace->memory, args.workspace_bytes = backward_workspace->bytes;
    return spattn_backward(plan.get(), &args);
}

void Run::both_passes() {
    succeed(forward(), "forward");
    if (c.backward) succeed(backward(), "backward");
    cuda(cudaDeviceSynchronize(), "run");
}

void Run::demand_truth(const Truth& truth) const {
    check::context = c.name();
    const double bound = element_bound(c);
    const Values got_out = out.read();
    compare("out", got_out, truth.out, bound, Unit::element);
    compare("lse", lse.read(), truth.lse, row_bound(c), Unit::element);
    bool empty_rows_hold = true;
    for (size_t i = 0; i < got_out.size(); ++i)
        if (truth.lse[i / size_t(c.head_dim_v)] == -INFINITY) empty_rows_hold &= got_out[i] == 0;
    CHECK(empty_rows_hold);
    // Where nothing is kept all is exactly 0. (A query that sees one key has a dq of 0, too, but by rounding.)
    const auto is_zero = [](const Values& x) {
        return std::all_of(x.begin(), x.end(), [](double y) { return y == 0; });
    };
    if (is_zero(truth.out)) {
        CHECK(is_zero(got_out));
        for (const DeviceTensor* x : {&dq, &dk, &dv})
            CHECK(!c.backward || (x == &dv && c.value_in_key) || is_zero(x->read()));
    }
    if (has_max_logits(c)) compare("max_logits", max_logits.read(), truth.max_logits, row_bound(c), Unit::element);
    if (c.backward) {
        const double least_bound = std::fmax(bound, 2e-6);  // of float32, whatever the other tensors are
        compare("dq", dq.read(), truth.dq, bound, Unit::largest);
        compare("dk", dk.read(), truth.dk, bound, Unit::largest);
        if (!c.value_in_key) compare("dv", dv.read(), truth.dv, bound, Unit::largest);
        // Each row brings the rounding of its out, and they add up as a random walk does.
        const double sum_bound = least_bound * std::fmax(1, std::sqrt(double(c.batch * c.seq_q)) / 2);
        if (c.sinks) compare("dsinks", dsinks.read(), truth.dsinks, sum_bound, Unit::largest);
    }
    for (const DeviceTensor* x : {&out, &lse, &max_logits, &dq, &dk, &dv, &dsinks}) CHECK(x->guards_hold());
}

}  // namespace gpu
