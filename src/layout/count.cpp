// SPDX-License-Identifier: MIT
#include <algorithm>
#include <bit>

#include "layout/layout.h"
#include "layout/tables.h"

namespace spattn {
namespace {

// Kept keys of each row of each mask, [num_masks * block_q].
std::vector<int32_t> count_mask_rows(const Layout& layout) {
    std::vector<int32_t> kept(size_t(layout.num_masks) * layout.block_q);
    for (int32_t mask = 0; mask < layout.num_masks; ++mask)
        for (int32_t row = 0; row < layout.block_q; ++row)
            for (int32_t key = 0; key < layout.block_k; key += 64)
                kept[size_t(mask) * layout.block_q + row] +=
                    std::popcount(get_bits(&layout.masks[size_t(mask) * layout.mask_words],
                                           int64_t(row) * layout.block_k + key, std::min(64, layout.block_k - key)));
    return kept;
}

// What one list says, for one (batch, head).
struct RowCounts {
    int64_t full = 0, partial = 0, pairs = 0, row_min = 0, row_max = 0, rows_empty = 0;
};

class RowCounter {
public:
    explicit RowCounter(const Layout& layout)
        : layout_(layout), mask_rows_(count_mask_rows(layout)), kept_(layout.block_q),
          known_(layout.by_query.runs.size() + 1, unknown) {}

    // Slices are shared, so most rows are known. The last row may stick out: `rows` of it lie within the sequence.
    RowCounts count(Slice slice, int32_t rows) {
        if (rows < layout_.block_q) return measure(slice, rows);
        const bool is_empty = slice.begin == slice.end;
        int32_t& id = known_[is_empty ? layout_.by_query.runs.size() : size_t(slice.begin)];
        if (id == unknown) {
            id = int32_t(measured_.size());
            measured_.push_back(measure(slice, rows));
        }
        return measured_[id];
    }

private:
    static constexpr int32_t unknown = -1;

    RowCounts measure(Slice slice, int32_t rows) {
        RowCounts counts;
        std::fill(kept_.begin(), kept_.end(), 0);
        for (int32_t i = slice.begin; i < slice.end; ++i) {
            const Run& run = layout_.by_query.runs[i];
            (run.mask == full_block ? counts.full : counts.partial) += run.count;
            if (run.mask == full_block) continue;
            const int32_t* of_mask = &mask_rows_[size_t(run.mask) * layout_.block_q];
            for (int32_t row = 0; row < layout_.block_q; ++row) kept_[row] += int64_t(of_mask[row]) * run.count;
        }
        counts.row_min = counts.row_max = kept_[0];
        for (int32_t row = 0; row < rows; ++row) {
            counts.pairs += kept_[row];
            counts.row_min = std::min(counts.row_min, kept_[row]);
            counts.row_max = std::max(counts.row_max, kept_[row]);
            counts.rows_empty += kept_[row] == 0 && counts.full == 0;
        }
        // Full blocks add the same to every row.
        counts.pairs += counts.full * layout_.block_k * rows;
        counts.row_min += counts.full * layout_.block_k;
        counts.row_max += counts.full * layout_.block_k;
        return counts;
    }

    const Layout& layout_;
    std::vector<int32_t> mask_rows_;
    std::vector<int64_t> kept_;       // [block_q]
    std::vector<RowCounts> measured_;
    std::vector<int32_t> known_;      // of the slice that begins at a run; the last: of empty ones
};

void add(Counts& total, const RowCounts& row, int64_t columns, int64_t heads) {
    total.pairs += double(row.pairs) * double(heads);
    total.blocks_full += row.full * heads;
    total.blocks_partial += row.partial * heads;
    total.blocks_empty += (columns - row.full - row.partial) * heads;
    total.row_min = std::min(total.row_min, row.row_min);
    total.row_max = std::max(total.row_max, row.row_max);
    total.rows_empty += row.rows_empty * heads;
}

}  // namespace

Counts count(const Layout& layout) {
    Counts total;
    total.row_min = layout.extent.seq_k;
    RowCounter counter(layout);
    std::vector<int64_t> heads(layout.classes);
    for (int32_t c : layout.class_of) ++heads[c];
    const int32_t rows = layout.by_query.rows;
    for (int32_t c = 0; c < layout.classes; ++c)
        for (int32_t row = 0; row < rows; ++row) {
            const int64_t left = layout.extent.seq_q - int64_t(row) * layout.block_q;
            const int32_t inside = int32_t(std::min<int64_t>(left, layout.block_q));
            const Slice slice = layout.by_query.slices[size_t(c) * rows + row];
            add(total, counter.count(slice, inside), layout.by_key.rows, heads[c]);
        }
    total.visited = double(total.blocks_full + total.blocks_partial) * layout.block_q * layout.block_k;
    return total;
}

}  // namespace spattn
