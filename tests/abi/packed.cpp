// SPDX-License-Identifier: MIT
// Packed documents in THD tensors against one call a document, within rounding: their blocks differ.
#include <cstring>

#include "abi/abi.h"

using namespace abi;

namespace {

constexpr int64_t heads_q = 4, heads_kv = 2, dim = 16, dim_v = 8;

// Rows [begin, begin + rows) of a [tokens, heads, dim] tensor as [1, rows, heads, dim].
struct Excerpt {
    Excerpt(Tensor& whole, int64_t begin, int64_t rows) : sizes{1, rows, whole.shape[1], whole.shape[2]} {
        view = whole.view;
        view.ndim = 4;
        view.shape = sizes;
        view.strides = nullptr;
        view.byte_offset = uint64_t(begin * sizes[2] * sizes[3]) * sizeof(float);
    }
    int64_t sizes[4];
    spattn_tensor view;
};

// Operands and results of a batch of packed documents.
struct Packed {
    Packed(int64_t queries, int64_t keys)
        : q({queries, heads_q, dim}, f32),
          k({keys, heads_kv, dim}, f32),
          v({keys, heads_kv, dim_v}, f32),
          dout({queries, heads_q, dim_v}, f32),
          out({queries, heads_q, dim_v}, f32),
          lse({heads_q, queries}, f32),
          dq({queries, heads_q, dim}, f32),
          dk({keys, heads_kv, dim}, f32),
          dv({keys, heads_kv, dim_v}, f32) {
        uint32_t seed = 1;
        for (Tensor* t : {&q, &k, &v, &dout}) t->fill(seed++);
    }
    Tensor q, k, v, dout, out, lse, dq, dk, dv;
};

struct Views {
    const spattn_tensor *q, *k, *v, *dout, *out, *lse, *dq, *dk, *dv;
};

void run(const spattn_plan* plan, const Views& t) {
    size_t bytes[2], align = 0;
    for (int op = 0; op < 2; ++op) succeed(spattn_plan_workspace(plan, op, &bytes[op], &align), "workspace");
    Tensor workspace({int64_t(std::max(bytes[0], bytes[1])) + 1}, u8);
    auto forward = sized<spattn_forward_args>();
    forward.q = t.q, forward.k = t.k, forward.v = t.v, forward.out = t.out, forward.lse = t.lse;
    forward.workspace = workspace.data, forward.workspace_bytes = bytes[0];
    succeed(spattn_forward(plan, &forward), "forward");
    auto backward = sized<spattn_backward_args>();
    backward.q = t.q, backward.k = t.k, backward.v = t.v, backward.out = t.out, backward.lse = t.lse,
    backward.dout = t.dout;
    backward.dq = t.dq, backward.dk = t.dk, backward.dv = t.dv;
    backward.workspace = workspace.data, backward.workspace_bytes = bytes[1];
    succeed(spattn_backward(plan, &backward), "backward");
}

spattn_problem problem(int64_t seq_q, int64_t seq_k, spattn_enum axes) {
    auto p = make_problem();
    p.batch = 1, p.heads_q = heads_q, p.heads_kv = heads_kv, p.seq_q = seq_q, p.seq_k = seq_k;
    p.head_dim = dim, p.head_dim_v = dim_v, p.axes = axes;
    return p;
}

bool is_near(Tensor& a, Tensor& b) {
    for (size_t i = 0; i < a.bytes / 4; ++i)
        if (!(std::fabs(a.as<float>()[i] - b.as<float>()[i]) <= 2e-5f)) return false;
    return true;
}

}  // namespace

TEST(packed_documents_are_runs_of_their_own) {
    const std::vector<int64_t> cu_q{0, 5, 5, 100, 103, 190}, cu_k{0, 9, 12, 107, 210, 297};
    const Context context = make_context();
    for (const char* inner_text : {"causal", "full", "causal & (sink(2) | window(7,0))"}) {
        check::context = inner_text;
        const Pattern inner = parse(inner_text);
        Numbers q_list(cu_q), k_list(cu_k);
        spattn_pattern* made = nullptr;
        succeed(spattn_pattern_per_document(inner.get(), &q_list.view, &k_list.view, &made), "per_document");
        const Pattern packed(made);
        Packed got(190, 297), wanted(190, 297);
        const Plan plan = make_plan(context.get(), packed.get(), problem(190, 297, SPATTN_THD));
        run(plan.get(), {&got.q.view, &got.k.view, &got.v.view, &got.dout.view, &got.out.view, &got.lse.view,
                         &got.dq.view, &got.dk.view, &got.dv.view});
        // Keys of a document without queries get no gradient.
        for (Tensor* t : {&wanted.dk, &wanted.dv}) std::memset(t->data, 0, t->bytes);
        for (size_t d = 0; d + 1 < cu_q.size(); ++d) {
            const int64_t rows = cu_q[d + 1] - cu_q[d], keys = cu_k[d + 1] - cu_k[d];
            if (rows == 0) continue;
            const auto of_q = [&](Tensor& t) { return Excerpt(t, cu_q[d], rows); };
            const auto of_k = [&](Tensor& t) { return Excerpt(t, cu_k[d], keys); };
            Excerpt q = of_q(wanted.q), dout = of_q(wanted.dout), out = of_q(wanted.out), dq = of_q(wanted.dq);
            Excerpt k = of_k(wanted.k), v = of_k(wanted.v), dk = of_k(wanted.dk), dv = of_k(wanted.dv);
            for (Excerpt* p : {&q, &dout, &out, &dq, &k, &v, &dk, &dv}) p->view.shape = p->sizes;
            Tensor lse({1, heads_q, rows}, f32);
            const Plan own = make_plan(context.get(), inner.get(), problem(rows, keys, SPATTN_BSHD));
            run(own.get(), {&q.view, &k.view, &v.view, &dout.view, &out.view, &lse.view, &dq.view, &dk.view, &dv.view});
            for (int64_t h = 0; h < heads_q; ++h)
                std::memcpy(wanted.lse.as<float>() + h * 190 + cu_q[d], lse.as<float>() + h * rows, size_t(rows) * 4);
        }
        CHECK(is_near(got.out, wanted.out));
        CHECK(is_near(got.lse, wanted.lse));
        CHECK(is_near(got.dq, wanted.dq));
        CHECK(is_near(got.dk, wanted.dk));
        CHECK(is_near(got.dv, wanted.dv));
    }
}

TEST(thd_is_one_batch) {
    const Context context = make_context();
    const Pattern full = parse("full");
    auto p = problem(8, 8, SPATTN_THD);
    p.batch = 2;
    spattn_plan* result = nullptr;
    demand("batch 2", "spattn_plan_create", spattn_plan_create(context.get(), full.get(), &p, nullptr, &result),
           SPATTN_E_RANGE, "problem.batch");
}
