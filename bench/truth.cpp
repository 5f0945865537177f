// SPDX-License-Identifier: MIT
#include "truth.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bench {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr int sampled_rows = 16, sampled_keys = 4;

struct Deviation {
    double worst = 0, largest = 0;
    void compare(double given, double truth) {
        const double error = given == truth ? 0 : std::abs(given - truth);
        worst = error <= infinity ? std::max(worst, error) : infinity;  // NaN compares false
        if (std::isfinite(truth)) largest = std::max(largest, std::abs(truth));
    }
    double relative() const { return largest > 0 ? worst / largest : worst; }
};

struct Row {
    int64_t batch, head, row;
};

// The first and the last row of the first head, and others scattered over batch entries, heads and rows.
std::vector<Row> sample(const Case& shape, int64_t heads, int count) {
    std::vector<Row> rows = {{0, 0, 0}, {0, 0, shape.seq - 1}};
    for (int i = int(rows.size()); i < count; ++i) {
        const double turn = std::fmod(i * 0.6180339887498949, 1.0);
        rows.push_back({i % shape.batch, i % heads, int64_t(turn * double(shape.seq))});
    }
    return rows;
}

double scale_of(const Case& shape) { return 1 / std::sqrt(double(shape.head_dim)); }

// One query row of attention in double precision, straight from the pattern.
class TrueRow {
public:
    TrueRow(const Attention& a, Row at);
    std::vector<double> out() const;
    std::vector<double> dq() const;
    double lse() const { return lse_; }

private:
    double dot(const Tensor& queries, const Tensor& keys, int64_t key, int64_t columns) const;

    const Attention& a_;
    Row at_;
    int64_t head_kv_;
    std::vector<int32_t> keys_;
    std::vector<double> p_;
    double lse_ = -infinity;
};

template <class T>
spattn_tensor vector_of(std::vector<T>& values, const int64_t& count) {
    spattn_tensor tensor{};
    tensor.data = values.data();
    tensor.device = {SPATTN_CPU, 0};
    tensor.ndim = 1;
    tensor.dtype = {SPATTN_INT, 8 * sizeof(T), 1};
    tensor.shape = &count;
    return tensor;
}

// The keys that rows [0, rows) of an extent see, one row after the other; `status` says whether the pattern could
// answer.
struct Csr {
    std::vector<int64_t> row_ptr;
    std::vector<int32_t> keys;
    spattn_status status;
};

Csr read_csr(const Attention& a, int64_t head, int64_t rows, int64_t q_offset) {
    spattn_extent extent{};
    extent.struct_size = sizeof extent;
    extent.flags = SPATTN_EXTENT_Q_OFFSET;
    extent.batch = a.shape.batch;
    extent.heads = a.shape.heads_q;
    extent.seq_q = rows;
    extent.seq_k = a.shape.keys();
    extent.q_offset = q_offset;
    Csr csr;
    csr.row_ptr.resize(rows + 1);
    const int64_t bounds = rows + 1;
    const spattn_tensor row_ptr = vector_of(csr.row_ptr, bounds);
    int64_t count = 0;
    csr.status = spattn_pattern_to_csr(a.pattern.get(), &extent, head, &row_ptr, nullptr, &count);
    if (csr.status != SPATTN_OK || count == 0) return csr;
    csr.keys.resize(count);
    const spattn_tensor columns = vector_of(csr.keys, count);
    require(spattn_pattern_to_csr(a.pattern.get(), &extent, head, nullptr, &columns, &count));
    return csr;
}

// A row is asked for alone, as an extent of one query at its position. A pattern of lists knows no extent but its own,
// so it is read whole.
std::vector<int32_t> keys_of(const Attention& a, Row at) {
    if (a.shape.top) return {a.list(at.row), a.list(at.row) + a.shape.top};
    const Csr alone = read_csr(a, at.head, 1, at.row);
    if (alone.status != SPATTN_E_SHAPE) {
        require(alone.status);
        return alone.keys;
    }
    const Csr whole = read_csr(a, at.head, a.shape.seq, 0);
    require(whole.status);
    return {whole.keys.begin() + whole.row_ptr[at.row], whole.keys.begin() + whole.row_ptr[at.row + 1]};
}

TrueRow::TrueRow(const Attention& a, Row at)
    : a_(a), at_(at), head_kv_(at.head / (a.shape.heads_q / a.shape.heads_kv)), keys_(keys_of(a, at)) {
    double m = -infinity, l = 0;
    for (int32_t key : keys_) p_.push_back(scale_of(a.shape) * dot(a.q, a.k, key, a.shape.head_dim));
    for (double s : p_) m = std::max(m, s);
    for (double s : p_) l += std::exp(s - m);
    if (!keys_.empty()) lse_ = m + std::log(l);
    for (double& s : p_) s = std::exp(s - lse_);
}

double TrueRow::dot(const Tensor& queries, const Tensor& keys, int64_t key, int64_t columns) const {
    double sum = 0;
    for (int64_t c = 0; c < columns; ++c)
        sum += queries.at(at_.batch, at_.head, at_.row, c) * keys.at(at_.batch, head_kv_, key, c);
    return sum;
}

std::vector<double> TrueRow::out() const {
    std::vector<double> sum(a_.shape.values());
    for (size_t j = 0; j < keys_.size(); ++j)
        for (int64_t c = 0; c < a_.shape.values(); ++c)
            sum[c] += p_[j] * a_.values().at(at_.batch, head_kv_, keys_[j], c);
    return sum;
}

std::vector<double> TrueRow::dq() const {
    std::vector<double> dp, sum(a_.shape.head_dim);
    double delta = 0;
    for (size_t j = 0; j < keys_.size(); ++j) {
        dp.push_back(dot(a_.dout, a_.values(), keys_[j], a_.shape.values()));
        delta += p_[j] * dp[j];
    }
    for (size_t j = 0; j < keys_.size(); ++j) {
        const double ds = p_[j] * (dp[j] - delta) * scale_of(a_.shape);
        for (int64_t c = 0; c < a_.shape.head_dim; ++c) sum[c] += ds * a_.k.at(at_.batch, head_kv_, keys_[j], c);
    }
    return sum;
}

// dk and dv of one key in double precision. lse and out are taken from the forward call, whose own error is checked by
// rows: otherwise a single key of a causal pattern would cost a whole forward pass.
class TrueKey {
public:
    TrueKey(const Attention& a, Row at) : a_(a), at_(at), dk(a.shape.head_dim), dv(a.shape.values()) {
        const int64_t group = a.shape.heads_q / a.shape.heads_kv;
        for (int64_t head = at.head * group; head < (at.head + 1) * group; ++head)
            for (int64_t row = 0; row < a.shape.seq; ++row)
                for (int64_t n = times(head, row); n > 0; --n) add(head, row);
        for (int64_t c = 0; a.shape.top && c < a.shape.values(); ++c) dk[c] += dv[c];
    }

private:
    // How often the query sees the key: lists may name it twice.
    int64_t times(int64_t head, int64_t row) const {
        if (a_.shape.top) return std::count(a_.list(row), a_.list(row) + a_.shape.top, int32_t(at_.row));
        spattn_extent extent{};
        extent.struct_size = sizeof extent;
        extent.batch = a_.shape.batch;
        extent.heads = a_.shape.heads_q;
        extent.seq_q = a_.shape.seq;
        extent.seq_k = a_.shape.keys();
        int32_t kept = 0;
        require(spattn_pattern_keeps(a_.pattern.get(), &extent, at_.batch, head, row, at_.row, &kept));
        return kept;
    }
    void add(int64_t head, int64_t row) {
        double s = 0, dp = 0, delta = 0;
        for (int64_t c = 0; c < a_.shape.head_dim; ++c)
            s += a_.q.at(at_.batch, head, row, c) * a_.k.at(at_.batch, at_.head, at_.row, c);
        for (int64_t c = 0; c < a_.shape.values(); ++c) {
            dp += a_.dout.at(at_.batch, head, row, c) * a_.values().at(at_.batch, at_.head, at_.row, c);
            delta += a_.dout.at(at_.batch, head, row, c) * a_.out.at(at_.batch, head, row, c);
        }
        const double p = std::exp(scale_of(a_.shape) * s - a_.lse.at(at_.batch, head, row));
        const double ds = p * (dp - delta) * scale_of(a_.shape);
        for (int64_t c = 0; c < a_.shape.head_dim; ++c) dk[c] += ds * a_.q.at(at_.batch, head, row, c);
        for (int64_t c = 0; c < a_.shape.values(); ++c) dv[c] += p * a_.dout.at(at_.batch, head, row, c);
    }

    const Attention& a_;
    Row at_;

public:
    std::vector<double> dk, dv;
};

void compare(Deviation& deviation, const Tensor& given, Row at, const std::vector<double>& truth) {
    for (size_t c = 0; c < truth.size(); ++c)
        deviation.compare(given.at(at.batch, at.head, at.row, int64_t(c)), truth[c]);
}

double forward_error(const Attention& a) {
    Deviation out, lse;
    for (Row at : sample(a.shape, a.shape.heads_q, sampled_rows)) {
        const TrueRow truth(a, at);
        compare(out, a.out, at, truth.out());
        lse.compare(a.lse.at(at.batch, at.head, at.row), truth.lse());
    }
    return std::max(out.relative(), lse.relative());
}

double backward_error(const Attention& a) {
    Deviation dq, dk, dv;
    for (Row at : sample(a.shape, a.shape.heads_q, sampled_rows)) compare(dq, a.dq, at, TrueRow(a, at).dq());
    for (Row at : sample(a.shape, a.shape.heads_kv, sampled_keys)) {
        const TrueKey truth(a, at);
        compare(dk, a.dk, at, truth.dk);
        if (!a.shape.top) compare(dv, a.dv, at, truth.dv);
    }
    return std::max({dq.relative(), dk.relative(), dv.relative()});
}

}  // namespace

double max_error(const Attention& attention, Pass pass) {
    return pass == Pass::forward ? forward_error(attention) : backward_error(attention);
}

double error_bound(Dtype dtype) { return dtype == Dtype::bf16 ? 4e-2 : dtype == Dtype::f16 ? 5e-3 : 1e-4; }

}  // namespace bench
