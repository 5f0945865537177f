// SPDX-License-Identifier: MIT
// What compositions and lists mean, from the definitions alone: functions of a plane, a query's position p and a key k,
// made of such functions. A plane has its extent, its batch entry and its head, whoever declares it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace meaning {

inline int64_t mod(int64_t a, int64_t n) { return (a % n + n) % n; }  // floored
inline int64_t div(int64_t a, int64_t n) { return (a - mod(a, n)) / n; }

// ---- compositions ----

template <class Sees>
auto any_of(std::vector<Sees> parts) {
    return [parts = std::move(parts)](const auto& s, int64_t p, int64_t k) {
        return std::any_of(parts.begin(), parts.end(), [&](const Sees& sees) { return sees(s, p, k); });
    };
}

template <class Sees>
auto all_of(std::vector<Sees> parts) {
    return [parts = std::move(parts)](const auto& s, int64_t p, int64_t k) {
        return std::all_of(parts.begin(), parts.end(), [&](const Sees& sees) { return sees(s, p, k); });
    };
}

template <class Sees>
auto difference(Sees f, Sees g) {
    return [f = std::move(f), g = std::move(g)](const auto& s, int64_t p, int64_t k) {
        return f(s, p, k) && !g(s, p, k);
    };
}

template <class Sees>
auto transpose(Sees f) {
    return [f = std::move(f)](const auto& s, int64_t p, int64_t k) { return f(s, k, p); };
}

// map: the part of each head, or of each batch entry.
template <class Sees>
auto choice(std::vector<Sees> parts, std::vector<int32_t> map, bool by_head) {
    return [parts = std::move(parts), map = std::move(map), by_head](const auto& s, int64_t p, int64_t k) {
        return parts[size_t(map[size_t(by_head ? s.head : s.batch)])](s, p, k);
    };
}

template <class Sees>
auto per_document(Sees f, std::vector<int64_t> cu_q, std::vector<int64_t> cu_k) {
    return [f = std::move(f), cu_q = std::move(cu_q), cu_k = std::move(cu_k)](const auto& s, int64_t p, int64_t k) {
        const int64_t row = p - s.extent.q_offset;
        for (size_t t = 0; t + 1 < cu_q.size(); ++t) {
            if (row < cu_q[t] || row >= cu_q[t + 1]) continue;
            if (k < cu_k[t] || k >= cu_k[t + 1]) return false;
            auto own = s;
            own.extent.seq_q = cu_q[t + 1] - cu_q[t];
            own.extent.seq_k = cu_k[t + 1] - cu_k[t];
            own.extent.q_offset = own.extent.seq_k - own.extent.seq_q;
            return f(own, row - cu_q[t] + own.extent.q_offset, k - cu_k[t]);
        }
        return false;
    };
}

// ---- lists: of rows, not of positions ----

struct Rows {
    int64_t seq_q, seq_k;
    bool has(int64_t row, int64_t k) const { return row >= 0 && row < seq_q && k >= 0 && k < seq_k; }
};

// Pairs of block row and block column.
inline auto blocks(std::set<std::pair<int64_t, int64_t>> kept, int64_t block_q, int64_t block_k, Rows rows) {
    return [=, kept = std::move(kept)](const auto& s, int64_t p, int64_t k) {
        const int64_t row = p - s.extent.q_offset;
        return rows.has(row, k) && kept.count({row / block_q, k / block_k}) > 0;
    };
}

// values [batch][heads][seq_q][seq_k]; one batch entry or one head serves all.
template <class Value>
auto mask(std::vector<Value> values, int64_t batch, int64_t heads, Rows rows) {
    return [=, values = std::move(values)](const auto& s, int64_t p, int64_t k) {
        const int64_t row = p - s.extent.q_offset;
        const int64_t plane = (batch > 1 ? s.batch : 0) * heads + (heads > 1 ? s.head : 0);
        return rows.has(row, k) && values[size_t((plane * rows.seq_q + row) * rows.seq_k + k)] != 0;
    };
}

}  // namespace meaning
