// SPDX-License-Identifier: MIT
// Builds a layout row of blocks by row of blocks. A row whose row_key() was met before is reused; for the others
// classify() is asked along the keys, a run at a time. The closed form names masks by keys: bits are computed once for
// each key, and masks with equal bits become one. A causal layout of any length has one mask.
//
//     row of blocks   ........ffffffffffm....   . empty: skipped  f full: a run  m mask: found by key, else by bits
#include "layout/build.h"

#include <algorithm>

#include "core/cancel.h"
#include "core/error.h"
#include "layout/head_kinds.h"
#include "layout/fill.h"
#include "layout/layout.h"
#include "layout/live.h"
#include "layout/tables.h"

namespace spattn {
namespace {

constexpr int32_t unresolved = -3;  // a mask whose bits are still to be computed

// Builds the by_query lists, row after row of one kind of heads after the other.
class RowBuilder {
public:
    RowBuilder(const Pattern& pattern, Layout& layout)
        : pattern_(pattern), layout_(layout), bits_(pattern, layout.extent, layout.block_q, layout.block_k),
          masks_(layout), slices_(layout.by_query), columns_(blocks(layout.extent.seq_k, layout.block_k)),
          whole_columns_(int32_t(layout.extent.seq_k / layout.block_k)) {}

    void build(const Plane& plane, int32_t head_kind) {
        head_kind_ = head_kind;
        for (int32_t row = 0; row < layout_.by_query.rows; ++row)
            layout_.by_query.slices.push_back(build_row(plane, int64_t(row) * layout_.block_q));
    }

    // The last row first: of those that share a stem it has the longest.
    void build_on_stems(const Plane& plane, int32_t head_kind) {
        head_kind_ = head_kind;
        Lists& lists = layout_.by_query;
        const size_t first = lists.slices.size(), end = first + size_t(lists.rows);
        lists.slices.resize(end), lists.stems.resize(end);
        for (int32_t row = lists.rows; row-- > 0;) {
            const size_t at = first + size_t(row);
            build_row_on_stem(plane, int64_t(row) * layout_.block_q, lists.stems[at], lists.slices[at]);
        }
    }

    static int32_t blocks(int64_t tokens, int32_t block) { return int32_t((tokens + block - 1) / block); }

private:
    // Blocks [first, first + count) of the row. memo >= 0: where masks_memo_ has the mask; slot >= 0: which bits it
    // has.
    struct Entry {
        int32_t first, count, mask, memo, slot;
    };

    // What rows share, as far as one of them went: all blocks before column `end`.
    struct Stem {
        Slice slice;
        int32_t end;
    };

    void begin_row(int64_t row) {
        rows_ = int32_t(std::min<int64_t>(layout_.block_q, layout_.extent.seq_q - row));
        key_.clear();
    }

    Slice build_row(const Plane& plane, int64_t row) {
        begin_row(row);
        if (!pattern_.row_key(plane, row, layout_.block_q, key_)) return compile_row(plane, row, 0, columns_);
        key_.push_back(int64_t(head_kind_) << 16 | rows_);
        const int32_t id = rows_memo_.at(key_, Slice{-1, -1});
        if (rows_memo_.values[id].begin < 0) {
            const Slice slice = compile_row(plane, row, 0, columns_);
            rows_memo_.values[id] = slice;
        }
        return rows_memo_.values[id];
    }

    // The run that reaches the end of the stem may go on behind it, and is the row's own.
    void build_row_on_stem(const Plane& plane, int64_t row, Slice& of_stem, Slice& own) {
        begin_row(row);
        const Stem stem = find_stem(plane, row);
        const std::vector<Run>& runs = layout_.by_query.runs;
        const auto begin = runs.begin() + stem.slice.begin, end = runs.begin() + stem.slice.end;
        const auto last =
            std::partition_point(begin, end, [&](const Run& run) { return run.first + run.count < stem.end; });
        of_stem = last == begin ? Slice{0, 0} : Slice{stem.slice.begin, int32_t(last - runs.begin())};
        if (last != end && last->first < stem.end) {
            const Run reaching = *last;
            slices_.add({reaching.first, std::min(reaching.count, stem.end - reaching.first), reaching.mask});
        }
        own = compile_row(plane, row, stem.end, columns_);
    }

    Stem find_stem(const Plane& plane, int64_t row) {
        const int64_t key = pattern_.stem_key(plane, row, layout_.block_q, key_);
        const int32_t end =
            key >= layout_.extent.seq_k ? columns_ : int32_t(std::max<int64_t>(key, 0) / layout_.block_k);
        if (end == 0) return {{0, 0}, 0};
        key_.push_back(int64_t(head_kind_) << 16 | rows_);
        const int32_t id = stems_memo_.at(key_, Stem{{0, 0}, -1});
        if (stems_memo_.values[id].end < 0) {
            const Slice slice = compile_row(plane, row, 0, end);
            stems_memo_.values[id] = {slice, end};
        }
        const Stem& known = stems_memo_.values[id];
        return {known.slice, std::min(known.end, end)};
    }

    // Columns [begin, end) of a row. What follows a stem lies about a diagonal, which no two rows share.
    Slice compile_row(const Plane& plane, int64_t row, int32_t begin, int32_t end) {
        entries_.clear();
        bits_.clear();
        walk(plane, row, begin, end);
        if (bits_.size() > 0) resolve();
        for (const Entry& entry : entries_) {
            const int32_t mask = entry.slot < 0 ? entry.mask : slot_masks_[entry.slot];
            if (mask != absent_block) slices_.add({entry.first, entry.count, mask});
        }
        return begin > 0 ? slices_.finish_beside() : slices_.finish();
    }

    void walk(const Plane& plane, int64_t row, int32_t begin, int32_t end) {
        for (int32_t column = begin; column < end;) {
            check_cancelled();
            key_.clear();
            bool known = true;
            const Block block{row, layout_.block_q, int64_t(column) * layout_.block_k, layout_.block_k};
            const Coverage coverage = pattern_.classify(plane, block, key_, known);
            if (coverage.kind == Coverage::partial && !known) {
                bits_.fill(plane, row);  // what was wanted so far; the rest comes from the rows themselves
                take_rest(plane, row, column, end);
                return;
            }
            // The last block may stick out beyond the end. Its mask is then another one, so no run goes on into it.
            const int32_t last = column < whole_columns_ ? std::min(whole_columns_, end) : end;
            const int32_t count = int32_t(std::min<int64_t>(coverage.repeat, last - column));
            if (coverage.kind != Coverage::empty) add(column, count, coverage.kind);
            column += count;
        }
        bits_.fill(plane, row);
    }

    void add(int32_t column, int32_t count, Coverage::Kind kind) {
        const int64_t left = layout_.extent.seq_k - int64_t(column) * layout_.block_k;
        const int64_t keys = std::min<int64_t>(layout_.block_k, left);
        const bool is_cut = rows_ < layout_.block_q || keys < layout_.block_k;
        if (kind == Coverage::full && !is_cut) {
            entries_.push_back({column, count, full_block, -1, -1});
            return;
        }
        // Where the sequence ends inside a block is part of what determines its mask.
        key_.push_back(int64_t(head_kind_) << 32 | keys << 20 | int64_t(rows_) << 4 | int64_t(kind));
        const int32_t memo = masks_memo_.at(key_, unresolved);
        int32_t& mask = masks_memo_.values[memo];
        if (mask == unresolved) mask = first_slot - bits_.want(column);
        if (mask <= first_slot)
            entries_.push_back({column, count, unresolved, memo, first_slot - mask});
        else if (mask != absent_block)
            entries_.push_back({column, count, mask, -1, -1});
    }

    // Some columns at a time: a row that keeps a key in two lists very many intervals.
    void take_rest(const Plane& plane, int64_t row, int32_t column, int32_t end) {
        constexpr int32_t most_columns = 1 << 16;
        for (int32_t next; column < end; column = next) {
            next = end - column > most_columns ? column + most_columns : end;
            const int32_t first = bits_.size();
            bits_.fill_rest(plane, row, column, next);
            for (int32_t slot = first; slot < bits_.size(); ++slot)
                entries_.push_back({bits_.column(slot), 1, unresolved, -1, slot});
            std::sort(entries_.end() - (bits_.size() - first), entries_.end(),
                      [](const Entry& a, const Entry& b) { return a.first < b.first; });
        }
    }

    // Gives every computed mask its id, and tells it to the memo.
    void resolve() {
        slot_masks_.clear();
        for (int32_t slot = 0; slot < bits_.size(); ++slot) slot_masks_.push_back(masks_.intern(bits_.bits(slot)));
        for (const Entry& entry : entries_)
            if (entry.memo >= 0) masks_memo_.values[entry.memo] = slot_masks_[entry.slot];
    }

    // Values of masks_memo_ at and below this one are slots of the row at hand: first_slot - slot.
    static constexpr int32_t first_slot = unresolved - 1;

    const Pattern& pattern_;
    Layout& layout_;
    BlockRowBits bits_;
    MaskTable masks_;
    SliceTable slices_;
    int32_t columns_, whole_columns_;  // whole: those that do not stick out
    int32_t head_kind_ = 0, rows_ = 0;
    Key key_;
    KeyMemo<Slice> rows_memo_;
    KeyMemo<Stem> stems_memo_;
    KeyMemo<int32_t> masks_memo_;
    std::vector<Entry> entries_;
    std::vector<int32_t> slot_masks_;
};

using BuildKind = void (RowBuilder::*)(const Plane&, int32_t);

Layout build_lists(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k, BuildKind build) {
    require_range(block_q, 1, max_block, "block_q");
    require_range(block_k, 1, max_block, "block_k");
    pattern.check(extent);
    Layout layout;
    layout.extent = extent;
    layout.block_q = block_q;
    layout.block_k = block_k;
    layout.mask_words = words_for(int64_t(block_q) * block_k);
    layout.by_query.rows = layout.queries.residue_tiles = RowBuilder::blocks(extent.seq_q, block_q);
    layout.keys.residue_tiles = RowBuilder::blocks(extent.seq_k, block_k);
    layout.by_key.rows = layout.keys.residue_tiles;
    const std::vector<Plane> planes = find_head_kinds(pattern, layout);
    layout.by_query.slices.reserve(size_t(layout.head_kinds) * layout.by_query.rows);

    RowBuilder rows(pattern, layout);
    for (int32_t c = 0; c < layout.head_kinds; ++c) (rows.*build)(planes[c], c);
    return layout;
}

}  // namespace

Layout build_query_lists(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k) {
    return build_lists(pattern, extent, block_q, block_k, &RowBuilder::build);
}

Layout build_stem_lists(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k) {
    Layout layout = build_lists(pattern, extent, block_q, block_k, &RowBuilder::build_on_stems);
    std::vector<Slice>& stems = layout.by_query.stems;
    const auto is_empty = [](const Slice& stem) { return stem.begin == stem.end; };
    if (std::all_of(stems.begin(), stems.end(), is_empty)) stems = {};
    return layout;
}

Layout build_layout(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k) {
    Layout layout = build_query_lists(pattern, extent, block_q, block_k);
    layout.by_key = transpose_lists(layout.by_query, layout.head_kinds, layout.keys.residue_tiles);
    build_live(layout);
    return layout;
}

}  // namespace spattn
