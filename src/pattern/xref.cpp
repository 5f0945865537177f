// SPDX-License-Identifier: MIT
// xref([ids],[symbols],numbers): sinks, a window, and spans around earlier places where the last tokens, the identifier
// being typed or those just typed already occurred. The header defines it; pattern/xref_index.h finds the places.
//
// N-gram heads (https://arxiv.org/abs/2401.12973) look up what followed the last tokens before, SparseCoder
// (https://arxiv.org/abs/2401.14727) and LongCoder (https://arxiv.org/abs/2306.14893) link identifiers. Ours joins both
// in one causal mask, the most specific links first, under one budget for all rows.
#include <memory>

#include "core/error.h"
#include "pattern/bytes.h"
#include "pattern/index_pattern.h"
#include "pattern/leaf.h"
#include "pattern/xref_index.h"

namespace spattn {
namespace {

constexpr int64_t none = -1;

struct Tokens {
    std::vector<int64_t> ids, symbols;  // symbols: open, completed of each token; empty where none has any
    int64_t size() const { return int64_t(ids.size()); }
    int64_t symbol(int64_t token, int64_t which) const {
        return symbols.empty() ? none : symbols[size_t(2 * token + which)];
    }
};

// In the order of the text.
constexpr int64_t XrefParams::* fields[] = {
    &XrefParams::sinks,        &XrefParams::window,     &XrefParams::budget,
    &XrefParams::links,        &XrefParams::ngram_keys, &XrefParams::symbol_before,
    &XrefParams::symbol_after, &XrefParams::look_back,  &XrefParams::stop_ratio};

std::vector<int64_t> numbers_of(const XrefParams& params) {
    std::vector<int64_t> numbers;
    for (const auto field : fields) numbers.push_back(params.*field);
    return numbers;
}

std::string digest_of(const Tokens& tokens) {
    Digest digest;
    digest.add(uint64_t(tokens.size()));
    for (int64_t id : tokens.ids) digest.add(uint64_t(id));
    for (int64_t symbol : tokens.symbols) digest.add(uint64_t(symbol));
    return digest.hex();
}

class Xref : public Pattern {
public:
    Xref(Tokens tokens, const XrefParams& params)
        : tokens_(std::move(tokens)), params_(params), digest_(digest_of(tokens_)) {
        XrefIndex index(params);
        begin_.reserve(size_t(tokens_.size()) + 1);
        for (int64_t i = 0; i < tokens_.size(); ++i) {
            index.append(tokens_.ids[size_t(i)], tokens_.symbol(i, 0), tokens_.symbol(i, 1), spans_);
            begin_.push_back(int64_t(spans_.size()));
        }
    }

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        const int64_t p = plane.position(row);
        if (p < 0 || p >= tokens_.size()) return;
        Cutter cutter(clip, out);
        for (int64_t s = begin_[size_t(p)]; s < begin_[size_t(p) + 1]; ++s) {
            const Span& span = spans_[size_t(s)];
            if (span.begin >= clip.end) return;
            cutter.add(span.begin, span.end);
        }
    }

    // Between the sinks and the window every row differs.
    Coverage classify(const Plane& plane, const Block& block, Key&, bool& known) const override {
        const int64_t first = plane.position(block.row), last = first + block.rows - 1;
        if (last < 0 || first >= tokens_.size() || block.key > last) return {Coverage::empty, forever};
        if (block.key + block.keys <= 0) return {Coverage::empty, blocks_until(0, block.key, block.keys)};
        const bool all_rows_are_tokens = first >= 0 && last < tokens_.size();
        const int64_t sinks_end = std::min(params_.sinks, first + 1);
        if (all_rows_are_tokens && block.key >= 0 && block.key + block.keys <= sinks_end)
            return {Coverage::full, blocks_until(sinks_end, block.key, block.keys)};
        known = false;
        return {Coverage::partial, 1};
    }

    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key&) const override {
        return plane.position(row) + rows <= 0 || plane.position(row) >= tokens_.size();
    }

    void check(const Extent& extent) const override {
        if (extent.seq_k <= tokens_.size()) return;
        fail(SPATTN_E_SHAPE, "pattern",
             text("xref has ", tokens_.size(), " tokens for seq_k ", extent.seq_k,
                  "; accepted: at least seq_k tokens"));
    }

    std::string print() const override {
        const bool is_short = tokens_.ids.size() + tokens_.symbols.size() <= printed_numbers;
        const std::string lists =
            is_short ? '[' + list(tokens_.ids) + "],[" + list(tokens_.symbols) + ']' : digest_;
        return "xref(" + lists + ',' + list(numbers_of(params_)) + ')';
    }

    std::string identity() const override { return "xref(" + digest_ + ',' + list(numbers_of(params_)) + ')'; }

    void save(ByteWriter& out) const override {
        out.node(Node::xref);
        out.array(numbers_of(params_));
        out.array(tokens_.ids);
        out.array(tokens_.symbols);
    }

private:
    Tokens tokens_;
    XrefParams params_;
    std::string digest_;
    std::vector<int64_t> begin_{0};  // of each row's spans
    Spans spans_;
};

void check_tokens(const Tokens& tokens) {
    require_range(tokens.size(), 1, most_tokens, "token_ids");
    if (!tokens.symbols.empty() && tokens.symbols.size() != 2 * tokens.ids.size()) {
        fail(SPATTN_E_SHAPE, "symbols",
             text("has ", tokens.symbols.size(), " numbers for ", tokens.size(),
                  " tokens; accepted: two a token, or none"));
    }
    for (int64_t symbol : tokens.symbols) {
        if (symbol < none)
            fail(SPATTN_E_RANGE, "symbols", text("has ", symbol, "; accepted: -1 for none, or 0 and more"));
    }
}

void check_params(const XrefParams& p) {
    require_range(p.sinks, 0, most_tokens, "params.sinks");
    require_range(p.window, 1, most_tokens, "params.window");
    require_range(p.budget, p.sinks + p.window, 3 * most_tokens, "params.budget");
    require_range(p.links, 0, p.budget - p.sinks - p.window, "params.links");
    require_range(p.ngram_keys, 0, most_tokens, "params.ngram_keys");
    require_range(p.symbol_before, 0, most_tokens, "params.symbol_before");
    require_range(p.symbol_after, 0, most_tokens, "params.symbol_after");
    require_range(p.look_back, 0, most_tokens, "params.look_back");
    require_range(p.stop_ratio, 0, most_tokens, "params.stop_ratio");
}

}  // namespace

PatternRef make_xref(std::vector<int64_t> token_ids, std::vector<int64_t> symbols, const XrefParams& params) {
    check_params(params);
    Tokens tokens{std::move(token_ids), std::move(symbols)};
    check_tokens(tokens);
    return make_ref<Xref>(std::move(tokens), params);
}

XrefParams xref_params(const std::vector<int64_t>& numbers) {
    XrefParams params;
    for (size_t n = 0; n < std::min(numbers.size(), std::size(fields)); ++n) params.*fields[n] = numbers[n];
    constexpr size_t before_links = 3;
    if (numbers.size() <= before_links) params.links = params.default_links();
    return params;
}

}  // namespace spattn
