// SPDX-License-Identifier: MIT
// The misuse matrix of the C ABI through sparseattn.hpp: a typed error that names the argument, never a crash.
#include <cmath>
#include <limits>
#include <sparseattn/sparseattn.hpp>

#include "check.h"

namespace sa = sparseattn;

namespace {

constexpr int64_t huge = int64_t(1) << 62, least = std::numeric_limits<int64_t>::min();

template <class Call>
void demand(const char* status, const std::string& argument, Call call) {
    check::context = argument + " wants " + status;
    try {
        call();
        CHECK(!"an error");
    } catch (const sa::Error& error) {
        CHECK_EQ(std::string(error.failure().name()), status);
        CHECK_EQ(error.argument(), argument);
        CHECK_EQ(error.family(), error.status() / 1000 * 1000);
        CHECK(error.what()[0] != 0 && error.function().find("spattn_") == 0);
    }
}

sa::Problem legal_problem() {
    sa::Problem problem;
    problem.batch = 2, problem.heads_q = 4, problem.heads_kv = 2, problem.seq_q = problem.seq_k = 8;
    problem.head_dim = 4, problem.backward = true, problem.sink_logits = true;
    return problem;
}

const sa::Context& context() {
    static const sa::Context shared(sa::cpu);
    return shared;
}

// Legal operands of both passes of legal_problem.
struct Operands {
    std::vector<float> memory = std::vector<float>(4096, 1.0f);
    sa::Forward forward;
    sa::Backward backward;

    Operands() {
        sa::Backward& b = backward;
        size_t next = 0;
        const auto place = [&](std::initializer_list<int64_t> shape) {
            float* data = &memory[next];
            int64_t size = 1;
            for (int64_t axis : shape) size *= axis;
            next += size_t(size);
            return sa::View(data, sa::float32, shape.begin(), nullptr, int(shape.size()));
        };
        b.q = place({2, 8, 4, 4}), b.k = place({2, 8, 2, 4}), b.v = place({2, 8, 2, 4});
        forward.out = place({2, 8, 4, 4}), forward.lse = place({2, 4, 8}), forward.max_logits = place({2, 4, 8});
        b.out = forward.out, b.lse = forward.lse, b.dout = place({2, 8, 4, 4}), b.dlse = place({2, 4, 8});
        b.dq = place({2, 8, 4, 4}), b.dk = place({2, 8, 2, 4}), b.dv = place({2, 8, 2, 4});
        b.sink_logits = place({4}), b.dsink_logits = place({4});
        forward.q = b.q, forward.k = b.k, forward.v = b.v, forward.sink_logits = b.sink_logits;
        CHECK(next <= memory.size());
    }
};

// Sends every wrong form of one operand through a pass.
template <class Args, class V, class Run>
void demand_operand(const char* name, V Args::* field, bool is_optional, Args args, Run run) {
    const V good = args.*field;
    const spattn_tensor legal = good.c();
    using Axes = std::vector<int64_t>;
    using Spoil = std::function<void(spattn_tensor&, Axes& shape, Axes& strides)>;
    const auto wrong = [&](const char* status, const Spoil& spoil) {
        spattn_tensor tensor = legal;
        Axes shape(legal.shape, legal.shape + legal.ndim), strides(shape.size(), 1);
        for (size_t i = shape.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * shape[i + 1];
        tensor.shape = shape.data(), tensor.strides = strides.data();
        spoil(tensor, shape, strides);
        args.*field = V(tensor);
        demand(status, name, [&] { run(args); });
    };
    if (!is_optional) {
        args.*field = V();
        demand("SPATTN_E_NULL", name, [&] { run(args); });
    }
    wrong("SPATTN_E_NULL", [](spattn_tensor& t, Axes&, Axes&) { t.data = nullptr; });
    wrong("SPATTN_E_NULL", [](spattn_tensor& t, Axes&, Axes&) { t.shape = nullptr; });
    wrong("SPATTN_E_DTYPE", [](spattn_tensor& t, Axes&, Axes&) { t.dtype = sa::float64; });
    wrong("SPATTN_E_DTYPE", [](spattn_tensor& t, Axes&, Axes&) { t.dtype.lanes = 2; });
    wrong("SPATTN_E_DEVICE", [](spattn_tensor& t, Axes&, Axes&) { t.device = sa::cuda(0); });
    wrong("SPATTN_E_LAYOUT", [](spattn_tensor& t, Axes&, Axes&) { t.byte_offset = 1; });
    for (int32_t axes : {-1, 0, 9, std::numeric_limits<int32_t>::max()})
        wrong("SPATTN_E_SHAPE", [axes](spattn_tensor& t, Axes&, Axes&) { t.ndim = axes; });
    for (size_t i = 0; i < size_t(legal.ndim); ++i) {
        for (int64_t size : {int64_t(-1), int64_t(0), legal.shape[i] + 1, huge, least})
            wrong("SPATTN_E_SHAPE", [=](spattn_tensor&, Axes& shape, Axes&) { shape[i] = size; });
        for (int64_t stride : {int64_t(-1), huge, least})
            wrong("SPATTN_E_LAYOUT", [=](spattn_tensor&, Axes&, Axes& strides) { strides[i] = stride; });
    }
}

}  // namespace

TEST(numbers) {
    for (int64_t bad : {int64_t(-2), least}) {
        demand("SPATTN_E_RANGE", "left", [=] { sa::window(bad, 0); });
        demand("SPATTN_E_RANGE", "right", [=] { sa::window(0, bad); });
        demand("SPATTN_E_RANGE", "left", [=] { sa::dilated(bad, 0, 1); });
        demand("SPATTN_E_RANGE", "right", [=] { sa::dilated(0, bad, 1); });
        demand("SPATTN_E_RANGE", "tokens", [=] { sa::sink(bad); });
        demand("SPATTN_E_RANGE", "landmarks", [=] { sa::landmark(4, bad); });
        demand("SPATTN_E_RANGE", "landmarks", [=] { sa::fixed(4, bad); });
        demand("SPATTN_E_RANGE", "offset", [=] { sa::residue(4, bad); });
        demand("SPATTN_E_RANGE", "params.global_blocks", [=] { sa::bigbird({4, 3, bad, 1, 0}); });
        demand("SPATTN_E_RANGE", "params.random_blocks", [=] { sa::bigbird({4, 3, 1, bad, 0}); });
    }
    for (int64_t bad : {int64_t(0), int64_t(-1), least}) {
        demand("SPATTN_E_RANGE", "block", [=] { sa::block_diagonal(bad); });
        demand("SPATTN_E_RANGE", "dilation", [=] { sa::dilated(1, 1, bad); });
        demand("SPATTN_E_RANGE", "stride", [=] { sa::strided(bad); });
        demand("SPATTN_E_RANGE", "block", [=] { sa::landmark(bad, 0); });
        demand("SPATTN_E_RANGE", "block", [=] { sa::fixed(bad, 0); });
        demand("SPATTN_E_RANGE", "modulus", [=] { sa::residue(bad, 0); });
        demand("SPATTN_E_RANGE", "params.block", [=] { sa::bigbird({bad, 3, 1, 1, 0}); });
        demand("SPATTN_E_RANGE", "seq_k", [=] { sa::csr({0, 1}, {0}, bad); });
        demand("SPATTN_E_RANGE", "block_q", [=] { sa::bsr({0, 1}, {0}, bad, 4, 4, 4); });
        demand("SPATTN_E_RANGE", "block_k", [=] { sa::bsr({0, 1}, {0}, 4, bad, 4, 4); });
        demand("SPATTN_E_RANGE", "seq_q", [=] { sa::bsr({0, 1}, {0}, 4, 4, bad, 4); });
        demand("SPATTN_E_RANGE", "seq_k", [=] { sa::bsr({0, 1}, {0}, 4, 4, 4, bad); });
        demand("SPATTN_E_RANGE", "seq_q", [=] { sa::rows(sa::causal(), {{0, 1}}, bad); });
        demand("SPATTN_E_RANGE", "seq_k", [=] { sa::columns(sa::causal(), {{0, 1}}, bad); });
        demand("SPATTN_E_RANGE", "max_tokens_per_row", [=] { sa::runtime_tokens(bad); });
        demand("SPATTN_E_RANGE", "block_q", [=] { sa::runtime_blocks(bad, 4, 4); });
        demand("SPATTN_E_RANGE", "block_k", [=] { sa::runtime_blocks(4, bad, 4); });
        demand("SPATTN_E_RANGE", "max_blocks_per_row", [=] { sa::runtime_blocks(4, 4, bad); });
        const auto keep = [](int64_t, int64_t, int64_t) { return true; };
        demand("SPATTN_E_RANGE", "heads", [=] { sa::predicate(keep, bad, 4, 4); });
        demand("SPATTN_E_RANGE", "seq_q", [=] { sa::predicate(keep, 1, bad, 4); });
        demand("SPATTN_E_RANGE", "seq_k", [=] { sa::predicate(keep, 1, 4, bad); });
    }
    demand("SPATTN_E_RANGE", "params.window_blocks", [] { sa::bigbird({4, 2, 1, 1, 0}); });
    demand("SPATTN_E_UNKNOWN_FIELD", "flags", [] { sa::csr({0, 1}, {0}, 4, 4); });
}

TEST(lists_and_texts) {
    for (const char* text : {"", "cuasal", "causal &", "window(1)", "window(-2,0)", "(causal", "causal\xff"})
        demand("SPATTN_E_FORMAT", "text", [=] { sa::parse(text); });
    for (const std::string text : {std::string("causal\0 & sink(4)", 17), std::string("full\0", 5), std::string(1, '\0')}) {
        demand("SPATTN_E_FORMAT", "text", [=] { sa::parse(text); });
        try {
            sa::parse(text);
        } catch (const sa::Error& error) {
            const std::string place = "column " + std::to_string(text.find('\0') + 1) + ": found byte 0";
            CHECK(std::string(error.what()).find(place) != std::string::npos);
        }
    }
    demand("SPATTN_E_NULL", "text", [] { sa::parse(static_cast<const char*>(nullptr)); });
    demand("SPATTN_E_FORMAT", "bytes", [] { sa::load(std::vector<unsigned char>{1, 2, 3}); });
    demand("SPATTN_E_NULL", "bytes", [] { sa::load(nullptr, 8); });
    demand("SPATTN_E_RANGE", "cu_seqlens", [] { sa::documents({3, 2}); });
    demand("SPATTN_E_RANGE", "positions", [] { sa::global_keys({-1}); });
    demand("SPATTN_E_RANGE", "positions", [] { sa::global_tokens({-1}); });
    demand("SPATTN_E_ARGUMENT", "parents", [] { sa::tree({1, 0}); });
    demand("SPATTN_E_NULL", "cu_seqlens", [] { sa::documents(sa::ConstView()); });
    demand("SPATTN_E_DTYPE", "cu_seqlens", [] { sa::documents(std::vector<float>{0, 1}); });
    demand("SPATTN_E_RANGE", "row_ptr", [] { sa::csr({1, 1}, {0}, 4); });
    demand("SPATTN_E_RANGE", "col_idx", [] { sa::csr({0, 1}, {4}, 4); });
    demand("SPATTN_E_NULL", "mask", [] { sa::mask(sa::ConstView()); });
    demand("SPATTN_E_RANGE", "count", [] { sa::unite({}); });
    demand("SPATTN_E_RANGE", "count", [] { sa::intersect({}); });
    demand("SPATTN_E_RANGE", "part_of_head[1]", [] { sa::per_head({sa::causal(), sa::full()}, {0, 2}); });
    demand("SPATTN_E_RANGE", "part_of_batch[1]", [] { sa::per_batch({sa::causal(), sa::full()}, {0, -1}); });
    demand("SPATTN_E_RANGE", "axes", [] { sa::grid({}); });
    demand("SPATTN_E_RANGE", "sizes[0]", [] { sa::grid({{0, sa::full()}}); });
    demand("SPATTN_E_RANGE", "tile[1]", [] { sa::grid({{4, sa::full()}, {6, sa::full(), 4}}); });
    const std::vector<int64_t> flat{0, 1};
    for (const auto make : {sa::rows, sa::columns}) {
        demand("SPATTN_E_SHAPE", "ranges", [=] { make(sa::causal(), {}, 8); });
        demand("SPATTN_E_SHAPE", "ranges", [=] { make(sa::causal(), std::vector<sa::Range>(), 8); });
        demand("SPATTN_E_SHAPE", "ranges", [&] { make(sa::causal(), sa::view(flat), 8); });
        demand("SPATTN_E_NULL", "ranges", [=] { make(sa::causal(), sa::ConstView(), 8); });
        demand("SPATTN_E_RANGE", "ranges", [=] { make(sa::causal(), {{0, 4}, {4, 9}}, 8); });
        demand("SPATTN_E_RANGE", "ranges", [=] { make(sa::causal(), {{4, 4}}, 8); });
    }
    demand("SPATTN_E_UNSUPPORTED", "inner", [] { sa::columns(sa::runtime_tokens(8), {{0, 4}}, 8); });
    sa::Extent three;
    three.seq_q = 3, three.seq_k = 8;
    demand("SPATTN_E_SHAPE", "pattern", [&] { sa::rows(sa::causal(), {{0, 4}}, 8).stats(three); });
    demand("SPATTN_E_SHAPE", "pattern", [&] { sa::columns(sa::causal(), {{0, 4}}, 8).stats(three); });
}

TEST(empty_handles) {
    const sa::Pattern none;
    sa::Extent extent;
    demand("SPATTN_E_NULL", "parts[0]", [&] { none | sa::causal(); });
    demand("SPATTN_E_NULL", "parts[1]", [&] { sa::causal() & none; });
    demand("SPATTN_E_NULL", "b", [&] { sa::causal() - none; });
    demand("SPATTN_E_NULL", "pattern", [&] { sa::transpose(none); });
    demand("SPATTN_E_NULL", "inner", [&] { sa::per_document(none, {0, 1}, {0, 1}); });
    demand("SPATTN_E_NULL", "inner", [&] { sa::rows(none, {{0, 1}}, 1); });
    demand("SPATTN_E_NULL", "inner", [&] { sa::columns(none, {{0, 1}}, 1); });
    demand("SPATTN_E_NULL", "pattern", [&] { none.text(); });
    demand("SPATTN_E_NULL", "pattern", [&] { none.save(); });
    demand("SPATTN_E_NULL", "pattern", [&] { none.hash(); });
    demand("SPATTN_E_NULL", "pattern", [&] { none.stats(extent); });
    demand("SPATTN_E_NULL", "pattern", [&] { none.keeps(extent, 0, 0); });
    demand("SPATTN_E_NULL", "pattern", [&] { none.to_csr(extent); });
    demand("SPATTN_E_NULL", "pattern", [&] { context().plan(none, legal_problem()); });
    sa::Context gone = context();
    const sa::Context taken = std::move(gone);
    demand("SPATTN_E_NULL", "context", [&] { gone.plan(sa::causal(), legal_problem()); });
    const sa::Plan plan;
    demand("SPATTN_E_NULL", "plan", [&] { plan.workspace(sa::Pass::forward); });
    demand("SPATTN_E_NULL", "plan", [&] { plan.stats(); });
    demand("SPATTN_E_NULL", "plan", [&] { plan.explain(); });
    demand("SPATTN_E_NULL", "plan", [&] { plan.forward(Operands().forward); });
    demand("SPATTN_E_NULL", "plan", [&] { plan.backward(Operands().backward); });
    CHECK_EQ(std::hash<sa::Pattern>()(none), 0u);
}

TEST(questions) {
    const sa::Pattern causal = sa::causal();
    const auto spoil = [](int64_t sa::Extent::* field, int64_t value) {
        sa::Extent extent;
        extent.seq_q = 6, extent.seq_k = 9, extent.heads = 2;
        extent.*field = value;
        return extent;
    };
    const std::pair<const char*, int64_t sa::Extent::*> fields[] = {
        {"extent.batch", &sa::Extent::batch}, {"extent.heads", &sa::Extent::heads},
        {"extent.seq_q", &sa::Extent::seq_q}, {"extent.seq_k", &sa::Extent::seq_k},
        {"extent.block_q", &sa::Extent::block_q}, {"extent.block_k", &sa::Extent::block_k}};
    for (const auto& [name, field] : fields)
        for (int64_t bad : {int64_t(-1), huge, least})
            demand("SPATTN_E_RANGE", name, [&, field = field] { causal.stats(spoil(field, bad)); });
    sa::Extent extent = spoil(&sa::Extent::batch, 1);
    for (int64_t bad : {int64_t(-1), int64_t(9), huge, least}) {
        demand("SPATTN_E_RANGE", "q", [&] { causal.keeps(extent, bad, 0); });
        demand("SPATTN_E_RANGE", "k", [&] { causal.keeps(extent, 0, bad); });
        demand("SPATTN_E_RANGE", "head", [&] { causal.keeps(extent, 0, 0, bad); });
        demand("SPATTN_E_RANGE", "batch", [&] { causal.keeps(extent, 0, 0, 0, bad); });
        demand("SPATTN_E_RANGE", "head", [&] { causal.to_csr(extent, bad); });
    }
    unsigned char mask[108] = {};
    demand("SPATTN_E_SHAPE", "out", [&] { causal.to_mask(extent, sa::view(mask, {1, 2, 6, 8})); });
    demand("SPATTN_E_NULL", "out", [&] { causal.to_mask(extent, {}); });
    demand("SPATTN_E_DTYPE", "coverage", [&] { causal.to_image(extent, sa::view(mask, {2, 2})); });
    extent.q_offset = huge;
    demand("SPATTN_E_RANGE", "extent.q_offset", [&] { causal.stats(extent); });
}

TEST(problems) {
    const std::pair<const char*, int64_t sa::Problem::*> sizes[] = {
        {"problem.batch", &sa::Problem::batch}, {"problem.heads_q", &sa::Problem::heads_q},
        {"problem.heads_kv", &sa::Problem::heads_kv}, {"problem.seq_q", &sa::Problem::seq_q},
        {"problem.seq_k", &sa::Problem::seq_k}, {"problem.head_dim", &sa::Problem::head_dim}};
    const auto plan = [](auto change) {
        sa::Problem problem = legal_problem();
        change(problem);
        context().plan(sa::causal(), problem);
    };
    for (const auto& [name, field] : sizes)
        for (int64_t bad : {int64_t(0), int64_t(-1), least}) {
            const bool may_be_empty = field == &sa::Problem::batch || field == &sa::Problem::seq_q ||
                                      field == &sa::Problem::seq_k;
            if (bad == 0 && may_be_empty) continue;
            demand("SPATTN_E_RANGE", name,
                   [&, field = field] { plan([&](sa::Problem& problem) { problem.*field = bad; }); });
        }
    demand("SPATTN_E_RANGE", "problem.head_dim_v", [&] { plan([](sa::Problem& p) { p.head_dim_v = -1; }); });
    demand("SPATTN_E_RANGE", "problem.heads_kv", [&] { plan([](sa::Problem& p) { p.heads_kv = 3; }); });
    demand("SPATTN_E_RANGE", "problem.scale", [&] { plan([](sa::Problem& p) { p.scale = NAN; }); });
    demand("SPATTN_E_RANGE", "problem.softcap", [&] { plan([](sa::Problem& p) { p.softcap = -1; }); });
    demand("SPATTN_E_RANGE", "problem.q_offset", [&] { plan([](sa::Problem& p) { p.q_offset = least; }); });
    demand("SPATTN_E_RANGE", "problem.axes", [&] { plan([](sa::Problem& p) { p.axes = sa::Axes(3); }); });
    demand("SPATTN_E_DTYPE", "problem.dtype", [&] { plan([](sa::Problem& p) { p.dtype = {0, 0, 0}; }); });
    demand("SPATTN_E_RANGE", "op", [] { context().plan(sa::causal(), legal_problem()).workspace(sa::Pass(2)); });
    for (sa::Device bad : {sa::Device{99, 0}, sa::Device{SPATTN_CPU, 1}})
        demand("SPATTN_E_DEVICE", "options.device", [=] { sa::Context{bad}; });
}

TEST(operands_of_forward) {
    const sa::Plan plan = context().plan(sa::causal(), legal_problem());
    const Operands good;
    const auto run = [&](const sa::Forward& args) { plan.forward(args); };
    run(good.forward);
    using F = sa::Forward;
    demand_operand("q", &F::q, false, good.forward, run);
    demand_operand("k", &F::k, false, good.forward, run);
    demand_operand("v", &F::v, false, good.forward, run);
    demand_operand("out", &F::out, false, good.forward, run);
    demand_operand("lse", &F::lse, true, good.forward, run);
    demand_operand("max_logits", &F::max_logits, true, good.forward, run);
    demand_operand("sink_logits", &F::sink_logits, false, good.forward, run);
    sa::Forward args = good.forward;
    args.indices = args.q;
    demand("SPATTN_E_STATE", "indices", [&] { run(args); });
    unsigned char one;
    args = good.forward, args.workspace = {&one, 1};
    demand("SPATTN_E_WORKSPACE", "workspace_bytes", [&] { run(args); });
}

TEST(operands_of_backward) {
    const sa::Plan plan = context().plan(sa::causal(), legal_problem());
    const Operands good;
    const auto run = [&](const sa::Backward& args) { plan.backward(args); };
    plan.forward(good.forward);
    run(good.backward);
    using B = sa::Backward;
    const std::pair<const char*, sa::ConstView B::*> inputs[] = {
        {"q", &B::q}, {"k", &B::k}, {"v", &B::v}, {"out", &B::out}, {"lse", &B::lse}, {"dout", &B::dout},
        {"sink_logits", &B::sink_logits}};
    for (const auto& [name, field] : inputs) demand_operand(name, field, false, good.backward, run);
    demand_operand("dlse", &B::dlse, true, good.backward, run);
    demand_operand("dq", &B::dq, false, good.backward, run);
    demand_operand("dk", &B::dk, false, good.backward, run);
    demand_operand("dv", &B::dv, false, good.backward, run);
    demand_operand("dsink_logits", &B::dsink_logits, true, good.backward, run);
}

TEST(caches) {
    sa::Problem problem = legal_problem();
    problem.backward = problem.sink_logits = false, problem.starts = true, problem.page_size = 4, problem.seq_q = 1;
    const auto plan = [&](auto change) {
        sa::Problem changed = problem;
        change(changed);
        return context().plan(sa::causal(), changed);
    };
    demand("SPATTN_E_RANGE", "problem.page_size", [&] { plan([](sa::Problem& p) { p.starts = false; }); });
    for (int64_t bad : {int64_t(3), int64_t(16), int64_t(-4), huge, least})
        demand("SPATTN_E_RANGE", "problem.page_size", [&] { plan([=](sa::Problem& p) { p.page_size = bad; }); });
    demand("SPATTN_E_UNSUPPORTED", "problem.flags", [&] { plan([](sa::Problem& p) { p.backward = true; }); });
    demand("SPATTN_E_UNSUPPORTED", "problem.flags", [&] { plan([](sa::Problem& p) { p.q_offset = 0; }); });
    demand("SPATTN_E_UNSUPPORTED", "pattern", [&] { context().plan(sa::runtime_tokens(4) & sa::sink(2), problem); });

    const std::vector<float> q(2 * 4 * 4), pages(4 * 4 * 2 * 4);
    std::vector<float> out(q.size());
    const std::vector<int32_t> starts{5, 2}, table{3, 0, 1, 2};
    sa::Forward good;
    good.q = sa::view(q.data(), {2, 1, 4, 4}), good.out = sa::view(out.data(), {2, 1, 4, 4});
    good.k = good.v = sa::view(pages.data(), {4, 4, 2, 4});
    good.starts = sa::view(starts), good.page_table = sa::view(table.data(), {2, 2});
    const auto run_on = [](const sa::Plan& on) { return [on](const sa::Forward& args) { on.forward(args); }; };
    const auto run = run_on(plan([](sa::Problem&) {}));
    run(good);
    demand_operand("starts", &sa::Forward::starts, false, good, run);
    demand_operand("page_table", &sa::Forward::page_table, false, good, run);

    // Pages of a cache that has none, and a cache that is none.
    good.k = good.v = sa::view(pages.data(), {2, 8, 2, 4});
    demand("SPATTN_E_STATE", "page_table", [&] { run_on(plan([](sa::Problem& p) { p.page_size = 0; }))(good); });
    const auto none = run_on(plan([](sa::Problem& p) { p.starts = false, p.page_size = 0; }));
    demand("SPATTN_E_STATE", "starts", [&] { none(good); });

    // A layout of an earlier call, where calls make none.
    good.starts = good.page_table = sa::ConstView(), good.same_step = true;
    none(good);  // there is no workspace that it could be in
    const sa::Buffer buffer({4096, 64});
    good.workspace = buffer;
    demand("SPATTN_E_STATE", "args.flags", [&] { none(good); });
}

TEST(appends) {
    sa::Problem problem = legal_problem();
    problem.backward = problem.sink_logits = false, problem.starts = true, problem.page_size = 4, problem.seq_q = 3;
    const std::vector<float> rows(2 * 3 * 2 * 4);
    std::vector<float> keys(4 * 4 * 2 * 4), values(keys);
    const std::vector<int32_t> starts{5, 2}, table{3, 0, 1, 2}, offsets{0, 1, 3};
    sa::CacheAppend good;
    good.k_new = good.v_new = sa::view(rows.data(), {2, 3, 2, 4});
    good.k = sa::view(keys.data(), {4, 4, 2, 4}), good.v = sa::view(values.data(), {4, 4, 2, 4});
    good.starts = good.counts = sa::view(starts), good.page_table = sa::view(table.data(), {2, 2});
    const auto run = [&](const sa::CacheAppend& args) { context().append(problem, args); };
    run(good);
    using A = sa::CacheAppend;
    demand_operand("k_new", &A::k_new, false, good, run);
    demand_operand("v_new", &A::v_new, false, good, run);
    demand_operand("starts", &A::starts, false, good, run);
    demand_operand("counts", &A::counts, true, good, run);
    demand_operand("page_table", &A::page_table, false, good, run);
    const auto refused = [&](const char* status, const char* argument, const sa::CacheAppend& args) {
        demand(status, argument, [&] { run(args); });
    };
    auto bad = good;
    bad.k = sa::View(), refused("SPATTN_E_NULL", "k", bad);
    bad = good, bad.v = good.k, refused("SPATTN_E_LAYOUT", "k", bad);
    bad = good, bad.query_offsets = sa::view(offsets), refused("SPATTN_E_STATE", "query_offsets", bad);
    problem.starts = false, problem.page_size = 0;
    refused("SPATTN_E_RANGE", "problem.flags", good);
}

TEST(float8_caches) {
    sa::Problem problem = legal_problem();
    problem.backward = problem.sink_logits = false, problem.starts = true;
    const auto plan = [&](sa::Dtype cache_dtype, bool starts) {
        sa::Problem changed = problem;
        changed.cache_dtype = cache_dtype, changed.starts = starts;
        return context().plan(sa::causal(), changed);
    };
    demand("SPATTN_E_DTYPE", "problem.cache_dtype", [&] { plan(sa::float8_e4m3fn, false); });
    for (const sa::Dtype bad : {sa::float16, sa::Dtype{SPATTN_FLOAT8_E4M3FN, 16, 1}, sa::element<uint8_t>::dtype})
        demand("SPATTN_E_DTYPE", "problem.cache_dtype", [&] { plan(bad, true); });

    const std::vector<float> floats(2 * 8 * 4 * 4);
    std::vector<uint8_t> keys(2 * 8 * 2 * 4), values(keys);
    std::vector<float> out(floats.size()), cache(keys.size()), scales(2 * 8 * 2), value_scales(scales);
    const std::vector<int32_t> starts{0, 2};
    const int64_t shape[] = {2, 8, 2, 4};
    sa::Forward good;
    good.q = sa::view(floats.data(), {2, 8, 4, 4}), good.out = sa::view(out.data(), {2, 8, 4, 4});
    good.k = sa::ConstView(keys.data(), sa::float8_e4m3fn, shape, nullptr, 4);
    good.v = sa::ConstView(values.data(), sa::float8_e4m3fn, shape, nullptr, 4);
    good.starts = sa::view(starts);
    good.k_scales = sa::view(scales.data(), {2, 8, 2}), good.v_scales = sa::view(value_scales.data(), {2, 8, 2});
    const auto run_on = [](const sa::Plan& on) { return [on](const sa::Forward& args) { on.forward(args); }; };
    const auto run = run_on(plan(sa::float8_e4m3fn, true));
    run(good);
    demand_operand("k_scales", &sa::Forward::k_scales, true, good, run);
    demand_operand("v_scales", &sa::Forward::v_scales, true, good, run);
    sa::Forward args = good;
    args.k = sa::view(floats.data(), shape);
    demand("SPATTN_E_DTYPE", "k", [&] { run(args); });
    args.v = args.k;
    const auto of_floats = run_on(plan(sa::float32, true));
    demand("SPATTN_E_STATE", "k_scales", [&] { of_floats(args); });
    args.k_scales = sa::ConstView();
    demand("SPATTN_E_STATE", "v_scales", [&] { of_floats(args); });

    sa::CacheAppend rows;
    rows.k_new = rows.v_new = sa::view(floats.data(), shape);
    rows.k = sa::View(keys.data(), sa::float8_e4m3fn, shape, nullptr, 4);
    rows.v = sa::View(values.data(), sa::float8_e4m3fn, shape, nullptr, 4);
    rows.k_scales = sa::view(scales.data(), {2, 8, 2}), rows.v_scales = sa::view(value_scales.data(), {2, 8, 2});
    rows.starts = good.starts, rows.choose_scales = true;
    const auto refused = [&](const char* status, const char* argument, const sa::CacheAppend& of) {
        demand(status, argument, [&] { context().append(problem, of); });
    };
    problem.cache_dtype = sa::float8_e4m3fn;
    context().append(problem, rows);
    auto bad = rows;
    bad.k_scales = sa::View(), refused("SPATTN_E_NULL", "k_scales", bad);
    bad = rows, bad.v_scales = sa::View(), refused("SPATTN_E_NULL", "v_scales", bad);
    bad = rows, bad.v_scales = rows.k_scales, refused("SPATTN_E_LAYOUT", "k_scales", bad);
    problem.cache_dtype = sa::Dtype{};
    rows.k = sa::view(cache.data(), shape), rows.v = sa::view(out.data(), shape);
    refused("SPATTN_E_RANGE", "args.flags", rows);
    rows.choose_scales = false;
    refused("SPATTN_E_STATE", "k_scales", rows);
}

TEST(float8_operands) {
    sa::Problem problem = legal_problem();
    problem.sink_logits = false, problem.dtype = sa::float8_e4m3fn;
    sa::Problem on_cache = problem;
    on_cache.backward = false, on_cache.starts = true;
    demand("SPATTN_E_UNSUPPORTED", "problem.dtype", [&] { context().plan(sa::causal(), on_cache); });

    const std::vector<uint8_t> bytes(2 * 8 * 4 * 4);
    const std::vector<float> floats(bytes.size()), scales(2 * 8 * 4, 1.f);
    std::vector<float> lse(2 * 4 * 8);
    std::vector<uint16_t> half_out(bytes.size()), half_dq(half_out), half_dk(half_out), half_dv(half_out);
    const int64_t shape[] = {2, 8, 4, 4}, shape_k[] = {2, 8, 2, 4};
    sa::Forward good;
    good.q = sa::ConstView(bytes.data(), sa::float8_e4m3fn, shape, nullptr, 4);
    good.k = good.v = sa::ConstView(bytes.data(), sa::float8_e4m3fn, shape_k, nullptr, 4);
    good.out = sa::View(half_out.data(), sa::bfloat16, shape, nullptr, 4), good.lse = sa::view(lse.data(), {2, 4, 8});
    good.q_scales = sa::view(scales.data(), {2, 8, 4});
    good.k_scales = good.v_scales = sa::view(scales.data(), {2, 8, 2});
    sa::Backward backward;
    backward.q = good.q, backward.k = good.k, backward.v = good.v;
    backward.q_scales = good.q_scales, backward.k_scales = good.k_scales, backward.v_scales = good.v_scales;
    backward.out = backward.dout = good.out, backward.lse = good.lse;
    backward.dq = sa::View(half_dq.data(), sa::bfloat16, shape, nullptr, 4);
    backward.dk = sa::View(half_dk.data(), sa::bfloat16, shape_k, nullptr, 4);
    backward.dv = sa::View(half_dv.data(), sa::bfloat16, shape_k, nullptr, 4);

    const sa::Plan plan = context().plan(sa::causal(), problem);
    problem.value_in_key = true;
    const sa::Plan of_keys = context().plan(sa::causal(), problem);
    problem.value_in_key = false, problem.dtype = sa::float32;
    const sa::Plan of_floats = context().plan(sa::causal(), problem);
    const auto demand_of_both_passes = [&](const auto& good, auto pass) {
        using Args = std::decay_t<decltype(good)>;
        const auto run = [&](const Args& args) { pass(plan, args); };
        run(good);
        demand_operand("out", &Args::out, false, good, run);
        demand_operand("q_scales", &Args::q_scales, true, good, run);
        demand_operand("k_scales", &Args::k_scales, true, good, run);
        demand_operand("v_scales", &Args::v_scales, true, good, run);
        Args all_floats = good;
        for (const auto& [name, field] : {std::pair("q", &Args::q), {"k", &Args::k}, {"v", &Args::v}}) {
            Args wrong = good;
            wrong.*field = all_floats.*field = sa::view(floats.data(), field == &Args::q ? shape : shape_k);
            demand("SPATTN_E_DTYPE", name, [&] { run(wrong); });
        }
        demand("SPATTN_E_STATE", "q_scales", [&] { pass(of_floats, all_floats); });
        Args without_v = good;
        without_v.v = sa::ConstView();
        demand("SPATTN_E_STATE", "v_scales", [&] { pass(of_keys, without_v); });
    };
    demand_of_both_passes(good, [](const sa::Plan& on, const sa::Forward& args) { on.forward(args); });
    demand_of_both_passes(backward, [](const sa::Plan& on, const sa::Backward& args) { on.backward(args); });
    const auto run = [&](const sa::Backward& args) { plan.backward(args); };
    demand_operand("dout", &sa::Backward::dout, false, backward, run);
    demand_operand("dq", &sa::Backward::dq, false, backward, run);
    demand_operand("dk", &sa::Backward::dk, false, backward, run);
    demand_operand("dv", &sa::Backward::dv, false, backward, run);
}

TEST(queries_of_several_sequences) {
    sa::Problem problem = legal_problem();
    problem.backward = problem.sink_logits = false, problem.starts = true, problem.page_size = 4, problem.seq_q = 3;
    problem.axes = sa::Axes::thd;
    const auto plan = [&](auto change) {
        sa::Problem changed = problem;
        change(changed);
        return context().plan(sa::causal(), changed);
    };
    demand("SPATTN_E_RANGE", "problem.page_size", [&] { plan([](sa::Problem& p) { p.page_size = 0; }); });
    demand("SPATTN_E_RANGE", "problem.batch", [&] { plan([](sa::Problem& p) { p.batch = 0; }); });
    demand("SPATTN_E_RANGE", "problem.batch", [&] { plan([](sa::Problem& p) { p.starts = false, p.page_size = 0; }); });

    const std::vector<float> q(3 * 4 * 4), pages(4 * 4 * 2 * 4);
    std::vector<float> out(q.size());
    const std::vector<int32_t> starts{5, 2}, table{3, 0, 1, 2}, offsets{0, 1, 3};
    sa::Forward good;
    good.q = sa::view(q.data(), {3, 4, 4}), good.out = sa::view(out.data(), {3, 4, 4});
    good.k = good.v = sa::view(pages.data(), {4, 4, 2, 4});
    good.starts = sa::view(starts), good.page_table = sa::view(table.data(), {2, 2});
    good.query_offsets = sa::view(offsets);
    const auto run_on = [](const sa::Plan& on) { return [on](const sa::Forward& args) { on.forward(args); }; };
    const auto run = run_on(plan([](sa::Problem&) {}));
    run(good);
    demand_operand("starts", &sa::Forward::starts, false, good, run);
    demand_operand("query_offsets", &sa::Forward::query_offsets, false, good, run);

    // Offsets for a cache whose entries all have as many queries, and for packed tokens without a cache.
    sa::Forward args = good;
    args.q = sa::view(q.data(), {3, 1, 4, 4}), args.out = sa::view(out.data(), {3, 1, 4, 4});
    args.starts = sa::view(offsets), args.page_table = sa::view(offsets.data(), {3, 1});
    args.k = args.v = sa::view(pages.data(), {2, 8, 2, 4});
    const auto even = run_on(plan([](sa::Problem& p) {
        p.axes = sa::Axes::bshd, p.batch = 3, p.seq_q = 1, p.page_size = 8;
    }));
    demand("SPATTN_E_STATE", "query_offsets", [&] { even(args); });
    args.query_offsets = sa::ConstView();
    even(args);
    good.starts = good.page_table = sa::ConstView(), good.k = good.v = sa::view(pages.data(), {8, 2, 4});
    const auto packed = run_on(plan([](sa::Problem& p) { p.batch = 1, p.starts = false, p.page_size = 0; }));
    demand("SPATTN_E_STATE", "query_offsets", [&] { packed(good); });
}

TEST(nodes_of_trees) {
    sa::Problem problem = legal_problem();
    problem.backward = problem.sink_logits = false, problem.starts = problem.parents = true, problem.seq_q = 3;
    const auto plan = [&](auto change) {
        sa::Problem changed = problem;
        change(changed);
        return context().plan(sa::causal(), changed);
    };
    demand("SPATTN_E_UNSUPPORTED", "problem.flags", [&] { plan([](sa::Problem& p) { p.starts = false; }); });
    demand("SPATTN_E_UNSUPPORTED", "problem.flags", [&] { plan([](sa::Problem& p) { p.backward = true; }); });
    demand("SPATTN_E_UNSUPPORTED", "problem.flags", [&] { context().plan(sa::runtime_tokens(4), problem); });

    const std::vector<float> q(2 * 3 * 4 * 4), keys(2 * 8 * 2 * 4);
    std::vector<float> out(q.size());
    const std::vector<int32_t> starts{5, 2}, parents{-1, 0, 0, -1, -1, 1}, table{0, 1}, offsets{0, 2, 3};
    sa::Forward good;
    good.q = sa::view(q.data(), {2, 3, 4, 4}), good.out = sa::view(out.data(), {2, 3, 4, 4});
    good.k = good.v = sa::view(keys.data(), {2, 8, 2, 4});
    good.starts = sa::view(starts), good.parents = sa::view(parents.data(), {2, 3});
    const auto run_on = [](const sa::Plan& on) { return [on](const sa::Forward& args) { on.forward(args); }; };
    const auto run = run_on(plan([](sa::Problem&) {}));
    run(good);
    demand_operand("parents", &sa::Forward::parents, false, good, run);
    demand_operand("starts", &sa::Forward::starts, false, good, run);

    // Packed queries have one axis of parents.
    sa::Forward args = good;
    args.q = sa::view(q.data(), {3, 4, 4}), args.out = sa::view(out.data(), {3, 4, 4});
    args.page_table = sa::view(table.data(), {2, 1}), args.query_offsets = sa::view(offsets);
    const auto packed = run_on(plan([](sa::Problem& p) { p.axes = sa::Axes::thd, p.page_size = 8; }));
    demand("SPATTN_E_SHAPE", "parents", [&] { packed(args); });
    args.parents = sa::view(parents.data(), {3});
    packed(args);
    demand_operand("parents", &sa::Forward::parents, false, args, packed);

    // Parents of queries that are rows of a sequence, and of those that have no cache.
    const auto rows = run_on(plan([](sa::Problem& p) { p.parents = false; }));
    demand("SPATTN_E_STATE", "parents", [&] { rows(good); });
    good.starts = sa::ConstView();
    const auto none = run_on(plan([](sa::Problem& p) { p.starts = p.parents = false; }));
    demand("SPATTN_E_STATE", "parents", [&] { none(good); });
}
