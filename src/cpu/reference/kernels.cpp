// SPDX-License-Identifier: MIT
// The truth: dense loops in double over the token rows of the pattern. No layout, no blocks, no cleverness: what every
// other row is tested against. Slow, and the one kind of row that may allocate while it runs (what a row sees).
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "plan/kernel.h"

namespace spattn::cpu::reference {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};
double read(double x) { return x; }
double read(float x) { return x; }
double read(Bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}
double read_float8(uint8_t x) {
    const double sign = x & 0x80 ? -1 : 1;
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
    return sign * (exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9));
}
double read(F16 x) {
    const double sign = x.bits & 0x8000 ? -1 : 1;
    const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
    if (exponent == 31) return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * infinity;
    return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}
void write(double x, double& to) { to = x; }
void write(double x, float& to) { to = float(x); }
// Rounded once, from double, to nearest even: through float it could be rounded twice. Half of a unit beyond what is
// kept, or just the kept bits, decide.
void write(double x, Bf16& to) {
    float below = float(x);
    if (std::abs(double(below)) > std::abs(x)) below = std::nextafter(below, 0.f);
    uint32_t bits;
    std::memcpy(&bits, &below, sizeof bits);
    if (std::isnan(x)) return void(to.bits = uint16_t(bits >> 16 | 0x40));
    if (double(below) != x) bits |= 1;  // sticky: not a tie
    to.bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// Units of the last place are 2^-24 up to 2^-13, and double with every power of two beyond. What rounds to 2048 units
// has the next exponent, for a carry out of the mantissa adds one to it.
void write(double x, F16& to) {
    const int exponent = std::max(std::ilogb(x), -14);
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return void(to.bits = sign | 0x7e00);
    if (std::abs(x) >= 65520) return void(to.bits = sign | 0x7c00);
    const auto units = uint16_t(std::nearbyint(std::ldexp(std::abs(x), 10 - exponent)));
    to.bits = uint16_t(sign | (((exponent + 14) << 10) + units));
}

template <class T>
T& at(const TensorView& x, int64_t batch, int64_t head, int64_t row, int64_t column = 0) {
    return static_cast<T*>(x.data)[batch * x.batch + head * x.head + row * x.row + column * x.column];
}

double logit(const TensorView& sink_logits, int64_t head) {
    return sink_logits.data ? at<float>(sink_logits, 0, head, 0) : -infinity;
}

// One query row: the keys it sees, and its p. A key that a call lists twice is seen twice.
template <class T>
struct Row {
    const Problem& p;
    const TokenRows& pattern;
    TensorView q, k, v, sink_logits, k_scales{}, v_scales{};
    std::vector<double> s{};      // for each key that is seen
    std::vector<int64_t> seen{};  // begin0, end0, begin1, ...
    int64_t batch = 0, head = 0, head_kv = 0, row = 0;
    double lse = 0, max_logit = 0;

    // body(key, s of this key)
    template <class Body>
    void each_key(Body body) {
        size_t n = 0;
        for (size_t i = 0; i < seen.size(); i += 2)
            for (int64_t key = seen[i]; key < seen[i + 1]; ++key) body(key, s[n++]);
    }

    double score(int64_t key) const {  // scale q k
        double dot = 0;
        for (int64_t c = 0; c < p.head_dim; ++c)
            dot += read(at<T>(q, batch, head, row, c)) * element(k, k_scales, key, c);
        return p.scale * dot;
    }

    // An element of k or v, and what it stands for.
    double element(const TensorView& x, const TensorView& scales, int64_t key, int64_t column) const {
        if (!p.float8_cache) return read(at<T>(x, batch, head_kv, key, column));
        const double scale = scales.data ? at<float>(scales, batch, head_kv, key) : 1;
        return scale * read_float8(at<uint8_t>(x, batch, head_kv, key, column));
    }

    // d s / d score, where s = softcap tanh(score / softcap)
    double slope(int64_t key) const {
        if (p.softcap == 0) return 1;
        const double cosh = std::cosh(score(key) / p.softcap);
        return 1 / (cosh * cosh);
    }

    // s = score, or capped; p = exp(s - lse); the sink's score is z. lse = -inf where there is neither key nor sink. A
    // score of -inf is as good as a key that is not seen.
    void softmax(int64_t b, int64_t h, int64_t i) {
        batch = b, head = h, head_kv = h / p.group(), row = i;
        seen.clear();
        pattern.keys(b, h, i, seen);
        const double z = logit(sink_logits, h);
        size_t count = 0;
        for (size_t n = 0; n < seen.size(); n += 2) count += size_t(seen[n + 1] - seen[n]);
        s.resize(count);
        max_logit = -infinity;
        each_key([&](int64_t key, double& x) {
            x = p.softcap == 0 ? score(key) : p.softcap * std::tanh(score(key) / p.softcap);
            max_logit = std::max(max_logit, x);
        });
        const double m = std::max(max_logit, z);
        double l = z == -infinity ? 0 : std::exp(z - m);
        for (double& x : s) l += x = x == -infinity ? 0 : std::exp(x - m);
        for (double& x : s) x = l == 0 ? 0 : x / l;
        lse = max_logit == -infinity && !std::isnan(l) ? z : m + std::log(l);
    }
};

struct Call {
    const void* args;
    int64_t next, lane_doubles;
};

// Who works on which row, or kv head, next; beyond every end where the call is cancelled.
int64_t next_of(Call& call, Parallel& parallel) {
    return parallel.is_cancelled() ? INT64_MAX : __atomic_fetch_add(&call.next, 1, __ATOMIC_RELAXED);
}

template <class T>
void forward_lane(void* argument, int64_t lane) {
    Call& call = *static_cast<Call*>(argument);
    const ForwardArgs& a = *static_cast<const ForwardArgs*>(call.args);
    const Problem& p = *a.problem;
    double* out = static_cast<double*>(a.workspace) + lane * call.lane_doubles;
    Row<T> row{p, *a.rows, a.q, a.k, a.v, a.sink_logits, a.k_scales, a.v_scales};
    for (int64_t n; (n = next_of(call, *a.parallel)) < p.batch * p.heads_q * p.seq_q;) {
        row.softmax(n / p.seq_q / p.heads_q, n / p.seq_q % p.heads_q, n % p.seq_q);
        std::fill(out, out + p.head_dim_v, 0.0);
        row.each_key([&](int64_t key, double x) {
            for (int64_t c = 0; c < p.head_dim_v; ++c) out[c] += x * row.element(a.v, a.v_scales, key, c);
        });
        for (int64_t c = 0; c < p.head_dim_v; ++c) write(out[c], at<T>(a.out, row.batch, row.head, row.row, c));
        if (a.lse.data) at<float>(a.lse, row.batch, row.head, row.row) = float(row.lse);
        if (a.max_logits.data) at<float>(a.max_logits, row.batch, row.head, row.row) = float(row.max_logit);
    }
}

// Gradients of one query row; dk and dv of its kv head are summed in double. Returns its share in dz.
template <class T>
double backward_row(const BackwardArgs& a, Row<T>& row, double* dk, double* dv, double* dq) {
    const Problem& p = *a.problem;
    const int64_t b = row.batch, h = row.head, i = row.row;
    // out = p v: dp = dout v, delta = rowsum(p dp); lse's own gradient is p.
    const auto dp = [&](int64_t key) {
        double sum = 0;
        for (int64_t c = 0; c < p.head_dim_v; ++c)
            sum += read(at<T>(a.dout, b, h, i, c)) * read(at<T>(a.v, b, row.head_kv, key, c));
        return sum;
    };
    double delta = 0;
    row.each_key([&](int64_t key, double x) { delta += x * dp(key); });
    const double z = logit(a.sink_logits, h);
    if (a.dlse.data && (!row.seen.empty() || z > -infinity)) delta -= at<float>(a.dlse, b, h, i);
    std::fill(dq, dq + p.head_dim, 0.0);
    row.each_key([&](int64_t key, double x) {
        // s = scale q k, or capped: dq += scale ds k, dk += scale ds q
        const double ds = p.scale * x * (dp(key) - delta) * row.slope(key);
        for (int64_t c = 0; c < p.head_dim; ++c) {
            dq[c] += ds * read(at<T>(a.k, b, row.head_kv, key, c));
            dk[key * p.head_dim + c] += ds * read(at<T>(a.q, b, h, i, c));
        }
        for (int64_t c = 0; c < p.head_dim_v; ++c)
            dv[key * p.head_dim_v + c] += x * read(at<T>(a.dout, b, h, i, c));
    });
    for (int64_t c = 0; c < p.head_dim; ++c) write(dq[c], at<T>(a.dq, b, h, i, c));
    return z == -infinity ? 0 : -std::exp(z - row.lse) * delta;
}

// A lane owns a kv head with the query heads of its group, so that sums into dk and dv have one order.
template <class T>
void backward_lane(void* argument, int64_t lane) {
    Call& call = *static_cast<Call*>(argument);
    const BackwardArgs& a = *static_cast<const BackwardArgs*>(call.args);
    const Problem& p = *a.problem;
    double* dz = static_cast<double*>(a.workspace);  // [batch * heads_q]
    double* dq = dz + p.batch * p.heads_q + lane * call.lane_doubles;
    double *dk = dq + p.head_dim, *dv = dk + p.seq_k * p.head_dim, *end = dv + p.seq_k * p.head_dim_v;
    Row<T> row{p, *a.rows, a.q, a.k, a.v, a.sink_logits};
    for (int64_t n; (n = next_of(call, *a.parallel)) < p.batch * p.heads_kv;) {
        const int64_t b = n / p.heads_kv, head_kv = n % p.heads_kv;
        std::fill(dk, end, 0.0);
        for (int64_t head = head_kv * p.group(); head < (head_kv + 1) * p.group(); ++head) {
            double& sum = dz[b * p.heads_q + head] = 0;
            for (int64_t i = 0; i < p.seq_q && !a.parallel->is_cancelled(); ++i) {
                row.softmax(b, head, i);
                sum += backward_row(a, row, dk, dv, dq);
            }
        }
        for (int64_t key = 0; key < p.seq_k; ++key) {
            for (int64_t c = 0; p.value_in_key && c < p.head_dim_v; ++c)
                dk[key * p.head_dim + c] += dv[key * p.head_dim_v + c];
            for (int64_t c = 0; c < p.head_dim; ++c) write(dk[key * p.head_dim + c], at<T>(a.dk, b, head_kv, key, c));
            for (int64_t c = 0; a.dv.data && c < p.head_dim_v; ++c)
                write(dv[key * p.head_dim_v + c], at<T>(a.dv, b, head_kv, key, c));
        }
    }
}

int64_t forward_doubles(const Problem& p) { return p.head_dim_v; }
int64_t backward_doubles(const Problem& p) { return p.seq_k * (p.head_dim + p.head_dim_v) + p.head_dim; }

size_t forward_workspace(const Sizing& s) {
    return size_t(forward_doubles(s.problem) * s.lanes) * sizeof(double);
}
size_t backward_workspace(const Sizing& s) {
    const Problem& p = s.problem;
    return size_t(p.batch * p.heads_q + backward_doubles(p) * s.lanes) * sizeof(double);
}

template <class T>
void forward(const ForwardArgs& args) {
    Call call{&args, 0, forward_doubles(*args.problem)};
    args.parallel->run(forward_lane<T>, &call);
}

template <class T>
void backward(const BackwardArgs& args) {
    Call call{&args, 0, backward_doubles(*args.problem)};
    args.parallel->run(backward_lane<T>, &call);
    const Problem& p = *args.problem;
    const double* dz = static_cast<double*>(args.workspace);
    for (int64_t head = 0; args.dsink_logits.data && head < p.heads_q; ++head) {
        double sum = 0;
        for (int64_t b = 0; b < p.batch; ++b) sum += dz[b * p.heads_q + head];
        at<float>(args.dsink_logits, 0, head, 0) = float(sum);
    }
}

bool runs_here(int32_t) { return true; }
const char* fits(const Problem&) { return nullptr; }

// About one multiply-add a clock. It never competes: the plan takes it only where the truth is asked for.
template <int pass_flops>
Cost cost(const Problem& p, const LayoutStats& stats, const Machine& machine) {
    const double flops = pass_flops * double(p.head_dim + p.head_dim_v) * stats.pairs;
    return {flops / (2e3 * machine.clock * machine.lanes), "compute"};
}

template <class T>
constexpr Kernel forward_row(const char* name, Dtype dtype) {
    return {.name = name,
            .device = SPATTN_CPU,
            .pass = Pass::forward,
            .dtype = dtype,
            .runs_here = runs_here,
            .fits = fits,
            .cost = cost<2>,
            .workspace = forward_workspace,
            .forward = forward<T>,
            .family = Family::reference,
            .max_logits = true,
            .float8_cache = true};
}
template <class T>
constexpr Kernel backward_row_of(const char* name, Dtype dtype) {
    return {.name = name,
            .device = SPATTN_CPU,
            .pass = Pass::backward,
            .dtype = dtype,
            .runs_here = runs_here,
            .fits = fits,
            .cost = cost<5>,
            .workspace = backward_workspace,
            .backward = backward<T>,
            .family = Family::reference};
}

constexpr Kernel rows[] = {
    forward_row<float>("reference_forward_f32", Dtype::f32),
    forward_row<F16>("reference_forward_f16", Dtype::f16),
    forward_row<double>("reference_forward_f64", Dtype::f64),
    forward_row<Bf16>("reference_forward_bf16", Dtype::bf16),
    backward_row_of<float>("reference_backward_f32", Dtype::f32),
    backward_row_of<F16>("reference_backward_f16", Dtype::f16),
    backward_row_of<double>("reference_backward_f64", Dtype::f64),
    backward_row_of<Bf16>("reference_backward_bf16", Dtype::bf16),
};

}  // namespace

KernelTable kernels() { return {rows, int(std::size(rows))}; }

}  // namespace spattn::cpu::reference
