// SPDX-License-Identifier: MIT
#include "api/empty.h"

#include <algorithm>
#include <utility>

#include "core/math.h"

namespace spattn {
namespace {

constexpr int64_t stand_in_alignment = 256;  // of each stand-in: enough for any device

size_t matrix_bytes(const Problem& p, int64_t heads, int64_t dim) {
    return size_t(round_up(p.batch * heads * dim * dtype_row(p.dtype).bytes, stand_in_alignment));
}
size_t rows_bytes(const Problem& p) {
    return size_t(round_up(p.batch * p.heads_q * int64_t(sizeof(float)), stand_in_alignment));
}

}  // namespace

Problem stand_in_problem(Problem p) {
    if (p.batch == 0) p.seq_q = p.seq_k = 0;  // there is no entry whose queries or keys would be real
    p.batch = std::max<int64_t>(p.batch, 1);
    p.seq_q = std::max<int64_t>(p.seq_q, 1);
    p.seq_k = std::max<int64_t>(p.seq_k, 1);
    p.call_lists = {};
    p.has_starts = p.has_parents = p.float8_cache = false, p.page_size = 0, p.ragged = 0;
    return p;
}

size_t kernel_workspace(const spattn_plan& plan, spattn_enum op) {
    return size_t(round_up(int64_t(plan.pass(op).workspace), stand_in_alignment));
}

size_t run_workspace(const spattn_plan& plan, spattn_enum op) {
    if (!is_empty(plan.given)) return plan.pass(op).workspace;
    const Problem &given = plan.given, &p = plan.compiled.problem;
    const auto both_dims = [&](int64_t heads) {
        return matrix_bytes(p, heads, p.head_dim) + matrix_bytes(p, heads, p.head_dim_v);
    };
    const size_t absent =
        (has_queries(given) ? 0 : both_dims(p.heads_q)) + (has_keys(given) ? 0 : both_dims(p.heads_kv));
    if (op == SPATTN_OP_FORWARD) return kernel_workspace(plan, op) + absent;
    return kernel_workspace(plan, op) + 2 * absent + (has_queries(given) ? 0 : rows_bytes(p));  // 2: gradients are absent too
}

Counts count_empty(const Problem& given) {
    Counts counts;
    counts.rows_empty = given.batch * given.heads_q * given.seq_q;
    return counts;
}

StandIns::StandIns(const spattn_plan& plan, spattn_enum op, void* workspace)
    : p_(plan.compiled.problem),
      next_(static_cast<char*>(workspace) + (workspace ? kernel_workspace(plan, op) : 0)) {}

TensorView StandIns::matrix(int64_t heads, int64_t dim) {
    return {take(matrix_bytes(p_, heads, dim)), heads * dim, dim, dim, 1};
}

TensorView StandIns::rows() { return {take(rows_bytes(p_)), p_.heads_q, 1, 1, 0}; }

void* StandIns::take(size_t bytes) { return std::exchange(next_, next_ + bytes); }

void clear_sinks(const spattn_plan& plan, const TensorView& dsink_logits, void* stream) {
    const Memory& memory = *plan.device->memory();
    float* const heads = static_cast<float*>(dsink_logits.data);
    const int64_t count = plan.given.heads_q;
    if (dsink_logits.head == 1) return memory.clear(heads, size_t(count) * sizeof(float), stream);
    for (int64_t head = 0; head < count; ++head) memory.clear(heads + head * dsink_logits.head, sizeof(float), stream);
}

}  // namespace spattn
