// SPDX-License-Identifier: MIT
#include "drawn.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "meaning.h"

namespace drawn {

using meaning::div, meaning::mod;

namespace {

template <class Make>
Model made(Make make, Sees sees) {
    spattn_pattern* result = nullptr;
    if (make(&result) != SPATTN_OK || !result)
        throw std::logic_error(std::string("no pattern of legal arguments: ") + spattn_last_error_text());
    return {Pattern(result), std::move(sees)};
}

}  // namespace

std::vector<uint8_t> model_mask(const Sees& sees, const Rectangle& e) {
    std::vector<uint8_t> mask;
    for (Plane s{e, 0, 0}; s.batch < e.batch; ++s.batch) {
        for (s.head = 0; s.head < e.heads; ++s.head) {
            for (int64_t q = 0; q < e.seq_q; ++q) {
                for (int64_t k = 0; k < e.seq_k; ++k) mask.push_back(sees(s, q + e.q_offset, k));
            }
        }
    }
    return mask;
}

Integers::Integers(const std::vector<int64_t>& values, int32_t axes) : shape{int64_t(values.size()) / axes, axes} {
    tensor.data = const_cast<int64_t*>(values.empty() ? shape : values.data());
    tensor.device = {SPATTN_CPU, 0};
    tensor.ndim = axes;
    tensor.dtype = {SPATTN_INT, 64, 1};
    tensor.shape = shape;
}

std::set<int64_t> random_blocks(int64_t i, int64_t blocks, int64_t window, int64_t global, int64_t random,
                                uint64_t seed) {
    std::set<int64_t> chosen, seen;
    for (int64_t j = 0; j < blocks; ++j)
        if (2 * std::abs(i - j) < window || j < global || i < global) seen.insert(j);
    uint64_t state = seed + uint64_t(i) * 0x9E3779B97F4A7C15;
    while (int64_t(chosen.size()) < random && int64_t(seen.size()) < blocks) {
        uint64_t z = state += 0x9E3779B97F4A7C15;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        const int64_t j = int64_t((z ^ (z >> 31)) % uint64_t(blocks));
        if (seen.insert(j).second) chosen.insert(j);
    }
    return chosen;
}

Model Builder::build(int depth) {
    if (depth == 0 || choices_.is_empty()) return leaf();
    switch (number(0, 10)) {
        case 0: return many(depth, true);
        case 1: return many(depth, false);
        case 2: return difference(depth);
        case 3: return transpose(depth);
        case 4: return choice(depth, true);
        case 5: return choice(depth, false);
        case 6: return has_lists_ ? per_document(depth) : leaf();
        case 7: return !has_lists_ ? leaf() : number(0, 1) ? rows(depth) : columns(depth);
        case 8: return grid(depth);
        default: return leaf();
    }
}

Model Builder::leaf() {
    switch (number(0, has_lists_ ? 20 : 15)) {
        case 0: return made(spattn_pattern_full, [](const Plane&, int64_t, int64_t) { return true; });
        case 1: return made(spattn_pattern_causal, [](const Plane&, int64_t p, int64_t k) { return k <= p; });
        case 2: return band(1);
        case 3: return band(number(1, 7 * reach_));
        case 4: return sink();
        case 5: return blocks(0);
        case 6: return documents();
        case 7: return strided();
        case 8: return landmark();
        case 9: return blocks(1);
        case 10:
            return made(spattn_pattern_logsparse, [](const Plane&, int64_t p, int64_t k) {
                return p >= k && ((p - k) & (p - k - 1)) == 0;
            });
        case 11: return residue();
        case 12: return global(true);
        case 13: return global(false);
        case 14:
        case 15: return bigbird();
        case 16: return csr(1, 1);
        case 17: return bsr();
        case 18: return mask();
        case 19: return xref();
        default: return tree();
    }
}

Model Builder::lists() {
    switch (number(0, 2)) {
        case 0: return csr(1, 1);
        case 1: return bsr();
        default: return mask();
    }
}

Model Builder::per_document(int depth) {
    if (reach_ > 1 && number(0, 1)) return even_documents(depth);
    std::vector<int64_t> cu_q = cuts(extent_.seq_q), cu_k = cuts(extent_.seq_k);
    cu_q.resize(std::min(cu_q.size(), cu_k.size()));
    cu_k.resize(cu_q.size());
    const Rectangle any{extent_.batch, extent_.heads, 0, 0, 0};
    return per_document(Builder(choices_, any, reach_, false).build(depth - 1), cu_q, cu_k);
}

// Bounds of ranges of `tokens` tokens, which have `count` together.
std::vector<int64_t> Builder::ranges(int64_t tokens, int64_t count) {
    std::vector<int64_t> bounds;
    for (int64_t left = count; left > 0;) {
        const int64_t most = std::min(left, tokens), length = most - number(0, most - 1);
        bounds.push_back(number(0, tokens - length));
        bounds.push_back(bounds.back() + length);
        left -= length;
    }
    return bounds;
}

// Ranges of a longer or shorter extent, which may have lists of its own.
Model Builder::columns(int depth) {
    Rectangle own = extent_;
    own.seq_k = number(1, 2 * extent_.seq_k), own.q_offset += own.seq_k - extent_.seq_k;
    const std::vector<int64_t> bounds = ranges(own.seq_k, extent_.seq_k);
    const Model inner = Builder(choices_, own, reach_).build(depth - 1);
    const Integers pairs(bounds, 2);
    return made([&](auto out) { return spattn_pattern_columns(inner.pattern.get(), &pairs.tensor, own.seq_k, out); },
                meaning::columns(inner.sees, bounds, own.seq_k));
}

Model Builder::rows(int depth) {
    const Rectangle own{extent_.batch, extent_.heads, number(1, 2 * extent_.seq_q), extent_.seq_k, 0};
    const std::vector<int64_t> bounds = ranges(own.seq_q, extent_.seq_q);
    const Model inner = Builder(choices_, own, reach_).build(depth - 1);
    const Integers pairs(bounds, 2);
    return made([&](auto out) { return spattn_pattern_rows(inner.pattern.get(), &pairs.tensor, own.seq_q, out); },
                meaning::rows(inner.sees, bounds, own.seq_q));
}

// ---- leaves ----

Model Builder::band(int64_t s) {
    const int64_t l = number(-1, 12 * reach_), r = number(-1, 9 * reach_);
    return made(
        [&](auto out) { return s == 1 ? spattn_pattern_window(l, r, out) : spattn_pattern_dilated(l, r, s, out); },
        [=](const Plane&, int64_t p, int64_t k) {
            return (l < 0 || k >= p - l) && (r < 0 || k <= p + r) && mod(k - p, s) == 0;
        });
}

Model Builder::sink() {
    const int64_t n = number(0, 12 * reach_);
    return made([&](auto out) { return spattn_pattern_sink(n, out); },
                [=](const Plane&, int64_t, int64_t k) { return k < n; });
}

Model Builder::blocks(bool has_landmarks) {
    const int64_t b = number(1, 17 * reach_), m = has_landmarks ? number(0, b) : 0;
    return made(
        [&](auto out) {
            return has_landmarks ? spattn_pattern_fixed(b, m, out) : spattn_pattern_block_diagonal(b, out);
        },
        [=](const Plane&, int64_t p, int64_t k) {
            return (p >= 0 && div(k, b) == div(p, b)) || mod(k, b) >= b - m;
        });
}

Model Builder::documents() {
    const std::vector<int64_t> cu = cuts(40 * reach_);
    const Integers tensor(cu);
    return made([&](auto out) { return spattn_pattern_documents(&tensor.tensor, out); },
                [=](const Plane&, int64_t p, int64_t k) {
                    for (size_t t = 0; t + 1 < cu.size(); ++t) {
                        if (cu[t] <= p && p < cu[t + 1] && cu[t] <= k && k < cu[t + 1]) return true;
                    }
                    return false;
                });
}

Model Builder::strided() {
    const int64_t s = number(1, 11 * reach_);
    return made([&](auto out) { return spattn_pattern_strided(s, out); },
                [=](const Plane&, int64_t p, int64_t k) { return mod(k - p, s) == 0; });
}

Model Builder::landmark() {
    const int64_t b = number(1, 11 * reach_), m = number(0, b);
    return made([&](auto out) { return spattn_pattern_landmark(b, m, out); },
                [=](const Plane&, int64_t, int64_t k) { return mod(k, b) >= b - m; });
}

Model Builder::residue() {
    const int64_t r = number(1, 9 * reach_), o = number(0, r - 1);
    return made([&](auto out) { return spattn_pattern_residue(r, o, out); },
                [=](const Plane&, int64_t p, int64_t k) { return mod(p, r) == o && mod(k, r) == o; });
}

Model Builder::global(bool keys_only) {
    std::vector<int64_t> list;
    for (int64_t n = number(0, 6); n > 0; --n) list.push_back(number(0, 30 * reach_));
    const std::set<int64_t> set(list.begin(), list.end());
    const Integers tensor(list);
    return made([&](auto out) {
                    return keys_only ? spattn_pattern_global_keys(&tensor.tensor, out)
                                     : spattn_pattern_global_tokens(&tensor.tensor, out);
                },
                [=](const Plane&, int64_t p, int64_t k) { return set.count(k) || (!keys_only && set.count(p)); });
}

Model Builder::bigbird() {
    spattn_bigbird b{};
    b.struct_size = sizeof b;
    b.block = number(1, 9 * reach_), b.window_blocks = number(0, 3) ? number(0, 2) * 2 + 1 : 0;
    b.global_blocks = number(0, 2), b.random_blocks = number(0, 4), b.seed = uint64_t(number(0, 255));
    return made([&](auto out) { return spattn_pattern_bigbird(&b, out); },
                [=](const Plane& s, int64_t p, int64_t k) {
                    if (p < 0) return false;
                    const int64_t i = div(p, b.block), j = div(k, b.block);
                    if (2 * std::abs(i - j) < b.window_blocks || j < b.global_blocks || i < b.global_blocks)
                        return true;
                    return random_blocks(i, div(s.extent.seq_k + b.block - 1, b.block), b.window_blocks,
                                         b.global_blocks, b.random_blocks, b.seed).count(j) > 0;
                });
}

// ---- lists for this extent; rows, not positions ----

Model Builder::bsr() {
    const auto block = [&] { return reach_ > 1 && number(0, 1) ? 16 : number(1, 7 * reach_); };
    const int64_t bq = block(), bk = block();
    return csr(bq, bk);
}

Model Builder::csr(int64_t bq, int64_t bk) {
    std::set<std::pair<int64_t, int64_t>> kept;
    std::vector<int64_t> row_ptr{0}, col_idx;
    const int64_t rows = div(extent_.seq_q + bq - 1, bq), columns = div(extent_.seq_k + bk - 1, bk);
    for (int64_t row = 0; row < rows; ++row) {
        // Columns here and there; of long rows many are a stretch, from nothing to all.
        const bool is_stretch = reach_ > 1 && number(0, 1);
        const int64_t first = is_stretch ? number(0, columns) : number(0, 5);
        const int64_t end = is_stretch && number(0, 3) ? number(first, columns) : columns;
        for (int64_t column = first; column < end; column += is_stretch ? 1 : number(1, 7)) {
            kept.insert({row, column});
            col_idx.push_back(column);
        }
        row_ptr.push_back(int64_t(col_idx.size()));
    }
    const Integers rows_tensor(row_ptr), columns_tensor(col_idx);
    const Rectangle e = extent_;
    return made(
        [&](auto out) {
            return bq == 1 && bk == 1
                       ? spattn_pattern_csr(&rows_tensor.tensor, &columns_tensor.tensor, e.seq_k, 0, out)
                       : spattn_pattern_bsr(&rows_tensor.tensor, &columns_tensor.tensor, bq, bk, e.seq_q, e.seq_k,
                                            0, out);
        },
        meaning::blocks(kept, bq, bk, {e.seq_q, e.seq_k}));
}

Model Builder::mask() {
    const Rectangle e = extent_;
    const int64_t batch = number(0, 1) ? e.batch : 1, heads = number(0, 1) ? e.heads : 1, turn = number(1, 200);
    std::vector<uint8_t> values(size_t(batch * heads * e.seq_q * e.seq_k));
    for (size_t i = 0; i < values.size(); ++i) values[i] = uint8_t((i * size_t(turn)) >> 5) % 3 == 0;
    const int64_t shape[] = {batch, heads, e.seq_q, e.seq_k};
    spattn_tensor tensor{values.data(), {SPATTN_CPU, 0}, 4, {SPATTN_BOOL, 8, 1}, shape, nullptr, 0};
    return made([&](auto out) { return spattn_pattern_mask(&tensor, 0, out); },
                meaning::mask(values, batch, heads, {e.seq_q, e.seq_k}));
}

Model Builder::tree() {
    if (extent_.seq_q > extent_.seq_k) return sink();
    const int64_t size = number(extent_.seq_q, extent_.seq_k);
    const bool is_rising = number(0, 2) == 0;  // parents after their children, or before them
    std::vector<int64_t> parents;
    for (int64_t n = 0; n < size; ++n) {
        const int64_t parent = is_rising ? number(n + 1, size) : number(-1, n - 1);
        parents.push_back(parent == size ? -1 : parent);
    }
    const Integers tensor(parents);
    return made([&](auto out) { return spattn_pattern_tree(&tensor.tensor, out); },
                [=](const Plane& s, int64_t p, int64_t k) {
                    const int64_t base = s.extent.seq_k - size;
                    if (k < base) return true;
                    if (p < base || p >= s.extent.seq_k) return false;
                    for (int64_t n = p - base; n >= 0; n = parents[size_t(n)]) {
                        if (n == k - base) return true;
                    }
                    return false;
                });
}

Model Builder::xref() {
    Random text(uint64_t(number(0, 1 << 16)));
    const int64_t tokens = extent_.seq_k + text.in(0, 5), most = text.in(0, 8);
    std::vector<int64_t> ids, open, completed, symbols;
    for (int64_t i = 0; i < tokens; ++i) {
        ids.push_back(text.in(0, most));
        for (auto* symbol : {&open, &completed}) {
            symbol->push_back(text.one_in(2) ? -1 : text.in(0, 3));
            symbols.push_back(symbol->back());
        }
    }
    meaning::XrefNumbers n{text.in(0, 4), text.in(1, 6 * reach_), 0, text.in(0, 15 * reach_), text.in(0, 4),
                           text.in(0, 3), text.in(0, 4), text.in(0, 9), text.in(0, 3)};
    n.budget = n.sinks + n.window + n.links + text.in(0, 9 * reach_);
    const auto given = [](int64_t value) { return value ? value : -1; };
    const spattn_xref params{sizeof(spattn_xref), 0, given(n.sinks), n.window, n.budget, given(n.links),
                             given(n.ngram_keys), given(n.symbol_before), given(n.symbol_after),
                             given(n.look_back), given(n.stop_ratio)};
    const Integers words(ids), pairs(symbols, 2);
    const auto rows = std::make_shared<std::map<int64_t, std::set<int64_t>>>();
    return made([&](auto out) { return spattn_pattern_xref(&words.tensor, &pairs.tensor, &params, out); },
                [=](const Plane&, int64_t p, int64_t k) {
                    if (p < 0 || p >= tokens) return false;
                    const auto [row, is_new] = rows->try_emplace(p);
                    if (is_new) row->second = meaning::xref_row(p, ids, open, completed, n);
                    return row->second.count(k) > 0;
                });
}

// ---- compositions ----

Model Builder::many(int depth, bool is_union) {
    std::vector<Sees> sees;
    std::vector<Pattern> owned;
    for (int64_t n = number(1, 3); n > 0; --n) add(build(depth - 1), owned, sees);
    const auto parts = views(owned);
    if (is_union)
        return made([&](auto out) { return spattn_pattern_union(parts.data(), parts.size(), out); },
                    meaning::any_of(sees));
    return made([&](auto out) { return spattn_pattern_intersection(parts.data(), parts.size(), out); },
                meaning::all_of(sees));
}

Model Builder::difference(int depth) {
    const Model a = build(depth - 1), b = build(depth - 1);
    return made([&](auto out) { return spattn_pattern_difference(a.pattern.get(), b.pattern.get(), out); },
                meaning::difference(a.sees, b.sees));
}

Model Builder::transpose(int depth) {
    const Model a = build(depth - 1);
    return made([&](auto out) { return spattn_pattern_transpose(a.pattern.get(), out); },
                meaning::transpose(a.sees));
}

Model Builder::choice(int depth, bool by_head) {
    std::vector<Sees> sees;
    std::vector<Pattern> owned;
    for (int64_t n = number(1, 3); n > 0; --n) add(build(depth - 1), owned, sees);
    const auto parts = views(owned);
    std::vector<int32_t> map;
    for (int64_t n = by_head ? extent_.heads : extent_.batch; n > 0; --n)
        map.push_back(int32_t(number(0, int64_t(parts.size()) - 1)));
    return made(
        [&](auto out) {
            return by_head ? spattn_pattern_per_head(parts.data(), parts.size(), map.data(), map.size(), out)
                           : spattn_pattern_per_batch(parts.data(), parts.size(), map.data(), map.size(), out);
        },
        meaning::choice(sees, map, by_head));
}

// It has as many tokens as the extent has keys, more or less.
Model Builder::grid(int depth) {
    const int64_t axes = number(1, 3);
    std::vector<int64_t> sizes, tile;
    std::vector<Sees> sees;
    std::vector<Pattern> owned;
    for (int64_t axis = 0, left = extent_.seq_k; axis < axes; ++axis) {
        const int64_t part = number(1, 4), places = axis + 1 == axes ? left : number(1, 8);
        sizes.push_back(std::max<int64_t>(1, places / part) * part), tile.push_back(part);
        left = std::max<int64_t>(1, left / sizes.back());
        const Rectangle along{extent_.batch, extent_.heads, sizes.back(), sizes.back(), 0};
        add(Builder(choices_, along, 1, has_lists_).build(depth - 1), owned, sees);
    }
    const auto parts = views(owned);
    if (number(0, 2) == 0) tile = sizes;
    return made(
        [&](auto out) {
            return spattn_pattern_grid(sizes.data(), tile.data(), parts.data(), parts.size(), out);
        },
        meaning::grid(sees, sizes, tile));
}

Model Builder::even_documents(int depth) {
    const int64_t count = number(1, std::min<int64_t>({6, extent_.seq_q, extent_.seq_k}));
    const Rectangle own{extent_.batch, extent_.heads, extent_.seq_q / count, extent_.seq_k / count, 0};
    std::vector<int64_t> cu_q, cu_k;
    for (int64_t t = 0; t <= count; ++t) cu_q.push_back(t * own.seq_q), cu_k.push_back(t * own.seq_k);
    return per_document(Builder(choices_, own, reach_).build(depth - 1), cu_q, cu_k);
}

Model Builder::per_document(const Model& inner, const std::vector<int64_t>& cu_q, const std::vector<int64_t>& cu_k) {
    const Integers q(cu_q), k(cu_k);
    return made(
        [&](auto out) { return spattn_pattern_per_document(inner.pattern.get(), &q.tensor, &k.tensor, out); },
        meaning::per_document(inner.sees, cu_q, cu_k));
}

void Builder::add(Model model, std::vector<Pattern>& patterns, std::vector<Sees>& sees) {
    patterns.push_back(std::move(model.pattern));
    sees.push_back(std::move(model.sees));
}

std::vector<const spattn_pattern*> Builder::views(const std::vector<Pattern>& patterns) {
    std::vector<const spattn_pattern*> result;
    for (const Pattern& pattern : patterns) result.push_back(pattern.get());
    return result;
}

std::vector<int64_t> Builder::cuts(int64_t limit) {
    std::vector<int64_t> cu{number(0, 3) ? 0 : number(0, limit)};
    for (int64_t n = number(0, 5 * reach_); n > 0; --n)
        cu.push_back(std::min(limit, cu.back() + number(0, reach_ > 1 && number(0, 2) == 0 ? 70 : 9)));
    return cu;
}

}  // namespace drawn
