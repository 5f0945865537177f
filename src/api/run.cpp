// SPDX-License-Identifier: MIT
// Chapter 6 of the header: checks the operands of a call, then hands them to the plan's kernel.
#include "api/args.h"
#include "api/empty.h"
#include "api/guard.h"
#include "core/cancel.h"
#include "core/dtype.h"
#include "core/math.h"
#include "core/overlap.h"
#include "core/tensor.h"
#include "plan/run.h"
#include "plan/token_rows.h"

namespace spattn {
namespace {

// Checks one operand after the other and remembers where each lies, to find outputs that overlap. The workspace comes
// first: what stands in for operands without elements lies there.
class Operands {
public:
    template <class Args>
    Operands(const spattn_plan& plan, spattn_enum op, const Args& args)
        : plan_(plan), p_(plan.given),
          workspace_(check_workspace(args.workspace, args.workspace_bytes, run_workspace(plan, op))),
          stand_ins_(plan, op, workspace_) {}

    void* workspace() const { return workspace_; }

    // [batch, heads, seq, dim] in the plan's axes and dtype: THD has no batch.
    TensorView input(const spattn_tensor* t, const char* argument, int64_t heads, int64_t seq, int64_t dim) {
        return add(matrix(t, argument, heads, seq, dim), false);
    }
    TensorView output(const spattn_tensor* t, const char* argument, int64_t heads, int64_t seq, int64_t dim) {
        return add(matrix(t, argument, heads, seq, dim), true);
    }
    // [batch, heads_q, seq_q] float32. Absent where it has no element.
    TensorView row_input(const spattn_tensor* t, const char* argument) { return add(rows(t, argument), false); }
    TensorView row_output(const spattn_tensor* t, const char* argument) { return add(rows(t, argument), true); }
    // [heads_q] float32.
    TensorView head_input(const spattn_tensor* t, const char* argument) { return add(heads(t, argument), false); }
    TensorView head_output(const spattn_tensor* t, const char* argument) { return add(heads(t, argument), true); }

    // lse, which backward always reads.
    TensorView lse_input(const spattn_tensor* t, const char* argument) {
        const TensorView lse = row_input(t, argument);
        return lse.data ? lse : stand_ins_.rows();
    }

    // The lists that come with a call are [batch, rows, heads_kv, most]; their counts lack the last axis.
    IndexView index_input(const spattn_tensor* t, const char* argument) {
        const std::array shape{p_.batch, list_rows(), p_.heads_kv, p_.call_lists.most};
        return index(t, argument, shape);
    }
    IndexView count_input(const spattn_tensor* t, const char* argument) {
        return index(t, argument, std::array{p_.batch, list_rows(), p_.heads_kv});
    }

    // These come with a call on a cache: where queries begin, which of them are whose, and which pages keys lie in.
    IndexView start_input(const spattn_tensor* t, const char* argument) {
        return integers(t, argument, p_.sequences());
    }
    IndexView query_offset_input(const spattn_tensor* t, const char* argument) {
        return integers(t, argument, p_.sequences() + 1);
    }
    IndexView page_input(const spattn_tensor* t, const char* argument) {
        const std::array shape{p_.sequences(), p_.seq_k / p_.page_size};
        const auto s = place(t, argument, shape, {dtype_i32, dtype_i64});
        return {data_, s[0], 0, 0, s[1], t->dtype.bits == 64};
    }

    // Pages of keys or values, as rows one after the other: all entries have the same.
    struct Pool {
        TensorView view;
        int64_t pages, page_rows;  // page_rows: from the first row of a page to that of the next
    };
    Pool pool_input(const spattn_tensor* t, const char* argument, int64_t heads, int64_t dim) {
        const bool is_bhsd = plan_.axes == SPATTN_BHSD;
        const int64_t size = p_.page_size, pages = required(t, argument).ndim == 4 && t->shape ? t->shape[0] : 1;
        const auto shape = is_bhsd ? std::array{pages, heads, size, dim} : std::array{pages, size, heads, dim};
        const auto s = place(t, argument, shape, {dtype_row(p_.dtype).wire});
        if (!has_keys(p_)) return {stand_ins_.matrix(heads, dim), 1, size};
        if (pages < 1) fail(SPATTN_E_SHAPE, argument, text("has ", pages, " pages; accepted: 1 or more"));
        const int64_t head = is_bhsd ? s[1] : s[2], row = size == 1 ? s[0] : is_bhsd ? s[2] : s[1];
        if (pages == 1) return {{data_, 0, head, row, s[3]}, pages, size};
        const int64_t page = s[0], page_rows = row ? page / row : 0;
        if (!row || page % row || page_rows < size)
            fail(SPATTN_E_LAYOUT, argument,
                 text("has pages ", page, " elements apart, and rows ", row,
                      "; accepted: pages a whole number of rows apart, at least page_size"));
        if (pages - 1 > (longest_sequence - size) / page_rows)
            fail(SPATTN_E_RANGE, argument,
                 text("has ", pages, " pages ", page_rows, " rows apart; accepted: up to ", longest_sequence, " rows"));
        return {{data_, 0, head, row, s[3]}, pages, page_rows};
    }

    // An output overlaps nothing, itself included; inputs may overlap each other. The first to blame is named: the
    // workspace, which comes first, because it is large and what it lies over is innocent.
    void check_overlaps() const {
        for (size_t i = 0; i < size_t(count_); ++i)
            if (placed_[i].is_output) check_output(i);
    }

private:
    struct Placed {
        const char* argument = "";
        StridedBytes bytes{};
        bool is_output = false;
    };

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
        placed_[size_t(count_++)] = {"workspace", {reinterpret_cast<uintptr_t>(memory), int64_t(needed)}, true};
        return memory;
    }

    void check_output(size_t output) const {
        const Placed& o = placed_[output];
        if (overlaps_itself(o.bytes))
            fail(SPATTN_E_LAYOUT, o.argument,
                 "has strides by which its own elements overlap; accepted: outputs without overlap");
        for (size_t other = 0; other < size_t(count_); ++other)
            if (other != output && overlaps(o.bytes, placed_[other].bytes))
                fail(SPATTN_E_LAYOUT, o.argument,
                     text("overlaps ", placed_[other].argument,
                          "; accepted: outputs that share no byte with another operand"));
    }

    TensorView matrix(const spattn_tensor* t, const char* argument, int64_t heads, int64_t seq, int64_t dim) {
        const spattn_dtype dtype = dtype_row(p_.dtype).wire;
        if (plan_.axes == SPATTN_THD) {
            const auto s = place(t, argument, std::array{seq, heads, dim}, {dtype});
            return is_absent_ ? stand_ins_.matrix(heads, dim) : TensorView{data_, 0, s[1], s[0], s[2]};
        }
        const bool is_bhsd = plan_.axes == SPATTN_BHSD;
        const auto shape = is_bhsd ? std::array{p_.batch, heads, seq, dim} : std::array{p_.batch, seq, heads, dim};
        const auto s = place(t, argument, shape, {dtype});
        if (is_absent_) return stand_ins_.matrix(heads, dim);
        return {data_, s[0], is_bhsd ? s[1] : s[2], is_bhsd ? s[2] : s[1], s[3]};
    }

    TensorView rows(const spattn_tensor* t, const char* argument) {
        if (plan_.axes == SPATTN_THD) {
            const auto s = place(t, argument, std::array{p_.heads_q, p_.seq_q}, {dtype_f32});
            return is_absent_ ? TensorView{} : TensorView{data_, 0, s[0], s[1], 0};
        }
        const auto s = place(t, argument, std::array{p_.batch, p_.heads_q, p_.seq_q}, {dtype_f32});
        return is_absent_ ? TensorView{} : TensorView{data_, s[0], s[1], s[2], 0};
    }

    int64_t list_rows() const { return ceil_div(p_.seq_q, p_.call_lists.block_q); }

    IndexView integers(const spattn_tensor* t, const char* argument, int64_t count) {
        const auto s = place(t, argument, std::array{count}, {dtype_i32, dtype_i64});
        return {data_, s[0], 0, 0, 0, t->dtype.bits == 64};
    }

    // THD has no batch.
    IndexView index(const spattn_tensor* t, const char* argument, std::span<const int64_t> shape) {
        const bool is_packed = plan_.axes == SPATTN_THD;
        const auto strides = place(t, argument, shape.subspan(is_packed), {dtype_i32, dtype_i64});
        const int64_t* s = strides.data() - is_packed;
        return {data_, is_packed ? 0 : s[0], s[1], s[2], shape.size() == 4 ? s[3] : 0, t->dtype.bits == 64};
    }

    TensorView heads(const spattn_tensor* t, const char* argument) {
        const auto s = place(t, argument, std::array{p_.heads_q}, {dtype_f32});
        return {data_, 0, s[0], 0, 0};
    }

    std::array<int64_t, max_axes> place(const spattn_tensor* tensor, const char* argument,
                                        std::span<const int64_t> shape,
                                        std::initializer_list<spattn_dtype> accepted) {
        const spattn_tensor& t = required(tensor, argument);
        check_device(t, argument);
        check_dtype(t, argument, accepted);
        check_shape(t, argument, shape);
        const auto strides = tensor_strides(t, argument);
        data_ = tensor_data(t, argument);
        is_absent_ = std::find(shape.begin(), shape.end(), 0) != shape.end();
        StridedBytes bytes{reinterpret_cast<uintptr_t>(data_), t.dtype.bits / 8};
        for (size_t i = 0; i < shape.size(); ++i) bytes.axes[i] = {shape[i], strides[i] * bytes.element};
        placed_[size_t(count_++)] = {argument, bytes, false};
        return strides;
    }

    void check_device(const spattn_tensor& t, const char* argument) const {
        const spattn_device id = plan_.device->id();
        const bool is_host = t.device.type == SPATTN_CPU || t.device.type == SPATTN_CUDA_HOST;
        const bool is_here =
            id.type == SPATTN_CPU
                ? is_host
                : (t.device.type == id.type || t.device.type == SPATTN_CUDA_MANAGED) && t.device.index == id.index;
        if (!is_here)
            fail(SPATTN_E_DEVICE, argument,
                 text("is on ", describe_device(t.device), "; accepted: the plan's device, ", describe_device(id)));
    }

    TensorView add(TensorView view, bool is_output) {
        placed_[size_t(count_ - 1)].is_output = is_output;
        return view;
    }

    const spattn_plan& plan_;
    const Problem& p_;
    std::array<Placed, 18> placed_;  // as many as backward has operands
    int count_ = 0;
    void* const workspace_;
    StandIns stand_ins_;
    void* data_ = nullptr;     // what place() has found of the last tensor,
    bool is_absent_ = false;   // and whether it has no element
};

constexpr const char* values_are_in_keys = "SPATTN_PLAN_VALUE_IN_KEY says that k holds the values";

void refuse_operand(const spattn_tensor* t, const char* argument, const char* why) {
    if (t) fail(SPATTN_E_STATE, argument, text("is given where ", why, "; accepted: NULL"));
}

// Required exactly where the pattern has its lists given at run time.
template <class Args>
CallLists read_lists(Operands& operands, const Problem& p, const Args& a) {
    CallLists lists{};
    if (!p.call_lists.at_run_time()) {
        refuse_operand(a.indices, "indices", "the plan's pattern has its lists");
        refuse_operand(a.index_counts, "index_counts", "the plan's pattern has its lists");
        return lists;
    }
    lists.indices = operands.index_input(a.indices, "indices");
    if (a.index_counts) lists.counts = operands.count_input(a.index_counts, "index_counts");
    return lists;
}

// Kernels that take sinks are chosen by the plan, so it must know of them.
constexpr const char* unplanned_sinks = "the plan is not one with SPATTN_PLAN_SINK_LOGITS";

TensorView read_sinks(Operands& operands, const Problem& p, const spattn_tensor* sink_logits) {
    if (p.has_sink_logits) return operands.head_input(sink_logits, "sink_logits");
    refuse_operand(sink_logits, "sink_logits", unplanned_sinks);
    return {};
}

// Keys, and values or the columns of keys that are values, which lie in pages.
void read_pages(Operands& operands, const Problem& p, const spattn_forward_args& a, ForwardArgs& call) {
    const Operands::Pool k = operands.pool_input(a.k, "k", p.heads_kv, p.head_dim);
    call.k = call.v = k.view;
    call.cache.pages = k.pages, call.cache.page_rows = k.page_rows;
    if (p.value_in_key) return refuse_operand(a.v, "v", values_are_in_keys);
    const Operands::Pool v = operands.pool_input(a.v, "v", p.heads_kv, p.head_dim_v);
    if (v.pages != k.pages)
        fail(SPATTN_E_SHAPE, "v", text("has ", v.pages, " pages; accepted: as many as k, ", k.pages));
    if (v.page_rows != k.page_rows)
        fail(SPATTN_E_LAYOUT, "v",
             text("has pages ", v.page_rows, " rows apart; accepted: as many as those of k, ", k.page_rows));
    call.v = v.view;
}

// Where queries begin, which are whose, and the table of pages.
void read_cache(Operands& operands, const Problem& p, const spattn_forward_args& a, ForwardArgs& call) {
    if (!p.ragged)
        refuse_operand(a.query_offsets, "query_offsets", "the plan is not one of SPATTN_THD with SPATTN_PLAN_STARTS");
    if (!p.has_starts) {
        refuse_operand(a.starts, "starts", "the plan is not one with SPATTN_PLAN_STARTS");
        refuse_operand(a.page_table, "page_table", "the plan has no page_size");
        return;
    }
    call.cache.starts = operands.start_input(a.starts, "starts");
    if (p.ragged) call.cache.query_offsets = operands.query_offset_input(a.query_offsets, "query_offsets");
    if (!p.page_size) return refuse_operand(a.page_table, "page_table", "the plan has no page_size");
    call.cache.page_table = operands.page_input(a.page_table, "page_table");
}

// v, or the columns of k that are v.
TensorView read_values(Operands& operands, const Problem& p, const spattn_tensor* v, TensorView k) {
    if (!p.value_in_key) return operands.input(v, "v", p.heads_kv, p.seq_k, p.head_dim_v);
    refuse_operand(v, "v", values_are_in_keys);
    return k;
}

// The rows that a reference kernel reads: of the pattern, of the call's lists, or of its place in a cache.
class RowsOfCall {
public:
    RowsOfCall(const spattn_plan& plan, const CallLists& lists, const CallCache& cache)
        : pattern_(*plan.pattern, plan.compiled.problem),
          call_rows_(plan.known.get(), plan.compiled.problem, lists),
          cache_rows_(*plan.pattern, plan.compiled.problem, cache), rows_(choose(plan.compiled.problem)) {}
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

CancellableParallel threads_of(const spattn_plan& plan) {
    return {plan.device->parallel(), plan.device->cancel(), plan.device->cancel_user()};
}

void check_call_flags(uint32_t flags) {
    if (flags) fail(SPATTN_E_UNKNOWN_FIELD, "args.flags", text("is ", flags, "; accepted: 0"));
}

}  // namespace
}  // namespace spattn

using namespace spattn;

spattn_status spattn_forward(const spattn_plan* plan, const spattn_forward_args* given) {
    return guard(__func__, [&] {
        const Problem& p = required(plan, "plan").given;
        const spattn_forward_args a = read_struct(given, "args");
        check_call_flags(a.flags);
        const PassPlan& pass = plan->compiled.forward;
        Operands operands(*plan, SPATTN_OP_FORWARD, a);
        ForwardArgs call{};
        call.workspace = operands.workspace();
        call.q = operands.input(a.q, "q", p.heads_q, p.seq_q, p.head_dim);
        if (p.page_size) {
            read_pages(operands, p, a, call);
        } else {
            call.k = operands.input(a.k, "k", p.heads_kv, p.seq_k, p.head_dim);
            call.v = read_values(operands, p, a.v, call.k);
        }
        read_cache(operands, p, a, call);
        call.out = operands.output(a.out, "out", p.heads_q, p.seq_q, p.head_dim_v);
        if (a.lse) call.lse = operands.row_output(a.lse, "lse");
        if (a.max_logits) call.max_logits = operands.row_output(a.max_logits, "max_logits");
        call.call_lists = read_lists(operands, p, a);
        call.sink_logits = read_sinks(operands, p, a.sink_logits);
        operands.check_overlaps();
        if (a.max_logits) check_max_logits(pass);
        check_pages(pass, call.cache);
        const RowsOfCall rows(*plan, call.call_lists, call.cache);
        CancellableParallel threads = threads_of(*plan);
        fill(call, *plan, rows, threads, a.stream);
        run_pass(plan->device->backend(), pass, plan->placed.forward, call);
    });
}

spattn_status spattn_backward(const spattn_plan* plan, const spattn_backward_args* given) {
    return guard(__func__, [&] {
        const Problem& p = required(plan, "plan").given;
        const spattn_backward_args a = read_struct(given, "args");
        check_call_flags(a.flags);
        const PassPlan& pass = plan->compiled.backward;
        require(!pass.pieces.empty(), SPATTN_E_STATE, "plan",
                "has no backward; accepted: plans of problems with SPATTN_PLAN_BACKWARD");
        Operands operands(*plan, SPATTN_OP_BACKWARD, a);
        BackwardArgs call{};
        call.workspace = operands.workspace();
        call.q = operands.input(a.q, "q", p.heads_q, p.seq_q, p.head_dim);
        call.k = operands.input(a.k, "k", p.heads_kv, p.seq_k, p.head_dim);
        call.v = read_values(operands, p, a.v, call.k);
        call.out = operands.input(a.out, "out", p.heads_q, p.seq_q, p.head_dim_v);
        call.lse = operands.lse_input(a.lse, "lse");
        call.dout = operands.input(a.dout, "dout", p.heads_q, p.seq_q, p.head_dim_v);
        if (a.dlse) call.dlse = operands.row_input(a.dlse, "dlse");
        call.dq = operands.output(a.dq, "dq", p.heads_q, p.seq_q, p.head_dim);
        call.dk = operands.output(a.dk, "dk", p.heads_kv, p.seq_k, p.head_dim);
        if (p.value_in_key)
            refuse_operand(a.dv, "dv", "SPATTN_PLAN_VALUE_IN_KEY adds its gradient to dk");
        else
            call.dv = operands.output(a.dv, "dv", p.heads_kv, p.seq_k, p.head_dim_v);
        call.call_lists = read_lists(operands, p, a);
        call.sink_logits = read_sinks(operands, p, a.sink_logits);
        if (!p.has_sink_logits) refuse_operand(a.dsink_logits, "dsink_logits", unplanned_sinks);
        if (a.dsink_logits) call.dsink_logits = operands.head_output(a.dsink_logits, "dsink_logits");
        operands.check_overlaps();
        if (a.dsink_logits && !has_queries(p)) {
            clear_sinks(*plan, call.dsink_logits, a.stream);
            call.dsink_logits = {};
        }
        const RowsOfCall rows(*plan, call.call_lists, {});
        CancellableParallel threads = threads_of(*plan);
        fill(call, *plan, rows, threads, a.stream);
        run_pass(plan->device->backend(), pass, plan->placed.backward, call);
    });
}
