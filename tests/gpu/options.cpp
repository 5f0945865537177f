// SPDX-License-Identifier: MIT
// The plain CUDA rows, forward and backward, against the double-precision rows of the CPU: every dtype, options of the
// header, orders of the layout, values that nobody may look at.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "gpu/gpu.h"

using namespace gpu;

namespace {

constexpr spattn_dtype f16{SPATTN_FLOAT, 16, 1};
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

struct Kind {
    const char* name;
    spattn_dtype dtype;
    double bound;  // of an error, in units of the largest number of a tensor, or of 1
};
constexpr Kind kinds[] = {
    {"f32", abi::f32, 2e-5}, {"f16", f16, 4e-3}, {"bf16", abi::bf16, 3e-2}, {"f64", abi::f64, 1e-11}};

struct Trial {
    std::string pattern = "causal";
    int64_t batch = 1, heads_q = 2, heads_kv = 1, seq_q = 100, seq_k = 100, head_dim = 32, head_dim_v = 32;
    spattn_enum axes = SPATTN_BHSD;
    int64_t padding = 0, column = 1;  // elements between rows; stride of the last axis
    double softcap = 0;
    bool sinks = false, dlse = false, value_in_key = false, hostile = false;
    Kind kind = kinds[0];
    int block = 64;           // of the rows that run it

    std::string name() const {
        std::string text = pattern + " " + kind.name + " in blocks of " + std::to_string(block) + ":";
        for (int64_t n : {batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v, int64_t(axes), padding, column})
            text += " " + std::to_string(n);
        if (softcap != 0) text += " softcap " + std::to_string(softcap);
        return text + (sinks ? " sinks" : "") + (dlse ? " dlse" : "") + (value_in_key ? " value_in_key" : "");
    }
    spattn_problem problem() const {
        auto p = abi::sized<spattn_problem>();
        p.flags = SPATTN_PLAN_BACKWARD | (sinks ? SPATTN_PLAN_SINK_LOGITS : 0) |
                  (value_in_key ? SPATTN_PLAN_VALUE_IN_KEY : 0);
        p.batch = batch, p.heads_q = heads_q, p.heads_kv = heads_kv, p.seq_q = seq_q, p.seq_k = seq_k;
        p.head_dim = head_dim, p.head_dim_v = head_dim_v, p.dtype = kind.dtype, p.axes = axes, p.softcap = softcap;
        return p;
    }
};

using Values = std::vector<double>;

bool operator==(const spattn_dtype& a, const spattn_dtype& b) { return a.code == b.code && a.bits == b.bits; }

double rounded(spattn_dtype dtype, double x) {
    if (dtype == abi::f64) return x;
    if (dtype == abi::f32) return float(x);
    return dtype == abi::bf16 ? float(__nv_bfloat16(float(x))) : float(__half(float(x)));
}

// [batch, heads, seq, columns] in device memory, or on the host for the truth, with guard bytes wherever no element is.
class Operand {
public:
    Operand(const Trial& t, spattn_dtype dtype, int64_t heads, int64_t seq, int64_t columns, bool on_host)
        : dtype_(dtype), on_host_(on_host), is_row_(columns == 0) {
        const bool plain = on_host || is_row_;
        const spattn_enum axes = plain ? spattn_enum(SPATTN_BHSD) : t.axes;
        const int64_t width = std::max<int64_t>(columns, 1), column = plain ? 1 : t.column;
        const int64_t row = width * column + (plain ? 0 : t.padding);
        const bool heads_first = axes == SPATTN_BHSD;
        sizes_ = {t.batch, heads, seq, width};
        steps_ = {heads * seq * row, heads_first ? seq * row : row, heads_first ? row : heads * row, column};
        bytes_.assign(size_t(t.batch * heads * seq * row) * size_t(dtype.bits / 8) + 2 * guard, guard_byte);
        memory_ = bytes_.data();
        if (!on_host) cuda(cudaMalloc(&device_, bytes_.size()), "cudaMalloc"), memory_ = device_;
        std::vector<int> order = heads_first ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0, 2, 1, 3};
        if (axes == SPATTN_THD) order.erase(order.begin());
        if (is_row_ && t.axes == SPATTN_THD && !on_host) order.erase(order.begin());
        if (is_row_) order.pop_back();
        for (int axis : order) shape_.push_back(sizes_[size_t(axis)]), strides_.push_back(steps_[size_t(axis)]);
        view_.data = static_cast<char*>(memory_) + guard, view_.dtype = dtype;
        view_.device = {on_host ? SPATTN_CPU : SPATTN_CUDA, 0};
        view_.ndim = int32_t(shape_.size()), view_.shape = shape_.data(), view_.strides = strides_.data();
        send();
    }
    ~Operand() { cudaFree(device_); }
    Operand(const Operand&) = delete;

    void write(const Values& values) {
        each([&](size_t i, char* at) { write(values[i], at); });
        send();
    }
    Values read() {
        receive();
        Values values(size_t(sizes_[0] * sizes_[1] * sizes_[2] * sizes_[3]));
        each([&](size_t i, char* at) { values[i] = read(at); });
        return values;
    }
    bool guards_hold() {
        receive();
        std::vector<char> rest = bytes_;
        each([&](size_t, char* at) { std::memset(rest.data() + (at - bytes_.data()), guard_byte, dtype_.bits / 8); });
        return std::all_of(rest.begin(), rest.end(), [](char byte) { return byte == guard_byte; });
    }
    const spattn_tensor* view() const { return &view_; }

private:
    static constexpr size_t guard = 512;
    static constexpr char guard_byte = 0x5a;

    void send() {
        if (!on_host_) cuda(cudaMemcpy(device_, bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
    }
    void receive() {
        if (!on_host_) cuda(cudaMemcpy(bytes_.data(), device_, bytes_.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    }
    template <class Body>
    void each(Body body) {
        size_t i = 0;
        for (int64_t b = 0; b < sizes_[0]; ++b)
            for (int64_t h = 0; h < sizes_[1]; ++h)
                for (int64_t s = 0; s < sizes_[2]; ++s)
                    for (int64_t c = 0; c < sizes_[3]; ++c) {
                        const int64_t at = b * steps_[0] + h * steps_[1] + s * steps_[2] + c * steps_[3];
                        body(i++, bytes_.data() + guard + size_t(at) * (dtype_.bits / 8));
                    }
    }
    void write(double x, char* at) const {
        const float narrow = float(x);
        if (dtype_ == abi::f64) std::memcpy(at, &x, 8);
        else if (dtype_ == abi::f32) std::memcpy(at, &narrow, 4);
        else {
            const uint16_t bits = dtype_ == abi::bf16 ? __bfloat16_as_ushort(__float2bfloat16(narrow))
                                                      : __half_as_ushort(__float2half(narrow));
            std::memcpy(at, &bits, 2);
        }
    }
    double read(const char* at) const {
        double x;
        float narrow;
        uint16_t bits;
        if (dtype_ == abi::f64) return std::memcpy(&x, at, 8), x;
        if (dtype_ == abi::f32) return std::memcpy(&narrow, at, 4), narrow;
        std::memcpy(&bits, at, 2);
        if (dtype_ == abi::bf16) return __bfloat162float(__ushort_as_bfloat16(bits));
        return __half2float(__ushort_as_half(bits));
    }

    spattn_dtype dtype_;
    bool on_host_, is_row_;
    std::vector<int64_t> sizes_, steps_, shape_, strides_;
    std::vector<char> bytes_;
    void *device_ = nullptr, *memory_;
    spattn_tensor view_{};
};

// A tensor [heads] of float32.
struct HeadTensor {
    HeadTensor(int64_t heads, const Values& values, bool on_host) : shape(heads), host(values.begin(), values.end()) {
        host.resize(size_t(heads));
        view.data = host.data(), view.device = {on_host ? SPATTN_CPU : SPATTN_CUDA, 0}, view.ndim = 1;
        view.dtype = abi::f32, view.shape = &shape;
        if (on_host) return;
        cuda(cudaMalloc(&memory, host.size() * 4), "cudaMalloc"), view.data = memory;
        cuda(cudaMemcpy(memory, host.data(), host.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    }
    ~HeadTensor() { cudaFree(memory); }
    Values read() {
        if (memory) cuda(cudaMemcpy(host.data(), memory, host.size() * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
        return {host.begin(), host.end()};
    }
    int64_t shape;
    std::vector<float> host;
    void* memory = nullptr;
    spattn_tensor view{};
};

struct Inputs {
    Values q, k, v, dout, dlse, sinks;
};
struct Results {
    Values out, lse, max_logits, dq, dk, dv, dsinks;
    bool guards_hold = true;
};

class Force {
public:
    explicit Force(const std::string& kernels) { setenv("SPATTN_FORCE_KERNEL", kernels.c_str(), 1); }
    ~Force() { unsetenv("SPATTN_FORCE_KERNEL"); }
};

// The pair of rows for a kind and a block.
std::string rows_of(const Kind& kind, int block) {
    const std::string tail = std::string(kind.name) + "_" + std::to_string(block) + "x" + std::to_string(block);
    return "any_block_forward_" + tail + ",any_block_backward_" + tail;
}

// Both passes of a trial on one device.
Results run(const Trial& t, const Inputs& in, const Context& context, bool on_host) {
    auto problem = t.problem();
    const spattn_dtype dtype = on_host ? abi::f64 : t.kind.dtype;
    if (on_host) problem.flags |= SPATTN_PLAN_REFERENCE, problem.dtype = dtype, problem.axes = SPATTN_BHSD;
    const Pattern pattern = abi::parse(t.pattern.c_str());
    const Force force(on_host ? "" : rows_of(t.kind, t.block));
    const Plan plan = abi::make_plan(context.get(), pattern.get(), problem);
    Results results;
    if (!plan) return results;
    const auto queries = [&](int64_t columns) {
        return std::make_unique<Operand>(t, dtype, t.heads_q, t.seq_q, columns, on_host);
    };
    const auto keys = [&](int64_t columns) {
        return std::make_unique<Operand>(t, dtype, t.heads_kv, t.seq_k, columns, on_host);
    };
    const auto rows = [&] { return std::make_unique<Operand>(t, abi::f32, t.heads_q, t.seq_q, 0, on_host); };
    const auto q = queries(t.head_dim), k = keys(t.head_dim), v = keys(t.head_dim_v), out = queries(t.head_dim_v);
    const auto dout = queries(t.head_dim_v), dq = queries(t.head_dim), dk = keys(t.head_dim), dv = keys(t.head_dim_v);
    const auto lse = rows(), max_logits = rows(), dlse = rows();
    HeadTensor sinks(t.heads_q, in.sinks, on_host), dsinks(t.heads_q, {}, on_host);
    q->write(in.q), k->write(in.k), v->write(in.v), dout->write(in.dout), dlse->write(in.dlse);

    const auto with_workspace = [&](spattn_enum op, auto body) {
        size_t bytes = 0;
        succeed(spattn_plan_workspace(plan.get(), op, &bytes, nullptr), "workspace");
        if (on_host) {
            std::vector<char> memory(bytes + 64);
            return body(memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64), bytes);
        }
        void* memory = nullptr;
        if (bytes) cuda(cudaMalloc(&memory, bytes), "cudaMalloc"), cuda(cudaMemset(memory, 0xff, bytes), "cudaMemset");
        body(memory, bytes);
        cuda(cudaDeviceSynchronize(), "run");
        cudaFree(memory);
    };
    with_workspace(SPATTN_OP_FORWARD, [&](void* memory, size_t bytes) {
        auto args = abi::sized<spattn_forward_args>();
        args.q = q->view(), args.k = k->view(), args.v = t.value_in_key ? nullptr : v->view(), args.out = out->view();
        args.lse = lse->view(), args.max_logits = max_logits->view();
        args.sink_logits = t.sinks ? &sinks.view : nullptr;
        args.workspace = memory, args.workspace_bytes = bytes;
        succeed(spattn_forward(plan.get(), &args), "forward");
    });
    with_workspace(SPATTN_OP_BACKWARD, [&](void* memory, size_t bytes) {
        auto args = abi::sized<spattn_backward_args>();
        args.q = q->view(), args.k = k->view(), args.v = t.value_in_key ? nullptr : v->view(), args.out = out->view();
        args.lse = lse->view(), args.dout = dout->view(), args.dlse = t.dlse ? dlse->view() : nullptr;
        args.dq = dq->view(), args.dk = dk->view(), args.dv = t.value_in_key ? nullptr : dv->view();
        args.sink_logits = t.sinks ? &sinks.view : nullptr, args.dsink_logits = t.sinks ? &dsinks.view : nullptr;
        args.workspace = memory, args.workspace_bytes = bytes;
        succeed(spattn_backward(plan.get(), &args), "backward");
    });
    for (Operand* x : {out.get(), lse.get(), max_logits.get(), dq.get(), dk.get(), dv.get()})
        results.guards_hold &= x->guards_hold();
    results.out = out->read(), results.lse = lse->read(), results.max_logits = max_logits->read();
    results.dq = dq->read(), results.dk = dk->read();
    if (!t.value_in_key) results.dv = dv->read();
    if (t.sinks) results.dsinks = dsinks.read();
    return results;
}

// ---- inputs ----
Inputs make_inputs(const Trial& t, unsigned seed) {
    std::mt19937 random(seed);
    const auto normal = [&](int64_t count, spattn_dtype dtype) {
        std::normal_distribution<double> distribution;
        Values values(static_cast<size_t>(count));
        for (double& x : values) x = rounded(dtype, distribution(random));
        return values;
    };
    const int64_t rows_q = t.batch * t.heads_q * t.seq_q, rows_k = t.batch * t.heads_kv * t.seq_k;
    Inputs in{normal(rows_q * t.head_dim, t.kind.dtype),   normal(rows_k * t.head_dim, t.kind.dtype),
              normal(rows_k * t.head_dim_v, t.kind.dtype), normal(rows_q * t.head_dim_v, t.kind.dtype),
              normal(rows_q, abi::f32),                    normal(t.heads_q, abi::f32)};
    if (t.sinks && t.heads_q > 1) in.sinks.back() = -infinity;
    return in;
}

// [batch, heads_q, seq_q, seq_k]
std::vector<uint8_t> make_mask(const Trial& t) {
    auto extent = abi::make_extent(t.seq_q, t.seq_k);
    extent.batch = t.batch, extent.heads = t.heads_q;
    abi::Tensor mask({t.batch, t.heads_q, t.seq_q, t.seq_k}, abi::u8);
    succeed(spattn_pattern_to_mask(abi::parse(t.pattern.c_str()).get(), &extent, &mask.view), "mask");
    return mask.content();
}

// NaN and infinity where the pattern lets nobody look.
void poison(const Trial& t, Inputs& in) {
    const std::vector<uint8_t> mask = make_mask(t);
    std::vector<uint8_t> seen(size_t(t.batch * t.heads_kv * t.seq_k));
    int n = 0;
    const auto spoil = [&](Values& x, size_t row, int64_t columns) {
        std::fill_n(x.begin() + int64_t(row) * columns, columns, n++ % 2 ? not_a_number : infinity);
    };
    for (int64_t plane = 0; plane < t.batch * t.heads_q; ++plane)
        for (int64_t i = 0; i < t.seq_q; ++i) {
            const size_t row = size_t(plane * t.seq_q + i);
            const int64_t head_kv = plane / t.heads_q * t.heads_kv + plane % t.heads_q / (t.heads_q / t.heads_kv);
            bool sees = false;
            for (int64_t key = 0; key < t.seq_k; ++key)
                if (mask[row * size_t(t.seq_k) + size_t(key)]) sees = seen[size_t(head_kv * t.seq_k + key)] = 1;
            if (!sees) spoil(in.q, row, t.head_dim), spoil(in.dout, row, t.head_dim_v);
        }
    for (size_t key = 0; key < seen.size(); ++key)
        if (!seen[key]) spoil(in.k, key, t.head_dim), spoil(in.v, key, t.head_dim_v);
}

void copy_values_into_keys(const Trial& t, Inputs& in) {
    for (int64_t row = 0; row < t.batch * t.heads_kv * t.seq_k; ++row)
        for (int64_t c = 0; c < t.head_dim_v; ++c)
            in.v[size_t(row * t.head_dim_v + c)] = in.k[size_t(row * t.head_dim + c)];
}

// ---- comparisons ----
void compare(const char* what, const Values& got, const Values& truth, double bound) {
    double most = 1, worst = 0;
    for (double x : truth)
        if (std::isfinite(x)) most = std::fmax(most, std::fabs(x));
    for (size_t i = 0; i < truth.size() && i < got.size(); ++i) {
        const double error = got[i] == truth[i] ? 0 : std::fabs(got[i] - truth[i]) / most;
        worst = std::fmax(worst, std::isnan(error) ? infinity : error);
        if (truth[i] == 0 && std::all_of(truth.begin(), truth.end(), [](double x) { return x == 0; }) && got[i] != 0)
            worst = infinity;  // exactly zero where nothing is kept
    }
    const std::string before = check::context;
    check::context += std::string(": ") + what + " off by " + std::to_string(worst / bound) + " bounds";
    CHECK(got.size() == truth.size());
    CHECK(worst <= bound);
    check::context = before;
}

void demand_truth(const Trial& t, const Context& gpu_context) {
    check::context = t.name();
    Inputs in = make_inputs(t, unsigned(t.seq_q * 131 + t.seq_k));
    poison(t, in);
    if (t.value_in_key) copy_values_into_keys(t, in);
    Trial narrow = t;
    narrow.axes = SPATTN_BHSD;
    const Results truth = run(narrow, in, abi::make_context(), true), got = run(t, in, gpu_context, false);
    const double rows_bound = std::fmax(t.kind.bound, 2e-6);  // float32 tensors
    compare("out", got.out, truth.out, t.kind.bound), compare("lse", got.lse, truth.lse, 5e-6);
    compare("max_logits", got.max_logits, truth.max_logits, 5e-6);
    compare("dq", got.dq, truth.dq, t.kind.bound), compare("dk", got.dk, truth.dk, t.kind.bound);
    compare("dv", got.dv, truth.dv, t.kind.bound), compare("dsinks", got.dsinks, truth.dsinks, rows_bound);
    CHECK(got.guards_hold);
}

// SPATTN_TEST_EVERY=n runs one case of n: under tools that slow every access down.
bool is_wanted(int n) {
    const char* given = std::getenv("SPATTN_TEST_EVERY");
    return n % (given ? std::max(1, std::atoi(given)) : 1) == 0;
}

// Blocks, residue classes, tiles of packed and of listed tokens, unions in pieces.
const char* const patterns[] = {"full",
                                "causal",
                                "causal & (sink(5) | window(20,0))",
                                "window(3,40)",
                                "residue(3,1)",
                                "dilated(60,60,4)",
                                "dilated(40,0,3) | sink(3)",
                                "global_tokens(0,31,57,90) | window(8,8)",
                                "logsparse",
                                "strided(16) | window(4,4)",
                                "documents(0,1,30,31,90)",
                                "causal - causal",
                                "bigbird(16,1,1,1,3)",
                                "landmark(16,1) & causal",
                                "causal & strided(8) | block_diagonal(16)"};

}  // namespace

TEST(options_of_all_plain_rows) {
    NEEDS_GPU();
    const Context context = make_context();
    const int64_t dims[][2] = {{32, 32}, {1, 1}, {7, 3}, {64, 80}, {130, 40}, {300, 129}};
    const int64_t lengths[][2] = {{100, 100}, {63, 130}, {129, 70}, {1, 1}};
    int n = 0;
    for (const Kind& kind : kinds)
        for (int block : {64, 32, 16})
            for (const char* pattern : patterns) {
                if (!is_wanted(++n)) continue;
                Trial t;
                t.kind = kind, t.pattern = pattern;
                t.head_dim = dims[n % 6][0], t.head_dim_v = dims[n % 6][1];
                t.seq_q = lengths[n % 4][0], t.seq_k = lengths[n % 4][1];
                t.batch = 1 + n % 2, t.heads_q = n % 3 ? 4 : 3, t.heads_kv = n % 3 ? 2 : 1;
                t.axes = t.batch == 1 && n % 5 == 0 ? SPATTN_THD : n % 5 < 3 ? SPATTN_BHSD : SPATTN_BSHD;
                t.padding = n % 7 == 0 ? 3 : 0, t.column = n % 4 == 1 ? 2 : 1;
                t.softcap = n % 3 == 1 ? 1.5 : 0, t.sinks = n % 4 == 2, t.dlse = n % 2;
                t.block = block;
                demand_truth(t, context);
            }
}

TEST(values_in_keys) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const Kind& kind : kinds) {
        Trial t;
        t.kind = kind, t.value_in_key = true, t.head_dim = 72, t.head_dim_v = 40;
        demand_truth(t, context);
        t.head_dim_v = 72, t.pattern = "dilated(60,60,4)";
        demand_truth(t, context);
    }
}

// Lengths that split rows and columns.
TEST(split_rows_and_columns) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const Kind& kind : kinds) {
        Trial t;
        t.kind = kind, t.heads_q = 2, t.heads_kv = 1, t.seq_q = t.seq_k = 1200, t.head_dim = t.head_dim_v = 8;
        t.pattern = "causal & (global_tokens(3,1190,1199) | window(20,0))", t.sinks = true;
        t.block = 16;
        demand_truth(t, context);
    }
}

// What one document holds does not change a bit of another's results, and no call differs from another.
TEST(isolation) {
    NEEDS_GPU();
    const Context context = make_context();
    for (const Kind& kind : kinds)
        for (const char* pattern : {"documents(0,40,100)", "documents(0,40,100) & causal"}) {
            Trial t;
            t.kind = kind, t.pattern = pattern, t.heads_q = 4, t.heads_kv = 2, t.dlse = true;
            check::context = t.name();
            t.block = kind.dtype.bits == 16 ? 64 : 32;
            Inputs in = make_inputs(t, 5);
            const Results before = run(t, in, context, false), again = run(t, in, context, false);
            for (auto part : {&Results::out, &Results::lse, &Results::dq, &Results::dk, &Results::dv})
                CHECK(before.*part == again.*part);
            const auto spoil = [&](Values& x, int64_t heads, int64_t columns) {
                for (int64_t h = 0; h < heads; ++h)
                    for (int64_t i = 40 * columns; i < 100 * columns; ++i)
                        x[size_t(h * 100 * columns + i)] = i % 3 == 0 ? not_a_number : (i % 3 - 1.5) * infinity;
            };
            spoil(in.q, 4, 32), spoil(in.k, 2, 32), spoil(in.v, 2, 32), spoil(in.dout, 4, 32);
            const Results after = run(t, in, context, false);
            const auto demand_same = [&](const char* what, const Values& a, const Values& b, int64_t heads,
                                         int64_t columns) {
                check::context = t.name() + ": " + what;
                bool same = true;
                for (int64_t h = 0; h < heads; ++h)
                    for (int64_t i = 0; i < 40 * columns; ++i)
                        same &= a[size_t(h * 100 * columns + i)] == b[size_t(h * 100 * columns + i)];
                CHECK(same);
            };
            demand_same("out", before.out, after.out, 4, 32), demand_same("lse", before.lse, after.lse, 4, 1);
            demand_same("dq", before.dq, after.dq, 4, 32), demand_same("dk", before.dk, after.dk, 2, 32);
            demand_same("dv", before.dv, after.dv, 2, 32);
        }
}
