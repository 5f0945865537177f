// SPDX-License-Identifier: MIT
// A problem drawn from a seed and a number: pattern, sizes, options, where its tensors lie, and what is in them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "keys.h"
#include "operand.h"
#include "pattern.h"

namespace random_test {

// What the tensors hold where everybody looks. search: each query looks for a stretch of keys, which get most of its
// weight, so that a few keys that are lost among thousands are missed.
enum class Values { normal, loud, ramp, spikes, constant, zeros, denormal, large, search, count };
inline constexpr const char* value_names[] = {"normal", "loud",     "ramp",  "spikes", "constant",
                                              "zeros",  "denormal", "large", "search"};
// Where NaN, infinity and numbers that overflow stand. unseen: where nobody looks. Isolation: others: where some look,
// and those who do not must not notice.
enum class Poison { none, unseen, others, count };
inline constexpr const char* poison_names[] = {"none", "unseen", "others"};

// A kernel row that the plan is pinned to, and what it asks of a problem.
struct Row {
    std::string name;
    const Type* type = nullptr;
    bool is_backward = false, is_reference = false;
    int64_t tile_heads = 1;  // heads of a group that share its tiles
};

// What a caller lets be drawn.
struct Choices {
    uint64_t seed = 1;
    std::vector<Values> values;
    std::vector<Poison> poisons;
    double most_work = 0;    // multiplications of a forward pass on kept pairs
    int64_t most_tokens = 0;  // of one sequence
    bool is_large = false;    // problems have thousands of tokens
};

struct Problem {
    int64_t index = 0;
    Random random{0};  // for what is drawn after the plan stands: memory and values
    const Type* type = nullptr;
    spattn_problem c{};  // as the library is told, unless queries are ragged
    DrawnPattern drawn;
    Values values = Values::normal;
    Poison poison = Poison::none;
    bool is_large = false;
    bool is_dispatched = false;  // a pass of its plan says so (plan/dispatch.h): parts of results are elements
    bool is_gathered = false;    // its backward reads lists of keys, whoever made them
    bool multiplies_float8 = false;  // a row of its plan may, as the bytes are
    bool splits_float32 = false;     // a row of its plan does, into two numbers in TF32
    // Whose the rows of a ragged call are, [batch + 1]. Entries have up to c.seq_q queries each, and what they lack is
    // drawn and judged as queries that see nothing.
    std::vector<int64_t> query_offsets;
    int64_t ragged_rows = 0;  // of the call
    bool wants_lse = true, wants_max_logits = false, has_dlse = false, wants_dsinks = false;

    int64_t group() const { return c.heads_q / c.heads_kv; }
    double scale() const;
    int64_t q_offset() const { return c.flags & SPATTN_PLAN_Q_OFFSET ? c.q_offset : c.seq_k - c.seq_q; }
    bool has(uint32_t flag) const { return (c.flags & flag) != 0; }
    bool is_backward() const { return has(SPATTN_PLAN_BACKWARD); }
    bool is_on_cache() const { return has(SPATTN_PLAN_STARTS); }
    bool is_tree() const { return has(SPATTN_PLAN_PARENTS); }
    bool has_float8_cache() const { return c.cache_dtype.code == SPATTN_FLOAT8_E4M3FN; }
    bool has_float8_operands() const { return type == &bf16_from_float8; }
    bool has_float8_keys() const { return has_float8_cache() || has_float8_operands(); }
    bool is_ragged() const { return !query_offsets.empty(); }
    int64_t queries_of(int64_t batch) const {
        return is_ragged() ? query_offsets[size_t(batch + 1)] - query_offsets[size_t(batch)] : c.seq_q;
    }
    spattn_problem told() const;
    spattn_extent extent() const;  // that the pattern stands on: of a call on a cache, all tokens
    int64_t value_dim() const { return c.head_dim_v ? c.head_dim_v : c.head_dim; }
    std::string describe() const;
};

// The first ones are fixed: they were found by hand.
inline constexpr int64_t num_fixed_problems = 2;
Problem draw_problem(const Choices& choices, int64_t index, int64_t attempt, const Row* pin);

// Kept pairs over all batch entries and heads: the library's own count. Run-time lists count as full. A call on a cache
// counts the pairs of all tokens, or, of a large problem, as many of them as it has queries.
double count_pairs(const Problem& problem);

// All tensors of a call, filled, and who sees what.
struct Tensors {
    explicit Tensors(Problem& problem);
    // From a ragged call's results to those of each entry. Rows that are nobody's stand for queries that entries lack.
    void unpack(const Problem& problem);

    Operand q, k, v, out, lse, max_logits, sinks;
    Operand dout, dlse, dq, dk, dv, dsinks;
    std::vector<int64_t> indices, counts;  // of run-time lists
    std::vector<int64_t> starts, parents;  // of a call on a cache
    std::vector<int64_t> page_table;       // of a cache in pages, which lie in pools and hold what k and v say
    Operand pool_k, pool_v;
    // What stands in place of k and v in a float8 cache, or in its pools, and in place of q, too, where the dtype is
    // float8; q, k and v are what it stands for, without rounding.
    struct Narrow {
        Operand k, v, k_scales, v_scales, q, q_scales;
    } narrow;
    struct Ragged {  // the rows of a ragged call: batch entry 0 has all
        Operand q, out, lse, max_logits;
        std::vector<int64_t> indices, counts, parents;
    } ragged;
    Keys keys;
    bool is_misaligned = false, has_gaps = false, is_transposed = false, is_shared = false;

private:
    Keys make_keys(Problem& problem);
    void fill(Problem& problem);
    void fill_pages(Problem& problem);
    void narrow_operands(Problem& problem);
    void narrow_rows(Random& random, Operand& x, Operand& narrow, Operand& scales);
    void pack(Problem& problem);
    void poison_others(Problem& problem);
};

}  // namespace random_test
