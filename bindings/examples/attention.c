/* SPDX-License-Identifier: MIT
 * A plan, a forward and a backward pass, and a check of the gradient by small differences. The same program in C++,
 * Python and Rust lies beside this one. */
#include <math.h>
#include <sparseattn/sparseattn.h>
#include <stdio.h>
#include <stdlib.h>

enum { heads = 2, seq = 256, dim = 16, size = seq * heads * dim };

static float q[size], k[size], v[size], out[size], lse[heads * seq], dq[size], dk[size], dv[size];
static const int64_t shape[4] = {1, seq, heads, dim}, lse_shape[3] = {1, heads, seq};
static const spattn_dtype float32 = {SPATTN_FLOAT, 32, 1};

static void require(spattn_status status) {
    if (status == SPATTN_OK) return;
    fprintf(stderr, "%s: %s\n", spattn_status_name(status), spattn_last_error_text());
    exit(1);
}

static spattn_tensor view(float* data) {
    spattn_tensor tensor = {data, {SPATTN_CPU, 0}, 4, {SPATTN_FLOAT, 32, 1}, shape, NULL, 0};
    return tensor;
}

/* Scratch that one pass needs; the plan knows how much. */
static void* workspace(const spattn_plan* plan, spattn_enum op, size_t* bytes) {
    size_t align = 0;
    char* memory = NULL;
    require(spattn_plan_workspace(plan, op, bytes, &align));
    memory = malloc(*bytes + align); /* freed when the program ends */
    return memory + (align - (size_t)memory % align) % align;
}

/* Runs forward; returns half the sum of squares of out, whose gradient at out is out itself. */
static double loss(const spattn_plan* plan) {
    static spattn_forward_args args; /* zero is the default of every field */
    spattn_tensor q_view = view(q), k_view = view(k), v_view = view(v), out_view = view(out), lse_view = view(lse);
    double sum = 0;
    lse_view.ndim = 3, lse_view.shape = lse_shape;
    if (!args.workspace) args.workspace = workspace(plan, SPATTN_OP_FORWARD, &args.workspace_bytes);
    args.struct_size = sizeof args;
    args.q = &q_view, args.k = &k_view, args.v = &v_view, args.out = &out_view, args.lse = &lse_view;
    require(spattn_forward(plan, &args));
    for (int i = 0; i < size; ++i) sum += 0.5 * out[i] * out[i];
    return sum;
}

static void backward(const spattn_plan* plan) {
    spattn_backward_args args = {0};
    spattn_tensor q_view = view(q), k_view = view(k), v_view = view(v), out_view = view(out), lse_view = view(lse);
    spattn_tensor dq_view = view(dq), dk_view = view(dk), dv_view = view(dv);
    lse_view.ndim = 3, lse_view.shape = lse_shape;
    args.struct_size = sizeof args;
    args.q = &q_view, args.k = &k_view, args.v = &v_view, args.out = &out_view, args.lse = &lse_view;
    args.dout = &out_view, args.dq = &dq_view, args.dk = &dk_view, args.dv = &dv_view;
    args.workspace = workspace(plan, SPATTN_OP_BACKWARD, &args.workspace_bytes);
    require(spattn_backward(plan, &args));
}

int main(void) {
    spattn_context_options options = {0};
    spattn_problem problem = {0};
    spattn_context* context = NULL;
    spattn_pattern* pattern = NULL;
    spattn_plan* plan = NULL;
    const float step = 0.01f;
    double numeric;
    for (int i = 0; i < 3 * size; ++i)
        (i < size ? q : i < 2 * size ? k : v)[i % size] = (float)((uint32_t)i * 2654435761u >> 8) / (1 << 23) - 1;

    options.struct_size = sizeof options, options.device.type = SPATTN_CPU;
    require(spattn_context_create(&options, &context));
    require(spattn_pattern_parse("causal & (sink(4) | window(31,0))", &pattern));
    problem.struct_size = sizeof problem, problem.flags = SPATTN_PLAN_BACKWARD, problem.dtype = float32;
    problem.batch = 1, problem.heads_q = problem.heads_kv = heads, problem.seq_q = problem.seq_k = seq;
    problem.head_dim = dim, problem.axes = SPATTN_BSHD;
    require(spattn_plan_create(context, pattern, &problem, NULL, &plan));

    loss(plan);
    backward(plan);
    q[1000] += step;
    numeric = loss(plan);
    q[1000] -= 2 * step;
    numeric = (numeric - loss(plan)) / (2 * step);
    printf("dq[1000] = %.5f, by differences %.5f\n", dq[1000], numeric);

    spattn_plan_release(plan), spattn_pattern_release(pattern), spattn_context_release(context);
    return fabs(numeric - dq[1000]) > 1e-3;
}
