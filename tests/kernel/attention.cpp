// SPDX-License-Identifier: MIT
#include "kernel/attention.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "core/text.h"
#include "plan/call_lists.h"

namespace attention {

Problem problem_of(const Case& c, Dtype dtype) {
    const double scale = std::isnan(c.scale) ? 1 / std::sqrt(double(c.head_dim)) : c.scale;
    const int64_t offset = c.q_offset == aligned_end ? c.seq_k - c.seq_q : c.q_offset;
    Problem p{c.batch, c.heads_q, c.heads_kv, c.seq_q, c.seq_k, c.head_dim, c.head_dim_v, dtype, scale, offset, true};
    p.softcap = c.softcap, p.has_sink_logits = c.has_sinks;
    p.value_in_key = c.value_in_key;
    const PatternRef pattern = parse_pattern(c.pattern);
    if (const RuntimeShape* lists = pattern->runtime())
        p.call_lists = {lists->block_q, lists->block_k, lists->most};
    return p;
}

std::string describe(const Case& c) {
    return text(c.pattern, " batch ", c.batch, " heads ", c.heads_q, "/", c.heads_kv, " seq ", c.seq_q, "/", c.seq_k,
                " dim ", c.head_dim, "/", c.head_dim_v, c.value_in_key ? " value in key" : "", " axes ", int(c.axes),
                " scale ", c.scale, " softcap ", c.softcap, c.has_sinks ? " sinks" : "");
}

// ---- inputs -------------------------------------------------------------------------------------------------------

namespace {

Lists make_lists(const Problem& p, std::mt19937& random) {
    Lists lists;
    const int64_t rows = (p.seq_q + p.call_lists.block_q - 1) / p.call_lists.block_q;
    const int64_t blocks = (p.seq_k + p.call_lists.block_k - 1) / p.call_lists.block_k;
    const auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
    for (int64_t list = 0; list < p.batch * rows * p.heads_kv; ++list) {
        for (int64_t i = 0; i < p.call_lists.most; ++i) {
            const int64_t kind = below(8);
            lists.indices.push_back(kind == 0 && i > 0 ? lists.indices.back() : kind == 1 ? -1 - below(5)
                                    : kind == 2       ? blocks + below(3)
                                                      : below(blocks));
        }
        // Some are empty, some say less than nothing or more than there is.
        const int64_t kind = below(6);
        lists.counts.push_back(kind == 0   ? -below(2)
                               : kind == 1 ? p.call_lists.most + 7
                                           : below(p.call_lists.most + 1));
    }
    lists.narrow.assign(lists.indices.begin(), lists.indices.end());
    return lists;
}

// Values that elements of the dtype hold.
Values normal(int64_t count, Dtype dtype, std::mt19937& random) {
    std::normal_distribution<double> distribution;
    Values values(static_cast<size_t>(count));
    for (double& x : values) x = round_to(dtype, distribution(random));
    return values;
}

void share_one_head(Values& x, int64_t size) {
    for (size_t i = size_t(size); i < x.size(); ++i) x[i] = x[i % size_t(size)];
}

void poison(Values& x, int64_t row, int64_t columns) {
    for (int64_t c = 0; c < columns; ++c) x[size_t(row * columns + c)] = not_a_number;
}

// NaN where it must not matter.
void poison_unseen(Inputs& in, const Problem& p, const TokenRows& rows) {
    std::vector<char> seen(size_t(p.batch * p.heads_kv * p.seq_k));
    std::vector<int64_t> keys;
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t h = 0; h < p.heads_q; ++h)
            for (int64_t i = 0; i < p.seq_q; ++i) {
                rows.keys(b, h, i, keys);
                const int64_t row = (b * p.heads_q + h) * p.seq_q + i, head_kv = b * p.heads_kv + h / p.group();
                for (size_t n = 0; n < keys.size(); n += 2)
                    for (int64_t key = keys[n]; key < keys[n + 1]; ++key) seen[size_t(head_kv * p.seq_k + key)] = 1;
                if (!keys.empty()) continue;
                poison(in.q, row, p.head_dim);
                poison(in.dout, row, p.head_dim_v);
                if (!p.has_sink_logits) poison(in.dlse, row, 1);  // a sink's lse is z there
            }
    for (size_t row = 0; row < seen.size(); ++row) {
        if (seen[row]) continue;
        poison(in.k, int64_t(row), p.head_dim);
        poison(in.v, int64_t(row), p.head_dim_v);
    }
}

}  // namespace

CallLists view(const Lists& lists, const Problem& p) {
    if (lists.indices.empty()) return {};
    const int64_t rows = (p.seq_q + p.call_lists.block_q - 1) / p.call_lists.block_q, lines = rows * p.heads_kv;
    const bool is_wide = p.head_dim % 2;
    CallLists run{};
    run.indices = {is_wide ? static_cast<const void*>(lists.indices.data()) : lists.narrow.data(),
                   lines * p.call_lists.most, p.heads_kv * p.call_lists.most, p.call_lists.most, 1, is_wide};
    if (p.seq_k % 3) run.counts = {lists.counts.data(), lines, p.heads_kv, 1, 0, true};
    return run;
}

Inputs make_inputs(const Case& c, Dtype dtype, unsigned seed) {
    const Problem p = problem_of(c, dtype);
    std::mt19937 random(seed);
    const int64_t rows_q = p.batch * p.heads_q * p.seq_q, rows_k = p.batch * p.heads_kv * p.seq_k;
    Inputs in{normal(rows_q * p.head_dim, dtype, random), normal(rows_k * p.head_dim, dtype, random),
              normal(rows_k * p.head_dim_v, dtype, random), normal(rows_q * p.head_dim_v, dtype, random),
              normal(rows_q, Dtype::f32, random), normal(p.heads_q, Dtype::f32, random)};
    for (double& z : in.sinks) z *= 4;  // some above the scores, some far below
    if (p.call_lists.at_run_time()) in.lists = make_lists(p, random);
    if (c.axes == Axes::shared) {
        share_one_head(in.q, p.seq_q * p.head_dim);
        share_one_head(in.k, p.seq_k * p.head_dim);
        share_one_head(in.v, p.seq_k * p.head_dim_v);
        share_one_head(in.dout, p.seq_q * p.head_dim_v);
    } else {
        const PatternRef pattern = parse_pattern(c.pattern), known = pattern->known_part();
        if (p.call_lists.at_run_time())
            poison_unseen(in, p, CallListRows(known.get(), p, view(in.lists, p)));
        else
            poison_unseen(in, p, PatternRows(*pattern, p));
    }
    return in;
}

// ---- runs ---------------------------------------------------------------------------------------------------------

bool same_bits(const Values& a, const Values& b) {
    return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])));
}

namespace {

template <class T>
constexpr Dtype dtype_of = Dtype::f32;
template <>
constexpr Dtype dtype_of<F16> = Dtype::f16;
template <>
constexpr Dtype dtype_of<double> = Dtype::f64;
template <>
constexpr Dtype dtype_of<Bf16> = Dtype::bf16;

}  // namespace

template <class T>
Attention<T>::Attention(const Case& c, const Rows& rows, int threads, const Layouts& layouts, PlanOptions options)
    : case_(c),
      pattern_(parse_pattern(c.pattern)),
      known_(pattern_->known_part()),
      problem_(problem_of(c, dtype_of<T>)),
      threads_(make_thread_pool(threads)) {
    options.backward = true;
    options.reference = rows.forward.family == Family::reference;
    options.machine = this_machine(threads);
    kernels_ = {rows.forward, rows.backward};
    plan_ = compile_plan(*pattern_, problem_, options, kernels_);
    if (layouts.forward) replace(plan_.forward, layouts.forward);
    if (layouts.backward) replace(plan_.backward, layouts.backward);
}

template <class T>
Results Attention<T>::run(const Inputs& in) {
    const Problem& p = problem_;
    const Axes out_axes = case_.axes == Axes::shared ? Axes::bhsd : case_.axes;
    Tensor<T> q(case_.axes, p.batch, p.heads_q, p.seq_q, p.head_dim),
        k(case_.axes, p.batch, p.heads_kv, p.seq_k, p.head_dim),
        v(case_.axes, p.batch, p.heads_kv, p.seq_k, p.head_dim_v),
        dout(case_.axes, p.batch, p.heads_q, p.seq_q, p.head_dim_v),
        out(out_axes, p.batch, p.heads_q, p.seq_q, p.head_dim_v),
        dq(out_axes, p.batch, p.heads_q, p.seq_q, p.head_dim),
        dk(out_axes, p.batch, p.heads_kv, p.seq_k, p.head_dim),
        dv(out_axes, p.batch, p.heads_kv, p.seq_k, p.head_dim_v);
    Tensor<float> lse(out_axes, p.batch, p.heads_q, p.seq_q, 1), dlse(out_axes, p.batch, p.heads_q, p.seq_q, 1),
        max_logits(out_axes, p.batch, p.heads_q, p.seq_q, 1);
    Tensor<float> sinks(Axes::gaps, 1, p.heads_q, 1, 1), dsinks(Axes::gaps, 1, p.heads_q, 1, 1);
    lists_ = attention::view(in.lists, p);
    q.set(in.q), k.set(in.k), v.set(in.v), dout.set(in.dout), dlse.set(in.dlse), sinks.set(in.sinks);

    ForwardArgs f{};
    f.q = q.view(), f.k = k.view(), f.v = v.view(), f.out = out.view(), f.lse = lse.view();
    f.max_logits = max_logits.view();
    if (p.value_in_key) f.v = f.k;
    if (p.has_sink_logits) f.sink_logits = sinks.view();
    run(plan_.forward, f);
    const Values first = out.values();
    if (!case_.optional_operands) f.lse = f.max_logits = {};
    run(plan_.forward, f);
    CHECK(same_bits(first, out.values()));  // again, and with or without lse

    BackwardArgs b{};
    b.q = f.q, b.k = f.k, b.v = f.v, b.out = f.out, b.lse = lse.view(), b.dout = dout.view();
    if (case_.optional_operands) b.dlse = dlse.view();
    b.sink_logits = f.sink_logits;
    if (case_.optional_operands && p.has_sink_logits) b.dsink_logits = dsinks.view();
    b.dq = dq.view(), b.dk = dk.view();
    if (!p.value_in_key) b.dv = dv.view();
    run(plan_.backward, b);
    CHECK(out.kept_guards() && lse.kept_guards() && max_logits.kept_guards());
    CHECK(dq.kept_guards() && dk.kept_guards() && dv.kept_guards() && dsinks.kept_guards());
    return {out.values(), lse.values(), max_logits.values(), dq.values(), dk.values(), dv.values(),
            b.dsink_logits.data ? dsinks.values() : Values()};
}

template <class T>
void Attention<T>::replace(PassPlan& pass, std::shared_ptr<const Layout> layout) const {
    if (pass.pieces.size() != 1) std::abort();  // the layout is one of the whole pattern
    PiecePlan& whole = pass.pieces[0];
    const Kernel& kernel = *whole.kernel;
    auto masks = std::make_shared<std::vector<uint64_t>>(layout->masks);
    if (kernel.permute)
        for (int32_t i = 0; i < layout->num_masks; ++i)
            kernel.permute(&layout->masks[size_t(i) * layout->mask_words], layout->block_q, layout->block_k,
                           &(*masks)[size_t(i) * kernel.mask_words]);
    whole.layout = std::move(layout);
    whole.masks = std::move(masks);
    whole.schedule = make_schedule(problem_, whole.layout_view(), kernel.walks[0], threads_->lanes());
    pass.workspace = kernel.workspace(
        {problem_, whole.layout_view(), spattn::view(whole.schedule), {}, {}, threads_->lanes()});
}

template <class T>
template <class Args>
void Attention<T>::run(const PassPlan& pass, Args& args) {
    Workspace workspace(pass.workspace);
    args.problem = &problem_;
    const PatternRows pattern_rows(*pattern_, problem_);
    const CallListRows list_rows(known_.get(), problem_, lists_);
    args.rows = &pattern_rows;
    if (problem_.call_lists.at_run_time()) args.rows = &list_rows;
    args.call_lists = lists_;
    args.parallel = threads_.get();
    args.workspace = workspace.start();
    spattn::run_pass(cpu_backend(), pass, spattn::view(pass), args);
    CHECK(workspace.kept_guard());
}

template class Attention<float>;
template class Attention<F16>;
template class Attention<Bf16>;
template class Attention<double>;

Results run_rows(const Case& c, const Rows& rows, const Inputs& in, int threads, const Layouts& layouts,
                 const PlanOptions& options) {
    switch (rows.forward.dtype) {
        case Dtype::f32: return Attention<float>(c, rows, threads, layouts, options).run(in);
        case Dtype::f16: return Attention<F16>(c, rows, threads, layouts, options).run(in);
        case Dtype::f64: return Attention<double>(c, rows, threads, layouts, options).run(in);
        case Dtype::bf16: return Attention<Bf16>(c, rows, threads, layouts, options).run(in);
    }
    std::abort();
}

const Backend& cpu_backend() {
    for (const Backend& backend : all_backends())
        if (backend.device == SPATTN_CPU) return backend;
    std::abort();
}

std::vector<Rows> cpu_rows(bool reference, FewQueries few_queries) {
    std::vector<Rows> pairs;
    const auto replace = [](std::string& text, const std::string& part, const char* by) {
        const size_t at = text.find(part);
        if (at != std::string::npos) text.replace(at, part.size(), by);
        return at != std::string::npos;
    };
    const auto partner_of = [&](std::string name) {
        if (replace(name, "_few_forward", "_block_forward")) {
            if (few_queries == FewQueries::left_out) return std::string();
            name.replace(name.rfind("heads"), std::string::npos, "16x16");
        }
        replace(name, "forward", "backward");
        return name;
    };
    for (const Kernel& f : all_kernels()) {
        if (f.device != SPATTN_CPU || f.pass != Pass::forward || (f.family == Family::reference) != reference) continue;
        for (const Kernel& b : all_kernels())
            if (partner_of(f.name) == b.name) pairs.push_back({f, b});
    }
    return pairs;
}

bool takes(const Rows& rows, const Case& c) {
    const PatternRef pattern = parse_pattern(c.pattern), known = pattern->runtime() ? pattern->known_part() : pattern;
    const Problem p = problem_of(c, Dtype::f32);
    for (const Kernel& row : {rows.forward, rows.backward})
        if (row.fits(p) || (has_call_layout(row, p) && refuse_call_lists(row, p))) return false;
    if (!rows.forward.shares_lists || !known) return true;
    for (int64_t plane = 0; plane < p.batch * p.heads_q; ++plane) {
        Key own, first;
        const int64_t head = plane % p.heads_q;
        known->selection({extent_of(p), plane / p.heads_q, head}, own);
        known->selection({extent_of(p), plane / p.heads_q, head - head % p.group()}, first);
        if (own != first) return false;
    }
    return true;
}

bool is_tested(const Rows& rows) {
    const char* wanted = std::getenv("SPATTN_TEST_ROWS");
    return rows.forward.runs_here(0) && (!wanted || !std::strncmp(rows.forward.name, wanted, std::strlen(wanted)));
}

Rows reference_rows(Dtype dtype) {
    for (const Rows& rows : cpu_rows(true))
        if (rows.forward.dtype == dtype) return rows;
    std::abort();
}

}  // namespace attention
