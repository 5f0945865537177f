/* SPDX-License-Identifier: MIT
 * One sequence on several processes, each with a part of its tokens: keys that others see go to them, and gradients come
 * back. Pipes carry the bytes here; between GPUs ncclSend and ncclRecv take the same parts of the same buffers. What
 * comes out is compared with one pass over all tokens. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <sparseattn/sparseattn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ranks = 4, length = 1024, own = length / ranks, heads = 2, dim = 32, row = heads * dim };

static float q[length * row], k[length * row], v[length * row], dout[length * row];
static float out[length * row], lse[length * heads], dq[length * row], dk[length * row], dv[length * row]; /* of all */
static int pipes[ranks][ranks][2];

static void require(spattn_status status) {
    if (status == SPATTN_OK) return;
    fprintf(stderr, "%s: %s\n", spattn_status_name(status), spattn_last_error_text());
    exit(1);
}

static void* allocate(size_t bytes) {
    void* memory = NULL;
    if (posix_memalign(&memory, 64, bytes + 64)) exit(1);
    return memory;
}

static spattn_tensor view(float* data, const int64_t* shape, int32_t axes) {
    spattn_tensor tensor = {data, {SPATTN_CPU, 0}, axes, {SPATTN_FLOAT, 32, 1}, shape, NULL, 0};
    return tensor;
}

/* What both passes of a plan read and write: some queries, and the keys that they see. */
typedef struct {
    float *q, *dout, *out, *lse, *dq, *k, *v, *dk, *dv;
} operands;

static void run(const spattn_plan* plan, int64_t rows, int64_t keys, operands x) {
    const int64_t of_q[] = {1, rows, heads, dim}, of_k[] = {1, keys, heads, dim}, of_lse[] = {1, heads, rows};
    spattn_tensor q_view = view(x.q, of_q, 4), out_view = view(x.out, of_q, 4), dout_view = view(x.dout, of_q, 4);
    spattn_tensor dq_view = view(x.dq, of_q, 4), lse_view = view(x.lse, of_lse, 3);
    spattn_tensor k_view = view(x.k, of_k, 4), v_view = view(x.v, of_k, 4);
    spattn_tensor dk_view = view(x.dk, of_k, 4), dv_view = view(x.dv, of_k, 4);
    spattn_forward_args forward = {0};
    spattn_backward_args backward = {0};
    forward.struct_size = sizeof forward, backward.struct_size = sizeof backward;
    forward.q = backward.q = &q_view, forward.k = backward.k = &k_view, forward.v = backward.v = &v_view;
    forward.out = backward.out = &out_view, forward.lse = backward.lse = &lse_view;
    backward.dout = &dout_view, backward.dq = &dq_view, backward.dk = &dk_view, backward.dv = &dv_view;
    require(spattn_plan_workspace(plan, SPATTN_OP_FORWARD, &forward.workspace_bytes, NULL));
    require(spattn_plan_workspace(plan, SPATTN_OP_BACKWARD, &backward.workspace_bytes, NULL));
    forward.workspace = allocate(forward.workspace_bytes), backward.workspace = allocate(backward.workspace_bytes);
    require(spattn_forward(plan, &forward));
    require(spattn_backward(plan, &backward));
    free(forward.workspace), free(backward.workspace);
}

static void transfer(int file, char* bytes, size_t count, int is_sent) {
    while (count) {
        const ssize_t done = is_sent ? write(file, bytes, count) : read(file, bytes, count);
        if (done <= 0) exit(1);
        bytes += done, count -= (size_t)done;
    }
}

/* The parts of one buffer go to each other rank, and theirs come into the parts of another. Pairs of ranks take turns. */
static void carry(const spattn_sharding* sharding, int rank, char* sent, char* received, int is_back) {
    for (int turn = 0; turn < ranks * ranks; ++turn) {
        const int from = turn / ranks, to = turn % ranks, other = from == rank ? to : from;
        spattn_peer peer = {0};
        peer.struct_size = sizeof peer;
        if (from == to || (from != rank && to != rank)) continue;
        require(spattn_sharding_peer(sharding, other, &peer));
        if (!is_back && from == rank)
            transfer(pipes[from][to][1], sent + peer.sent_offset, peer.sent_bytes, 1);
        else if (!is_back)
            transfer(pipes[from][to][0], received + peer.received_offset, peer.received_bytes, 0);
        else if (from == rank) /* gradients: out of `received`, into `sent` */
            transfer(pipes[from][to][1], received + peer.back_received_offset, peer.back_received_bytes, 1);
        else
            transfer(pipes[from][to][0], sent + peer.back_sent_offset, peer.back_sent_bytes, 0);
    }
}

/* How many keys the plan of a rank takes: those that it holds or receives, and a few between. */
static int64_t count_seen(const spattn_sharding* sharding) {
    int64_t ranges = 0, tokens = 0;
    require(spattn_sharding_seen(sharding, NULL, &ranges, &tokens));
    return tokens;
}

static void exchange(const spattn_sharding* sharding, spattn_enum step, const float* const* held, float* const* seen,
                     void* buffer, size_t bytes) {
    const int64_t of_held[] = {1, own, heads, dim}, of_seen[] = {1, count_seen(sharding), heads, dim};
    spattn_exchange_args args = {0};
    spattn_tensor views[4];
    args.struct_size = sizeof args, args.buffer = buffer, args.buffer_bytes = bytes;
    if (held) views[0] = view((float*)held[0], of_held, 4), views[1] = view((float*)held[1], of_held, 4);
    if (held) args.k = &views[0], args.v = &views[1];
    if (seen) views[2] = view(seen[0], of_seen, 4), views[3] = view(seen[1], of_seen, 4);
    if (seen) args.seen_k = &views[2], args.seen_v = &views[3];
    require(spattn_exchange(sharding, step, &args));
}

static double distance(const float* a, const float* b, int64_t count) {
    double worst = 0;
    for (int64_t i = 0; i < count; ++i) worst = fabs((double)a[i] - b[i]) <= worst ? worst : fabs((double)a[i] - b[i]);
    return worst;
}

int main(void) {
    int rank = 0, failed = 0;
    spattn_context_options options = {0};
    spattn_sharding_options sharding_options = {0};
    spattn_problem problem = {0};
    spattn_context* context = NULL;
    spattn_pattern* pattern = NULL;
    spattn_plan *of_all = NULL, *of_own = NULL;
    spattn_sharding* sharding = NULL;
    spattn_peer peer = {0};
    int64_t tokens = 0, keys = 0; /* how many come from other ranks, and how many the plan takes */
    size_t sent_bytes = 0, received_bytes = 0;
    for (int i = 0; i < length * row; ++i) {
        q[i] = (float)((uint32_t)i * 2654435761u >> 8) / (1 << 23) - 1, k[i] = q[i] * 2;
        v[i] = (float)sin(i), dout[i] = (float)cos(i);
    }
    for (int pair = 0; pair < ranks * ranks; ++pair)
        if (pipe(pipes[pair / ranks][pair % ranks])) return 1;
    while (rank + 1 < ranks && fork() == 0) ++rank; /* before any context: those do not outlive a fork */

    options.struct_size = sizeof options, options.device.type = SPATTN_CPU, options.cpu_threads = 1;
    require(spattn_context_create(&options, &context));
    require(spattn_pattern_parse("causal & (sink(4) | window(99,0))", &pattern));
    problem.struct_size = sizeof problem, problem.flags = SPATTN_PLAN_BACKWARD, problem.axes = SPATTN_BSHD;
    problem.batch = 1, problem.heads_q = problem.heads_kv = heads, problem.head_dim = dim;
    problem.seq_q = problem.seq_k = length;
    problem.dtype.code = SPATTN_FLOAT, problem.dtype.bits = 32, problem.dtype.lanes = 1;
    sharding_options.struct_size = sizeof sharding_options;
    sharding_options.ranks = ranks, sharding_options.rank = rank; /* equal parts, one after the other */
    require(spattn_sharding_create(context, pattern, &problem, &sharding_options, NULL, &sharding));
    require(spattn_sharding_plan(sharding, &of_own));
    require(spattn_sharding_buffers(sharding, &sent_bytes, &received_bytes));
    keys = count_seen(sharding);

    {
        const int64_t first = (int64_t)rank * own * row; /* of this rank's rows in what all have */
        char *sent = allocate(sent_bytes), *received = allocate(received_bytes);
        const size_t of_seen = sizeof(float) * (size_t)keys * row, mine = sizeof(float) * own * row;
        float* seen[] = {allocate(of_seen), allocate(of_seen)};
        float* seen_gradients[] = {allocate(of_seen), allocate(of_seen)};
        const float* held[] = {k + first, v + first};
        float* gradients[] = {allocate(mine), allocate(mine)};
        float* own_lse = allocate(sizeof(float) * own * heads);
        operands x = {q + first, dout + first, allocate(mine), own_lse, allocate(mine),
                      seen[0], seen[1], seen_gradients[0], seen_gradients[1]};
        operands y = {q, dout, out, lse, dq, k, v, dk, dv};
        memset(seen[0], 0xff, of_seen), memset(seen[1], 0xff, of_seen); /* NaN: nobody reads what was not received */

        exchange(sharding, SPATTN_EXCHANGE_PACK, held, NULL, sent, sent_bytes);
        carry(sharding, rank, sent, received, 0);
        exchange(sharding, SPATTN_EXCHANGE_UNPACK, held, seen, received, received_bytes);
        run(of_own, own, keys, x);
        exchange(sharding, SPATTN_EXCHANGE_PACK_GRADIENTS, NULL, seen_gradients, received, received_bytes);
        carry(sharding, rank, sent, received, 1);
        exchange(sharding, SPATTN_EXCHANGE_ADD_GRADIENTS, (const float* const*)gradients, seen_gradients, sent,
                 sent_bytes);

        require(spattn_plan_create(context, pattern, &problem, NULL, &of_all));
        run(of_all, length, length, y);
        peer.struct_size = sizeof peer;
        for (int other = 0; other < ranks; ++other) {
            require(spattn_sharding_peer(sharding, other, &peer));
            tokens += peer.tokens_received;
        }
        {
            const double off_out = distance(x.out, out + first, own * row);
            const double off_dq = distance(x.dq, dq + first, own * row);
            const double off_dk = distance(gradients[0], dk + first, own * row);
            const double off_dv = distance(gradients[1], dv + first, own * row);
            const double worst = fmax(fmax(off_out, off_dq), fmax(off_dk, off_dv));
            printf("rank %d holds %d tokens, received %d and takes %d keys of %d: %.1e off one pass\n", rank, own,
                   (int)tokens, (int)keys, length, worst);
            failed = !(worst < 1e-4);
        }
    }
    spattn_plan_release(of_own), spattn_plan_release(of_all), spattn_sharding_release(sharding);
    spattn_pattern_release(pattern), spattn_context_release(context);
    if (rank + 1 < ranks) { /* the next rank is this process' child */
        int status = 0;
        wait(&status);
        failed |= status != 0;
    }
    return failed;
}
