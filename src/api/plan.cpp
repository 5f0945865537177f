// SPDX-License-Identifier: MIT
// Chapter 5 of the header.
#include "api/plan.h"

#include <bit>
#include <cmath>
#include <cstdlib>

#include "api/args.h"
#include "api/context.h"
#include "api/empty.h"
#include "api/guard.h"
#include "api/stats.h"
#include "core/cancel.h"
#include "core/dtype.h"
#include "plan/dispatch.h"
#include "plan/token_rows.h"

namespace spattn {
namespace {

Dtype read_dtype(spattn_dtype given) {
    std::string names;
    for (const DtypeRow& row : dtype_rows) {
        if (row.wire == given) return row.dtype;
        names += (names.empty() ? "" : " or ") + describe_dtype(row.wire);
    }
    fail(SPATTN_E_DTYPE, "problem.dtype", text("is ", describe_dtype(given), "; accepted: ", names));
}

double read_scale(const spattn_problem& p) {
    if (!(p.flags & SPATTN_PLAN_SCALE)) {
        if (p.scale != 0)
            fail(SPATTN_E_RANGE, "problem.scale",
                 text("is ", p.scale, " without SPATTN_PLAN_SCALE; accepted: 0, or the flag too"));
        return 1 / std::sqrt(double(p.head_dim));
    }
    if (!std::isfinite(p.scale) || std::fabs(p.scale) > 1e30)
        fail(SPATTN_E_RANGE, "problem.scale", text("is ", p.scale, "; accepted: finite, at most 1e30 in size"));
    return p.scale;
}

double read_softcap(double softcap) {
    constexpr double least = 1e-6, most = 1e30;
    if (softcap != 0 && !(softcap >= least && softcap <= most))
        fail(SPATTN_E_RANGE, "problem.softcap",
             text("is ", softcap, "; accepted: 0 for none, or ", least, " to ", most));
    return softcap;
}

constexpr uint32_t known_flags = SPATTN_PLAN_BACKWARD | SPATTN_PLAN_DETERMINISTIC | SPATTN_PLAN_REFERENCE |
                                 SPATTN_PLAN_Q_OFFSET | SPATTN_PLAN_SCALE | SPATTN_PLAN_VALUE_IN_KEY |
                                 SPATTN_PLAN_SINK_LOGITS | SPATTN_PLAN_TF32 | SPATTN_PLAN_STARTS;

// What a problem says of a cache.
void read_cache_sizes(const spattn_problem& p, Problem& r) {
    constexpr int64_t largest_page = 65536;
    r.has_starts = p.flags & SPATTN_PLAN_STARTS;
    if (!r.has_starts) {
        if (p.page_size != 0)
            fail(SPATTN_E_RANGE, "problem.page_size",
                 text("is ", p.page_size, " without SPATTN_PLAN_STARTS; accepted: 0, or the flag too"));
        return;
    }
    for (const auto& [flag, name] : {std::pair(SPATTN_PLAN_BACKWARD, "SPATTN_PLAN_BACKWARD"),
                                     std::pair(SPATTN_PLAN_Q_OFFSET, "SPATTN_PLAN_Q_OFFSET")})
        if (p.flags & uint32_t(flag))
            fail(SPATTN_E_UNSUPPORTED, "problem.flags",
                 text("has ", name, " beside SPATTN_PLAN_STARTS; accepted: either alone"));
    const bool is_ragged = p.axes == SPATTN_THD;
    require_range(p.page_size, is_ragged ? 1 : 0, largest_page, "problem.page_size");
    if (p.page_size && p.seq_k % p.page_size)
        fail(SPATTN_E_RANGE, "problem.page_size",
             text("is ", p.page_size, "; accepted: 0, or divisors of seq_k, ", p.seq_k));
    r.page_size = p.page_size;
    r.q_offset = 0;
    if (is_ragged) r.ragged = p.batch, r.batch = 1;
}

Problem read_problem(const spattn_problem& p) {
    if (p.flags & ~known_flags)
        fail(SPATTN_E_UNKNOWN_FIELD, "problem.flags", text("is ", p.flags, "; accepted: bits of ", known_flags));
    constexpr int64_t most_batch = 1 << 20;
    require_range(p.batch, 0, most_batch, "problem.batch");
    require_range(p.heads_q, 1, 1 << 16, "problem.heads_q");
    require_range(p.heads_kv, 1, p.heads_q, "problem.heads_kv");
    if (p.heads_q % p.heads_kv)
        fail(SPATTN_E_RANGE, "problem.heads_kv",
             text("is ", p.heads_kv, "; accepted: divisors of heads_q, ", p.heads_q));
    require_range(p.seq_q, 0, longest_sequence, "problem.seq_q");
    require_range(p.seq_k, 0, longest_sequence, "problem.seq_k");
    require_range(p.head_dim, 1, 1024, "problem.head_dim");
    require_range(p.head_dim_v, 0, 1024, "problem.head_dim_v");
    require_range(p.axes, SPATTN_BSHD, SPATTN_THD, "problem.axes");
    if (p.axes == SPATTN_THD)
        require_range(p.batch, 1, p.flags & SPATTN_PLAN_STARTS ? most_batch : 1, "problem.batch");
    if (p.batch * p.heads_q > longest_sequence)
        fail(SPATTN_E_RANGE, "problem.batch",
             text("times heads_q is ", p.batch * p.heads_q, "; accepted: up to ", longest_sequence));
    Problem r{};
    r.batch = p.batch, r.heads_q = p.heads_q, r.heads_kv = p.heads_kv, r.seq_q = p.seq_q, r.seq_k = p.seq_k;
    r.head_dim = p.head_dim;
    r.head_dim_v = p.head_dim_v ? p.head_dim_v : p.head_dim;
    r.dtype = read_dtype(p.dtype);
    r.scale = read_scale(p);
    r.q_offset = read_q_offset(p.flags & SPATTN_PLAN_Q_OFFSET, p.q_offset, p.seq_q, p.seq_k, "problem.q_offset");
    r.deterministic = p.flags & SPATTN_PLAN_DETERMINISTIC;
    r.softcap = read_softcap(p.softcap);
    r.has_sink_logits = p.flags & SPATTN_PLAN_SINK_LOGITS;
    r.value_in_key = p.flags & SPATTN_PLAN_VALUE_IN_KEY;
    r.tf32 = p.flags & SPATTN_PLAN_TF32 && r.dtype == Dtype::f32;
    read_cache_sizes(p, r);
    if (r.value_in_key && r.head_dim_v > r.head_dim)
        fail(SPATTN_E_RANGE, "problem.head_dim_v",
             text("is ", r.head_dim_v, " with SPATTN_PLAN_VALUE_IN_KEY; accepted: up to head_dim, ", r.head_dim));
    return r;
}

// Everything that decides what a plan is. Problem fields are written one by one: padding must not tell plans apart.
std::string cache_key(const Pattern& pattern, const Problem& p, uint32_t flags, spattn_enum axes) {
    const char* forced = std::getenv("SPATTN_FORCE_KERNEL");
    std::string key;
    for (int64_t value : {p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k, p.head_dim, p.head_dim_v, int64_t(p.dtype),
                          p.q_offset, int64_t(flags), int64_t(axes), std::bit_cast<int64_t>(p.scale),
                          std::bit_cast<int64_t>(p.softcap), p.page_size, p.ragged}) {
        append(key, value);
        append(key, ' ');
    }
    return key + (forced ? forced : "") + '\n' + pattern.identity();
}

// "a", or "a,b" where a pass works on several pieces: what SPATTN_FORCE_KERNEL reads.
std::string names_of(const PassPlan& pass) {
    std::string names;
    for (const PiecePlan& piece : pass.pieces) names += text(names.empty() ? "" : ",", piece.kernel->name);
    return names;
}

// Those of a plan, made for its log, are worth their time only where somebody reads it.
void log_plan(const Device& device, const spattn_plan& plan) {
    if (!device.logs(SPATTN_LOG_INFO)) return;
    const auto named = [](const std::string& kernels) { return kernels.empty() ? "none" : kernels; };
    device.log(SPATTN_LOG_INFO, text("plan for ", plan.compiled.pattern_text, ": forward ",
                                     named(plan.kernels[SPATTN_OP_FORWARD]), ", backward ",
                                     named(plan.kernels[SPATTN_OP_BACKWARD])));
}

// What a cache's pattern is cut to. The pattern itself, where it says so already.
PatternRef cut_to_causal(const Pattern& pattern) {
    PatternRef own = PatternRef::share(&pattern), cut = make_intersection({make_causal(), own});
    return cut->identity() == own->identity() ? own : cut;
}

Ref<const spattn_plan> make_plan(const spattn_context& context, const Pattern& pattern, const Problem& problem,
                                 uint32_t flags, spattn_enum axes, void* stream) {
    auto plan = make_ref<spattn_plan>();
    plan->device = context.device;
    plan->pattern = is_empty(problem)    ? make_global_keys({})
                    : problem.has_starts ? cut_to_causal(pattern)
                                         : PatternRef::share(&pattern);
    plan->known = plan->pattern->known_part();
    plan->axes = axes;
    plan->given = problem;
    PlanOptions options;
    options.device = context.device->id().type;
    options.device_index = context.device->id().index;
    options.backward = flags & SPATTN_PLAN_BACKWARD;
    options.reference = flags & SPATTN_PLAN_REFERENCE;
    options.machine = context.device->machine();
    plan->compiled = compile_plan(*plan->pattern, is_empty(problem) ? stand_in_problem(problem) : problem, options,
                                  all_kernels());
    plan->placed = place_plan(plan->compiled, context.device->memory(), stream);
    for (spattn_enum op : {SPATTN_OP_FORWARD, SPATTN_OP_BACKWARD}) {
        plan->kernels[op] = names_of(plan->pass(op));
        for (const PiecePlan& piece : plan->pass(op).pieces) {
            const int32_t index = context.device->id().index;
            if (piece.kernel->prepare) piece.kernel->prepare(index);
            if (piece.order == Order::dispatched)
                piece.kernel->dispatch->prepare(index);
            else if (has_call_layout(*piece.kernel, plan->compiled.problem))
                context.device->backend().prepare_call_layout(index);
            if (piece.cache) context.device->backend().cache.prepare(index);
        }
    }
    if (is_empty(problem)) {
        plan->compiled.pattern_text = pattern.print();
        plan->compiled.counts = count_empty(problem);
    }
    log_plan(*context.device, *plan);
    return plan;
}

bool is_op(spattn_enum op) { return op == SPATTN_OP_FORWARD || op == SPATTN_OP_BACKWARD; }

std::string explain(const spattn_plan& plan, Considered considered) {
    if (!is_empty(plan.given)) return explain(plan.compiled, considered);
    CompiledPlan given = plan.compiled;
    given.problem = plan.given;
    return explain(given, considered);
}

}  // namespace
}  // namespace spattn

using namespace spattn;

spattn_status spattn_plan_create(const spattn_context* context, const spattn_pattern* pattern,
                                 const spattn_problem* given, spattn_stream stream, spattn_plan** result) {
    return guard_result(__func__, result, [&]() -> Ref<const spattn_plan> {
        required(context, "context");
        required(pattern, "pattern");
        const spattn_problem p = read_struct(given, "problem");
        Problem problem = read_problem(p);
        if (const RuntimeShape* s = pattern->runtime()) problem.call_lists = {s->block_q, s->block_k, s->most};
        if (problem.has_starts && problem.call_lists.at_run_time())
            fail(SPATTN_E_UNSUPPORTED, "pattern",
                 "has lists at run time with SPATTN_PLAN_STARTS; accepted: patterns that are known before a call");
        pattern->check(pattern_extent(problem));
        const CancelScope scope(context->device->cancel(), context->device->cancel_user(), "options.cancel");
        const auto make = [&] { return make_plan(*context, *pattern, problem, p.flags, p.axes, stream); };
        if (context->cache.keeps_none()) return make();
        const std::string key = cache_key(*pattern, problem, p.flags, p.axes);
        if (auto kept = context->cache.find(key)) {
            context->device->log(SPATTN_LOG_DEBUG, "plan found in the context's cache");
            return kept;
        }
        auto plan = make();
        // The cache would read borrowed arrays after the caller has released all that they were lent to.
        return pattern->borrows() ? plan : context->cache.keep(key, std::move(plan));
    });
}

void spattn_plan_retain(const spattn_plan* plan) {
    if (plan) plan->retain();
}

void spattn_plan_release(const spattn_plan* plan) {
    if (plan) plan->release();
}

spattn_status spattn_plan_workspace(const spattn_plan* plan, spattn_enum op, size_t* bytes, size_t* align) {
    return guard(__func__, [&] {
        required(plan, "plan");
        require_range(op, SPATTN_OP_FORWARD, SPATTN_OP_BACKWARD, "op");
        require(!plan->pass(op).pieces.empty(), SPATTN_E_STATE, "op",
                "is SPATTN_OP_BACKWARD, which needs SPATTN_PLAN_BACKWARD in the problem's flags");
        required(bytes, "bytes");
        if (align) *align = workspace_alignment(*plan);
        *bytes = run_workspace(*plan, op);
    });
}

const char* spattn_plan_kernel(const spattn_plan* plan, spattn_enum op) {
    return plan && is_op(op) && !plan->pass(op).pieces.empty() ? plan->kernels[op].c_str() : nullptr;
}

spattn_status spattn_plan_stats(const spattn_plan* plan, spattn_stats* result) {
    return guard(__func__, [&] {
        const CompiledPlan& compiled = required(plan, "plan").compiled;
        const Problem& p = plan->given;
        const Extent extent = pattern_extent(p);
        spattn_stats stats = make_stats(compiled.counts, extent.batch * p.heads_q, extent.seq_q, extent.seq_k);
        stats.layout_bytes = int64_t(compiled.layout_bytes);
        stats.flops_forward = flops(p, compiled.counts.pairs, Pass::forward);
        stats.flops_backward = flops(p, compiled.counts.pairs, Pass::backward);
        stats.bytes_forward = operand_bytes(p, Pass::forward);
        stats.bytes_backward = operand_bytes(p, Pass::backward);
        write_struct(result, stats, "result");
    });
}

spattn_status spattn_plan_explain(const spattn_plan* plan, char* buffer, size_t capacity, size_t* needed) {
    return guard(__func__, [&] {
        copy_text(explain(required(plan, "plan"), Considered::grouped), buffer, capacity, needed);
    });
}

spattn_status spattn_plan_explain_all(const spattn_plan* plan, char* buffer, size_t capacity, size_t* needed) {
    return guard(__func__, [&] {
        copy_text(explain(required(plan, "plan"), Considered::each), buffer, capacity, needed);
    });
}
