// SPDX-License-Identifier: MIT
// Chapter 6 of the header: checks the operands of a call, then hands them to the plan's kernel.
#include "api/args.h"
#include "api/empty.h"
#include "api/guard.h"
#include "api/operands.h"
#include "core/cancel.h"
#include "plan/run.h"
#include "plan/token_rows.h"

namespace spattn {
namespace {

// The operands of a plan's call. The workspace comes first: what stands in for operands without elements lies there.
class PlanOperands : public Operands {
public:
    template <class Args>
    PlanOperands(const spattn_plan& plan, spattn_enum op, const Args& args)
        : Operands(plan.device->id(), plan.axes, plan.given), plan_(plan),
          workspace_(check_workspace(args.workspace, args.workspace_bytes, run_workspace(plan, op))),
          stand_ins_(plan, op, workspace_) {}

    void* workspace() const { return workspace_; }

    TensorView query_input(const spattn_tensor* t) {
        return stand_in(queries(t, "q", Use::input), plan_.given.heads_q, plan_.given.head_dim);
    }
    TensorView input(const spattn_tensor* t, const char* argument, int64_t heads, int64_t seq, int64_t dim) {
        return stand_in(matrix(t, argument, Use::input, heads, seq, dim), heads, dim);
    }
    TensorView key_input(const spattn_tensor* t, const char* argument, int64_t dim) {
        return stand_in(keys(t, argument, Use::input, dim), plan_.given.heads_kv, dim);
    }
    TensorView output(const spattn_tensor* t, const char* argument, int64_t heads, int64_t seq, int64_t dim) {
        return stand_in(matrix(t, argument, Use::output, heads, seq, dim), heads, dim);
    }
    Pools pool_inputs(const spattn_tensor* k, const spattn_tensor* v) {
        Pools found = pools(k, v, Use::input);
        if (!is_absent()) return found;
        found.k = stand_ins_.matrix(plan_.given.heads_kv, plan_.given.head_dim);
        found.v = plan_.given.value_in_key ? found.k
                                           : stand_ins_.matrix(plan_.given.heads_kv, plan_.given.head_dim_v);
        return found;
    }
    // lse, which backward always reads.
    TensorView lse_input(const spattn_tensor* t, const char* argument) {
        const TensorView lse = rows(t, argument, Use::input);
        return lse.data ? lse : stand_ins_.rows();
    }

private:
    void* check_workspace(void* memory, size_t bytes, size_t needed) {
        if (!needed) return nullptr;
        if (!memory)
            fail(SPATTN_E_NULL, "workspace", text("is NULL; accepted: ", needed, " bytes, see spattn_plan_workspace"));
        if (bytes < needed)
            fail(SPATTN_E_WORKSPACE, "workspace_bytes",
                 text("is ", bytes, "; accepted: at least ", needed, ", see spattn_plan_workspace"));
        const size_t align = workspace_alignment(plan_);
        if (reinterpret_cast<uintptr_t>(memory) % align)
            fail(SPATTN_E_LAYOUT, "workspace", text("is not aligned; accepted: multiples of ", align, " bytes"));
        add_memory("workspace", memory, needed, Use::output);
        return memory;
    }
    TensorView stand_in(const TensorView& view, int64_t heads, int64_t dim) {
        return is_absent() ? stand_ins_.matrix(heads, dim) : view;
    }

    const spattn_plan& plan_;
    void* const workspace_;
    StandIns stand_ins_;
};

using Use = Operands::Use;

// Required exactly where the pattern has its lists given at run time.
template <class Args>
CallLists read_lists(PlanOperands& operands, const Problem& p, const Args& a) {
    CallLists lists{};
    if (!p.call_lists.at_run_time()) {
        refuse_operand(a.indices, "indices", "the plan's pattern has its lists");
        refuse_operand(a.index_counts, "index_counts", "the plan's pattern has its lists");
        return lists;
    }
    lists.indices = operands.lists(a.indices, "indices");
    if (a.index_counts) lists.counts = operands.list_counts(a.index_counts, "index_counts");
    return lists;
}

// Kernels that take sinks are chosen by the plan, so it must know of them.
constexpr const char* unplanned_sinks = "the plan is not one with SPATTN_PLAN_SINK_LOGITS";

TensorView read_sinks(PlanOperands& operands, const Problem& p, const spattn_tensor* sink_logits) {
    if (p.has_sink_logits) return operands.heads(sink_logits, "sink_logits", Use::input);
    refuse_operand(sink_logits, "sink_logits", unplanned_sinks);
    return {};
}

// v, or the columns of k that are v.
TensorView read_values(PlanOperands& operands, const Problem& p, const spattn_tensor* v, TensorView k) {
    if (!p.value_in_key) return operands.key_input(v, "v", p.head_dim_v);
    refuse_operand(v, "v", values_are_in_keys);
    return k;
}

template <class Args>
void read_scales(PlanOperands& operands, const Problem& p, const Args& a, const Operands::Pools& pools, CallArgs& call) {
    call.q_scales = operands.query_scales(a.q_scales, "q_scales");
    call.k_scales = operands.scales(a.k_scales, "k_scales", Use::input, pools);
    if (p.value_in_key)
        refuse_operand(a.v_scales, "v_scales", values_are_in_keys);
    call.v_scales = p.value_in_key ? call.k_scales : operands.scales(a.v_scales, "v_scales", Use::input, pools);
}

// The rows that a reference kernel reads: of the pattern, of the call's lists, or of its place in a cache.
class RowsOfCall {
public:
    RowsOfCall(const spattn_plan& plan, const CallLists& lists, const CallCache& cache)
        : pattern_(*plan.pattern, plan.compiled.problem),
          call_rows_(plan.known.get(), plan.compiled.problem, lists),
          cache_rows_(*plan.pattern, plan.compiled.problem, cache, lists), rows_(choose(plan.compiled.problem)) {}
    const TokenRows& get() const { return rows_; }

private:
    const TokenRows& choose(const Problem& p) const {
        if (p.has_starts) return cache_rows_;
        return p.call_lists.at_run_time() ? static_cast<const TokenRows&>(call_rows_) : pattern_;
    }

    PatternRows pattern_;
    CallListRows call_rows_;
    CacheRows cache_rows_;
    const TokenRows& rows_;
};

// What forward and backward share once the operands are checked.
void fill(CallArgs& call, const spattn_plan& plan, const RowsOfCall& rows, Parallel& parallel, void* stream) {
    call.problem = &plan.compiled.problem;
    call.rows = &rows.get();
    call.parallel = &parallel;
    call.stream = stream;
    call.device = plan.device->id().index;
}

// Where lists name blocks of pages, each page begins at a whole block.
void check_pages(const PassPlan& pass, const CallCache& cache) {
    for (const PiecePlan& piece : pass.pieces)
        if (piece.cache && piece.cache->keys == CacheKeys::in_pages && cache.pages > 1 &&
            cache.page_rows % piece.cache->tile_k)
            fail(SPATTN_E_LAYOUT, "k",
                 text("has pages ", cache.page_rows, " rows apart; accepted: multiples of the kernel's blocks, ",
                      piece.cache->tile_k));
}

void check_max_logits(const PassPlan& pass) {
    for (const PiecePlan& piece : pass.pieces)
        if (!piece.kernel->max_logits)
            fail(SPATTN_E_UNSUPPORTED, "max_logits",
                 text("is given where the plan's kernel, ", piece.kernel->name, ", does not write it; accepted: NULL"));
}

// To wake a thread takes longer than some calls. On two of a virtual machine, those of 30 us took twice as long as on one,
// and as long where one takes 150 us. Others may wake threads sooner: passes are brief that one thread does in less than
// 40, as the plan expects.
bool is_brief(const spattn_plan& plan, const PassPlan& pass) {
    constexpr double most_us = 40;
    const bool is_reference = plan.compiled.options.reference;  // whose time nobody predicts
    return !is_reference && pass.cost.us * plan.device->parallel().lanes() < most_us;
}

CancellableParallel threads_of(const spattn_plan& plan, const PassPlan& pass) {
    return {plan.device->parallel(), plan.device->cancel(), plan.device->cancel_user(), is_brief(plan, pass)};
}

void check_forward_flags(uint32_t flags, const Problem& p) {
    if (flags & ~uint32_t(SPATTN_FORWARD_SAME_STEP))
        fail(SPATTN_E_UNKNOWN_FIELD, "args.flags", text("is ", flags, "; accepted: 0 or SPATTN_FORWARD_SAME_STEP"));
    if (flags && !p.has_starts)
        fail(SPATTN_E_STATE, "args.flags",
             "is SPATTN_FORWARD_SAME_STEP, and the plan is not one with SPATTN_PLAN_STARTS; accepted: 0");
}

}  // namespace
}  // namespace spattn

using namespace spattn;

spattn_status spattn_forward(const spattn_plan* plan, const spattn_forward_args* given) {
    return guard(__func__, [&] {
        const Problem& p = required(plan, "plan").given;
        const spattn_forward_args a = read_struct(given, "args");
        check_forward_flags(a.flags, p);
        const PassPlan& pass = plan->compiled.forward;
        PlanOperands operands(*plan, SPATTN_OP_FORWARD, a);
        ForwardArgs call{};
        call.workspace = operands.workspace();
        call.q = operands.query_input(a.q);
        Operands::Pools pools{};
        if (p.page_size) {
            pools = operands.pool_inputs(a.k, a.v);
            call.k = pools.k, call.v = pools.v;
        } else {
            call.k = operands.key_input(a.k, "k", p.head_dim);
            call.v = read_values(operands, p, a.v, call.k);
        }
        read_scales(operands, p, a, pools, call);
        call.cache = operands.cache(a.starts, a.page_table, a.query_offsets);
        call.cache.pages = pools.pages, call.cache.page_rows = pools.page_rows;
        if (p.has_parents)
            call.cache.parents = operands.parents(a.parents, "parents");
        else
            refuse_operand(a.parents, "parents", "the plan is not one with SPATTN_PLAN_PARENTS");
        call.out = operands.output(a.out, "out", p.heads_q, p.seq_q, p.head_dim_v);
        if (a.lse) call.lse = operands.rows(a.lse, "lse", Use::output);
        if (a.max_logits) call.max_logits = operands.rows(a.max_logits, "max_logits", Use::output);
        call.call_lists = read_lists(operands, p, a);
        call.has_layout = a.flags & SPATTN_FORWARD_SAME_STEP;
        call.sink_logits = read_sinks(operands, p, a.sink_logits);
        operands.check_overlaps();
        if (a.max_logits) check_max_logits(pass);
        check_pages(pass, call.cache);
        const RowsOfCall rows(*plan, call.call_lists, call.cache);
        CancellableParallel threads = threads_of(*plan, pass);
        fill(call, *plan, rows, threads, a.stream);
        run_pass(plan->device->backend(), pass, plan->placed.forward, call);
    });
}

spattn_status spattn_backward(const spattn_plan* plan, const spattn_backward_args* given) {
    return guard(__func__, [&] {
        const Problem& p = required(plan, "plan").given;
        const spattn_backward_args a = read_struct(given, "args");
        if (a.flags) fail(SPATTN_E_UNKNOWN_FIELD, "args.flags", text("is ", a.flags, "; accepted: 0"));
        const PassPlan& pass = plan->compiled.backward;
        require(!pass.pieces.empty(), SPATTN_E_STATE, "plan",
                "has no backward; accepted: plans of problems with SPATTN_PLAN_BACKWARD");
        PlanOperands operands(*plan, SPATTN_OP_BACKWARD, a);
        BackwardArgs call{};
        call.workspace = operands.workspace();
        call.q = operands.query_input(a.q);
        call.k = operands.key_input(a.k, "k", p.head_dim);
        call.v = read_values(operands, p, a.v, call.k);
        read_scales(operands, p, a, {}, call);
        call.out = operands.input(a.out, "out", p.heads_q, p.seq_q, p.head_dim_v);
        call.lse = operands.lse_input(a.lse, "lse");
        call.dout = operands.input(a.dout, "dout", p.heads_q, p.seq_q, p.head_dim_v);
        if (a.dlse) call.dlse = operands.rows(a.dlse, "dlse", Use::input);
        call.dq = operands.output(a.dq, "dq", p.heads_q, p.seq_q, p.head_dim);
        call.dk = operands.output(a.dk, "dk", p.heads_kv, p.seq_k, p.head_dim);
        if (p.value_in_key)
            refuse_operand(a.dv, "dv", "SPATTN_PLAN_VALUE_IN_KEY adds its gradient to dk");
        else
            call.dv = operands.output(a.dv, "dv", p.heads_kv, p.seq_k, p.head_dim_v);
        call.call_lists = read_lists(operands, p, a);
        call.sink_logits = read_sinks(operands, p, a.sink_logits);
        if (!p.has_sink_logits) refuse_operand(a.dsink_logits, "dsink_logits", unplanned_sinks);
        if (a.dsink_logits) call.dsink_logits = operands.heads(a.dsink_logits, "dsink_logits", Use::output);
        operands.check_overlaps();
        if (a.dsink_logits && !has_queries(p)) {
            clear_sinks(*plan, call.dsink_logits, a.stream);
            call.dsink_logits = {};
        }
        const RowsOfCall rows(*plan, call.call_lists, {});
        CancellableParallel threads = threads_of(*plan, pass);
        fill(call, *plan, rows, threads, a.stream);
        run_pass(plan->device->backend(), pass, plan->placed.backward, call);
    });
}
