// SPDX-License-Identifier: MIT
#include "pattern.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace random_test {

namespace {

constexpr size_t longest_text = 240;
constexpr int64_t most_pairs_by_number = 1 << 18;  // of masks: every pair of them is a number
constexpr int64_t most_transposed = 8192;          // tokens: a row of some transposes asks all rows of the pattern

template <class... Parts>
std::string join(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

std::string list(const std::vector<int64_t>& values) {
    std::string out;
    for (int64_t value : values) out += (out.empty() ? "" : ",") + std::to_string(value);
    return out;
}

struct Integers {
    explicit Integers(const std::vector<int64_t>& values, int32_t axes = 1)  // two axes: pairs
        : shape{int64_t(values.size()) / axes, axes} {
        tensor.data = const_cast<int64_t*>(values.empty() ? shape : values.data());
        tensor.device = {SPATTN_CPU, 0}, tensor.ndim = axes, tensor.dtype = {SPATTN_INT, 64, 1}, tensor.shape = shape;
    }
    Integers(const Integers&) = delete;
    int64_t shape[2];
    spattn_tensor tensor{};
};

template <class Make>
Pattern made(const char* what, Make make) {
    spattn_pattern* result = nullptr;
    demand(make(&result), what);
    return Pattern(result);
}

// The ranges that an extent has of more or fewer tokens: begin and end of each.
struct Ranges {
    int64_t tokens;
    std::vector<int64_t> bounds;

    Pattern rows_of(const Pattern& inner) const {
        const Integers pairs(bounds, 2);
        return made("rows", [&](auto out) { return spattn_pattern_rows(inner.get(), &pairs.tensor, tokens, out); });
    }
    Pattern columns_of(const Pattern& inner) const {
        const Integers pairs(bounds, 2);
        return made("columns", [&](auto out) { return spattn_pattern_columns(inner.get(), &pairs.tensor, tokens, out); });
    }
};

class Drawing {
public:
    Drawing(Random& random, const Extents& e) : random_(random), e_(e), longest_(std::max(e.seq_q, e.seq_k)) {}

    bool varies_by_batch = false, varies_by_head = false;

    // Sets of one or two thousand keys a row at most, on any length.
    Pattern sparse() {
        const std::string window = join("window(", number(700), ",", random_.one_in(3) ? number(300) : 0, ")");
        switch (random_.in(0, 9)) {
            case 0: return parse("causal & " + window);
            case 1: return parse(join("causal & (sink(", number(200), ") | ", window, ")"));
            case 2: return parse(join("global_tokens(", list(positions(4)), ") | ", window));
            case 3: return parse(join("block_diagonal(", 16 * number(60), ")"));
            case 4: return parse(join("causal & dilated(", 16 * number(60), ",0,", random_.of({2, 3, 16}), ")"));
            case 5: return parse(join("bigbird(64,3,", random_.in(0, 1), ",", random_.in(0, 3), ",", number(99), ")"));
            case 6:
            case 7: return documents();
            case 8: return parse("causal & (logsparse | " + window + ")");
        }
        return parse(join("causal & (", window, " | strided(", 16 * number(40), "))"));
    }

    Pattern any() {
        if (random_.one_in(3)) return usual();
        Pattern pattern = algebra(int(random_.in(0, 3)), true);
        if (random_.one_in(3)) pattern = two_of(spattn_pattern_intersection, parse("causal"), std::move(pattern));
        return pattern;
    }

    // As models of long contexts use them: windows reach over a few blocks or most of the tokens. Those of caches often
    // do the latter, beside sinks, since queries near the end of the capacity alone are beyond them then.
    Pattern large(bool on_cache) {
        const int64_t n = longest_;
        const bool is_far = on_cache ? !random_.one_in(3) : random_.one_in(3);
        const int64_t window = is_far ? random_.in(n / 3, n) : random_.size(n / 4 + 1);
        const std::string recent = join("window(", random_.one_in(2) ? window : window / 64 * 64, ",0)");
        const std::string sinks = join("sink(", random_.of({1, 4, 64, 128, 1000}), ")");
        const int64_t stride = random_.one_in(2) ? random_.of({64, 128, 256, 512})
                                                 : random_.in(n / 500 + 1, n / 10 + 2);
        switch (random_.in(on_cache ? -9 : 1, on_cache ? 14 : 15)) {
            default:
            case 1: return parse(join("causal & (", sinks, " | ", recent, ")"));
            case 2: return parse("causal & " + recent);
            case 3: return parse(join("causal & (", recent, " | strided(", stride, "))"));
            case 4: {
                const int64_t step = random_.of({2, 3, 4, 16, 64});
                return parse(join("causal & dilated(", step * random_.size(n / step / 4 + 1), ",0,", step, ")"));
            }
            case 5: return parse(join("bigbird(", random_.of({16, 64, 128}), ",3,", random_.in(0, 2), ",",
                                      random_.in(0, 3), ",", random_.in(0, 99), ")"));
            case 6: return two_of(spattn_pattern_intersection, parse("causal"), documents());
            case 7: return parse(join(random_.one_in(2) ? "causal & " : "", "block_diagonal(", random_.size(n), ")"));
            case 8: return parse(join("causal & (", recent, " | landmark(", stride, ",", random_.in(1, 3), "))"));
            case 9: return parse(join("global_tokens(", list(positions(8)), ") | ", recent));
            case 10: return e_.seq_q <= e_.seq_k ? tree(true) : documents();
            case 11: return csr(40, false);
            case 12: return bsr();
            case 13: {
                Pattern lists = random_.one_in(2) ? csr(20, false) : bsr();
                return two_of(spattn_pattern_union, std::move(lists), parse("causal & " + recent));
            }
            case 14: return choice(!random_.one_in(4), [&] { return large(on_cache); });
            case 15: return dealt().rows_of(parse(join("causal & (", sinks, " | ", recent, ")")));
        }
    }

    // Tokens behind an end are padding: they see nothing.
    Pattern padded(Pattern pattern) {
        return two_of(spattn_pattern_intersection, std::move(pattern),
                      parse(join("documents(0,", random_.in(0, longest_), ")")));
    }

    // Rows of more queries that one of several devices has: as far from the first one as others are from the last.
    Ranges dealt() {
        const int64_t seq_q = std::max(e_.seq_q, e_.seq_k), first = (e_.seq_q + 1) / 2, last = e_.seq_q - first;
        const int64_t begin = random_.in(0, (seq_q - e_.seq_q) / 2);
        Ranges dealt{seq_q, {begin, begin + first}};
        if (last) dealt.bounds.insert(dealt.bounds.end(), {seq_q - begin - last, seq_q - begin});
        return dealt;
    }

private:
    int64_t number(int64_t most) { return random_.size(std::max<int64_t>(1, std::min(most, longest_ + 20))); }
    std::vector<int64_t> positions(int64_t most) {
        std::vector<int64_t> out(size_t(random_.in(1, most)));
        for (int64_t& position : out) position = random_.in(0, longest_ + 20);
        return out;
    }

    // Packed sequences; the last one often ends before the tokens do.
    Pattern documents() {
        const int64_t most = random_.size(longest_), end = random_.one_in(2) ? random_.in(0, longest_) : longest_;
        std::vector<int64_t> cu{random_.one_in(5) ? number(50) : 0};
        while (cu.back() < end) cu.push_back(cu.back() + random_.in(0, most));
        const Integers tensor(cu);
        return made("documents", [&](auto out) { return spattn_pattern_documents(&tensor.tensor, out); });
    }

    // As people use them.
    Pattern usual() {
        const int64_t n = number(longest_);
        switch (random_.in(0, 11)) {
            case 0: return parse("full");
            case 1: return parse("causal");
            case 2: return two_of(spattn_pattern_intersection, parse("causal"), documents());
            case 3: return parse(join("causal & (window(", n, ",0) | strided(", n, "))"));
            case 4: return parse(join("fixed(", n, ",", random_.in(0, std::min<int64_t>(n, 3)), ") & causal"));
            case 5: return per_document(false);
            case 6: return choice(true, [&] { return sparse(); });
            case 7: return lists();
            case 8: return dealt().rows_of(random_.one_in(2) ? parse("causal") : sparse());
            // A window that few queries are beyond, so that few rows miss keys behind the sinks.
            case 9: return parse(join("causal & (sink(", number(99), ") | window(", random_.in(longest_ / 3, longest_), ",0))"));
        }
        return sparse();
    }

    Pattern leaf(bool is_whole) {
        if (is_whole && random_.one_in(6)) return lists();
        const int64_t n = number(longest_);
        switch (random_.in(0, 16)) {
            case 0: return parse("full");
            case 1: return parse("causal");
            case 2: return parse(join("window(", number(longest_) - 2, ",", number(longest_) - 2, ")"));
            case 3: return parse(join("sink(", number(longest_) - 1, ")"));
            case 4: return parse(join("block_diagonal(", n, ")"));
            case 5: return documents();
            case 6:
                return parse(join("dilated(", number(longest_) - 2, ",", number(longest_) - 2, ",", number(20), ")"));
            case 7: return parse(join("strided(", number(60), ")"));
            case 8: return parse(join("landmark(", n, ",", random_.in(0, std::min<int64_t>(n, 4)), ")"));
            case 9: return parse(join("fixed(", n, ",", random_.in(0, std::min<int64_t>(n, 4)), ")"));
            case 10: return parse("logsparse");
            case 11: {
                const int64_t r = number(20);
                return parse(join("residue(", r, ",", random_.in(0, r - 1), ")"));
            }
            case 12: return parse(join("global_keys(", list(positions(6)), ")"));
            case 13: return parse(join("global_tokens(", list(positions(6)), ")"));
            case 14:
                return parse(join("bigbird(", number(100), ",", 2 * random_.in(0, 2) + 1, ",", random_.in(0, 2), ",",
                                  random_.in(0, 3), ",", number(1000), ")"));
            case 15: return grid();
        }
        return parse("block_diagonal(64)");
    }

    // An image, in tiles or not.
    Pattern grid() {
        const int64_t part = 1 << random_.in(0, 3), width = part * random_.in(1, 12);
        const int64_t height = part * std::max<int64_t>(1, longest_ / width / part);
        const auto axis = [&] { return random_.one_in(5) ? "full" : join("window(", number(9) - 1, ",", number(9) - 1, ")"); };
        const int64_t columns = random_.one_in(2) ? part : width;
        return parse(join("grid([", height, ",", width, "], [", columns == part ? part : height, ",", columns, "], ",
                          axis(), ", ", axis(), ")"));
    }

    // Lists for the rows of these extents.
    Pattern lists() {
        const int64_t pairs = e_.seq_q * e_.seq_k;
        if (random_.one_in(4) && e_.seq_q <= e_.seq_k) return tree(false);
        if (random_.one_in(3) && e_.batch * e_.heads * pairs <= most_pairs_by_number) return mask();
        if (random_.one_in(2) && pairs <= 16 * most_pairs_by_number) return csr(60, true);
        return bsr();
    }

    // is_flat: a node's parent may be any before it, so that ways to the root are short.
    Pattern tree(bool is_flat) {
        std::vector<int64_t> parents(size_t(random_.in(e_.seq_q, e_.seq_k)));
        const int64_t back = is_flat ? int64_t(parents.size()) : number(20);
        for (size_t node = 0; node < parents.size(); ++node)
            parents[node] = std::max<int64_t>(-1, int64_t(node) - random_.in(1, back));
        const Integers tensor(parents);
        return made("tree", [&](auto out) { return spattn_pattern_tree(&tensor.tensor, out); });
    }

    // Rows that are empty, full, thin or a stretch.
    struct Rows {
        std::vector<int64_t> row_ptr{0}, col_idx;
    };
    Rows rows(int64_t count, int64_t columns, int64_t usual, bool may_be_full) {
        Rows out;
        for (int64_t row = 0; row < count; ++row) {
            const int64_t step = random_.one_in(2) ? 1 : random_.size(columns);
            const int64_t first = random_.in(0, columns);
            const int64_t length = may_be_full && random_.one_in(30) ? columns : random_.size(usual);
            if (!random_.one_in(8))
                for (int64_t c = first; c < std::min(columns, first + length * step); c += step)
                    out.col_idx.push_back(c);
            out.row_ptr.push_back(int64_t(out.col_idx.size()));
        }
        return out;
    }
    Pattern csr(int64_t usual, bool may_be_full) {
        const Rows r = rows(e_.seq_q, e_.seq_k, usual, may_be_full);
        const Integers row_ptr(r.row_ptr), col_idx(r.col_idx);
        return made("csr", [&](auto out) {
            return spattn_pattern_csr(&row_ptr.tensor, &col_idx.tensor, e_.seq_k, 0, out);
        });
    }
    Pattern bsr() {
        const auto block = [&] { return random_.one_in(3) ? 128 : random_.one_in(2) ? 16 : random_.in(1, 140); };
        const int64_t block_q = block(), block_k = block(), down = (e_.seq_q + block_q - 1) / block_q;
        const Rows r = rows(down, (e_.seq_k + block_k - 1) / block_k, 12, true);
        const Integers row_ptr(r.row_ptr), col_idx(r.col_idx);
        return made("bsr", [&](auto out) {
            return spattn_pattern_bsr(&row_ptr.tensor, &col_idx.tensor, block_q, block_k, e_.seq_q, e_.seq_k, 0, out);
        });
    }
    Pattern mask() {
        const int64_t batch = random_.one_in(3) ? e_.batch : 1, heads = random_.one_in(2) ? e_.heads : 1;
        varies_by_batch |= batch > 1, varies_by_head |= heads > 1;
        std::vector<uint8_t> values;
        const bool is_noise = random_.one_in(2);
        for (int64_t row = 0; row < batch * heads * e_.seq_q; ++row) {
            const int64_t begin = random_.in(-40, e_.seq_k), end = begin + random_.in(0, 160);
            for (int64_t k = 0; k < e_.seq_k; ++k)
                values.push_back(is_noise ? random_.one_in(3) : begin <= k && k < end);
        }
        const int64_t shape[4] = {batch, heads, e_.seq_q, e_.seq_k};
        spattn_tensor tensor{};
        tensor.data = values.data(), tensor.device = {SPATTN_CPU, 0}, tensor.ndim = 4;
        tensor.dtype = {SPATTN_UINT, 8, 1}, tensor.shape = shape;
        return made("mask", [&](auto out) { return spattn_pattern_mask(&tensor, 0, out); });
    }

    // is_whole: the pattern stands on the extents as they are, so that lists fit.
    Pattern algebra(int depth, bool is_whole) {
        if (depth == 0) return leaf(is_whole);
        const auto part = [&] { return algebra(depth - 1, is_whole); };
        switch (random_.in(0, 10)) {
            case 0:
            case 1: return two_of(spattn_pattern_union, part(), part());
            case 2: return two_of(spattn_pattern_intersection, part(), part());
            case 3: {
                const Pattern a = part(), b = part();
                return made("difference", [&](auto out) { return spattn_pattern_difference(a.get(), b.get(), out); });
            }
            case 4: {
                if (longest_ > most_transposed) return leaf(is_whole);
                const Pattern inner = algebra(depth - 1, false);
                return made("transpose", [&](auto out) { return spattn_pattern_transpose(inner.get(), out); });
            }
            case 5: return choice(true, part);
            case 6: return choice(false, part);
            case 7: return is_whole ? per_document(true) : leaf(false);
            case 8: return !is_whole ? leaf(false) : random_.one_in(2) ? some_rows() : some_columns();
        }
        return leaf(is_whole);
    }

    template <class Compose>
    Pattern two_of(Compose compose, Pattern a, Pattern b) {
        const spattn_pattern* parts[2] = {a.get(), b.get()};
        return made("composition", [&](auto out) { return compose(parts, 2, out); });
    }

    template <class Part>
    Pattern choice(bool is_by_head, Part part) {
        (is_by_head ? varies_by_head : varies_by_batch) = true;
        const Pattern a = part(), b = part();
        const spattn_pattern* parts[2] = {a.get(), b.get()};
        std::vector<int32_t> which(size_t(is_by_head ? e_.heads : e_.batch));
        for (int32_t& w : which) w = int32_t(random_.in(0, 1));
        return made("choice", [&](auto out) {
            return is_by_head ? spattn_pattern_per_head(parts, 2, which.data(), which.size(), out)
                              : spattn_pattern_per_batch(parts, 2, which.data(), which.size(), out);
        });
    }

    // Queries and keys of documents of their own lengths, which may end before the tokens do.
    Pattern per_document(bool in_algebra) {
        const int64_t count = random_.in(1, std::min<int64_t>({6, e_.seq_q, e_.seq_k}));
        std::vector<int64_t> cu_q, cu_k;
        for (int64_t t = 0; t <= count; ++t)
            cu_q.push_back(random_.in(0, e_.seq_q)), cu_k.push_back(random_.in(0, e_.seq_k));
        std::sort(cu_q.begin(), cu_q.end());
        std::sort(cu_k.begin(), cu_k.end());
        const Integers q(cu_q), k(cu_k);
        const Pattern inner = in_algebra ? algebra(1, false) : parse(random_.one_in(2) ? "causal" : "full");
        return made("per_document", [&](auto out) {
            return spattn_pattern_per_document(inner.get(), &q.tensor, &k.tensor, out);
        });
    }

    // Ranges in any order, of a longer or shorter extent, for which there may be lists.
    Pattern some_rows() {
        const Ranges some = ranges(e_.seq_q);
        return some.rows_of(of_extent({e_.batch, e_.heads, some.tokens, e_.seq_k}));
    }
    Pattern some_columns() {
        const Ranges some = ranges(e_.seq_k);
        return some.columns_of(of_extent({e_.batch, e_.heads, e_.seq_q, some.tokens}));
    }
    Ranges ranges(int64_t count) {
        Ranges some{random_.in(1, 2 * count), {}};
        for (int64_t left = count; left > 0;) {
            const int64_t length = random_.in(1, std::min(left, some.tokens));
            const int64_t begin = random_.in(0, some.tokens - length);
            some.bounds.insert(some.bounds.end(), {begin, begin + length});
            left -= length;
        }
        return some;
    }
    Pattern of_extent(const Extents& e) {
        Drawing own(random_, e);
        Pattern pattern = own.algebra(1, true);
        varies_by_batch |= own.varies_by_batch, varies_by_head |= own.varies_by_head;
        return pattern;
    }

    Random& random_;
    Extents e_;
    int64_t longest_;
};

}  // namespace

void demand(spattn_status status, const std::string& what) {
    if (status != SPATTN_OK) throw std::runtime_error(what + ": " + spattn_last_error_text());
}

Pattern parse(const std::string& text) {
    return made(text.c_str(), [&](auto out) { return spattn_pattern_parse(text.c_str(), out); });
}

DrawnPattern draw_pattern(Random& random, const Extents& e, Lengths lengths, bool is_group, bool on_cache) {
    Drawing drawing(random, e);
    DrawnPattern drawn;
    if (lengths != Lengths::sparse && random.one_in(is_group ? 1 : 10)) {
        const bool has_blocks = random.one_in(2);
        // Half of the blocks are of sizes that tiles make up, so that rows which read layouts take them, too.
        const bool fits_tiles = random.one_in(2);
        const auto block = [&] { return fits_tiles ? random.of({16, 32, 64, 128, 192, 256, 384}) : random.size(70); };
        drawn.list_block_q = has_blocks && !on_cache && !random.one_in(3) ? block() : 1;  // 1: each query has a list of its own
        drawn.list_block_k = has_blocks ? block() : 1;
        drawn.list_most = random.size(has_blocks ? 8 : is_group ? 1000 : 100);
        if (lengths == Lengths::large)
            drawn.list_most = std::min(has_blocks ? random.size(64) : random.size(2048), e.longest_list);
        drawn.pattern = has_blocks ? parse(join("runtime_blocks(", drawn.list_block_q, ",", drawn.list_block_k, ",",
                                                drawn.list_most, ")"))
                                   : parse(join("runtime_tokens(", drawn.list_most, ")"));
        if (random.one_in(2)) {
            drawn.known =
                parse(on_cache ? "causal" : join("causal & (sink(3) | window(", random.size(e.seq_k), ",0))"));
            const spattn_pattern* parts[2] = {drawn.pattern.get(), drawn.known.get()};
            drawn.pattern = made("lists", [&](auto out) { return spattn_pattern_intersection(parts, 2, out); });
        }
        if (!on_cache && random.one_in(4)) {
            const Ranges dealt = drawing.dealt();
            drawn.pattern = dealt.rows_of(drawn.pattern);
            if (drawn.known) drawn.known = dealt.rows_of(drawn.known);
        }
        return drawn;
    }
    const bool is_usual = lengths == Lengths::large && !random.one_in(on_cache ? 5 : 3);
    drawn.pattern = lengths == Lengths::sparse ? drawing.sparse() : is_usual ? drawing.large(on_cache) : drawing.any();
    if (random.one_in(5)) drawn.pattern = drawing.padded(std::move(drawn.pattern));
    drawn.varies_by_batch = drawing.varies_by_batch, drawn.varies_by_head = drawing.varies_by_head;
    return drawn;
}

std::string text_of(const spattn_pattern* pattern) {
    size_t needed = 0;
    demand(spattn_pattern_print(pattern, nullptr, 0, &needed), "print");
    std::string text(needed, ' ');
    demand(spattn_pattern_print(pattern, text.data(), needed, nullptr), "print");
    text.resize(needed - 1);
    if (text.size() > longest_text) text.replace(longest_text / 2, text.size() - longest_text, " ... ");
    return text;
}

}  // namespace random_test
