// SPDX-License-Identifier: MIT
#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "core/cancel.h"
#include "core/math.h"
#include "layout/layout.h"
#include "layout/tables.h"

namespace spattn {
namespace {

// Kept keys of each row of each mask, [num_masks * block_q]: up to a block's 1,024 keys. Of many masks this is a
// gigabyte, whose pages are met one by one in a loop that can be cancelled.
std::vector<uint16_t> count_mask_rows(const Layout& layout) {
    std::vector<uint16_t> kept;
    kept.reserve(size_t(layout.num_masks) * layout.block_q);
    for (int32_t mask = 0; mask < layout.num_masks; ++mask) {
        check_cancelled();
        const uint64_t* bits = &layout.masks[size_t(mask) * layout.mask_words];
        for (int32_t row = 0; row < layout.block_q; ++row) {
            int32_t keys = 0;
            for (int32_t key = 0; key < layout.block_k; key += 64)
                keys += std::popcount(
                    get_bits(bits, int64_t(row) * layout.block_k + key, std::min(64, layout.block_k - key)));
            kept.push_back(uint16_t(keys));
        }
    }
    return kept;
}

// What one list comes to, for one (batch, head).
struct RowCounts {
    int64_t full = 0, partial = 0, pairs = 0;
    int64_t row_min = 0, row_max = 0, rows_empty = 0;  // of its queries, as far as they are in this list
};

class RowCounter {
public:
    explicit RowCounter(const Layout& layout)
        : layout_(layout), mask_rows_(count_mask_rows(layout)), kept_(layout.block_q), times_(layout.num_masks),
          known_(layout.by_query.runs.size() + 1, unknown) {
        measured_.reserve(layout.by_query.slices.size());  // at most; what is not used is not touched
    }

    // Counts a row of blocks in which `rows` queries have a token: at least one, and all but where it sticks out.
    // Slices are shared, so most counts are known. Valid until the next.
    const RowCounts& count(Slice slice, int32_t rows) {
        if (rows < layout_.block_q) return measured_.emplace_back(measure(slice, rows));
        const bool is_empty = slice.begin == slice.end;
        int32_t& id = known_[is_empty ? layout_.by_query.runs.size() : size_t(slice.begin)];
        if (id == unknown) {
            id = int32_t(measured_.size());
            measured_.push_back(measure(slice, rows));
        }
        return measured_[id];
    }

    // The same of a row that has a stem. Rows come in the order in which stems grow, by and large, so what a stem comes
    // to follows from what it came to last.
    RowCounts count(Slice stem, Slice own, int32_t rows) {
        kept_.assign(kept_.size(), 0);
        RowCounts counts;
        if (stem.begin < stem.end) {
            Sums& grown = grown_.try_emplace(stem.begin, Sums{stem.begin, {}, {}}).first->second;
            grown.kept.resize(kept_.size());
            add({grown.end, stem.end}, 1, grown.counts, grown.kept);
            add({stem.end, grown.end}, -1, grown.counts, grown.kept);
            grown.end = stem.end;
            counts = grown.counts;
            std::copy(grown.kept.begin(), grown.kept.end(), kept_.begin());
        }
        add(own, 1, counts, kept_);
        return sum_kept(rows, counts);
    }

    // Keys that each row of a list keeps, [block_q].
    const std::vector<int64_t>& count_rows(Slice slice, RowCounts& counts) {
        tally(slice, counts);
        sum_masks();
        for (int64_t& kept : kept_) {
            kept += counts.full * layout_.block_k;
            counts.pairs += kept;
        }
        return kept_;
    }

private:
    static constexpr int32_t unknown = -1;

    // What a stem's runs up to one come to.
    struct Sums {
        int32_t end;
        RowCounts counts;
        std::vector<int64_t> kept;  // [block_q]
    };

    // Adds blocks so many times to `counts`, and what each row keeps of those that are not full to `kept`.
    void add(Slice slice, int64_t times, RowCounts& counts, std::vector<int64_t>& kept) {
        check_cancelled();
        for (int32_t i = slice.begin; i < slice.end; ++i) {
            const Run& run = layout_.by_query.runs[i];
            const int64_t blocks = times * run.count;
            (run.mask == full_block ? counts.full : counts.partial) += blocks;
            if (run.mask == full_block) continue;
            const uint16_t* of_mask = &mask_rows_[size_t(run.mask) * layout_.block_q];
            for (int32_t row = 0; row < layout_.block_q; ++row) kept[row] += of_mask[row] * blocks;
        }
    }

    // Lists of a window differ in where their masks lie, not in which masks they have, and share those sums.
    RowCounts measure(Slice slice, int32_t rows) {
        RowCounts counts;
        tally(slice, counts);
        const RowCounts sums = sum_of_masks(rows);
        const int64_t full_keys = counts.full * layout_.block_k;  // of every row
        counts.pairs = sums.pairs + full_keys * rows;
        counts.row_min = sums.row_min + full_keys;
        counts.row_max = sums.row_max + full_keys;
        counts.rows_empty = full_keys ? 0 : sums.rows_empty;
        return counts;
    }

    // Counts the list's blocks, and how often it has which mask: key_ becomes mask, times, mask, times, ...
    void tally(Slice slice, RowCounts& counts) {
        check_cancelled();
        key_.clear();
        for (int32_t i = slice.begin; i < slice.end; ++i) {
            const Run& run = layout_.by_query.runs[i];
            (run.mask == full_block ? counts.full : counts.partial) += run.count;
            if (run.mask == full_block) continue;
            if (times_[run.mask] == 0) {
                key_.push_back(run.mask);
                key_.push_back(0);
            }
            times_[run.mask] += run.count;
        }
        for (size_t i = 0; i < key_.size(); i += 2) key_[i + 1] = std::exchange(times_[key_[i]], 0);
    }

    // A mask that a row has very often (strides) the next row has more often still: such sums are remembered in vain.
    RowCounts sum_of_masks(int32_t rows) {
        constexpr int64_t often = 256;
        for (size_t i = 0; i < key_.size(); i += 2)
            if (key_[i + 1] > often) return sum(rows);
        key_.push_back(rows);
        const int32_t id = sums_.at(key_, {0, 0, unknown});
        key_.pop_back();
        if (sums_.values[id].pairs == unknown) sums_.values[id] = sum(rows);
        return sums_.values[id];
    }

    RowCounts sum(int32_t rows) {
        sum_masks();
        return sum_kept(rows, {});
    }

    // Adds the first so many of kept_, and with them the keys of full blocks, to a list's blocks.
    RowCounts sum_kept(int32_t rows, RowCounts counts) const {
        const auto begin = kept_.begin(), end = begin + rows;
        const int64_t full_keys = counts.full * layout_.block_k;
        counts.pairs = std::accumulate(begin, end, full_keys * rows);
        counts.row_min = *std::min_element(begin, end) + full_keys;
        counts.row_max = *std::max_element(begin, end) + full_keys;
        counts.rows_empty = full_keys ? 0 : std::count(begin, end, 0);
        return counts;
    }

    void sum_masks() {
        std::fill(kept_.begin(), kept_.end(), 0);
        for (size_t i = 0; i < key_.size(); i += 2) {
            const uint16_t* of_mask = &mask_rows_[size_t(key_[i]) * layout_.block_q];
            for (int32_t row = 0; row < layout_.block_q; ++row) kept_[row] += of_mask[row] * key_[i + 1];
        }
    }

    const Layout& layout_;
    std::vector<uint16_t> mask_rows_;
    std::vector<int64_t> kept_;       // [block_q]
    std::vector<int64_t> times_;      // [num_masks] all 0 between lists
    Key key_;
    KeyMemo<RowCounts> sums_;
    std::vector<RowCounts> measured_;
    std::unordered_map<int32_t, Sums> grown_;  // of stems, by where they begin
    std::vector<int32_t> known_;      // [runs + 1] in measured_: the slice that begins at a run; the last: an empty one
};

void add_blocks(Counts& total, const RowCounts& row, int64_t columns, int64_t heads) {
    total.pairs += double(row.pairs) * double(heads);
    total.blocks_full += row.full * heads;
    total.blocks_partial += row.partial * heads;
    total.blocks_empty += (columns - row.full - row.partial) * heads;
}

void add_rows(Counts& total, const RowCounts& row, int64_t heads) {
    total.row_min = std::min(total.row_min, row.row_min);
    total.row_max = std::max(total.row_max, row.row_max);
    total.rows_empty += row.rows_empty * heads;
}

// For layouts in which every query stands in one tile: what it keeps there is all that it keeps.
void count_homes(const Layout& layout, const Slice* slices, int64_t heads, RowCounter& counter, Counts& total) {
    const Axis& queries = layout.queries;
    Pace pace;
    for (int32_t tile = 0, residue = 0; tile < layout.by_query.rows; ++residue) {
        const int64_t seq = std::max<int64_t>(layout.extent.seq_q - residue, 0);
        for (int64_t left = ceil_div(seq, queries.modulus), at = 0; at < queries.residue_tiles; ++at, ++tile) {
            const int32_t tokens = int32_t(std::min<int64_t>(layout.block_q, left));
            left -= tokens;
            pace.step();
            if (tokens == 0) {
                add_blocks(total, {}, layout.by_key.rows, heads);
                continue;
            }
            const RowCounts& row = counter.count(slices[tile], tokens);
            add_blocks(total, row, layout.by_key.rows, heads);
            add_rows(total, row, heads);
        }
    }
}

// For layouts in plain order whose rows have stems.
void count_on_stems(const Layout& layout, const Slice* slices, int64_t heads, RowCounter& counter, Counts& total) {
    const Slice* const stems = layout.by_query.stems.data() + (slices - layout.by_query.slices.data());
    for (int32_t tile = 0; tile < layout.by_query.rows; ++tile) {
        const int64_t left = layout.extent.seq_q - int64_t(tile) * layout.block_q;
        const RowCounts row =
            counter.count(stems[tile], slices[tile], int32_t(std::min<int64_t>(layout.block_q, left)));
        add_blocks(total, row, layout.by_key.rows, heads);
        add_rows(total, row, heads);
    }
}

// Counts a tile's blocks, and adds what each of its queries keeps there to kept[place_of(query)].
template <class PlaceOf>
void add_kept(const Layout& layout, int32_t tile, Slice slice, int64_t heads, RowCounter& counter, Counts& total,
              std::vector<int64_t>& kept, PlaceOf place_of) {
    const TileView tokens = tile_at(view(layout).queries, layout.block_q, layout.extent.seq_q, tile);
    RowCounts blocks;
    const std::vector<int64_t>& of_place = counter.count_rows(slice, blocks);
    add_blocks(total, blocks, layout.by_key.rows, heads);
    for (int32_t i = 0; i < tokens.count; ++i) {
        const int64_t token = tokens.tokens ? tokens.tokens[i] : tokens.first + i * tokens.stride;
        if (token != no_token) kept[size_t(place_of(token))] += of_place[size_t(i)];
    }
}

// Homes with queries that are listed as well are split, and numbered from 0; the others are whole. Split ones are few,
// and with these numbers no memory is touched for queries of the others.
struct SplitTiles {
    static constexpr int32_t whole = -1;
    std::vector<int32_t> numbers;
    int32_t count = 0;
};

SplitTiles find_split(const Layout& layout) {
    const AxisView queries = view(layout).queries;
    SplitTiles split{std::vector<int32_t>(size_t(layout.by_query.rows - queries.listed), SplitTiles::whole)};
    for (int32_t token : layout.queries.tokens) {
        if (token == no_token) continue;
        int32_t& number = split.numbers[size_t(home_of(queries, layout.block_q, token) / layout.block_q)];
        if (number == SplitTiles::whole) number = split.count++;
    }
    return split;
}

// For layouts with queries that are listed: such a query stands in several tiles and keeps the sum of what it keeps
// there. Places without a token, and homes of queries that are away, keep nothing and add nothing.
void count_with_listed(const Layout& layout, const Slice* slices, int64_t heads, RowCounter& counter, Counts& total) {
    const AxisView queries = view(layout).queries;
    const SplitTiles split = find_split(layout);
    const int32_t block = layout.block_q;
    std::vector<int64_t> kept(size_t(split.count) * block);
    const auto place_of = [&](int64_t token) {
        const int64_t home = home_of(queries, block, token);
        return int64_t(split.numbers[size_t(home / block)]) * block + home % block;
    };
    for (int32_t tile = 0; tile < layout.by_query.rows; ++tile) {
        const int32_t tokens = tile_at(queries, block, layout.extent.seq_q, tile).count;
        const bool is_whole =
            tile >= queries.listed && split.numbers[size_t(tile - queries.listed)] == SplitTiles::whole;
        if (is_whole && tokens) {
            const RowCounts row = counter.count(slices[tile], tokens);
            add_blocks(total, row, layout.by_key.rows, heads);
            add_rows(total, row, heads);
        } else {
            add_kept(layout, tile, slices[tile], heads, counter, total, kept, place_of);
        }
    }
    for (int32_t home = 0; home < int32_t(split.numbers.size()); ++home) {
        if (split.numbers[size_t(home)] == SplitTiles::whole) continue;
        const int64_t first = int64_t(split.numbers[size_t(home)]) * block;
        const int32_t tokens = tile_at(queries, block, layout.extent.seq_q, queries.listed + home).count;
        for (int64_t place = first; place < first + tokens; ++place) {
            const int64_t of_row = kept[size_t(place)];
            add_rows(total, {0, 0, 0, of_row, of_row, of_row == 0}, heads);
        }
    }
}

double count_visited(const Counts& counts, const Layout& layout) {
    return double(counts.blocks_full + counts.blocks_partial) * layout.block_q * layout.block_k;
}

const Slice* slices_of(const Layout& layout, int32_t head_kind) {
    return &layout.by_query.slices[size_t(head_kind) * layout.by_query.rows];
}

}  // namespace

Counts count(const Layout& layout) {
    Counts total;
    total.row_min = layout.extent.seq_k;
    RowCounter counter(layout);
    const std::vector<int64_t> heads = count_heads(layout);
    for (int32_t c = 0; c < layout.head_kinds; ++c) {
        const auto count_kind = !layout.by_query.stems.empty()  ? count_on_stems
                                : layout.queries.tokens.empty() ? count_homes
                                                                : count_with_listed;
        count_kind(layout, slices_of(layout, c), heads[c], counter, total);
    }
    total.visited = count_visited(total, layout);
    return total;
}

Counts count(const std::vector<const Layout*>& pieces) {
    const Extent& extent = pieces[0]->extent;
    std::map<std::vector<int32_t>, int64_t> heads;  // by their kind in each piece
    for (size_t head = 0; head < pieces[0]->kind_of_head.size(); ++head) {
        check_cancelled();
        std::vector<int32_t> head_kinds;
        for (const Layout* piece : pieces) head_kinds.push_back(piece->kind_of_head[head]);
        ++heads[head_kinds];
    }
    std::vector<RowCounter> counters;
    for (const Layout* piece : pieces) counters.emplace_back(*piece);
    Counts total;
    total.row_min = extent.seq_k;
    for (const auto& [head_kinds, count] : heads) {
        std::vector<int64_t> kept(size_t(extent.seq_q));
        for (size_t i = 0; i < pieces.size(); ++i) {
            Counts counts;
            const Slice* slices = slices_of(*pieces[i], head_kinds[i]);
            for (int32_t tile = 0; tile < pieces[i]->by_query.rows; ++tile)
                add_kept(*pieces[i], tile, slices[tile], count, counters[i], counts, kept,
                         [](int64_t token) { return token; });
            total.pairs += counts.pairs;
            total.blocks_full += counts.blocks_full;
            total.blocks_partial += counts.blocks_partial;
            total.blocks_empty += counts.blocks_empty;
            total.visited += count_visited(counts, *pieces[i]);
        }
        for (int64_t of_row : kept) add_rows(total, {0, 0, 0, of_row, of_row, of_row == 0}, count);
    }
    return total;
}

}  // namespace spattn
