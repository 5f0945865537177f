// SPDX-License-Identifier: MIT
// A plan, a forward and a backward pass, and a check of the gradient by small differences. The same program in C,
// Python and Rust lies beside this one.
#include <cmath>
#include <cstdio>
#include <sparseattn/sparseattn.hpp>

namespace sa = sparseattn;

constexpr int64_t heads = 2, seq = 256, dim = 16, size = seq * heads * dim;

sa::View view(std::vector<float>& data) { return sa::view(data.data(), {1, seq, heads, dim}); }

int main() try {
    std::vector<float> q(size), k(size), v(size), out(size), lse(heads * seq), dq(size), dk(size), dv(size);
    for (uint32_t i = 0; i < 3 * size; ++i)
        (i < size ? q : i < 2 * size ? k : v)[i % size] = float(i * 2654435761u >> 8) / (1 << 23) - 1;

    const sa::Context context(sa::cpu);
    const sa::Pattern pattern = sa::causal() & (sa::sink(4) | sa::window(31, 0));
    sa::Problem problem;
    problem.heads_q = problem.heads_kv = heads, problem.seq_q = problem.seq_k = seq, problem.head_dim = dim;
    problem.backward = true;
    const sa::Plan plan = context.plan(pattern, problem);

    // Half the sum of squares of out, whose gradient at out is out itself.
    const auto loss = [&] {
        sa::Forward args;
        args.q = view(q), args.k = view(k), args.v = view(v), args.out = view(out);
        args.lse = sa::view(lse.data(), {1, heads, seq});
        plan.forward(args);
        double sum = 0;
        for (float x : out) sum += 0.5 * x * x;
        return sum;
    };
    loss();
    sa::Backward args;
    args.q = view(q), args.k = view(k), args.v = view(v), args.out = args.dout = view(out);
    args.lse = sa::view(lse.data(), {1, heads, seq});
    args.dq = view(dq), args.dk = view(dk), args.dv = view(dv);
    plan.backward(args);

    const float step = 0.01f;
    q[1000] += step;
    const double above = loss();
    q[1000] -= 2 * step;
    const double numeric = (above - loss()) / (2 * step);
    std::printf("dq[1000] = %.5f, by differences %.5f\n", dq[1000], numeric);
    return std::fabs(numeric - dq[1000]) > 1e-3;
} catch (const sa::Error& error) {
    std::fprintf(stderr, "%s: %s\n", error.failure().name(), error.what());
    return 1;
}
