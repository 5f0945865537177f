/* SPDX-License-Identifier: MIT
 * Decoding on a cache in pages: a prompt, then token after token, each appended and asked with. What comes out is
 * compared with one pass over the whole sequence. */
#include <math.h>
#include <sparseattn/sparseattn.h>
#include <stdio.h>
#include <stdlib.h>

enum { heads_q = 4, heads_kv = 2, dim = 32, prompt = 100, length = 128 };
enum { page = 16, entries = length / page, pages = 12, pool_size = pages * page * heads_kv * dim };

static float q[length * heads_q * dim], k[length * heads_kv * dim], v[length * heads_kv * dim];
static float out[length * heads_q * dim], whole[length * heads_q * dim];
static float pool_k[pool_size], pool_v[pool_size];
static const int32_t page_table[entries] = {7, 2, 11, 0, 5, 3, 9, 1}; /* which pages are this sequence's, in order */

static void require(spattn_status status) {
    if (status == SPATTN_OK) return;
    fprintf(stderr, "%s: %s\n", spattn_status_name(status), spattn_last_error_text());
    exit(1);
}

static spattn_tensor view(void* data, const int64_t* shape, int32_t axes, uint8_t code) {
    spattn_tensor tensor = {data, {SPATTN_CPU, 0}, axes, {code, 32, 1}, shape, NULL, 0};
    return tensor;
}

/* A plan for calls of so many queries; of the whole sequence, or of a cache that has room for it. */
static spattn_plan* make_plan(const spattn_context* context, spattn_problem* problem, int64_t queries, int is_cache) {
    spattn_pattern* pattern = NULL;
    spattn_plan* plan = NULL;
    problem->struct_size = sizeof *problem, problem->dtype.code = SPATTN_FLOAT;
    problem->dtype.bits = 32, problem->dtype.lanes = 1;
    problem->batch = 1, problem->heads_q = heads_q, problem->heads_kv = heads_kv, problem->head_dim = dim;
    problem->seq_q = queries, problem->seq_k = length, problem->axes = SPATTN_BSHD;
    if (is_cache) problem->flags = SPATTN_PLAN_STARTS, problem->page_size = page;
    require(spattn_pattern_parse("causal & (sink(4) | window(47,0))", &pattern));
    require(spattn_plan_create(context, pattern, problem, NULL, &plan));
    spattn_pattern_release(pattern);
    return plan;
}

static void forward(const spattn_plan* plan, spattn_forward_args* args) {
    size_t align = 0;
    char* memory;
    args->struct_size = sizeof *args;
    require(spattn_plan_workspace(plan, SPATTN_OP_FORWARD, &args->workspace_bytes, &align));
    memory = malloc(args->workspace_bytes + align);
    args->workspace = memory + (align - (size_t)memory % align) % align;
    require(spattn_forward(plan, args));
    free(memory);
}

/* Brings tokens [begin, begin + count) to the cache, and asks with them. */
static void step(const spattn_context* context, const spattn_plan* plan, const spattn_problem* problem, int64_t begin) {
    const int64_t count = problem->seq_q, of_q[] = {1, count, heads_q, dim}, of_kv[] = {1, count, heads_kv, dim};
    const int64_t of_pool[] = {pages, page, heads_kv, dim}, of_table[] = {1, entries}, one[] = {1};
    int64_t first = begin * heads_kv * dim;
    int32_t start = (int32_t)begin;
    spattn_tensor k_new = view(k + first, of_kv, 4, SPATTN_FLOAT), v_new = view(v + first, of_kv, 4, SPATTN_FLOAT);
    spattn_tensor keys = view(pool_k, of_pool, 4, SPATTN_FLOAT), values = view(pool_v, of_pool, 4, SPATTN_FLOAT);
    spattn_tensor table = view((void*)page_table, of_table, 2, SPATTN_INT), starts = view(&start, one, 1, SPATTN_INT);
    spattn_tensor asked = view(q + begin * heads_q * dim, of_q, 4, SPATTN_FLOAT);
    spattn_tensor answer = view(out + begin * heads_q * dim, of_q, 4, SPATTN_FLOAT);
    spattn_cache_append_args append = {0};
    spattn_forward_args args = {0};
    append.struct_size = sizeof append;
    append.k_new = &k_new, append.v_new = &v_new, append.k = &keys, append.v = &values;
    append.starts = args.starts = &starts, append.page_table = args.page_table = &table;
    require(spattn_cache_append(context, problem, &append));
    args.q = &asked, args.k = &keys, args.v = &values, args.out = &answer;
    forward(plan, &args);
}

int main(void) {
    const int64_t of_q[] = {1, length, heads_q, dim}, of_kv[] = {1, length, heads_kv, dim};
    spattn_tensor q_view = view(q, of_q, 4, SPATTN_FLOAT), k_view = view(k, of_kv, 4, SPATTN_FLOAT);
    spattn_tensor v_view = view(v, of_kv, 4, SPATTN_FLOAT), whole_view = view(whole, of_q, 4, SPATTN_FLOAT);
    spattn_context_options options = {0};
    spattn_problem of_prompt = {0}, of_token = {0}, of_all = {0};
    spattn_forward_args args = {0};
    spattn_context* context = NULL;
    spattn_plan *for_prompt, *for_token, *for_all;
    double worst = 0;
    for (int i = 0; i < length * heads_q * dim; ++i) q[i] = (float)((uint32_t)i * 2654435761u >> 8) / (1 << 23) - 1;
    for (int i = 0; i < length * heads_kv * dim; ++i) k[i] = q[i] * 2, v[i] = (float)sin(i);
    for (int i = 0; i < pool_size; ++i) pool_k[i] = pool_v[i] = NAN; /* nobody sees what was not written yet */

    options.struct_size = sizeof options, options.device.type = SPATTN_CPU;
    require(spattn_context_create(&options, &context));
    for_prompt = make_plan(context, &of_prompt, prompt, 1);
    for_token = make_plan(context, &of_token, 1, 1);
    step(context, for_prompt, &of_prompt, 0);
    for (int64_t token = prompt; token < length; ++token) step(context, for_token, &of_token, token);

    for_all = make_plan(context, &of_all, length, 0);
    args.q = &q_view, args.k = &k_view, args.v = &v_view, args.out = &whole_view;
    forward(for_all, &args);
    for (int i = 0; i < length * heads_q * dim; ++i) worst = fmax(worst, fabs((double)out[i] - whole[i]));
    printf("%d tokens, %d of them decoded one by one: %.1e off one pass\n", length, length - prompt, worst);

    spattn_plan_release(for_prompt), spattn_plan_release(for_token), spattn_plan_release(for_all);
    spattn_context_release(context);
    return !(worst < 1e-5);
}
