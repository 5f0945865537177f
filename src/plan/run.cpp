// SPDX-License-Identifier: MIT
#include "plan/run.h"

#include "plan/float8.h"

namespace spattn {
namespace {

// The call as a row sees it that reads layouts: with what the call's lists leave of the plan's, and with the workspace
// behind that.
template <class Args>
Args lay_out_lists(const Backend& backend, Args args, const Kernel& kernel) {
    const CallLayout made(*args.problem, args.layout, args.tasks, args.second_tasks, kernel, args.workspace);
    backend.make_call_layout(args, made);
    args.layout = made.layout();
    args.tasks = made.tasks[0].view(), args.second_tasks = made.tasks[1].view();
    args.workspace = static_cast<char*>(args.workspace) + made.bytes;
    return args;
}

// The call as a row sees it that queries are dispatched to.
template <class Args>
Args make_round(Args args, const DispatchShape& shape, const DispatchRound& to) {
    args.problem = &shape.round;
    args.layout = to.layout();
    args.tasks = to.tasks[0].view(), args.second_tasks = to.tasks[1].view();
    args.workspace = static_cast<char*>(args.workspace) + to.bytes;
    const Dtype dtype = shape.call.dtype;
    args.q = to.q, args.out = to.out, args.lse = to.lse;
    args.k = to.of_keys(args.k, dtype), args.v = to.of_keys(args.v, dtype);
    args.sink_logits = {};
    return args;
}

void run_round(const Kernel& kernel, const ForwardArgs& args, const DispatchShape& shape, const DispatchRound& to) {
    ForwardArgs round = make_round(args, shape, to);
    if (args.max_logits.data) round.max_logits = to.max_logits;
    kernel.dispatch->send(args, to);
    kernel.forward(round);
    kernel.dispatch->combine(args, to);
}

void run_round(const Kernel& kernel, const BackwardArgs& args, const DispatchShape& shape, const DispatchRound& to) {
    BackwardArgs round = make_round(args, shape, to);
    round.dout = round.out = to.dout, round.dq = to.dq, round.has_rows = true;
    const Dtype dtype = shape.call.dtype;
    round.dk = to.shares_keys ? to.dk : to.of_keys(args.dk, dtype);
    round.dv = to.shares_keys ? to.dv : to.of_keys(args.dv, dtype);
    round.dsink_logits = {};
    if (to.is_first) kernel.dispatch->sum_rows(args);
    kernel.dispatch->send_back(args, to);
    kernel.backward(round);
    kernel.dispatch->combine_back(args, to);
}

template <class Args>
void dispatch(const PiecePlan& piece, const PlacedPiece& placed, const Args& args) {
    const DispatchShape& shape = *piece.dispatch;
    for (int64_t number = 0; number < shape.rounds(); ++number)
        run_round(*piece.kernel, args, shape,
                  DispatchRound(shape, args.tasks, args.second_tasks, placed.bit_places, number, args.workspace));
}

// The view that begins at a head. bytes: of an element.
void shift(TensorView& x, int64_t batch, int64_t head, int64_t bytes) {
    if (x.data) x.data = static_cast<char*>(x.data) + (batch * x.batch + head * x.head) * bytes;
}

// Operands that begin where a portion does. bytes: of an element of q.
void shift(ForwardArgs& args, const FirstHead& first, int64_t bytes) {
    for (TensorView* x : {&args.q, &args.out}) shift(*x, first.batch, first.head_q, bytes);
    for (TensorView* x : {&args.k, &args.v}) shift(*x, first.batch, first.head_kv, bytes);
    for (TensorView* x : {&args.lse, &args.max_logits}) shift(*x, first.batch, first.head_q, sizeof(float));
    shift(args.sink_logits, 0, first.head_q, sizeof(float));
}
void shift(BackwardArgs& args, const FirstHead& first, int64_t bytes) {
    for (TensorView* x : {&args.q, &args.out, &args.dout, &args.dq}) shift(*x, first.batch, first.head_q, bytes);
    for (TensorView* x : {&args.k, &args.v, &args.dk, &args.dv}) shift(*x, first.batch, first.head_kv, bytes);
    for (TensorView* x : {&args.lse, &args.dlse}) shift(*x, first.batch, first.head_q, sizeof(float));
    for (TensorView* x : {&args.sink_logits, &args.dsink_logits}) shift(*x, 0, first.head_q, sizeof(float));
    args.adds_dsink = first.batch > 0;
    args.has_keys_before = !first.begins_group, args.has_keys_after = !first.ends_group;
}

// portion: none where the piece works on all heads.
void place(CallArgs& args, const PiecePlan& piece, const PlacedPiece& placed, std::optional<int64_t> portion) {
    args.layout = placed.layout;
    args.tasks = placed.tasks, args.second_tasks = placed.second_tasks;
    args.tokens = placed.tokens;
    if (!portion) return;
    args.layout.kind_of_head += *portion * args.problem->batch * args.problem->heads_q;
    args.tasks = placed.portion_tasks[size_t(piece.portions.schedule_of[size_t(*portion)])];
}

template <class Args, class Run>
void run_pieces(const Backend& backend, const PassPlan& pass, const PlacedPass& placed, Args args, Run run,
                std::optional<int64_t> portion = {}) {
    char* const workspace = static_cast<char*>(args.workspace);
    args.workspace = workspace ? workspace + pass.carried : nullptr;
    const size_t pieces = pass.pieces.size();
    const int32_t sweeps = pieces > 1 ? pass.pieces[0].kernel->sweeps : 1;
    for (int32_t sweep = 0; sweep < sweeps; ++sweep)
        for (size_t i = 0; i < pieces; ++i) {
            place(args, pass.pieces[i], placed[i], portion);
            args.piece = {workspace, i == 0, i + 1 == pieces, sweep};
            const Kernel& kernel = *pass.pieces[i].kernel;
            if (pass.pieces[i].order == Order::dispatched)
                dispatch(pass.pieces[i], placed[i], args);
            else
                run(kernel, has_call_layout(kernel, *args.problem) ? lay_out_lists(backend, args, kernel) : args);
        }
}

template <class Args, class Run>
void run_portions(const Backend& backend, const PassPlan& pass, const PlacedPass& placed, const Args& args, Run run) {
    if (!pass.portions) return run_pieces(backend, pass, placed, args, run);
    for (int64_t portion = 0; portion < pass.portions->count; ++portion) {
        Args some = args;
        some.problem = &pass.portions->each;
        shift(some, pass.portions->first(portion), dtype_row(some.problem->dtype).bytes);
        run_pieces(backend, pass, placed, some, run, portion);
    }
}

// Whether the pass reads q and k of float8 as they are. Of pieces none does, nor does a backward.
bool keeps_q_and_k(const PassPlan& pass, const ForwardArgs& args) {
    const Kernel& kernel = *pass.pieces[0].kernel;
    return kernel.multiplies_float8 && kernel.multiplies_float8(args);
}
bool keeps_q_and_k(const PassPlan&, const BackwardArgs&) { return false; }

// The call as rows see it that read elements, or some of its operands as they are.
template <class Args>
Args widen(const Backend& backend, const PassPlan& pass, Args args, Pass which) {
    const bool keeps = keeps_q_and_k(pass, args);
    const Float8Copies made(*args.problem, keeps, args.workspace);
    backend.float8.widen(args, made);
    if (keeps) {
        args.q_scales = made.q_factors, args.k_scales = have_one_scale(args.k_scales) ? TensorView{} : made.k_factors;
    } else {
        args.q = made.q, args.k = made.k, args.q_scales = args.k_scales = {};
    }
    args.v = made.v, args.v_scales = {};
    args.workspace = static_cast<char*>(args.workspace) + Float8Copies::most_bytes(*args.problem, which);
    return args;
}

// The view that begins at a row. bytes: of an element.
TensorView from_row(TensorView x, int64_t row, int64_t bytes) {
    if (x.data) x.data = static_cast<char*>(x.data) + row * x.row * bytes;
    return x;
}

// The call as rows see it that know of no cache, with lists of keys in place of its own, or of the plan's layout. The
// latter are those of an earlier call, where that has left all of them in the workspace.
void run_listed(const Backend& backend, const PiecePlan& piece, const PlacedPiece& placed, ForwardArgs args) {
    const CacheLists& lists = *piece.cache_lists;
    const int64_t element = dtype_row(args.problem->dtype).bytes;
    const bool has_lists = args.has_layout && lists.of_pattern() && lists.rounds() == 1;
    args.layout = placed.layout;
    for (int64_t round = 0; round < lists.rounds(); ++round) {
        ListedKeys made(lists, round, args.workspace);
        made.stems = placed.cache.stems;
        if (!has_lists) backend.cache.list_keys(args, made);
        const Problem inner = lists.inner(args.cache, made.count);
        ForwardArgs rows = args;
        rows.layout = {};
        rows.problem = &inner, rows.call_lists = made.view();
        rows.workspace = static_cast<char*>(args.workspace) + made.bytes;
        rows.q = from_row(args.q, made.first, element), rows.out = from_row(args.out, made.first, element);
        rows.lse = from_row(args.lse, made.first, sizeof(float));
        rows.max_logits = from_row(args.max_logits, made.first, sizeof(float));
        piece.kernel->forward(rows);
    }
}

// The call as rows see it that know of no cache. Such plans are of one piece, and have no backward. Where an earlier call
// has left its layout in the workspace, as that of a model's layer before this one, nothing of that is made again.
void run_cached(const Backend& backend, const PiecePlan& piece, const PlacedPiece& placed, const ForwardArgs& args) {
    const CacheShape& shape = *piece.cache;
    const Kernel& kernel = *piece.kernel;
    CacheLayout made(shape, placed.layout, placed.tasks, placed.cache, args.cache, args.workspace);
    Problem inner = shape.inner(args.cache, false);
    ForwardArgs rows = args;
    rows.problem = &inner;
    rows.layout = made.layout(inner);
    rows.tasks = made.tasks_view();
    rows.workspace = static_cast<char*>(args.workspace) + made.bytes;
    const bool widens = made.keys == CacheKeys::widened;
    if (widens) rows.k = made.k, rows.v = made.v, rows.k_scales = rows.v_scales = {};
    if (kernel.takes_spans && kernel.takes_spans(rows)) {
        made.copies = false;
        rows.layout.spans = made.spans;
    } else {
        inner = shape.inner(args.cache);
        rows.layout = made.layout(inner);
        rows.q = made.q, rows.out = made.out;
        if (args.lse.data) rows.lse = made.lse;
        if (args.max_logits.data) rows.max_logits = made.max_logits;
    }
    backend.cache.lay_out(args, made);
    if (widens) backend.cache.widen(args, made);
    kernel.forward(rows);
    if (made.copies) backend.cache.bring_back(args, made);
}

}  // namespace

void run_pass(const Backend& backend, const PassPlan& pass, const PlacedPass& placed, ForwardArgs args) {
    if (args.problem->float8_operands) args = widen(backend, pass, args, Pass::forward);
    if (pass.pieces[0].cache_lists) return run_listed(backend, pass.pieces[0], placed[0], args);
    if (pass.pieces[0].cache) return run_cached(backend, pass.pieces[0], placed[0], args);
    run_portions(backend, pass, placed, args,
                 [](const Kernel& kernel, const ForwardArgs& piece) { kernel.forward(piece); });
}

void run_pass(const Backend& backend, const PassPlan& pass, const PlacedPass& placed, BackwardArgs args) {
    if (args.problem->float8_operands) args = widen(backend, pass, args, Pass::backward);
    run_portions(backend, pass, placed, args,
                 [](const Kernel& kernel, const BackwardArgs& piece) { kernel.backward(piece); });
}

}  // namespace spattn
