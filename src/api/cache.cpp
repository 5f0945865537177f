// SPDX-License-Identifier: MIT
// New tokens of a cache, of chapter 6 of the header.
#include "api/args.h"
#include "api/context.h"
#include "api/guard.h"
#include "api/operands.h"
#include "api/problem.h"
#include "core/cancel.h"

namespace spattn {
namespace {

using Use = Operands::Use;

// The cache that is written: pages, or the keys and values of each entry.
void read_written(Operands& operands, const Problem& p, const spattn_cache_append_args& a, CacheAppend& call) {
    if (p.page_size) {
        const Operands::Pools pools = operands.pools(a.k, a.v, Use::output);
        call.k = pools.k, call.v = pools.v;
        call.cache.pages = pools.pages, call.cache.page_rows = pools.page_rows;
    } else {
        call.k = operands.matrix(a.k, "k", Use::output, p.heads_kv, p.seq_k, p.head_dim);
        if (p.value_in_key)
            refuse_operand(a.v, "v", values_are_in_keys);
        else
            call.v = operands.matrix(a.v, "v", Use::output, p.heads_kv, p.seq_k, p.head_dim_v);
    }
    if (p.value_in_key) call.v = {};
}

void read_new(Operands& operands, const Problem& p, const spattn_cache_append_args& a, CacheAppend& call) {
    call.k_new = operands.matrix(a.k_new, "k_new", Use::input, p.heads_kv, p.seq_q, p.head_dim);
    if (p.value_in_key)
        refuse_operand(a.v_new, "v_new", values_are_in_keys);
    else
        call.v_new = operands.matrix(a.v_new, "v_new", Use::input, p.heads_kv, p.seq_q, p.head_dim_v);
}

}  // namespace
}  // namespace spattn

using namespace spattn;

spattn_status spattn_cache_append(const spattn_context* context, const spattn_problem* given_problem,
                                  const spattn_cache_append_args* given) {
    return guard(__func__, [&] {
        const Device& device = *required(context, "context").device;
        const spattn_problem problem = read_struct(given_problem, "problem");
        const Problem p = read_problem(problem);
        if (!p.has_starts)
            fail(SPATTN_E_RANGE, "problem.flags",
                 text("is ", problem.flags, "; accepted: problems of a cache, with SPATTN_PLAN_STARTS"));
        const spattn_cache_append_args a = read_struct(given, "args");
        if (a.flags) fail(SPATTN_E_UNKNOWN_FIELD, "args.flags", text("is ", a.flags, "; accepted: 0"));
        Operands operands(device.id(), problem.axes, p);
        CacheAppend call{};
        read_new(operands, p, a, call);
        call.cache = operands.cache(a.starts, a.page_table, a.query_offsets);
        read_written(operands, p, a, call);
        if (p.ragged)
            refuse_operand(a.counts, "counts", "query_offsets says how many rows entries have");
        else if (a.counts)
            call.counts = operands.of_sequences(a.counts, "counts");
        operands.check_overlaps();
        if (p.sequences() == 0 || p.seq_q == 0 || p.seq_k == 0) return;
        CancellableParallel threads(device.parallel(), device.cancel(), device.cancel_user());
        call.problem = &p, call.parallel = &threads, call.stream = a.stream, call.device = device.id().index;
        device.backend().cache.append(call);
    });
}
