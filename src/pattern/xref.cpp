// SPDX-License-Identifier: MIT
// xref([ids],[symbols],numbers): sinks, a window, and spans around earlier places where the last tokens, the identifier
// being typed or those just typed already occurred. The header defines it; pattern/xref_index.h finds the places.
//
// N-gram heads (https://arxiv.org/abs/2401.12973) look up what followed the last tokens before, SparseCoder
// (https://arxiv.org/abs/2401.14727) and LongCoder (https://arxiv.org/abs/2306.14893) link identifiers. Ours joins both
// in one causal mask, the most specific links first, under one budget for all rows.
#include <atomic>
#include <memory>

#include "core/error.h"
#include "pattern/bytes.h"
#include "pattern/index_pattern.h"
#include "pattern/leaf.h"
#include "pattern/xref_index.h"

namespace spattn {
namespace {

constexpr int64_t none = -1;

// Tokens that join a text.
struct Tokens {
    std::vector<int64_t> ids, symbols;  // symbols: open, completed of each token; empty where none has any
    int64_t size() const { return int64_t(ids.size()); }
    int64_t symbol(int64_t token, int64_t which) const {
        return symbols.empty() ? none : symbols[size_t(2 * token + which)];
    }
};

// Some consecutive tokens of a text and what they see. Patterns of a text that goes on share those that are full.
constexpr size_t stretch_tokens = 512;
struct Stretch {
    std::vector<int64_t> ids, symbols;
    std::vector<int64_t> end;  // of each row's spans
    Spans spans;
};

// In the order of the text.
constexpr int64_t XrefParams::*fields[] = {
    &XrefParams::sinks,        &XrefParams::window,     &XrefParams::budget,
    &XrefParams::links,        &XrefParams::ngram_keys, &XrefParams::symbol_before,
    &XrefParams::symbol_after, &XrefParams::look_back,  &XrefParams::stop_ratio};

std::vector<int64_t> numbers_of(const XrefParams& params) {
    std::vector<int64_t> numbers;
    for (const auto field : fields) numbers.push_back(params.*field);
    return numbers;
}

class Xref : public Pattern {
public:
    Xref(const XrefParams& params, const Tokens& tokens) : params_(params) {
        XrefIndex index(params);
        append(tokens, index);
    }

    // `index` has all tokens of `before`.
    Xref(const Xref& before, std::unique_ptr<XrefIndex> index, const Tokens& tokens)
        : stretches_(before.stretches_),
          size_(before.size_),
          has_symbols_(before.has_symbols_),
          params_(before.params_),
          tokens_digest_(before.tokens_digest_) {
        append(tokens, *index);
        index_ = index.release();
    }

    ~Xref() override { delete index_.load(std::memory_order_relaxed); }

    int64_t size() const { return size_; }

    // The longer pattern takes over the index. A pattern that has none, since it was made at once or was extended
    // before, makes one anew.
    PatternRef extend(const Tokens& tokens) const {
        std::unique_ptr<XrefIndex> index(index_.exchange(nullptr));
        return make_ref<Xref>(*this, index ? std::move(index) : make_index(), tokens);
    }

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        const int64_t p = plane.position(row);
        if (p < 0 || p >= size_) return;
        const Stretch& stretch = *stretches_[size_t(p) / stretch_tokens];
        const size_t token = size_t(p) % stretch_tokens;
        Cutter cutter(clip, out);
        for (int64_t s = token ? stretch.end[token - 1] : 0; s < stretch.end[token]; ++s) {
            const Span& span = stretch.spans[size_t(s)];
            if (span.begin >= clip.end) return;
            cutter.add(span.begin, span.end);
        }
    }

    // Between the sinks and the window every row differs.
    Coverage classify(const Plane& plane, const Block& block, Key&, bool& known) const override {
        const int64_t first = plane.position(block.row), last = first + block.rows - 1;
        if (last < 0 || first >= size_ || block.key > last) return {Coverage::empty, forever};
        if (block.key + block.keys <= 0) return {Coverage::empty, blocks_until(0, block.key, block.keys)};
        const bool all_rows_are_tokens = first >= 0 && last < size_;
        const int64_t sinks_end = std::min(params_.sinks, first + 1);
        if (all_rows_are_tokens && block.key >= 0 && block.key + block.keys <= sinks_end)
            return {Coverage::full, blocks_until(sinks_end, block.key, block.keys)};
        known = false;
        return {Coverage::partial, 1};
    }

    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key&) const override {
        return plane.position(row) + rows <= 0 || plane.position(row) >= size_;
    }

    void check(const Extent& extent) const override {
        if (extent.seq_k <= size_) return;
        fail(SPATTN_E_SHAPE, "pattern",
             text("xref has ", size_, " tokens for seq_k ", extent.seq_k, "; accepted: at least seq_k tokens"));
    }

    std::string print() const override {
        const bool is_short = uint64_t(has_symbols_ ? 3 * size_ : size_) <= printed_numbers;
        return text_with(is_short ? '[' + list(ids()) + "],[" + list(symbols()) + ']' : digest_);
    }

    std::string identity() const override { return text_with(digest_); }

    size_t bytes() const override {
        size_t bytes = 0;
        for (const auto& stretch : stretches_) {
            const size_t numbers = stretch->ids.capacity() + stretch->symbols.capacity() + stretch->end.capacity();
            bytes += numbers * sizeof(int64_t) + stretch->spans.capacity() * sizeof(Span);
        }
        return bytes;
    }

    void save(ByteWriter& out) const override {
        out.node(Node::xref);
        out.array(numbers_of(params_));
        out.array(ids());
        out.array(symbols());
    }

private:
    void append(const Tokens& tokens, XrefIndex& index) {
        std::shared_ptr<Stretch> open;
        if (size_t(size_) % stretch_tokens) {
            open = std::make_shared<Stretch>(*stretches_.back());
            stretches_.back() = open;
        }
        for (int64_t i = 0; i < tokens.size(); ++i, ++size_) {
            if (size_t(size_) % stretch_tokens == 0) stretches_.push_back(open = new_stretch());
            const int64_t id = tokens.ids[size_t(i)], symbol = tokens.symbol(i, 0), completed = tokens.symbol(i, 1);
            index.append(id, symbol, completed, open->spans);
            open->end.push_back(int64_t(open->spans.size()));
            open->ids.push_back(id);
            for (int64_t number : {symbol, completed}) open->symbols.push_back(number);
            for (int64_t number : {id, symbol, completed}) tokens_digest_.add(uint64_t(number));
            has_symbols_ |= symbol != none || completed != none;
        }
        Digest digest = tokens_digest_;
        digest.add(uint64_t(size_));
        digest_ = digest.hex();
    }

    static std::shared_ptr<Stretch> new_stretch() {
        auto stretch = std::make_shared<Stretch>();
        stretch->ids.reserve(stretch_tokens);
        stretch->symbols.reserve(2 * stretch_tokens);
        stretch->end.reserve(stretch_tokens);
        return stretch;
    }

    std::unique_ptr<XrefIndex> make_index() const {
        auto index = std::make_unique<XrefIndex>(params_);
        Spans known;
        for (const auto& stretch : stretches_) {
            for (size_t i = 0; i < stretch->ids.size(); ++i) {
                known.clear();
                index->append(stretch->ids[i], stretch->symbols[2 * i], stretch->symbols[2 * i + 1], known);
            }
        }
        return index;
    }

    std::vector<int64_t> joined(std::vector<int64_t> Stretch::*part) const {
        std::vector<int64_t> all;
        for (const auto& stretch : stretches_) {
            const std::vector<int64_t>& some = (*stretch).*part;
            all.insert(all.end(), some.begin(), some.end());
        }
        return all;
    }
    std::vector<int64_t> ids() const { return joined(&Stretch::ids); }
    std::vector<int64_t> symbols() const { return has_symbols_ ? joined(&Stretch::symbols) : std::vector<int64_t>(); }

    std::string text_with(const std::string& tokens) const {
        return "xref(" + tokens + ',' + list(numbers_of(params_)) + ')';
    }

    std::vector<std::shared_ptr<const Stretch>> stretches_;
    int64_t size_ = 0;
    bool has_symbols_ = false;
    XrefParams params_;
    Digest tokens_digest_;
    std::string digest_;
    // Kept for the next extension where this pattern is one itself, else null. Who extends it takes it.
    mutable std::atomic<XrefIndex*> index_ = nullptr;
};

// `before`: tokens that the text has already.
void check_tokens(const Tokens& tokens, int64_t before) {
    require_range(before + tokens.size(), 1, most_tokens, "token_ids");
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
    const Tokens tokens{std::move(token_ids), std::move(symbols)};
    check_tokens(tokens, 0);
    return make_ref<Xref>(params, tokens);
}

PatternRef extend_xref(const PatternRef& pattern, std::vector<int64_t> token_ids, std::vector<int64_t> symbols) {
    const auto* xref = dynamic_cast<const Xref*>(pattern.get());
    if (!xref) fail(SPATTN_E_ARGUMENT, "pattern", text("is ", pattern->print(), "; accepted: xref(...) itself"));
    const Tokens tokens{std::move(token_ids), std::move(symbols)};
    check_tokens(tokens, xref->size());
    return xref->extend(tokens);
}

XrefParams xref_params(const std::vector<int64_t>& numbers) {
    XrefParams params;
    for (size_t n = 0; n < std::min(numbers.size(), std::size(fields)); ++n) params.*fields[n] = numbers[n];
    constexpr size_t before_links = 3;
    if (numbers.size() <= before_links) params.links = params.default_links();
    return params;
}

}  // namespace spattn
