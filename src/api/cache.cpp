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

// The scales of what is written: chosen by the call, or its caller's.
void read_scales(Operands& operands, const Problem& p, const spattn_cache_append_args& a,
                 const Operands::Pools& pools, CacheAppend& call) {
    call.writes_scales = a.flags & SPATTN_APPEND_SCALES;
    const Use use = call.writes_scales ? Use::output : Use::input;
    if (call.writes_scales) required(a.k_scales, "k_scales");
    call.k_scales = operands.scales(a.k_scales, "k_scales", use, pools);
    if (p.value_in_key) return refuse_operand(a.v_scales, "v_scales", values_are_in_keys);
    if (call.writes_scales) required(a.v_scales, "v_scales");
    call.v_scales = operands.scales(a.v_scales, "v_scales", use, pools);
}

// The cache that is written: pages, or the keys and values of each entry.
void read_written(Operands& operands, const Problem& p, const spattn_cache_append_args& a, CacheAppend& call) {
    Operands::Pools pools{};
    if (p.page_size) {
        pools = operands.pools(a.k, a.v, Use::output);
        call.k = pools.k, call.v = pools.v;
        call.cache.pages = pools.pages, call.cache.page_rows = pools.page_rows;
    } else {
        call.k = operands.keys(a.k, "k", Use::output, p.head_dim);
        if (p.value_in_key)
            refuse_operand(a.v, "v", values_are_in_keys);
        else
            call.v = operands.keys(a.v, "v", Use::output, p.head_dim_v);
    }
    if (p.value_in_key) call.v = {};
    read_scales(operands, p, a, pools, call);
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
        if (a.flags & ~uint32_t(SPATTN_APPEND_SCALES))
            fail(SPATTN_E_UNKNOWN_FIELD, "args.flags",
                 text("is ", a.flags, "; accepted: 0 or SPATTN_APPEND_SCALES"));
        if (a.flags && !p.float8_cache)
            fail(SPATTN_E_RANGE, "args.flags", "is SPATTN_APPEND_SCALES, and the cache is not of float8; accepted: 0");
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
