// SPDX-License-Identifier: MIT
// What a query does not see cannot change its result: NaN, infinities and huge numbers are put into some tokens, and
// whoever has nothing to do with these must get the same bits as before.
#pragma once

#include "bounds.h"

namespace attention {

// What is put into rows of q, dout and dlse, or of k and v.
enum class Dirt { not_a_number, one_element, huge };  // one_element: NaN or an infinity in one column

struct Soiling {
    Dirt dirt;
    bool keys, queries;  // whose rows
    unsigned seed;
};
inline Soiling draw_soiling(unsigned n) { return {Dirt(n % 3), n / 3 % 3 != 1, n / 3 % 3 != 2, n}; }

// Which queries [batch][heads_q][seq_q] and keys [batch][heads_kv][seq_k] hold dirt, and which can tell: queries that
// see keys and hold dirt or see a key that does, keys that such a query sees, and heads with such a query.
struct Isolation {
    std::vector<char> dirty_queries, dirty_keys, can_tell_queries, can_tell_keys, can_tell_heads;

    Isolation(const Problem& p, const TokenRows& rows, const Soiling& soiling)
        : dirty_queries(size_t(p.batch * p.heads_q * p.seq_q)),
          dirty_keys(size_t(p.batch * p.heads_kv * p.seq_k)),
          can_tell_queries(dirty_queries.size()),
          can_tell_keys(dirty_keys.size()),
          can_tell_heads(size_t(p.heads_q)) {
        std::mt19937 random(soiling.seed);
        for (unsigned i = 0; i < 1 + soiling.seed % 3; ++i) {
            if (soiling.queries) dirty_queries[random() % dirty_queries.size()] = 1;
            if (soiling.keys) dirty_keys[random() % dirty_keys.size()] = 1;
        }
        each_query(p, rows, [&](size_t query, size_t plane, const std::vector<int64_t>& keys) {
            can_tell_queries[query] = dirty_queries[query];
            for (const int64_t key : keys) can_tell_queries[query] |= dirty_keys[plane + size_t(key)];
            can_tell_heads[query / size_t(p.seq_q) % size_t(p.heads_q)] |= can_tell_queries[query];
            if (keys.empty()) can_tell_queries[query] = 0;
            for (const int64_t key : keys) can_tell_keys[plane + size_t(key)] |= can_tell_queries[query];
        });
    }

    // body(index of a query, index of its first key, its keys)
    template <class Body>
    static void each_query(const Problem& p, const TokenRows& rows, Body body) {
        std::vector<int64_t> intervals, keys;
        for (int64_t n = 0; n < p.batch * p.heads_q * p.seq_q; ++n) {
            const int64_t head = n / p.seq_q % p.heads_q, batch = n / p.seq_q / p.heads_q;
            intervals.clear(), keys.clear();
            rows.keys(batch, head, n % p.seq_q, intervals);
            for (size_t i = 0; i < intervals.size(); i += 2)
                for (int64_t key = intervals[i]; key < intervals[i + 1]; ++key) keys.push_back(key);
            body(size_t(n), size_t((batch * p.heads_kv + head / p.group()) * p.seq_k), keys);
        }
    }
};

inline void soil(Values& x, size_t row, int64_t columns, Dirt dirt, Dtype dtype, std::mt19937& random) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const double most = dtype == Dtype::f16 ? 65504 : dtype == Dtype::f64 ? 1e308 : 3e38, sign = random() % 2 ? 1 : -1;
    const size_t first = row * size_t(columns), one = first + random() % size_t(columns);
    if (dirt == Dirt::one_element) x[one] = random() % 3 == 0 ? not_a_number : sign * infinity;
    for (size_t i = first; dirt != Dirt::one_element && i < first + size_t(columns); ++i)
        x[i] = dirt == Dirt::huge ? round_to(dtype, most * (random() % 2 ? 1 : -1)) : not_a_number;
}

inline Inputs soiled(Inputs in, const Problem& p, const Isolation& isolation, Dirt dirt) {
    std::mt19937 random(4);
    for (size_t i = 0; i < isolation.dirty_queries.size(); ++i) {
        if (!isolation.dirty_queries[i]) continue;
        const unsigned which = 1 + random() % 3;
        if (which & 1) soil(in.q, i, p.head_dim, dirt, p.dtype, random);
        if (which & 2) soil(in.dout, i, p.head_dim_v, dirt, p.dtype, random);
        if (which == 3) soil(in.dlse, i, 1, dirt, Dtype::f32, random);
    }
    for (size_t i = 0; i < isolation.dirty_keys.size(); ++i) {
        if (!isolation.dirty_keys[i]) continue;
        const unsigned which = p.value_in_key ? 1 : 1 + random() % 3;
        if (which & 1) soil(in.k, i, p.head_dim, dirt, p.dtype, random);
        if (which & 2) soil(in.v, i, p.head_dim_v, dirt, p.dtype, random);
    }
    return in;
}

inline void check_untouched(const char* name, const Values& got, const Values& want,
                            const std::vector<char>& can_tell) {
    if (want.empty()) return;
    CHECK_EQ(got.size(), want.size());
    const size_t columns = want.size() / can_tell.size();
    size_t changed = 0;
    for (size_t i = 0; i < can_tell.size(); ++i)
        changed += !can_tell[i] && std::memcmp(&got[i * columns], &want[i * columns], columns * sizeof(double));
    check::report(changed == 0, __FILE__, __LINE__, text(name, ": ", changed, " rows changed that see none of it"));
}

// Those that can tell must: they have no number where the truth has none, and the truth where it has.
inline void check_told(const std::string& name, Values got, Values want, Bound bound) {
    for (size_t i = 0; i < want.size() && i < got.size(); ++i) {
        if (std::isinf(want[i]) && want[i] == got[i]) continue;  // an empty row's lse
        if (std::isfinite(want[i]) != std::isfinite(got[i]))
            return check::report(false, __FILE__, __LINE__,
                                 text(name, '[', i, "] is ", got[i], ", the truth is ", want[i]));
        if (!std::isfinite(want[i])) want[i] = got[i] = 0;
    }
    check_close(name, got, want, bound, 1);
}

struct Told {
    size_t queries = 0, keys = 0, all_queries = 0, all_keys = 0;
};

// `want` is what the same rows make of the same inputs without dirt.
inline void check_isolation(const Case& c, const Rows& rows, const Inputs& in, const Results& want,
                            const Soiling& soiling, Told& told, const Layouts& layouts = {}) {
    const Dtype dtype = rows.forward.dtype;
    const Problem p = problem_of(c, dtype);
    const PatternRef pattern = parse_pattern(c.pattern), known = pattern->known_part();
    const PatternRows pattern_rows(*pattern, p);
    const CallListRows list_rows(known.get(), p, view(in.lists, p));
    const bool lists = p.call_lists.at_run_time();
    const Isolation isolation(p, lists ? static_cast<const TokenRows&>(list_rows) : pattern_rows, soiling);
    const Inputs dirty = soiled(in, p, isolation, soiling.dirt);
    const Results got = run_rows(c, rows, dirty, 2, layouts);
    check_untouched("out", got.out, want.out, isolation.can_tell_queries);
    check_untouched("lse", got.lse, want.lse, isolation.can_tell_queries);
    check_untouched("max_logits", got.max_logits, want.max_logits, isolation.can_tell_queries);
    check_untouched("dq", got.dq, want.dq, isolation.can_tell_queries);
    check_untouched("dk", got.dk, want.dk, isolation.can_tell_keys);
    if (!c.value_in_key) check_untouched("dv", got.dv, want.dv, isolation.can_tell_keys);
    check_untouched("dsinks", got.dsinks, want.dsinks, isolation.can_tell_heads);
    for (const char can_tell : isolation.can_tell_queries) told.queries += can_tell, ++told.all_queries;
    for (const char can_tell : isolation.can_tell_keys) told.keys += can_tell, ++told.all_keys;
    if (soiling.dirt == Dirt::huge) return;  // where float overflows, the truth need not
    const Results truth = run_rows(c, reference_rows(Dtype::f64), dirty, 2);
    const Bound gradient = bound_of(rows, "gradient");
    check_told("out", got.out, truth.out, bound_of(rows, "out"));
    check_told("lse", got.lse, truth.lse, bound_of(dtype, "lse"));
    check_told("dq", got.dq, truth.dq, gradient);
    check_told("dk", got.dk, truth.dk, gradient);
    if (!c.value_in_key) check_told("dv", got.dv, truth.dv, gradient);
}

}  // namespace attention
