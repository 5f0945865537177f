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
#include "api/problem.h"
#include "api/stats.h"
#include "core/cancel.h"
#include "core/dtype.h"
#include "plan/dispatch.h"
#include "plan/token_rows.h"

namespace spattn {
namespace {

// Everything that decides what a plan is. Problem fields are written one by one: padding must not tell plans apart.
std::string cache_key(const Pattern& pattern, const Problem& p, uint32_t flags, spattn_enum axes) {
    const char* forced = std::getenv("SPATTN_FORCE_KERNEL");
    std::string key;
    for (int64_t value : {p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k, p.head_dim, p.head_dim_v, int64_t(p.dtype),
                          p.q_offset, int64_t(flags), int64_t(axes), std::bit_cast<int64_t>(p.scale),
                          std::bit_cast<int64_t>(p.softcap), p.page_size, p.ragged, int64_t(p.float8_cache),
                          int64_t(p.float8_operands)}) {
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

// A list on a cache is one query's own, and cut to what is causal, and to nothing else.
void check_cache_lists(const Pattern& pattern, const Problem& problem) {
    const PatternRef known = pattern.known_part();
    if (known && known->identity() != make_causal()->identity())
        fail(SPATTN_E_UNSUPPORTED, "pattern",
             text("cuts lists at run time to ", known->print(),
                  " with SPATTN_PLAN_STARTS; accepted: lists alone, or under causal"));
    if (problem.call_lists.block_q > 1)
        fail(SPATTN_E_UNSUPPORTED, "pattern",
             text("has lists of blocks of ", problem.call_lists.block_q,
                  " queries with SPATTN_PLAN_STARTS; accepted: a list a query"));
    if (problem.has_parents)
        fail(SPATTN_E_UNSUPPORTED, "problem.flags",
             "has SPATTN_PLAN_PARENTS where calls bring lists; accepted: lists without what a query is not to see");
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
        }
    }
    if (problem.has_starts) context.device->backend().cache.prepare(context.device->id().index);
    if (problem.float8_operands) context.device->backend().float8.prepare(context.device->id().index);
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

Ref<const spattn_plan> find_or_make_plan(const spattn_context& context, const Pattern& pattern, const spattn_problem& p,
                                         void* stream) {
    Problem problem = read_problem(p);
    if (const RuntimeShape* s = pattern.runtime()) problem.call_lists = {s->block_q, s->block_k, s->most};
    if (problem.has_starts && problem.call_lists.at_run_time()) check_cache_lists(pattern, problem);
    pattern.check(pattern_extent(problem));
    const CancelScope scope(context.device->cancel(), context.device->cancel_user(), "options.cancel");
    const auto make = [&] { return make_plan(context, pattern, problem, p.flags, p.axes, stream); };
    if (context.cache.keeps_none()) return make();
    const std::string key = cache_key(pattern, problem, p.flags, p.axes);
    if (auto kept = context.cache.find(key)) {
        context.device->log(SPATTN_LOG_DEBUG, "plan found in the context's cache");
        return kept;
    }
    auto plan = make();
    // The cache would read borrowed arrays after the caller has released all that they were lent to.
    return pattern.borrows() ? plan : context.cache.keep(key, std::move(plan));
}

}  // namespace spattn

using namespace spattn;

size_t spattn_plan::bytes() const {
    CountBytes tasks;
    TasksView unused;
    for (const PassPlan* pass : {&compiled.forward, &compiled.backward})
        for (const PiecePlan& piece : pass->pieces) {
            each_array(piece.schedule, unused, tasks);
            each_array(piece.second_schedule, unused, tasks);
            for (const Schedule& schedule : piece.portions.schedules) each_array(schedule, unused, tasks);
        }
    return pattern->bytes() + compiled.layout_bytes + tasks.bytes + placed.block.bytes();
}

spattn_status spattn_plan_create(const spattn_context* context, const spattn_pattern* pattern,
                                 const spattn_problem* given, spattn_stream stream, spattn_plan** result) {
    return guard_result(__func__, result, [&] {
        required(context, "context");
        required(pattern, "pattern");
        return find_or_make_plan(*context, *pattern, read_struct(given, "problem"), stream);
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
