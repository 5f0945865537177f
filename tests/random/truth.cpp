// SPDX-License-Identifier: MIT
#include "truth.h"

#include <algorithm>
#include <cfloat>
#include <cstdio>

#include "sample.h"

namespace random_test {

namespace {

// Multiplications for rows of the forward pass, and for gradients: of small and of large problems.
constexpr double most_work[] = {12e6, 1e8}, most_backward_work[] = {40e6, 2e8};
constexpr double fewest_heads = 4, fewest_backward_heads = 2;  // that are compared, if there are as many
constexpr double most_slip = 0.3;         // scores that are less sure than that say nothing about a row's values
constexpr int64_t near_rows = 16;
using Numbers = std::vector<double>;

double dot(const double* a, const double* b, int64_t n) {
    double sums[4] = {};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int64_t j = 0; j < 4; ++j) sums[j] += a[i + j] * b[i + j];
    for (; i < n; ++i) sums[0] += a[i] * b[i];
    return sums[0] + sums[1] + sums[2] + sums[3];
}

double magnitude_dot(const double* a, const double* b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += std::fabs(a[i] * b[i]);
    return sum;
}

double most(const Numbers& x) {
    double largest = 0;
    for (const double value : x) largest = std::max(largest, std::fabs(value));
    return largest;
}

class Comparison {
public:
    Comparison(const Problem& problem, const Tensors& tensors)
        : problem_(problem), p_(problem.c), t_(tensors), type_(*problem.type), dim_(p_.head_dim),
          value_dim_(problem.value_dim()) {}

    Findings run() {
        demand_guards();
        find_wild();
        judge_every_row();
        compare_rows();
        if (problem_.is_backward()) judge_every_gradient(), compare_gradients();
        return found_;
    }

private:
    // ---- who sees what ----

    void demand_guards() {
        const std::pair<const char*, const Operand*> outputs[] = {
            {"out", &t_.out},
            {"lse", &t_.lse},
            {"max_logits", &t_.max_logits},
            {"dq", &t_.dq},
            {"dk", &t_.dk},
            {"dv", &t_.dv},
            {"dsink_logits", &t_.dsinks},
            {"a ragged out", &t_.ragged.out},
            {"a ragged lse", &t_.ragged.lse},
            {"a ragged max_logits", &t_.ragged.max_logits}};
        for (const auto& [name, operand] : outputs)
            if (*operand && !operand->guards_hold()) fail(std::string(name) + ": bytes beside elements were written");
    }

    // Rows of an operand with values that may overflow.
    std::vector<char> wild_rows(const Operand& x) const {
        std::vector<char> wild;
        if (!x) return wild;
        Numbers row(size_t(x.size(column_axis)));
        for (int64_t b = 0; b < x.size(batch_axis); ++b)
            for (int64_t h = 0; h < x.size(head_axis); ++h)
                for (int64_t r = 0; r < x.size(row_axis); ++r) {
                    x.get(b, h, r, row.data());
                    wild.push_back(!std::all_of(row.begin(), row.end(), [&](double value) {
                        return std::fabs(value) < x.type().largest;
                    }));
                }
        return wild;
    }

    void find_wild() {
        if (problem_.poison == Poison::none) return;
        wild_q_ = wild_rows(t_.q), wild_keys_ = wild_rows(t_.k), wild_dout_ = wild_rows(t_.dout);
        const std::vector<char> values = wild_rows(t_.v);
        for (size_t i = 0; i < values.size(); ++i) wild_keys_[i] |= values[i];
        wild_before_.push_back(0);
        for (const char wild : wild_keys_) wild_before_.push_back(wild_before_.back() + wild);
    }

    // Rows that see a wild key, or are wild themselves: nothing is said about what they get.
    bool is_exposed(int64_t b, int64_t h, int64_t row) const {
        const Keys::Row keys = t_.keys.of(b, h, row);
        if (wild_keys_.empty() || keys.is_empty()) return false;
        if (wild_q_[index(b, h, row)]) return true;
        const int64_t* before = &wild_before_[size_t((b * p_.heads_kv + h / problem_.group()) * p_.seq_k)];
        return std::any_of(keys.begin(), keys.end(),
                           [&](const Keys::Run& run) { return before[run.end] > before[run.begin]; });
    }

    size_t index(int64_t b, int64_t h, int64_t row) const { return size_t((b * p_.heads_q + h) * p_.seq_q + row); }
    double sink(int64_t head) const { return t_.sinks ? t_.sinks.at(0, head, 0) : -infinity; }

    // What needs no truth: rows without keys are exact, all others are finite.
    void judge_every_row() {
        exposed_.resize(size_t(p_.batch * p_.heads_q * p_.seq_q));
        Numbers out(static_cast<size_t>(value_dim_));
        for (int64_t b = 0; b < p_.batch; ++b)
            for (int64_t h = 0; h < p_.heads_q; ++h) {
                int64_t empty = 0;
                bool has_work = false;
                for (int64_t row = 0; row < p_.seq_q; ++row) {
                    const bool is_empty = t_.keys.of(b, h, row).is_empty();
                    work_ += double(t_.keys.of(b, h, row).size()) * double(dim_ + value_dim_);
                    has_work |= !is_empty, empty = is_empty ? empty + 1 : 0;
                    found_.empty_rows += is_empty, found_.has_empty_stretch |= has_work && empty >= 128;
                    if ((exposed_[index(b, h, row)] = is_exposed(b, h, row))) continue;
                    t_.out.get(b, h, row, out.data());
                    judge_row(b, h, row, is_empty, out);
                }
            }
    }

    void judge_row(int64_t b, int64_t h, int64_t row, bool is_empty, const Numbers& out) {
        const double z = sink(h);
        for (const double x : out)
            if (is_empty ? x != 0 : !std::isfinite(x)) return fail_exactly("out", b, h, row, x, is_empty, 0);
        if (t_.lse) {
            const double lse = t_.lse.at(b, h, row);
            const bool is_right = is_empty ? lse == z || std::fabs(lse - z) < 1e-6 * std::fabs(z) : std::isfinite(lse);
            if (!is_right) return fail_exactly("lse", b, h, row, lse, is_empty, z);
        }
        if (t_.max_logits) {
            const double most = t_.max_logits.at(b, h, row);
            if (is_empty ? most != -infinity : !std::isfinite(most))
                fail_exactly("max_logits", b, h, row, most, is_empty, -infinity);
        }
    }

    // ---- one row ----

    // Keys and values of one kv head as doubles.
    void load_head(int64_t b, int64_t head_kv) {
        if (loaded_ == b * p_.heads_kv + head_kv) return;
        loaded_ = b * p_.heads_kv + head_kv;
        keys_.resize(size_t(p_.seq_k * dim_)), values_.resize(size_t(p_.seq_k * value_dim_));
        norms_.resize(size_t(p_.seq_k));
        for (int64_t key = 0; key < p_.seq_k; ++key) {
            double* const k = &keys_[size_t(key * dim_)];
            t_.k.get(b, head_kv, key, k);
            norms_[size_t(key)] = std::sqrt(dot(k, k, dim_));
            if (t_.v) t_.v.get(b, head_kv, key, &values_[size_t(key * value_dim_)]);
            else std::copy_n(k, value_dim_, &values_[size_t(key * value_dim_)]);
        }
    }

    struct Row {
        std::vector<int32_t> keys;
        Numbers q, scores, slopes, weights, out, out_error;
        double lse, most;
        double slip;      // how far a score may be off
        double relative;  // how far a probability may be off
    };

    double softcap(double s, double& slope) const {
        slope = 1;
        if (p_.softcap == 0) return s;
        const double t = std::tanh(s / p_.softcap);
        slope = 1 - t * t;
        return p_.softcap * t;
    }

    // Roundings of a sum that add up. Those of equal parts all go one way, and so do those of matrix units, which cut
    // off what lies below the digits of the largest part: up to a whole unit, where rounding leaves half.
    double roundings(int64_t parts) const {
        // Scores of zeros weigh all keys alike, and lists name one key many times.
        const bool is_even = problem_.values == Values::constant || problem_.values == Values::ramp ||
                             problem_.values == Values::zeros || problem_.drawn.list_most > 0;
        const bool is_cut = type_.weight != 0;
        if (is_cut) return 2 * double(parts) + 4;
        return is_even ? double(parts) + 4 : 2 * std::sqrt(double(parts)) + 4;
    }

    // The row's scores of its keys, and how far they may be off.
    void compute_scores(int64_t b, int64_t h, int64_t row, Row& r) {
        load_head(b, h / problem_.group());
        const double scale = problem_.scale();
        const size_t n = r.keys.size();
        r.q.resize(size_t(dim_)), r.scores.resize(n), r.slopes.resize(n), r.weights.resize(n);
        t_.q.get(b, h, row, r.q.data());
        double norm = 0, loudest = 0, rawest = 0;
        r.most = -infinity;
        for (size_t i = 0; i < n; ++i) {
            const int64_t key = r.keys[i];
            const double raw = scale * dot(r.q.data(), &keys_[size_t(key * dim_)], dim_);
            r.scores[i] = softcap(raw, r.slopes[i]);
            r.most = std::max(r.most, r.scores[i]), norm = std::max(norm, norms_[size_t(key)]);
            loudest = std::max(loudest, std::fabs(r.scores[i])), rawest = std::max(rawest, std::fabs(raw));
        }
        const double products = std::fabs(scale) * std::sqrt(dot(r.q.data(), r.q.data(), dim_)) * norm;
        r.slip = type_.sum * (product_roundings(dim_) * products + 4 * loudest) + 2 * operand() * products;
        if (p_.softcap != 0) r.slip += 8 * type_.sum * std::min(p_.softcap, rawest);
    }

    void weigh_keys(Row& r) const {
        for (size_t i = 0; i < r.keys.size(); ++i) r.weights[i] = std::exp(r.scores[i] - r.lse);
    }

    void compute_row(int64_t b, int64_t h, int64_t row, Row& r) {
        t_.keys.of(b, h, row).list(r.keys);
        compute_scores(b, h, row, r);
        const double top = std::max(r.most, sink(h));
        double sum = std::exp(sink(h) - top);
        for (const double s : r.scores) sum += std::exp(s - top);
        r.lse = top + std::log(sum);
        r.relative = std::expm1(2 * r.slip) + type_.sum * (64 + 2 * roundings(int64_t(r.keys.size())));
        weigh_keys(r);
        Numbers magnitude(static_cast<size_t>(value_dim_)), lost(static_cast<size_t>(value_dim_));
        r.out.assign(size_t(value_dim_), 0);
        for (size_t i = 0; i < r.keys.size(); ++i) {
            const double weight = r.weights[i];
            const double* const value = &values_[size_t(r.keys[i] * value_dim_)];
            for (size_t c = 0; c < size_t(value_dim_); ++c) {
                r.out[c] += weight * value[c];
                magnitude[c] += weight * std::fabs(value[c]), lost[c] += std::fabs(value[c]);
            }
        }
        r.out_error = magnitude;
        // What comes back from the blocks that a query is dispatched to are elements, too.
        const double parts = problem_.is_dispatched ? type_.rounded : 0;
        for (size_t c = 0; c < r.out.size(); ++c)
            r.out_error[c] = (r.relative + weight() + parts) * magnitude[c] + type_.rounded * std::fabs(r.out[c]) +
                             lightest() * lost[c] + type_.tiniest;
    }
    // What is read from a float8 cache may meet probabilities of fp16 whatever the dtype, times scales down to 2^-9.
    double lightest() const {
        return problem_.has_float8_cache() ? std::max(type_.lightest, 0x1p-23) : type_.lightest;
    }
    // Copies of operands of float8 are exact, as their scales have few digits. Matrix units that multiply bytes keep 14
    // digits below the largest of some products and their sum so far: for what that loses they have what a rounding of
    // both operands to bf16, which the header allows, would take.
    double operand() const { return problem_.multiplies_float8 ? 0x1p-9 : any_operand(); }

    // Matrix units cut three units off float32 that is split, and a product leaves out that of both remainders, each of
    // which is below 2^-10. Eight terms at a time are added, and what is added to is cut: two units each. Those of
    // probabilities are added with what is left of them, three times, 64 in a sum.
    double any_operand() const { return problem_.splits_float32 ? 3 * 0x1p-24 + 0x1p-21 : type_.operand; }
    double product_roundings(int64_t terms) const {
        const double cuts = problem_.splits_float32 ? 2 * std::ceil(double(terms) / 8) + 6 : 0;
        return std::max(roundings(terms), cuts);
    }
    // A probability as an operand.
    double weight() const {
        return problem_.splits_float32 ? 2 * any_operand() + type_.sum * (6 * 64 / 8 + 4) : type_.weight;
    }

    // Units of 16 bits take products and sums below the least normal float for zero.
    double flushed() const { return 1e-37 + std::fabs(problem_.scale()) * 2 * double(dim_) * double(FLT_MIN); }
    // With a factor below it they take all of a product for zero: what x y may be off by that.
    double flushed(double x, double y) const {
        const double least = type_.weight != 0 ? double(FLT_MIN) : 0;
        return std::fabs(x) * std::min(std::fabs(y), least) + std::fabs(y) * std::min(std::fabs(x), least);
    }
    double flushed(const double* x, const double* y, int64_t count) const {
        double sum = 0;
        for (int64_t i = 0; i < count; ++i) sum += flushed(x[i], y[i]);
        return sum;
    }

    // ---- forward ----

    bool has_exposed_neighbour(int64_t b, int64_t h, int64_t row) const {
        const auto first = exposed_.begin() + int64_t(index(b, h, std::max<int64_t>(0, row - near_rows)));
        const auto last = exposed_.begin() + int64_t(index(b, h, std::min(p_.seq_q - 1, row + near_rows))) + 1;
        return std::find(first, last, char(1)) != last;
    }

    // Keys of each query row of a head.
    std::vector<int64_t> count_keys(int64_t b, int64_t h) const {
        std::vector<int64_t> keys;
        for (int64_t row = 0; row < p_.seq_q; ++row) keys.push_back(t_.keys.of(b, h, row).size());
        return keys;
    }

    // All rows, or as many as there is time for: drawn, and of few heads, whose keys are widened once.
    void compare_rows() {
        Random random(uint64_t(problem_.index) + 1);
        const double share = std::min(1., most_work[problem_.is_large] / std::max(1., work_));
        const double fewest = std::min(1., fewest_heads / double(p_.batch * p_.heads_q));
        const double share_of_heads = std::max(std::sqrt(share), fewest);
        Row r;
        for (int64_t b = 0; b < p_.batch; ++b)
            for (int64_t h = 0; h < p_.heads_q; ++h) {
                if (random.unit() >= share_of_heads && b + h) continue;
                for (const int64_t row : draw_sample(random, count_keys(b, h), share / share_of_heads))
                    if (!exposed_[index(b, h, row)] && !t_.keys.of(b, h, row).is_empty()) compare_row(b, h, row, r);
            }
    }

    void compare_row(int64_t b, int64_t h, int64_t row, Row& r) {
        compute_row(b, h, row, r);
        ++found_.rows, found_.isolated += has_exposed_neighbour(b, h, row);
        const double loose = r.slip + type_.sum * (64 + 2 * roundings(int64_t(r.scores.size())));
        if (t_.lse)
            demand("lse", b, h, row, t_.lse.at(b, h, row), r.lse, loose + 4 * f32.sum * std::fabs(r.lse) + flushed());
        if (t_.max_logits)
            demand("max_logits", b, h, row, t_.max_logits.at(b, h, row), r.most,
                   r.slip + 4 * f32.sum * std::fabs(r.most) + flushed());
        if (r.slip > most_slip) return;
        Numbers out(r.out.size());
        t_.out.get(b, h, row, out.data());
        for (size_t c = 0; c < out.size(); ++c) demand("out", b, h, row, out[c], r.out[c], r.out_error[c]);
    }

    // ---- backward ----

    struct Gradient {
        Numbers values, errors, squares;  // squares: of all partial sums, each of which is rounded
        Numbers powers;                   // of the terms
        Numbers excess;                   // what rounding has added to values
        void reset(int64_t size) {
            for (Numbers* x : {&values, &errors, &squares, &powers, &excess}) x->assign(size_t(size), 0);
        }
        // Kahan's summation: the truth must be closer than a kernel of float64. That adds up thousands of equal terms
        // in parts, while here they come one by one. of_sums: the squares of partial sums that x is the last of.
        void add(size_t at, double x, double error, double of_sums = 0) {
            const double before = values[at], term = x - excess[at];
            values[at] += term, excess[at] = (values[at] - before) - term;
            errors[at] += error, squares[at] += values[at] * values[at] + of_sums, powers[at] += x * x;
        }
    };

    // Where keys are listed, gradients of 16 bits that are the same in every call may be sums of integers,
    // multiples of a quantum that follows from all terms of a key's row (cuda/any/key_sums.cuh): columns that are small
    // beside others keep fewer digits. A term is off by half a quantum at most, and a quantum is up to 2^-27 of the
    // row's terms, which the kernel knows within a factor of two each.
    struct Terms {
        double largest = 0;  // the sum of each term's largest column
        int64_t count = 0;
        double lost() const { return largest * double(count) * 0x1p-28; }
    };

    // What needs no truth: keys that nobody sees get nothing. What is seen is finite, unless values are so large that
    // gradients may be more than an element can hold.
    void judge_every_gradient() {
        const bool is_tame = problem_.values == Values::normal || problem_.values == Values::search;
        Numbers got;
        const auto judge = [&](const char* what, const Operand& x, std::array<int64_t, 3> at, bool is_zero) {
            if (!x) return;
            got.resize(size_t(x.size(column_axis)));
            x.get(at[0], at[1], at[2], got.data());
            for (const double value : got)
                if (is_zero ? value != 0 : is_tame && !std::isfinite(value))
                    return fail_exactly(what, at[0], at[1], at[2], value, is_zero, 0);
        };
        for (int64_t b = 0; b < p_.batch; ++b)
            for (int64_t head_kv = 0; head_kv < p_.heads_kv; ++head_kv) {
                const std::vector<int64_t> queries = t_.keys.count_queries(b, head_kv);
                std::vector<int64_t> spoiled(size_t(p_.seq_k) + 1);
                for (int64_t h = head_kv * problem_.group(); h < (head_kv + 1) * problem_.group(); ++h)
                    for (int64_t row = 0; row < p_.seq_q; ++row) {
                        const Keys::Row keys = t_.keys.of(b, h, row);
                        const bool is_judged = is_open(b, h, row);
                        if (is_judged) judge("dq", t_.dq, {b, h, row}, keys.is_empty());
                        for (const Keys::Run& run : keys)
                            spoiled[size_t(run.begin)] += !is_judged, spoiled[size_t(run.end)] -= !is_judged;
                    }
                int64_t spoilers = 0;
                for (int64_t key = 0; key < p_.seq_k; ++key) {
                    if (spoilers += spoiled[size_t(key)]) continue;
                    judge("dk", t_.dk, {b, head_kv, key}, queries[size_t(key)] == 0);
                    judge("dv", t_.dv, {b, head_kv, key}, queries[size_t(key)] == 0);
                }
            }
    }

    // A row whose gradients are known: it, and what it sees, holds no poison.
    bool is_open(int64_t b, int64_t h, int64_t row) const {
        const bool is_wild = !wild_dout_.empty() && wild_dout_[index(b, h, row)] && !t_.keys.of(b, h, row).is_empty();
        return !is_wild && !exposed_[index(b, h, row)];
    }

    // Kv heads over all batch entries, so that sums over rows are whole: of small problems all of a head, of large ones
    // some rows and some keys.
    void compare_gradients() {
        Random random(uint64_t(problem_.index) + 2);
        const double share = std::min(1., most_backward_work[problem_.is_large] / std::max(1., 8 * work_));
        const double fewest = std::min(1., fewest_backward_heads / double(p_.heads_kv));
        const double share_of_heads = problem_.is_large ? std::max(share, fewest) : share;
        const double share_of_head = problem_.is_large ? share / share_of_heads : 1;
        for (int64_t head_kv = 0; head_kv < p_.heads_kv; ++head_kv) {
            if (random.unit() >= share_of_heads && head_kv) continue;
            Gradient dsinks;
            dsinks.reset(problem_.group());
            std::vector<char> is_sink_open(size_t(problem_.group()), char(1));
            for (int64_t b = 0; b < p_.batch; ++b) {
                draw_keys(random, b, head_kv, share_of_head);
                compare_gradients_of(random, b, head_kv, share_of_head, dsinks, is_sink_open);
            }
            for (int64_t g = 0; t_.dsinks && g < problem_.group(); ++g)
                if (is_sink_open[size_t(g)])
                    demand("dsink_logits", 0, head_kv * problem_.group() + g, 0,
                           t_.dsinks.at(0, head_kv * problem_.group() + g, 0), dsinks.values[size_t(g)],
                           dsinks.errors[size_t(g)] * 4 + 1e-5 * std::fabs(dsinks.values[size_t(g)]) + 1e-6);
        }
    }

    // The keys of a head whose gradients are compared, and each one's place among them, or -1.
    void draw_keys(Random& random, int64_t b, int64_t head_kv, double share) {
        compared_keys_ = draw_sample(random, t_.keys.count_queries(b, head_kv), share);
        place_of_key_.assign(size_t(p_.seq_k), -1);
        for (size_t i = 0; i < compared_keys_.size(); ++i) place_of_key_[size_t(compared_keys_[i])] = int64_t(i);
    }

    void compare_gradients_of(Random& random, int64_t b, int64_t head_kv, double share, Gradient& dsinks,
                              std::vector<char>& is_sink_open) {
        Gradient dk, dv;
        const size_t count = compared_keys_.size();
        dk.reset(int64_t(count) * dim_), dv.reset(int64_t(count) * value_dim_);
        terms_.assign(count, {});
        std::vector<char> is_spoiled(count);
        for (int64_t g = 0; g < problem_.group(); ++g) {
            const int64_t h = head_kv * problem_.group() + g;
            std::vector<char> is_compared(size_t(p_.seq_q));
            for (const int64_t row : draw_sample(random, count_keys(b, h), share)) is_compared[size_t(row)] = 1;
            for (int64_t row = 0; row < p_.seq_q; ++row) {
                if (t_.keys.of(b, h, row).is_empty()) {
                    add_empty_row(b, h, row, dsinks, size_t(g));
                    continue;
                }
                const bool is_whole = is_compared[size_t(row)];
                if (is_open(b, h, row) && add_row(b, h, row, is_whole, dk, dv, dsinks, size_t(g))) continue;
                is_sink_open[size_t(g)] = 0;
                list_compared_keys(b, h, row, row_.keys);
                for (const int32_t key : row_.keys) is_spoiled[size_t(place_of_key_[size_t(key)])] = 1;
            }
        }
        const bool is_listed = problem_.is_gathered || !t_.indices.empty();
        const bool is_quantised = problem_.has(SPATTN_PLAN_DETERMINISTIC) && is_listed && type_.weight != 0;
        Numbers got_k(static_cast<size_t>(dim_)), got_v(static_cast<size_t>(value_dim_));
        for (size_t place = 0; place < count; ++place) {
            if (is_spoiled[place]) continue;
            const int64_t key = compared_keys_[place];
            const double quanta = is_quantised ? terms_[place].lost() : 0;
            t_.dk.get(b, head_kv, key, got_k.data());
            if (t_.dv) t_.dv.get(b, head_kv, key, got_v.data());
            for (size_t c = 0; c < size_t(value_dim_); ++c) {
                const size_t at = place * size_t(value_dim_) + c;
                if (t_.dv) demand("dv", b, head_kv, key, got_v[c], dv.values[at], stored(dv, at) + quanta);
                else dk.add(place * size_t(dim_) + c, dv.values[at], dv.errors[at], dv.squares[at]);
            }
            for (size_t c = 0; c < size_t(dim_); ++c) {
                const size_t at = place * size_t(dim_) + c;
                demand("dk", b, head_kv, key, got_k[c], dk.values[at], stored(dk, at) + quanta);
            }
        }
    }

    void list_compared_keys(int64_t b, int64_t h, int64_t row, std::vector<int32_t>& keys) const {
        keys.clear();
        for (const Keys::Run& run : t_.keys.of(b, h, row))
            for (auto at = std::lower_bound(compared_keys_.begin(), compared_keys_.end(), run.begin);
                 at != compared_keys_.end() && *at < run.end; ++at)
                keys.push_back(int32_t(*at));
    }

    // A row whose own results are not compared, as it adds to the gradients of compared keys: from the lse and out that
    // forward wrote, which are what backward reads. A wrong one that is not sampled goes unnoticed here, but for an lse
    // below a score.
    void take_row(int64_t b, int64_t h, int64_t row, Row& r) {
        list_compared_keys(b, h, row, r.keys);
        compute_scores(b, h, row, r);
        r.lse = t_.lse.at(b, h, row);
        const double sums = type_.sum * (64 + 2 * roundings(t_.keys.of(b, h, row).size()));
        const double rounded = 4 * f32.sum * std::fabs(r.lse);
        demand("lse", b, h, row, r.lse, std::max(r.lse, r.most), r.slip + sums + rounded + flushed());
        r.slip += rounded;
        r.relative = std::expm1(2 * r.slip) + 64 * type_.sum;
        weigh_keys(r);
        r.out.resize(size_t(value_dim_)), r.out_error.resize(size_t(value_dim_));
        t_.out.get(b, h, row, r.out.data());
        for (size_t c = 0; c < r.out.size(); ++c)  // reference rows compute what forward has rounded
            r.out_error[c] = type_.rounded * std::fabs(r.out[c]) + type_.tiniest;
    }

    // A query that is dispatched (plan/dispatch.h) gets an element from each entry's block: a sum of n terms, rounded once
    // more, whose square is up to n times those of its terms.
    double dispatched(const Gradient& x, size_t at) const {
        if (!problem_.is_dispatched) return 0;
        return double(problem_.drawn.list_most) * type_.tiniest +
               4 * type_.rounded * std::sqrt(x.powers[at] * double(problem_.drawn.list_block_k));
    }

    double stored(const Gradient& x, size_t at) const {
        const double sums = 4 * type_.sum * std::sqrt(x.squares[at]);
        return x.errors[at] + sums + type_.rounded * std::fabs(x.values[at]) + type_.tiniest;
    }

    void add_empty_row(int64_t b, int64_t h, int64_t row, Gradient& dsinks, size_t g) {
        if (t_.dlse && sink(h) != -infinity) {
            const double dlse = t_.dlse.at(b, h, row);
            dsinks.add(g, dlse, 8 * f32.sum * std::fabs(dlse));
        }
        Numbers dq(static_cast<size_t>(dim_));
        t_.dq.get(b, h, row, dq.data());
        for (const double x : dq)
            if (x != 0) return fail_exactly("dq", b, h, row, x, true, 0);
    }

    // out = sum p v:  dv = p dout,  dp = dout v,  ds = p (dp - delta) with delta = dout out - dlse,  dq = scale ds k,
    // dk = scale ds q. Beside each value, how far it may be off: of 16 bits, p and p (dp - delta) are operands of products,
    // which may flush what is light.
    bool add_row(int64_t b, int64_t h, int64_t row, bool is_whole, Gradient& dk, Gradient& dv, Gradient& dsinks,
                 size_t g) {
        Row& r = row_;
        if (is_whole) compute_row(b, h, row, r);
        else take_row(b, h, row, r);
        if (r.slip > most_slip) return false;
        const double scale = problem_.scale(), dlse = t_.dlse ? t_.dlse.at(b, h, row) : 0;
        const double sums = type_.sum * (product_roundings(value_dim_) + 4), inexact = r.relative + weight();
        Numbers dout(static_cast<size_t>(value_dim_));
        t_.dout.get(b, h, row, dout.data());
        const double delta = dot(dout.data(), r.out.data(), value_dim_) - dlse;
        const double delta_error = magnitude_dot(dout.data(), r.out_error.data(), value_dim_) +
                                   sums * (magnitude_dot(dout.data(), r.out.data(), value_dim_) + std::fabs(dlse));
        Gradient dq;
        dq.reset(dim_);
        const double most_dout = most(dout), most_q = most(r.q);
        for (size_t i = 0; i < r.keys.size(); ++i) {
            const int64_t key = r.keys[i], place = place_of_key_[size_t(key)];
            const double* const value = &values_[size_t(key * value_dim_)];
            const double* const k = &keys_[size_t(key * dim_)];
            const double p = r.weights[i], dp = dot(dout.data(), value, value_dim_);
            const double dp_error = (sums + 2 * any_operand()) * magnitude_dot(dout.data(), value, value_dim_) +
                                    flushed(dout.data(), value, value_dim_);
            const double slope_error = p_.softcap != 0 ? 2 * r.slip / p_.softcap + 16 * type_.sum : 0;
            const double ds = scale * p * (dp - delta) * r.slopes[i];
            const double ds_error = std::fabs(scale) * (p * ((dp_error + delta_error) * (1 + r.relative) +
                                                             (2 * inexact + slope_error) * std::fabs(dp - delta)) +
                                                        type_.lightest * (std::fabs(dp) + std::fabs(delta) + 1));
            if (is_whole)
                for (int64_t c = 0; c < dim_; ++c)
                    dq.add(size_t(c), ds * k[c], ds_error * std::fabs(k[c]) + flushed(ds, k[c]));
            if (place < 0) continue;
            terms_[size_t(place)].largest += p * most_dout + std::fabs(ds) * most_q, ++terms_[size_t(place)].count;
            for (int64_t c = 0; c < value_dim_; ++c)
                dv.add(size_t(place * value_dim_ + c), p * dout[size_t(c)],
                       (inexact * p + type_.lightest) * std::fabs(dout[size_t(c)]) + flushed(p, dout[size_t(c)]));
            for (int64_t c = 0; c < dim_; ++c)
                dk.add(size_t(place * dim_ + c), ds * r.q[size_t(c)],
                       ds_error * std::fabs(r.q[size_t(c)]) + flushed(ds, r.q[size_t(c)]));
        }
        if (is_whole) compare_dq(b, h, row, dq);
        const double p_sink = std::exp(sink(h) - r.lse);
        const double rounded = 2 * f32.sum * std::fabs(r.lse);  // rows of doubles, too, may read what forward wrote
        dsinks.add(g, -p_sink * delta, p_sink * ((r.relative + rounded) * std::fabs(delta) + delta_error));
        return true;
    }

    void compare_dq(int64_t b, int64_t h, int64_t row, const Gradient& dq) {
        Numbers got(static_cast<size_t>(dim_));
        t_.dq.get(b, h, row, got.data());
        for (size_t c = 0; c < got.size(); ++c)
            demand("dq", b, h, row, got[c], dq.values[c], stored(dq, c) + dispatched(dq, c));
    }

    // ---- judgement ----

    void demand(const char* what, int64_t b, int64_t h, int64_t row, double got, double want, double error) {
        if (std::fabs(want) + error > type_.largest) return;  // may be more than an element can hold
        const double off = std::fabs(got - want) / error;
        if (!(off <= found_.worst)) found_.worst = std::isnan(off) ? infinity : off;
        if (!(off <= 1)) fail(what, b, h, row, got, want, error);
    }

    void fail(const char* what, int64_t b, int64_t h, int64_t row, double got, double want, double error) {
        if (!found_.failure.empty()) return;
        char text[80];
        std::snprintf(text, sizeof text, " is %.9g, not %.9g +- %.2g", got, want, error);
        fail(place(what, b, h, row) + text);
    }
    void fail_exactly(const char* what, int64_t b, int64_t h, int64_t row, double got, bool is_empty, double want) {
        if (!found_.failure.empty()) return;
        char text[80];
        if (is_empty) std::snprintf(text, sizeof text, " is %.9g: without keys it is %g", got, want);
        else std::snprintf(text, sizeof text, " is %.9g: all that it sees is finite", got);
        fail(place(what, b, h, row) + text);
    }
    static std::string place(const char* what, int64_t b, int64_t h, int64_t row) {
        return std::string(what) + " of batch entry " + std::to_string(b) + ", head " + std::to_string(h) + ", row " +
               std::to_string(row);
    }
    void fail(const std::string& text) {
        if (found_.failure.empty()) found_.failure = text;
    }

    const Problem& problem_;
    const spattn_problem& p_;
    const Tensors& t_;
    const Type& type_;
    const int64_t dim_, value_dim_;
    Findings found_;
    std::vector<char> wild_q_, wild_keys_, wild_dout_, exposed_;
    std::vector<int64_t> wild_before_;  // wild keys before each one of all heads
    double work_ = 0;
    int64_t loaded_ = -1;
    Numbers keys_, values_, norms_;
    // What backward needs of the head at hand: the keys that are compared, each one's place among them, their terms.
    std::vector<int64_t> compared_keys_, place_of_key_;
    std::vector<Terms> terms_;
    Row row_;
};

}  // namespace

Findings compare(const Problem& problem, const Tensors& tensors) { return Comparison(problem, tensors).run(); }

}  // namespace random_test
