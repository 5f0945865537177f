// SPDX-License-Identifier: MIT
#include "keys.h"

#include <algorithm>

#include "pattern/pattern.h"
#include "problem.h"

namespace random_test {

namespace {

constexpr int64_t estimated_rows = 64;

// Asks a pattern for its rows. The handle of the ABI is the pattern itself, and a row is its meaning, of which layouts
// are made: so the truth needs no list of all pairs, which the ABI has.
class PatternRows {
public:
    PatternRows(const spattn_pattern* pattern, const spattn_extent& e) : pattern_(pattern) {
        plane_.extent = {e.batch, e.heads, e.seq_q, e.seq_k, e.q_offset};
    }
    const spattn::Intervals& of(int64_t batch, int64_t head, int64_t row) {
        plane_.batch = batch, plane_.head = head;
        kept_.clear();
        pattern_->keys(plane_, row, {0, plane_.extent.seq_k}, kept_);
        return kept_;
    }

private:
    const spattn_pattern* pattern_;
    spattn::Plane plane_;
    spattn::Intervals kept_;
};

}  // namespace

int64_t Keys::Row::size() const {
    int64_t keys = 0;
    for (const Run& run : *this) keys += run.end - run.begin;
    return keys;
}

void Keys::Row::list(std::vector<int32_t>& keys) const {
    keys.clear();
    for (const Run& run : *this)
        for (int32_t key = run.begin; key < run.end; ++key) keys.push_back(key);
}

void Keys::Plane::see(int64_t first, int64_t end) {
    if (first >= end) return;
    const bool goes_on = int64_t(runs.size()) > begin.back() && runs.back().end == first;
    if (goes_on) runs.back().end = int32_t(end);
    else runs.push_back({int32_t(first), int32_t(end)});
}

Keys::Keys(const Problem& problem, int64_t batches, int64_t heads)
    : heads_q_(problem.c.heads_q), heads_kv_(problem.c.heads_kv), seq_q_(problem.c.seq_q), seq_k_(problem.c.seq_k),
      batches_(batches), heads_(heads) {}

// Calls body(plane, batch entry, one of the query heads) for each row of each plane.
template <class Body>
void Keys::make_planes(Body body) {
    for (int64_t b = 0; b < batches_; ++b)
        for (int64_t h = 0; h < heads_; ++h) {
            Plane& plane = planes_.emplace_back();
            for (int64_t row = 0; row < seq_q_; ++row) {
                body(plane, b, h * heads_q_ / heads_, row);
                plane.end_row();
            }
        }
}

std::vector<int64_t> Keys::count_queries(int64_t batch, int64_t head_kv) const {
    std::vector<int64_t> queries(size_t(seq_k_) + 1);
    const int64_t group = heads_q_ / heads_kv_, planes = heads_ == heads_q_ ? group : 1;
    for (int64_t g = 0; g < planes; ++g)
        for (int64_t row = 0; row < seq_q_; ++row)
            for (const Run& run : of(batch, head_kv * group + g, row))
                queries[size_t(run.begin)] += group / planes, queries[size_t(run.end)] -= group / planes;
    for (size_t key = 1; key < queries.size(); ++key) queries[key] += queries[key - 1];
    queries.pop_back();
    return queries;
}

Keys Keys::of_pattern(const Problem& problem) {
    const DrawnPattern& d = problem.drawn;
    const bool varies = d.varies_by_batch || d.varies_by_head;
    Keys keys(problem, d.varies_by_batch ? problem.c.batch : 1, varies ? problem.c.heads_q : 1);
    PatternRows rows(d.pattern.get(), problem.extent());
    keys.make_planes([&](Plane& plane, int64_t b, int64_t h, int64_t row) {
        for (const spattn::Interval& kept : rows.of(b, h, row)) plane.see(kept.begin, kept.end);
    });
    return keys;
}

Keys Keys::of_cache(const Problem& problem, const CacheCall& call) {
    const spattn_problem& p = problem.c;
    const DrawnPattern& d = problem.drawn;
    const bool varies = d.varies_by_batch || d.varies_by_head;
    Keys keys(problem, p.batch, d.list_most ? p.heads_kv : varies ? p.heads_q : 1);
    PatternRows rows(d.pattern.get(), problem.extent());
    const auto see_listed = [&](Plane& plane, int64_t token, int64_t list) {
        const int64_t most = call.counts.empty() ? d.list_most : std::min(call.counts[size_t(list)], d.list_most);
        for (int64_t i = 0; i < most; ++i) {
            const int64_t first = call.indices[size_t(list * d.list_most + i)] * d.list_block_k;
            if (first >= 0) plane.see(first, std::min(first + d.list_block_k, token + 1));
        }
    };
    // A node sees those of its call's tokens, which begin at `start`, that are on its way to the root.
    const auto see_tree = [&](Plane& plane, int64_t b, int64_t h, int64_t n) {
        const int64_t start = call.starts[size_t(b)], token = start + n;
        const int64_t* const parent = call.parents.data() + b * p.seq_q;
        std::vector<bool> is_on_way(size_t(n + 1));
        for (int64_t at = n; at >= 0; at = parent[at] < at ? parent[at] : -1) is_on_way[size_t(at)] = true;
        for (const spattn::Interval& kept : rows.of(b, h, token)) {
            plane.see(kept.begin, std::min(kept.end, start));
            for (int64_t key = std::max(kept.begin, start); key < std::min(kept.end, token + 1); ++key)
                if (is_on_way[size_t(key - start)]) plane.see(key, key + 1);
        }
    };
    keys.make_planes([&](Plane& plane, int64_t b, int64_t h, int64_t n) {
        const int64_t token = call.starts[size_t(b)] + n;
        if (n >= problem.queries_of(b) || token < 0 || token >= p.seq_k) return;
        if (d.list_most) return see_listed(plane, token, (b * p.seq_q + n) * p.heads_kv + h / problem.group());
        if (problem.is_tree()) return see_tree(plane, b, h, n);
        for (const spattn::Interval& kept : rows.of(b, h, token)) plane.see(kept.begin, std::min(kept.end, token + 1));
    });
    return keys;
}

Keys Keys::of_lists(const Problem& problem, const std::vector<int64_t>& indices, const std::vector<int64_t>& counts) {
    const spattn_problem& p = problem.c;
    const DrawnPattern& d = problem.drawn;
    Keys keys(problem, p.batch, p.heads_kv);
    PatternRows known(d.known.get(), problem.extent());
    const int64_t lists = (p.seq_q + d.list_block_q - 1) / d.list_block_q;
    const spattn::Intervals all{{0, p.seq_k}};
    keys.make_planes([&](Plane& plane, int64_t b, int64_t h, int64_t row) {
        const int64_t at = (b * lists + row / d.list_block_q) * p.heads_kv + h / problem.group();
        const int64_t most = counts.empty() ? d.list_most : std::min(counts[size_t(at)], d.list_most);
        const spattn::Intervals& asked = d.known ? known.of(b, h, row) : all;
        for (int64_t n = 0; n < most; ++n) {
            const int64_t first = indices[size_t(at * d.list_most + n)] * d.list_block_k;
            if (first < 0) continue;
            for (const spattn::Interval& kept : asked)
                plane.see(std::max(first, kept.begin), std::min(first + d.list_block_k, kept.end));
        }
    });
    return keys;
}

double estimate_runs(const Problem& problem) {
    const DrawnPattern& d = problem.drawn;
    const spattn_problem& p = problem.c;
    const spattn_extent e = problem.extent();
    if (d.list_most) return double(p.batch * p.heads_kv) * double(p.seq_q) * double(d.list_most);
    PatternRows rows(d.pattern.get(), e);
    double runs = 0;
    for (int64_t i = 0; i < estimated_rows; ++i)
        runs += double(rows.of(i % e.batch, i % e.heads, i * (e.seq_q - 1) / (estimated_rows - 1)).size());
    const bool varies = d.varies_by_batch || d.varies_by_head, has_batches = d.varies_by_batch || problem.is_on_cache();
    return runs / double(estimated_rows) * double(p.seq_q) * double(has_batches ? p.batch : 1) *
           double(varies ? p.heads_q : 1);
}

}  // namespace random_test
