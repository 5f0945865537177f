// SPDX-License-Identifier: MIT
// A pattern answers one question: which keys may a query row see? Everything else here accelerates that answer.
//
// keys() is the meaning: sorted disjoint intervals of one row. classify() and row_key() are closed forms that let a
// layout be compiled in O(runs) instead of O(tokens * keys); tests compare them with keys().
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/math.h"
#include "core/ref.h"
#include "pattern/index_array.h"
#include "sparseattn/sparseattn.h"

namespace spattn {

class ByteWriter;

struct Interval {
    int64_t begin, end;  // keys [begin, end)
};
using Intervals = std::vector<Interval>;

// The rectangle a question is asked on; q_offset is resolved.
struct Extent {
    int64_t batch = 1, heads = 1, seq_q = 0, seq_k = 0, q_offset = 0;
};

// One (batch entry, query head) of an extent.
struct Plane {
    Extent extent;
    int64_t batch = 0, head = 0;
    int64_t position(int64_t row) const { return row + extent.q_offset; }
};

// The nominal rectangle rows [row, row + rows) x keys [key, key + keys). It may stick out of the extent at its ends;
// closed forms answer for the unbounded plane and the layout cuts.
struct Block {
    int64_t row, rows, key, keys;
};

// What a closed form knows of a block. repeat >= 1 says how many blocks from this one on, going along the keys in steps
// of Block::keys, have this same answer (forever: all that follow).
struct Coverage {
    enum Kind { empty, full, partial } kind;
    int64_t repeat;
};
constexpr int64_t forever = std::numeric_limits<int64_t>::max();

// Numbers that determine a mask (classify) or a whole row of blocks (row_key) of one pattern. Each node appends its
// own; equal keys from the same pattern and extent mean equal content.
using Key = std::vector<int64_t>;

// Tokens that stand out: keys that all queries would see, and queries that would see all keys, if the rest of the
// pattern let them (global tokens, landmarks). The pattern is `among` where `marks` keeps a pair and `apart` elsewhere.
struct HotTokens {
    std::vector<int64_t> keys, queries;  // of the extent (a query is its row), rising
    Ref<const spattn_pattern> marks;     // keeps the pairs that have one of them, and no other
    Ref<const spattn_pattern> among, apart;
    size_t size() const { return keys.size() + queries.size(); }
};

// Lists that come with each call: for each block of queries up to `most` blocks of keys. Tokens are blocks of 1.
struct RuntimeShape {
    int64_t block_q, block_k, most;
};

// spattn_xref with its defaults resolved: every 0 is a 0.
struct XrefParams {
    int64_t sinks = 32, window = 64, budget = 224, links = 112, ngram_keys = 7, symbol_before = 3, symbol_after = 10,
            look_back = 32, stop_ratio = 48;
    int64_t default_links() const { return std::max<int64_t>(0, std::min(budget / 2, budget - sinks - window)); }
};

}  // namespace spattn

// The handle of the C ABI is the abstract pattern itself.
struct spattn_pattern : spattn::RefCounted {
    // Appends the keys that `row` of the plane sees, cut to `clip`: sorted, disjoint, not touching, none empty. clip
    // may reach beyond [0, seq_k) on both sides: a transpose asks about positions that are no keys.
    virtual void keys(const spattn::Plane& plane, int64_t row, spattn::Interval clip, spattn::Intervals& out) const = 0;

    // Closed form of a block. partial with `known` left true: `key` gained the numbers that determine the mask. A
    // pattern without a closed form sets `known` to false and answers partial, 1. On empty and full, `key` is as it
    // was. empty and full are certain; partial of a composition may turn out to be either once its bits are made.
    virtual spattn::Coverage classify(const spattn::Plane& plane, const spattn::Block& block, spattn::Key& key,
                                      bool& known) const;

    // Not null where the keys are listed at run time: then keys() fails, and what is known before is known_part().
    virtual const spattn::RuntimeShape* runtime() const;

    // A pattern with lists at run time returns what else a listed key must satisfy; null where nothing else is asked.
    virtual spattn::Ref<const spattn_pattern> known_part() const;

    // Appends numbers that determine the whole row of blocks [row, row + rows) and returns true, or returns false where
    // every row differs.
    virtual bool row_key(const spattn::Plane& plane, int64_t row, int64_t rows, spattn::Key& key) const;

    // Appends numbers that determine what the row of blocks sees of the keys before the one that it returns: rows with
    // equal numbers see the same of all keys before those of either. Causal rows all differ, but up to the diagonal of
    // the shorter one they do not. Returns `lowest` (intervals.h), and appends nothing, where nothing is known.
    virtual int64_t stem_key(const spattn::Plane& plane, int64_t row, int64_t rows, spattn::Key& key) const;

    // Appends what per_head and per_batch choose for this plane: planes with equal keys see the same.
    virtual void selection(const spattn::Plane& plane, spattn::Key& key) const;

    // Fails with a typed error where the pattern means nothing on this extent.
    virtual void check(const spattn::Extent& extent) const;

    // The text form as given, which parse() reads back (lists beyond 64 numbers as #hash).
    virtual std::string print() const = 0;

    // Canonical bytes: equal patterns, by the rules of equality in the header, have equal bytes.
    virtual std::string identity() const = 0;

    // Appends the pattern in the form of pattern/bytes.h.
    virtual void save(spattn::ByteWriter& out) const = 0;

    // A pattern that means transpose(this) and has closed forms, or null where there is none.
    virtual spattn::Ref<const spattn_pattern> transposed() const;

    // Whether it counts query rows from the extent's first one, wherever that one stands.
    virtual bool counts_rows() const { return false; }

    // Whether it reads arrays that its caller keeps: nothing may outlive what the caller holds of it.
    virtual bool borrows() const { return false; }

    // Bytes of the arrays that it holds, and its parts do, so far as they may be many: what a plan costs who keeps it.
    // An array that several parts share counts for each.
    virtual size_t bytes() const { return 0; }

    // The largest m found such that p sees no key but those with k = p (mod m): residue classes keep to themselves.
    // 1 where none is known, 0 where any will do: nothing is kept but k = p.
    virtual int64_t modulus() const;

    // So many keys further on, or queries, the pattern looks alike, up to the ends of its bands and documents; `forever`
    // where that is too far for a number. 1 where any number will do, and where none is known.
    virtual int64_t period() const;

    // The pattern among the positions and keys that are `residue` mod `modulus`, counted within that residue class:
    // p = residue + modulus * p', k = residue + modulus * k'. Null where there is no closed form, for every
    // residue alike. Whether residue classes keep to themselves does not matter here: what leaves one is cut.
    // 0 <= residue < modulus.
    virtual spattn::Ref<const spattn_pattern> in_residue(int64_t modulus, int64_t residue) const;

    // Nothing where no token stands out, or so many do that they are no exception.
    virtual std::optional<spattn::HotTokens> hot(const spattn::Extent& extent) const;

    // Patterns that share no pair and together are this one, cut so that each keeps to a modulus of its own: what is
    // dense in residue classes apart from what is dense as it is. This one alone where there is nothing to cut.
    virtual std::vector<spattn::Ref<const spattn_pattern>> pieces() const;

    // How deep and how large the composition is from this node down; shared parts count each time. Both are bounded
    // when a node is made, so that no walk over a pattern can exhaust the stack or take for ever.
    int32_t levels = 1, nodes = 1;
};

namespace spattn {

using Pattern = ::spattn_pattern;
using PatternRef = Ref<const Pattern>;
using Patterns = std::vector<PatternRef>;

// One function a pattern, each in the file of its name. Arguments are checked; a bad one is a typed error.
PatternRef make_full();
PatternRef make_causal();
PatternRef make_window(int64_t left, int64_t right);
PatternRef make_sink(int64_t tokens);
PatternRef make_block_diagonal(int64_t block);
PatternRef make_documents(std::vector<int64_t> cu_seqlens);
PatternRef make_dilated(int64_t left, int64_t right, int64_t dilation);
PatternRef make_strided(int64_t stride);
PatternRef make_landmark(int64_t block, int64_t landmarks);
PatternRef make_fixed(int64_t block, int64_t landmarks);
PatternRef make_logsparse();
PatternRef make_residue(int64_t modulus, int64_t offset);
PatternRef make_global_keys(std::vector<int64_t> positions);
PatternRef make_global_tokens(std::vector<int64_t> positions);
PatternRef make_tree(std::vector<int64_t> parents);
PatternRef make_bigbird(int64_t block, int64_t window_blocks, int64_t global_blocks, int64_t random_blocks,
                        uint64_t seed);
// symbols: open and completed of each token, one after the other, or nothing.
PatternRef make_xref(std::vector<int64_t> token_ids, std::vector<int64_t> symbols, const XrefParams& params);
// The pattern of the text of `pattern`, an xref, and these tokens after it.
PatternRef extend_xref(const PatternRef& pattern, std::vector<int64_t> token_ids, std::vector<int64_t> symbols);
// numbers: the first fields of XrefParams, up to 9; the others have their defaults.
XrefParams xref_params(const std::vector<int64_t>& numbers);
PatternRef make_csr(IndexArray row_ptr, IndexArray col_idx, int64_t seq_k, bool is_trusted);
PatternRef make_bsr(IndexArray row_ptr, IndexArray col_idx, int64_t block_q, int64_t block_k, int64_t seq_q,
                    int64_t seq_k, bool is_trusted);
PatternRef make_mask(const std::vector<int64_t>& values, const std::vector<int64_t>& shape);  // shape: 2 to 4 sizes
PatternRef make_predicate(spattn_keep_fn keep, void* user, int64_t heads, int64_t seq_q, int64_t seq_k);
PatternRef make_runtime_tokens(int64_t max_tokens);
PatternRef make_runtime_blocks(int64_t block_q, int64_t block_k, int64_t max_blocks);
PatternRef make_union(Patterns parts);
PatternRef make_intersection(Patterns parts);
PatternRef make_difference(PatternRef a, PatternRef b);
PatternRef make_difference(Patterns parts);  // the first one without all the others
PatternRef make_transpose(PatternRef pattern);
// Fails where a grid may not have so many axes.
void check_axes(size_t axes);
// `tile` may be empty: the whole grid is one tile.
PatternRef make_grid(std::vector<int64_t> sizes, std::vector<int64_t> tile, Patterns parts);
PatternRef make_per_head(Patterns parts, std::vector<int32_t> part_of_head);
PatternRef make_per_batch(Patterns parts, std::vector<int32_t> part_of_batch);
PatternRef make_per_document(PatternRef inner, std::vector<int64_t> cu_q, std::vector<int64_t> cu_k);
// bounds: begin and end of each range, one after the other.
PatternRef make_rows(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q);
// The same where the extent has as many keys as inner queries, and q_offset 0: its rows then stand at known positions,
// and keep to residue classes where ranges allow it.
PatternRef make_rows_from_zero(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_q);
PatternRef make_columns(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_k);
// The same where inner queries, too, have q_offset 0, as those of the extent.
PatternRef make_columns_from_zero(PatternRef inner, std::vector<int64_t> bounds, int64_t seq_k);

PatternRef parse_pattern(const std::string& text);
std::string save_pattern(const Pattern& pattern);
size_t saved_size(const Pattern& pattern);  // in bytes, without the time that their hash takes
PatternRef load_pattern(const void* bytes, size_t size);  // SPATTN_E_FORMAT where they are not what save_pattern made
uint64_t hash_identity(std::string_view identity);        // the same in every process and release

}  // namespace spattn
