/* SPDX-License-Identifier: MIT
 *
 * Attention as custom calls of XLA, which sparseattn.jax registers.
 *
 * A call brings its buffers and three attributes: `pattern`, the bytes of spattn_pattern_save, `problem`, those of a
 * spattn_problem, and `given`, a byte for each operand that is optional: 1, or 0 where it is left out. A batch, seq_q
 * or seq_k of -1 is what the buffers have, for one program of jax.export serves many. A call has no state: plans are
 * remembered by the context, and the last patterns here, so that a program that was exported runs in every process.
 *
 * Operands come in the order q, k, v, sink_logits, then out, lse, dout, dlse in the backward, or of a cache starts,
 * page_table, query_offsets, parents, then the optional indices, index_counts, q_scales, k_scales, v_scales. What the
 * problem says is absent is left out. Axes that vmap has put in front of an operand's own are so many calls, made as
 * one wherever the pattern serves a larger batch.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sparseattn/sparseattn.h>

#include "ffi.h"

#define PUBLIC __attribute__((visibility("default")))

enum { MAX_RANK = 4, MAX_BUFFERS = 17, MAX_DEVICES = 64 };
enum { INDICES, INDEX_COUNTS, Q_SCALES, K_SCALES, V_SCALES, OPTIONAL }; /* of `given` */

typedef struct view {
    spattn_tensor tensor;
    int64_t shape[MAX_RANK];
    size_t step; /* bytes from one call's part to the next */
} view;

typedef struct task {
    const xla_call* call;
    spattn_device device;
    spattn_enum op;
    spattn_stream stream;
    spattn_problem problem;
    const uint8_t* given; /* [OPTIONAL] */
    const spattn_plan* plan;
    int64_t repeats; /* calls of the library that this call of XLA is */
    view views[MAX_BUFFERS];
    int num_views;
    int lacks_axes; /* a buffer has fewer than it should */
    spattn_forward_args forward;
    spattn_backward_args backward;
} task;

/* ---- errors ---- */

static xla_error* fail(const xla_call* call, int32_t code, const char* message) {
    xla_error_create args = {sizeof args, NULL, message, code};
    return call->api->create_error(&args);
}

static xla_error* refuse(const xla_call* call, spattn_status status) {
    const int family = status / 1000 * 1000;
    const int32_t code = status == SPATTN_E_CANCELLED           ? XLA_CANCELLED
                         : family == SPATTN_E_UNSUPPORTED       ? XLA_UNIMPLEMENTED
                         : family == SPATTN_E_RESOURCE          ? XLA_RESOURCE_EXHAUSTED
                         : family == SPATTN_E_ARGUMENT          ? XLA_INVALID_ARGUMENT
                         : family == SPATTN_E_FORMAT            ? XLA_INVALID_ARGUMENT
                                                                : XLA_INTERNAL;
    return fail(call, code, spattn_last_error_text());
}

/* ---- contexts ---- */

static pthread_mutex_t contexts_mutex = PTHREAD_MUTEX_INITIALIZER;
static spattn_context* contexts[MAX_DEVICES + 1]; /* the CPU's, then those of GPUs; they live as long as the process */

static spattn_status find_context(spattn_device device, const spattn_context** result) {
    spattn_context** mine = device.type == SPATTN_CPU ? &contexts[0] : &contexts[1 + device.index];
    spattn_status status = SPATTN_OK;
    pthread_mutex_lock(&contexts_mutex);
    if (!*mine) {
        spattn_context_options options = {0};
        options.struct_size = sizeof options, options.device = device;
        status = spattn_context_create(&options, mine);
    }
    *result = *mine;
    pthread_mutex_unlock(&contexts_mutex);
    return status;
}

/* ---- patterns ---- */

/* The last patterns that calls have read, for the next calls: of millions of pairs, to read one takes longer than its
 * attention. Bytes that were saved begin with a magic word and their own hash, which tell them from others of their
 * size. */
enum { SAVED_HEAD = 16, KEPT_PATTERNS = 8 };
static pthread_mutex_t patterns_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    unsigned char head[SAVED_HEAD];
    size_t size;
    const spattn_pattern* pattern;
} patterns[KEPT_PATTERNS]; /* those last read first */

/* Puts a pattern first, in the place of `old`, and those that were before `old` behind it. */
static void keep_pattern(int old, const xla_array* bytes, const spattn_pattern* pattern) {
    memmove(&patterns[1], &patterns[0], (size_t)old * sizeof *patterns);
    memcpy(patterns[0].head, bytes->data, SAVED_HEAD);
    patterns[0].size = bytes->size, patterns[0].pattern = pattern;
}

/* The result is the caller's to release. */
static spattn_status read_pattern(const xla_array* bytes, const spattn_pattern** result) {
    const spattn_pattern* found = NULL;
    spattn_pattern* made = NULL;
    pthread_mutex_lock(&patterns_mutex);
    for (int i = 0; i < KEPT_PATTERNS && !found && bytes->size >= SAVED_HEAD; ++i) {
        if (patterns[i].size != bytes->size || memcmp(patterns[i].head, bytes->data, SAVED_HEAD)) continue;
        found = patterns[i].pattern;
        spattn_pattern_retain(found);
        keep_pattern(i, bytes, found);
    }
    pthread_mutex_unlock(&patterns_mutex);
    *result = found;
    if (found) return SPATTN_OK;

    const spattn_status status = spattn_pattern_load(bytes->data, bytes->size, &made);
    if (status) return status;
    spattn_pattern_retain(made);
    pthread_mutex_lock(&patterns_mutex);
    const spattn_pattern* const forgotten = patterns[KEPT_PATTERNS - 1].pattern;
    keep_pattern(KEPT_PATTERNS - 1, bytes, made);
    pthread_mutex_unlock(&patterns_mutex);
    spattn_pattern_release(forgotten);
    *result = made;
    return SPATTN_OK;
}

/* ---- what a call brings ---- */

static const xla_array* find_bytes(const xla_call* call, const char* name) {
    for (int64_t i = 0; i < call->attributes.size; ++i) {
        const xla_span* given = call->attributes.names[i];
        if (given->length != strlen(name) || memcmp(given->text, name, given->length)) continue;
        const xla_array* array = (const xla_array*)call->attributes.items[i];
        return call->attributes.kinds[i] == XLA_ARRAY && array->dtype == XLA_U8 ? array : NULL;
    }
    return NULL;
}

static spattn_dtype read_dtype(int32_t dtype) {
    switch (dtype) {
        case XLA_F16: return (spattn_dtype){SPATTN_FLOAT, 16, 1};
        case XLA_F32: return (spattn_dtype){SPATTN_FLOAT, 32, 1};
        case XLA_F64: return (spattn_dtype){SPATTN_FLOAT, 64, 1};
        case XLA_BF16: return (spattn_dtype){SPATTN_BFLOAT, 16, 1};
        case XLA_F8E4M3FN: return (spattn_dtype){SPATTN_FLOAT8_E4M3FN, 8, 1};
        case XLA_S32: return (spattn_dtype){SPATTN_INT, 32, 1};
        case XLA_S64: return (spattn_dtype){SPATTN_INT, 64, 1};
        default: return (spattn_dtype){SPATTN_UINT, 8, 0}; /* no lanes: the library says what it takes instead */
    }
}

/* Reads the next buffer as an operand of this rank. The axes before those are a call each, unless they are folded into
 * the operand's first axis: then they make its batch larger. */
static const spattn_tensor* add_view(task* t, const xla_buffer* buffer, int rank, int fold) {
    view* added = &t->views[t->num_views++];
    const int outer = (int)buffer->rank - rank;
    int64_t elements = 1, calls = 1;
    t->lacks_axes |= outer < 0;
    if (outer < 0) return NULL;
    for (int i = 0; i < rank; ++i) elements *= added->shape[i] = buffer->sizes[outer + i];
    for (int i = 0; i < outer; ++i) calls *= buffer->sizes[i];
    if (fold) added->shape[0] *= calls;
    added->tensor = (spattn_tensor){buffer->data, t->device, rank, read_dtype(buffer->dtype), added->shape, NULL, 0};
    added->step = fold ? 0 : (size_t)elements * added->tensor.dtype.bits / 8;
    return &added->tensor;
}

/* Buffers as arguments. Returns whether there are as many as the problem has. */
static int read_buffers(task* t, int fold) {
    const xla_buffers *in = &t->call->operands, *out = &t->call->results;
    const uint32_t flags = t->problem.flags;
    const int is_packed = t->problem.axes == SPATTN_THD, dense = is_packed ? 3 : 4, rows = dense - 1;
    const int is_cache = !!(flags & SPATTN_PLAN_STARTS), has_pages = is_cache && t->problem.page_size != 0;
    const int has_offsets = is_cache && is_packed, has_trees = is_cache && flags & SPATTN_PLAN_PARENTS;
    const int of_keys = has_pages ? 4 : dense; /* pages are dense, whatever the queries are */
    const int has_v = !(flags & SPATTN_PLAN_VALUE_IN_KEY), has_sink = !!(flags & SPATTN_PLAN_SINK_LOGITS);
    const int is_backward = t->op == SPATTN_OP_BACKWARD;
    int needed = 2 + has_v + has_sink + 4 * is_backward + is_cache + has_pages + has_offsets + has_trees;
    spattn_forward_args forward = {0};
    spattn_backward_args backward = {0};
    int64_t next = 0;
    for (int i = 0; i < OPTIONAL; ++i) needed += t->given[i];
    if (in->size != needed) return 0;
    if (out->size != (is_backward ? 2 + has_v + has_sink : 2)) return 0;
    t->num_views = 0;
    forward.struct_size = sizeof forward, backward.struct_size = sizeof backward;
    forward.stream = backward.stream = t->stream;
    backward.q = forward.q = add_view(t, in->items[next++], dense, fold);
    backward.k = forward.k = add_view(t, in->items[next++], of_keys, fold);
    if (has_v) backward.v = forward.v = add_view(t, in->items[next++], of_keys, fold);
    if (has_sink) backward.sink_logits = forward.sink_logits = add_view(t, in->items[next++], 1, 0);
    if (is_backward) {
        backward.out = add_view(t, in->items[next++], dense, fold);
        backward.lse = add_view(t, in->items[next++], rows, fold);
        backward.dout = add_view(t, in->items[next++], dense, fold);
        backward.dlse = add_view(t, in->items[next++], rows, fold);
    }
    if (is_cache) forward.starts = add_view(t, in->items[next++], 1, 0);
    if (has_pages) forward.page_table = add_view(t, in->items[next++], 2, 0);
    if (has_offsets) forward.query_offsets = add_view(t, in->items[next++], 1, 0);
    if (has_trees) forward.parents = add_view(t, in->items[next++], is_packed ? 1 : 2, 0);
    if (t->given[INDICES]) backward.indices = forward.indices = add_view(t, in->items[next++], dense, fold);
    if (t->given[INDEX_COUNTS])
        backward.index_counts = forward.index_counts = add_view(t, in->items[next++], rows, fold);
    if (t->given[Q_SCALES]) backward.q_scales = forward.q_scales = add_view(t, in->items[next++], rows, fold);
    if (t->given[K_SCALES]) backward.k_scales = forward.k_scales = add_view(t, in->items[next++], of_keys - 1, fold);
    if (t->given[V_SCALES]) backward.v_scales = forward.v_scales = add_view(t, in->items[next++], of_keys - 1, fold);
    next = 0;
    if (!is_backward) {
        forward.out = add_view(t, out->items[next++], dense, fold);
        forward.lse = add_view(t, out->items[next++], rows, fold);
    } else {
        backward.dq = add_view(t, out->items[next++], dense, fold);
        backward.dk = add_view(t, out->items[next++], dense, fold);
        if (has_v) backward.dv = add_view(t, out->items[next++], dense, fold);
        if (has_sink) backward.dsink_logits = add_view(t, out->items[next++], 1, 0);
    }
    t->forward = forward, t->backward = backward;
    return !t->lacks_axes;
}

/* Sizes that a program leaves open are those of the buffers, which are read. */
static void read_open_sizes(task* t) {
    spattn_problem* p = &t->problem;
    const spattn_forward_args* f = &t->forward; /* which has q and k in a backward, too */
    const int seq = p->axes == SPATTN_BHSD ? 2 : p->axes == SPATTN_BSHD ? 1 : 0;
    if (p->batch < 0) p->batch = (f->starts ? f->starts : f->q)->shape[0];
    if (p->seq_q < 0) p->seq_q = f->q->shape[seq];
    if (p->seq_k < 0) p->seq_k = f->page_table ? f->page_table->shape[1] * p->page_size : f->k->shape[seq];
}

/* ---- plan and run ---- */

/* The plan of the whole call as one larger batch; on a cache, where the pattern names batch entries or a plan takes no
 * more of them, or sinks differ from call to call, that of one call. */
static spattn_status make_plan(task* t, const spattn_pattern* pattern) {
    const spattn_context* context = NULL;
    const int rank = t->problem.axes == SPATTN_THD ? 3 : 4;
    const xla_buffer* q = t->call->operands.items[0];
    spattn_problem larger = t->problem;
    spattn_plan* plan = NULL;
    spattn_status status = find_context(t->device, &context);
    int fold = rank == 4 && !(t->problem.flags & (SPATTN_PLAN_SINK_LOGITS | SPATTN_PLAN_STARTS));
    if (status) return status;
    t->repeats = 1;
    for (int i = 0; i < q->rank - rank; ++i) t->repeats *= q->sizes[i];
    larger.batch *= t->repeats;
    if (fold) status = spattn_plan_create(context, pattern, &larger, t->stream, &plan);
    if (!fold || status == SPATTN_E_SHAPE || status == SPATTN_E_RANGE) {
        fold = 0;
        status = spattn_plan_create(context, pattern, &t->problem, t->stream, &plan);
    }
    if (!status) read_buffers(t, fold);
    if (fold) t->repeats = 1;
    t->plan = plan;
    return status;
}

static spattn_status run(task* t, void* scratch, size_t bytes) {
    t->forward.workspace = t->backward.workspace = scratch;
    t->forward.workspace_bytes = t->backward.workspace_bytes = bytes;
    for (int64_t n = 0; n < t->repeats; ++n) {
        const spattn_status status = t->op == SPATTN_OP_FORWARD ? spattn_forward(t->plan, &t->forward)
                                                                : spattn_backward(t->plan, &t->backward);
        if (status) return status;
        for (int i = 0; i < t->num_views; ++i) t->views[i].tensor.byte_offset += t->views[i].step;
    }
    return SPATTN_OK;
}

/* Runs with scratch of XLA's own on a GPU: it is taken again only by what the stream does later. */
static xla_error* run_with_scratch(task* t) {
    const xla_api* api = t->call->api;
    size_t bytes = 0, align = 0;
    spattn_status status = spattn_plan_workspace(t->plan, t->op, &bytes, &align);
    if (status) return refuse(t->call, status);
    if (t->device.type == SPATTN_CPU) {
        void* scratch = bytes ? aligned_alloc(align, (bytes + align - 1) / align * align) : NULL;
        if (bytes && !scratch) return fail(t->call, XLA_RESOURCE_EXHAUSTED, "sparseattn: no memory for a workspace");
        status = run(t, scratch, bytes);
        free(scratch);
        return status ? refuse(t->call, status) : NULL;
    }
    /* XLA aligns to no more than 16 bytes when asked, so the rest is done here. */
    const size_t room = bytes ? bytes + align : 0;
    xla_memory_allocate taken = {sizeof taken, NULL, t->call->execution, room, 16, NULL};
    xla_error* error = room ? api->allocate_memory(&taken) : NULL;
    if (error) return error;
    status = run(t, (void*)(((uintptr_t)taken.data + align - 1) / align * align), bytes);
    xla_memory_free given_back = {sizeof given_back, NULL, t->call->execution, room, taken.data};
    error = room ? api->free_memory(&given_back) : NULL;
    return status ? refuse(t->call, status) : error;
}

static xla_error* find_device(task* t) {
    const xla_api* api = t->call->api;
    if (t->device.type == SPATTN_CPU) return NULL;
    if (api->struct_size < sizeof *api)
        return fail(t->call, XLA_UNIMPLEMENTED, "sparseattn: this jaxlib does not say which GPU a call runs on");
    xla_device_get device = {sizeof device, NULL, t->call->execution, 0};
    xla_stream_get stream = {sizeof stream, NULL, t->call->execution, NULL};
    xla_error* error = api->get_device(&device);
    if (!error) error = api->get_stream(&stream);
    if (!error && (device.ordinal < 0 || device.ordinal >= MAX_DEVICES))
        error = fail(t->call, XLA_UNIMPLEMENTED, "sparseattn: more than 64 GPUs");
    t->device.index = device.ordinal, t->stream = stream.stream;
    return error;
}

static xla_error* execute(const xla_call* call, spattn_enum op, int32_t device_type) {
    task t = {0};
    t.call = call, t.op = op, t.device.type = device_type;
    const xla_array *bytes = find_bytes(call, "pattern"), *problem = find_bytes(call, "problem");
    const xla_array* given = find_bytes(call, "given");
    if (!bytes || !problem || problem->size != sizeof t.problem || !given || given->size != OPTIONAL)
        return fail(call, XLA_INVALID_ARGUMENT, "sparseattn: the call is not one of this sparseattn.jax");
    memcpy(&t.problem, problem->data, sizeof t.problem);
    t.given = given->data;
    if (!read_buffers(&t, 0))
        return fail(call, XLA_INVALID_ARGUMENT, "sparseattn: buffers are not those of the problem");
    read_open_sizes(&t);
    xla_error* error = find_device(&t);
    if (error) return error;
    const spattn_pattern* pattern = NULL;
    spattn_status status = read_pattern(bytes, &pattern);
    if (!status) status = make_plan(&t, pattern);
    error = status ? refuse(call, status) : run_with_scratch(&t);
    spattn_plan_release(t.plan);
    spattn_pattern_release(pattern);
    return error;
}

/* XLA asks what version a handler was made for before it calls it. The structs of ffi.h are the same in all that have
 * this interface, so the answer is the version that asks. One that does not say its own, as in jaxlib 0.5 to
 * 0.8.0, has 0.1. */
static int describe(const xla_call* call) {
    xla_metadata_extension* asked = (xla_metadata_extension*)call->extensions;
    if (!asked || asked->base.kind != XLA_METADATA) return 0;
    asked->metadata->version.major = call->api ? call->api->version.major : 0;
    asked->metadata->version.minor = call->api ? call->api->version.minor : 1;
    asked->metadata->traits = 0;
    return 1;
}

static xla_error* handle(const xla_call* call, spattn_enum op, int32_t device_type) {
    return describe(call) ? NULL : execute(call, op, device_type);
}

PUBLIC xla_error* spattn_xla_forward_cpu(const xla_call* call) {
    return handle(call, SPATTN_OP_FORWARD, SPATTN_CPU);
}
PUBLIC xla_error* spattn_xla_backward_cpu(const xla_call* call) {
    return handle(call, SPATTN_OP_BACKWARD, SPATTN_CPU);
}
PUBLIC xla_error* spattn_xla_forward_cuda(const xla_call* call) {
    return handle(call, SPATTN_OP_FORWARD, SPATTN_CUDA);
}
PUBLIC xla_error* spattn_xla_backward_cuda(const xla_call* call) {
    return handle(call, SPATTN_OP_BACKWARD, SPATTN_CUDA);
}
