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

// Places on each axis of a token, which lies tile after tile: the last axis is the fastest, of tiles and in each of them.
inline std::vector<int64_t> places_of(int64_t token, const std::vector<int64_t>& sizes, const std::vector<int64_t>& tile) {
    std::vector<int64_t> places(sizes.size());
    for (size_t axis = sizes.size(); axis-- > 0; token /= tile[axis]) places[axis] = token % tile[axis];
    for (size_t axis = sizes.size(); axis-- > 0; token /= sizes[axis] / tile[axis])
        places[axis] += token % (sizes[axis] / tile[axis]) * tile[axis];
    return places;
}

template <class Sees>
auto grid(std::vector<Sees> parts, std::vector<int64_t> sizes, std::vector<int64_t> tile) {
    return [parts = std::move(parts), sizes = std::move(sizes), tile = std::move(tile)](const auto& s, int64_t p,
                                                                                        int64_t k) {
        int64_t tokens = 1;
        for (int64_t size : sizes) tokens *= size;
        if (p < 0 || p >= tokens || k < 0 || k >= tokens) return false;
        const std::vector<int64_t> of_p = places_of(p, sizes, tile), of_k = places_of(k, sizes, tile);
        for (size_t axis = 0; axis < sizes.size(); ++axis) {
            auto along = s;
            along.extent.seq_q = along.extent.seq_k = sizes[axis];
            along.extent.q_offset = 0;
            if (!parts[axis](along, of_p[axis], of_k[axis])) return false;
        }
        return true;
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

// bounds: begin and end of each range.
template <class Sees>
auto rows(Sees f, std::vector<int64_t> bounds, int64_t seq_q) {
    return [f = std::move(f), bounds = std::move(bounds), seq_q](const auto& s, int64_t p, int64_t k) {
        int64_t row = p - s.extent.q_offset;
        if (row < 0) return false;
        for (size_t i = 0; i < bounds.size(); i += 2) {
            const int64_t count = bounds[i + 1] - bounds[i];
            if (row < count) {
                auto own = s;
                own.extent.seq_q = seq_q;
                own.extent.q_offset = s.extent.seq_k - seq_q;
                return f(own, bounds[i] + row + own.extent.q_offset, k);
            }
            row -= count;
        }
        return false;
    };
}

template <class Sees>
auto columns(Sees f, std::vector<int64_t> bounds, int64_t seq_k) {
    return [f = std::move(f), bounds = std::move(bounds), seq_k](const auto& s, int64_t p, int64_t k) {
        if (k < 0) return false;
        for (size_t i = 0; i < bounds.size(); i += 2) {
            const int64_t count = bounds[i + 1] - bounds[i];
            if (k < count) {
                auto own = s;
                const int64_t longer = seq_k - s.extent.seq_k;
                own.extent.seq_k = seq_k, own.extent.q_offset += longer;
                return f(own, p + longer, bounds[i] + k);
            }
            k -= count;
        }
        return false;
    };
}

// ---- xref ----

struct XrefNumbers {
    int64_t sinks, window, budget, links, ngram_keys, symbol_before, symbol_after, look_back, stop_ratio;
};

// The keys that token i links. open and completed: the identifier of each token, -1 for none.
inline std::set<int64_t> xref_links(int64_t i, const std::vector<int64_t>& ids, const std::vector<int64_t>& open,
                                    const std::vector<int64_t>& completed, const XrefNumbers& n) {
    std::set<int64_t> linked;
    const auto link = [&](int64_t first, int64_t last) {
        for (int64_t k = std::max(first, n.sinks); k <= std::min(last, i - n.window); ++k)
            if (int64_t(linked.size()) < n.links) linked.insert(k);
    };
    const auto ends_alike = [&](int64_t m, int64_t length) {
        for (int64_t back = 0; back < length; ++back)
            if (m < back || i < back || ids[size_t(m - back)] != ids[size_t(i - back)]) return false;
        return true;
    };
    const auto link_symbol = [&](int64_t symbol, int64_t most) {
        std::vector<int64_t> places;
        for (int64_t m = i - n.window; m >= 0; --m)
            if (open[size_t(m)] == symbol) places.push_back(m);
        if (int64_t(places.size()) > most + 1) places.erase(places.begin() + most, places.end() - 1);
        for (int64_t m : places) link(m - n.symbol_before, m + n.symbol_after);
    };
    for (int64_t length = 4; length >= 2; --length) {
        int64_t found = 0;
        for (int64_t m = i - n.window - 1; m >= 0 && found < 3; --m)
            if (ends_alike(m, length)) ++found, link(m, m + n.ngram_keys - 1);
    }
    if (open[size_t(i)] >= 0) link_symbol(open[size_t(i)], 2);
    for (int64_t c = i; c >= 0 && c > i - n.look_back; --c) {
        const int64_t symbol = completed[size_t(c)];
        const int64_t times = std::count(open.begin(), open.begin() + i + 1, symbol);
        const bool is_stopped = n.stop_ratio && times > std::max<int64_t>(i / n.stop_ratio, 4);
        if (symbol >= 0 && !is_stopped) link_symbol(symbol, 1);
    }
    return linked;
}

inline std::set<int64_t> xref_row(int64_t i, const std::vector<int64_t>& ids, const std::vector<int64_t>& open,
                                  const std::vector<int64_t>& completed, const XrefNumbers& n) {
    std::set<int64_t> row = xref_links(i, ids, open, completed, n);
    for (int64_t k = 0; k < std::min(n.sinks, i + 1); ++k) row.insert(k);
    for (int64_t k = i; k >= 0; --k) {
        const bool fits = int64_t(row.size()) < n.budget || row.count(k);
        if (i - k >= n.window && !fits) break;
        row.insert(k);
    }
    return row;
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
