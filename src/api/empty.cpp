// SPDX-License-Identifier: MIT
#include "api/empty.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/math.h"

namespace spattn {
namespace {

constexpr int64_t alignment = 256;  // of each stand-in: enough for any device

size_t matrix_bytes(const Problem& p, int64_t heads, int64_t dim) {
    return size_t(round_up(p.batch * heads * dim * dtype_row(p.dtype).bytes, alignment));
}
size_t rows_bytes(const Problem& p) {
    return size_t(round_up(p.batch * p.heads_q * int64_t(sizeof(float)), alignment));
}

}  // namespace

Problem stand_in_problem(Problem p) {
    if (p.batch == 0) p.seq_q = p.seq_k = 0;  // there is no entry whose queries or keys would be real
    p.batch = std::max<int64_t>(p.batch, 1);
    p.seq_q = std::max<int64_t>(p.seq_q, 1);
    p.seq_k = std::max<int64_t>(p.seq_k, 1);
    p.call_lists = {};
    return p;
}

size_t kernel_workspace(const spattn_plan& plan, spattn_enum op) {
    return size_t(round_up(int64_t(plan.pass(op).workspace), alignment));
}

size_t run_workspace(const spattn_plan& plan, spattn_enum op) {
    if (!is_empty(plan.given)) return plan.pass(op).workspace;
    const Problem &given = plan.given, &p = plan.compiled.problem;
    const auto both_dims = [&](int64_t heads) {
        return matrix_bytes(p, heads, p.head_dim) + matrix_bytes(p, heads, p.head_dim_v);
    };
    const bool has_queries = given.batch && given.seq_q, has_keys = given.batch && given.seq_k;
    const size_t absent = (has_queries ? 0 : both_dims(p.heads_q)) + (has_keys ? 0 : both_dims(p.heads_kv));
    if (op == SPATTN_OP_FORWARD) return kernel_workspace(plan, op) + absent;
    return kernel_workspace(plan, op) + 2 * absent + (has_queries ? 0 : rows_bytes(p));  // 2: gradients are absent too
}

Counts count_empty(const Problem& given) {
    Counts counts;
    counts.rows_empty = given.batch * given.heads_q * given.seq_q;
    return counts;
}

StandIns::StandIns(const spattn_plan& plan, spattn_enum op, void* workspace, void* stream)
    : plan_(plan), p_(plan.compiled.problem), stream_(stream),
      is_read_(op == SPATTN_OP_BACKWARD && plan.given.has_sink_logits),
      next_(static_cast<char*>(workspace) + (workspace ? kernel_workspace(plan, op) : 0)) {}

TensorView StandIns::matrix(int64_t heads, int64_t dim) {
    return {take(matrix_bytes(p_, heads, dim), 0), heads * dim, dim, dim, 1};
}

// exp(z - infinity) is 0 for every sink logit z, so a sink's gradient gets nothing from a row that is not there.
TensorView StandIns::rows() {
    return {take(rows_bytes(p_), std::numeric_limits<float>::infinity()), p_.heads_q, 1, 1, 0};
}

void* StandIns::take(size_t bytes, float content) {
    char* const memory = next_;
    next_ += bytes;
    if (!is_read_) return memory;
    const size_t count = bytes / sizeof(float);
    if (plan_.device->id().type == SPATTN_CPU) {
        std::fill_n(reinterpret_cast<float*>(memory), count, content);
    } else {
        const std::vector<float> contents(count, content);
        plan_.device->memory()->copy_in(memory, contents.data(), bytes, stream_);
    }
    return memory;
}

}  // namespace spattn
