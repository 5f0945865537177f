// SPDX-License-Identifier: MIT
#include "api/problem.h"

#include <cmath>
#include <utility>

#include "api/args.h"
#include "core/dtype.h"

namespace spattn {
namespace {

Dtype read_dtype(spattn_dtype given) {
    if (given == dtype_float8) return Dtype::bf16;
    for (const DtypeRow& row : dtype_rows)
        if (row.wire == given) return row.dtype;
    std::string names;
    for (const DtypeRow& row : dtype_rows) names += describe_dtype(row.wire) + " or ";
    fail(SPATTN_E_DTYPE, "problem.dtype",
         text("is ", describe_dtype(given), "; accepted: ", names, describe_dtype(dtype_float8)));
}

void check_float8(const spattn_problem& p) {
    if (p.flags & SPATTN_PLAN_STARTS)
        fail(SPATTN_E_UNSUPPORTED, "problem.dtype",
             text("is ", describe_dtype(p.dtype),
                  " with SPATTN_PLAN_STARTS; accepted: a dtype of 16 bits or more, and a cache_dtype of float8"));
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

void check_q_offset(const spattn_problem& p) {
    if (!(p.flags & SPATTN_PLAN_Q_OFFSET) && p.q_offset != 0)
        fail(SPATTN_E_RANGE, "problem.q_offset",
             text("is ", p.q_offset, " without SPATTN_PLAN_Q_OFFSET; accepted: 0, or the flag too"));
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
                                 SPATTN_PLAN_SINK_LOGITS | SPATTN_PLAN_TF32 | SPATTN_PLAN_STARTS |
                                 SPATTN_PLAN_PARENTS;

constexpr spattn_dtype no_dtype{0, 0, 0};

bool is_float8(const spattn_problem& p) {
    const spattn_dtype given = p.cache_dtype;
    if (given == no_dtype || given == p.dtype) return false;
    if (given == dtype_float8) return true;
    fail(SPATTN_E_DTYPE, "problem.cache_dtype",
         text("is ", describe_dtype(given), "; accepted: {0, 0, 0} or dtype, ", describe_dtype(p.dtype), ", or ",
              describe_dtype(dtype_float8)));
}

// What a problem says of a cache.
void read_cache(const spattn_problem& p, Problem& r) {
    constexpr int64_t largest_page = 65536;
    r.has_starts = p.flags & SPATTN_PLAN_STARTS;
    r.has_parents = p.flags & SPATTN_PLAN_PARENTS;
    if (!r.has_starts) {
        if (r.has_parents)
            fail(SPATTN_E_UNSUPPORTED, "problem.flags",
                 "has SPATTN_PLAN_PARENTS without SPATTN_PLAN_STARTS; accepted: both, or a pattern of a tree");
        if (p.page_size != 0)
            fail(SPATTN_E_RANGE, "problem.page_size",
                 text("is ", p.page_size, " without SPATTN_PLAN_STARTS; accepted: 0, or the flag too"));
        if (!(p.cache_dtype == no_dtype))
            fail(SPATTN_E_DTYPE, "problem.cache_dtype",
                 text("is ", describe_dtype(p.cache_dtype),
                      " without SPATTN_PLAN_STARTS; accepted: {0, 0, 0}, or the flag too"));
        return;
    }
    r.float8_cache = is_float8(p);
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

}  // namespace

Problem read_problem(const spattn_problem& p) {
    if (p.flags & ~known_flags)
        fail(SPATTN_E_UNKNOWN_FIELD, "problem.flags", text("is ", p.flags, "; accepted: bits of ", known_flags));
    if (p.reserved)
        fail(SPATTN_E_UNKNOWN_FIELD, "problem.reserved", text("is ", p.reserved, "; accepted: 0"));
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
    r.float8_operands = p.dtype == dtype_float8;
    if (r.float8_operands) check_float8(p);
    r.scale = read_scale(p);
    check_q_offset(p);
    r.q_offset = read_q_offset(p.flags & SPATTN_PLAN_Q_OFFSET, p.q_offset, p.seq_q, p.seq_k, "problem.q_offset");
    r.deterministic = p.flags & SPATTN_PLAN_DETERMINISTIC;
    r.softcap = read_softcap(p.softcap);
    r.has_sink_logits = p.flags & SPATTN_PLAN_SINK_LOGITS;
    r.value_in_key = p.flags & SPATTN_PLAN_VALUE_IN_KEY;
    r.tf32 = p.flags & SPATTN_PLAN_TF32 && r.dtype == Dtype::f32;
    read_cache(p, r);
    if (r.value_in_key && r.head_dim_v > r.head_dim)
        fail(SPATTN_E_RANGE, "problem.head_dim_v",
             text("is ", r.head_dim_v, " with SPATTN_PLAN_VALUE_IN_KEY; accepted: up to head_dim, ", r.head_dim));
    return r;
}

}  // namespace spattn
