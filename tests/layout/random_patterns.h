// SPDX-License-Identifier: MIT
// Random patterns and extents: leaves with small numbers, so that boundaries of patterns, blocks and sequences meet.
#pragma once

#include <algorithm>
#include <random>

#include "pattern/pattern.h"

namespace spattn {

class Random {
public:
    explicit Random(uint64_t seed) : engine_(seed) {}
    int64_t in(int64_t low, int64_t high) { return low + int64_t(engine_() % uint64_t(high - low + 1)); }
    bool one_in(int64_t n) { return in(1, n) == 1; }

    std::vector<int64_t> positions(int64_t most, int64_t limit) {
        std::vector<int64_t> out(size_t(in(1, most)));
        for (int64_t& position : out) position = in(0, limit);
        return out;
    }

private:
    std::mt19937_64 engine_;  // the same numbers everywhere
};

inline PatternRef random_documents(Random& random, int64_t limit) {
    std::vector<int64_t> cu{random.one_in(4) ? random.in(0, limit / 4) : 0};
    while (cu.back() < limit) cu.push_back(cu.back() + (random.one_in(3) ? random.in(0, 70) : random.in(0, 9)));
    return make_documents(cu);
}

// Rows of sorted columns: empty, full, single columns and stretches.
struct RandomRows {
    RandomRows(Random& random, int64_t rows, int64_t columns) {
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t step = random.one_in(2) ? 1 : random.in(1, columns);
            const int64_t end = random.one_in(4) ? columns : random.in(0, columns);
            for (int64_t c = random.in(0, columns); c < end; c += step) col_idx.push_back(c);
            row_ptr.push_back(int64_t(col_idx.size()));
        }
    }
    std::vector<int64_t> row_ptr{0}, col_idx;
};

inline PatternRef random_bsr(Random& random, const Extent& e) {
    const auto block = [&] { return random.one_in(2) ? 16 : random.in(1, 70); };
    const int64_t block_q = block(), block_k = block();
    const RandomRows rows(random, ceil_div(e.seq_q, block_q), ceil_div(e.seq_k, block_k));
    return make_bsr(rows.row_ptr, rows.col_idx, block_q, block_k, e.seq_q, e.seq_k, random.one_in(2));
}

// Noise, or a stretch of keys a row: blocks that are full and blocks that are empty.
inline PatternRef random_mask(Random& random, const Extent& e) {
    const int64_t batch = random.one_in(2) ? e.batch : 1, heads = random.one_in(2) ? e.heads : 1;
    const bool is_noise = random.one_in(2);
    std::vector<int64_t> values;
    for (int64_t row = 0; row < batch * heads * e.seq_q; ++row) {
        const int64_t begin = random.in(-40, e.seq_k), end = begin + random.in(0, 160);
        for (int64_t k = 0; k < e.seq_k; ++k) values.push_back(is_noise ? random.one_in(3) : begin <= k && k < end);
    }
    return make_mask(values, {batch, heads, e.seq_q, e.seq_k});
}

// Lists for the rows of one extent.
inline PatternRef random_lists(Random& random, const Extent& e) {
    if (random.one_in(3)) return random_mask(random, e);
    if (random.one_in(2)) return random_bsr(random, e);
    const RandomRows rows(random, e.seq_q, e.seq_k);
    return make_csr(rows.row_ptr, rows.col_idx, e.seq_k, random.one_in(2));
}

// An extent without sizes stands for any: nothing that is drawn then depends on them.
inline PatternRef random_leaf(Random& random, const Extent& e) {
    if (e.seq_q > 0 && random.one_in(6)) return random_lists(random, e);
    const int64_t n = random.in(1, 40), limit = std::max(e.seq_q, e.seq_k) + 20;
    switch (random.in(0, 15)) {
        case 0: return make_full();
        case 1: return make_causal();
        case 2: return make_window(random.in(-1, 50), random.in(-1, 20));
        case 3: return make_sink(random.in(0, 40));
        case 4: return make_block_diagonal(n);
        case 5: return random_documents(random, limit);
        case 6: return make_dilated(random.in(-1, 90), random.in(-1, 40), random.in(1, 17));
        case 7: return make_strided(n);
        case 8: return make_landmark(n, random.in(0, n));
        case 9: return make_fixed(n, random.in(0, n));
        case 10: return make_logsparse();
        case 11: return make_residue(n, random.in(0, n - 1));
        case 12: return make_global_keys(random.positions(6, limit));
        case 13: return make_global_tokens(random.positions(6, limit));
        case 14: return make_bigbird(random.in(1, 20), 2 * random.in(0, 2) + 1, random.in(0, 2), random.in(0, 3), 7);
    }
    return make_block_diagonal(64);
}

inline PatternRef random_pattern(Random& random, const Extent& e, int depth);

// Documents of equal sizes may have lists of their own; those of several sizes share a pattern that fits all.
inline PatternRef random_per_document(Random& random, const Extent& e, int depth) {
    const bool is_even = random.one_in(2);
    const int64_t count = random.in(1, std::min<int64_t>({6, e.seq_q, e.seq_k}));
    Extent own{e.batch, e.heads, 0, 0, 0};
    if (is_even) own.seq_q = e.seq_q / count, own.seq_k = e.seq_k / count;
    std::vector<int64_t> cu_q, cu_k;
    for (int64_t t = 0; t <= count; ++t) {
        cu_q.push_back(is_even ? t * own.seq_q : random.in(0, e.seq_q));
        cu_k.push_back(is_even ? t * own.seq_k : random.in(0, e.seq_k));
    }
    std::sort(cu_q.begin(), cu_q.end());
    std::sort(cu_k.begin(), cu_k.end());
    return make_per_document(random_pattern(random, own, depth), cu_q, cu_k);
}

inline PatternRef random_pattern(Random& random, const Extent& e, int depth) {
    if (depth == 0 || random.one_in(3)) return random_leaf(random, e);
    if (e.seq_q > 0 && random.one_in(6)) return random_per_document(random, e, depth - 1);
    const auto part = [&] { return random_pattern(random, e, depth - 1); };
    switch (random.in(0, 4)) {
        case 0: return make_union({part(), part()});
        case 1: return make_intersection({part(), part()});
        case 2: return make_difference(part(), part());
        case 3: return make_transpose(part());
    }
    return make_intersection({make_causal(), make_union({part(), part()})});
}

// Chooses by head or by batch entry where the extent has several.
inline PatternRef random_pattern(Random& random, const Extent& extent) {
    const int depth = int(random.in(0, 3));
    if (extent.heads * extent.batch == 1) return random_pattern(random, extent, depth);
    const Patterns parts{random_pattern(random, extent, depth), random_pattern(random, extent, depth)};
    std::vector<int32_t> of_head, of_batch;
    for (int64_t head = 0; head < extent.heads; ++head) of_head.push_back(int32_t(random.in(0, 1)));
    for (int64_t batch = 0; batch < extent.batch; ++batch) of_batch.push_back(int32_t(random.in(0, 1)));
    const PatternRef by_head = make_per_head(parts, of_head);
    return random.one_in(2) ? by_head : make_per_batch({by_head, parts[0]}, of_batch);
}

inline Extent random_extent(Random& random) {
    Extent extent;
    extent.batch = random.one_in(3) ? 2 : 1;
    extent.heads = random.one_in(3) ? 3 : 1;
    extent.seq_q = random.one_in(4) ? random.in(1, 5) : random.in(1, 200);
    extent.seq_k = random.one_in(4) ? 64 * random.in(1, 3) : random.in(1, 200);
    extent.q_offset = random.one_in(2) ? extent.seq_k - extent.seq_q : random.in(-60, 250);
    return extent;
}

}  // namespace spattn
