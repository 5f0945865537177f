// SPDX-License-Identifier: MIT
#include "plan/token_rows.h"

#include <algorithm>

namespace spattn {

Extent extent_of(const Problem& p) { return {p.batch, p.heads_q, p.seq_q, p.seq_k, p.q_offset}; }

Extent pattern_extent(const Problem& p) {
    return p.is_of_sequences() ? Extent{p.sequences(), p.heads_q, p.seq_k, p.seq_k, 0} : extent_of(p);
}

void PatternRows::keys(int64_t batch, int64_t head, int64_t row, std::vector<int64_t>& out) const {
    Intervals intervals;
    pattern_.keys({extent_, batch, head}, row, {0, extent_.seq_k}, intervals);
    out.clear();
    for (const Interval& interval : intervals) out.insert(out.end(), {interval.begin, interval.end});
}

void CallListRows::keys(int64_t batch, int64_t head, int64_t row, std::vector<int64_t>& out) const {
    const ListShape& shape = problem_.call_lists;
    const Plane plane{extent_of(problem_), batch, head};
    const int64_t list = row / shape.block_q, head_kv = head / problem_.group();
    Intervals scratch;
    out.clear();
    for (int64_t i = 0; i < lists_.count(batch, list, head_kv, shape.most); ++i) {
        const int64_t block = lists_.indices.at(batch, list, head_kv, i);
        if (block < 0 || block > (problem_.seq_k - 1) / shape.block_k) continue;
        const int64_t first = block * shape.block_k, end = std::min(first + shape.block_k, problem_.seq_k);
        for (int64_t key = first; key < end; ++key)
            if (keeps(plane, row, key, scratch)) out.insert(out.end(), {key, key + 1});
    }
}

bool CallListRows::keeps(const Plane& plane, int64_t row, int64_t key, Intervals& scratch) const {
    if (!known_) return true;
    scratch.clear();
    known_->keys(plane, row, {key, key + 1}, scratch);
    return !scratch.empty();
}

void CacheRows::keys(int64_t batch, int64_t head, int64_t row, std::vector<int64_t>& out) const {
    out.clear();
    const int64_t sequence = sequence_of(batch, row);
    if (sequence < 0) return;
    const int64_t of_sequence = row - cache_.queries_of(sequence, problem_.seq_q).begin;
    const int64_t start = cache_.starts.at(sequence, 0, 0, 0), seq = problem_.seq_k, page_size = problem_.page_size;
    if (start < -of_sequence || start >= seq - of_sequence) return;
    const int64_t token = start + of_sequence;
    Intervals intervals;
    if (problem_.call_lists.at_run_time()) list_keys(batch, head, row, token, intervals);
    else pattern_.keys({pattern_extent(problem_), sequence, head}, token, {0, seq}, intervals);
    if (problem_.has_parents) keep_ancestors(batch, row - of_sequence, of_sequence, start, intervals);
    for (const Interval& interval : intervals) {
        if (!page_size) {
            out.insert(out.end(), {interval.begin, interval.end});
            continue;
        }
        for (int64_t key = interval.begin; key < interval.end; ++key) {
            const int64_t at = cache_.place_of(sequence, key, page_size);
            out.insert(out.end(), {at, at + 1});
        }
    }
}

// Those that its list names and that do not stand behind it, in the order of the list.
void CacheRows::list_keys(int64_t batch, int64_t head, int64_t row, int64_t token, Intervals& out) const {
    const ListShape& shape = problem_.call_lists;
    const int64_t head_kv = head / problem_.group();
    for (int64_t i = 0; i < lists_.count(batch, row, head_kv, shape.most); ++i) {
        const int64_t block = lists_.indices.at(batch, row, head_kv, i);
        if (block < 0 || block > token / shape.block_k) continue;
        out.push_back({block * shape.block_k, std::min((block + 1) * shape.block_k, token + 1)});
    }
}

// Leaves of the keys from `start` on those of a node and of its ancestors. begin: the first query of its sequence.
void CacheRows::keep_ancestors(int64_t batch, int64_t begin, int64_t node, int64_t start, Intervals& keys) const {
    std::vector<bool> is_seen(size_t(node) + 1);
    for (int64_t number = node; number >= 0; number = cache_.parent_of(batch, begin, number)) is_seen[number] = true;
    Intervals kept;
    for (const Interval& interval : keys) {
        if (interval.begin < start) kept.push_back({interval.begin, std::min(interval.end, start)});
        for (int64_t key = std::max(interval.begin, start); key < interval.end; ++key)
            if (key - start <= node && is_seen[key - start]) kept.push_back({key, key + 1});
    }
    keys = kept;
}

// The last that begins at or before a query of a batch entry, or -1: a sequence may have none.
int64_t CacheRows::sequence_of(int64_t batch, int64_t row) const {
    if (!problem_.ragged) return batch;
    for (int64_t sequence = problem_.ragged - 1; sequence >= 0; --sequence) {
        const CallCache::Queries queries = cache_.queries_of(sequence, problem_.seq_q);
        if (queries.begin <= row) return row < queries.end ? sequence : -1;
    }
    return -1;
}

}  // namespace spattn
