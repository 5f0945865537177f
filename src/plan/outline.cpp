// SPDX-License-Identifier: MIT
#include "plan/outline.h"

#include <algorithm>
#include <bit>
#include <optional>

#include "core/math.h"
#include "layout/head_kinds.h"
#include "layout/orders/hot_axis.h"
#include "pattern/key_walk.h"
#include "plan/mask_part.h"

namespace spattn {
namespace {

constexpr int32_t side = outlined_block, area = side * side, strips = side / strip, parts = side / outlined_part;
static_assert(outlined_part == strip && strip == 16, "a part is a strip of either axis");

// With more keys than this share of all, or with longer intervals on average, blocks are likely to cost less.
constexpr double most_kept = 1.0 / 8, longest_interval = 8;
constexpr int64_t asked_rows = 64;  // a sample of the rows, to expect that before all are read

// Judges by one row of blocks in the middle.
bool has_closed_form(const Pattern& pattern, const Plane& plane) {
    const int64_t row = plane.extent.seq_q / 2 / side * side, columns = ceil_div(plane.extent.seq_k, side);
    Key numbers;
    bool known = true;
    for (int64_t column = 0; column < columns && known;) {
        check_cancelled();
        numbers.clear();
        const Coverage coverage = pattern.classify(plane, {row, side, column * side, side}, numbers, known);
        known |= coverage.kind != Coverage::partial;
        column += std::min(coverage.repeat, columns - column);
    }
    return known;
}

// Expects the plane's number of pairs from a sample of its rows. Nothing where they are too many or lie together.
std::optional<double> expect_pairs(const Pattern& pattern, const Plane& plane) {
    const int64_t rows = std::min(asked_rows, plane.extent.seq_q);
    Intervals kept;
    double pairs = 0, intervals = 0;
    for (int64_t i = 0; i < rows; ++i)
        for (KeyWalk walk(pattern, plane, i * plane.extent.seq_q / rows, {0, plane.extent.seq_k}, kept); walk.next();) {
            intervals += double(kept.size());
            for (const Interval& interval : kept) pairs += double(interval.end - interval.begin);
        }
    const double most = most_kept * double(rows) * double(plane.extent.seq_k);
    if (pairs > most || pairs > longest_interval * intervals) return {};
    return pairs / double(rows) * double(plane.extent.seq_q) * 1.0625;  // rather a little more
}

// Sums over the blocks that one kind of heads sees.
struct Sums {
    // What listed tiles would change: blocks that need not be visited, and tokens that are gathered instead.
    struct Listed {
        double saved = 0, gathered = 0;
    };
    struct Side {
        int64_t worked = 0, worked_parts = 0;
        int64_t rows = 0, part_rows = 0;  // with work
        Listed at_home, away;             // where owning tokens stay at home, and where any may be away
        int64_t longest = 0;              // blocks of a row
        std::vector<int64_t> kept;        // of each owning token
    };
    Side by_query, by_key;
    int64_t blocks = 0, masked = 0, parts = 0, masked_parts = 0;
};

constexpr uint64_t part_of(uint64_t bits, int32_t part) { return bits >> (part * outlined_part) & 0xFFFF; }

int32_t span(uint64_t bits) { return bits ? 64 - std::countl_zero(bits) - std::countr_zero(bits) : 0; }

// Adds what strips of owning tokens work on: `seen` has the other tokens that each strip sees.
void add_strips(const uint64_t (&seen)[strips], Sums::Side& sums) {
    for (uint64_t tokens : seen) {
        sums.worked += strip * span(tokens);
        for (int32_t part = 0; part < parts; ++part) sums.worked_parts += strip * span(part_of(tokens, part));
    }
}

// Sets bit 15 of each part (16 bits) that has any bit.
constexpr uint64_t find_parts(uint64_t bits) {
    constexpr uint64_t below = 0x7FFF7FFF7FFF7FFF;
    return (((bits & below) + below) | bits) & ~below;
}

// Which tokens of a block keep a pair: keys for each strip of queries, queries for each strip (part) of keys, and all.
struct Seen {
    uint64_t keys[strips] = {}, queries[parts] = {};
    uint64_t all_keys = 0, all_queries = 0;
};

// Adds a block to the sums. `bits` has a word for each query.
Seen measure(const uint64_t* bits, Sums& sums) {
    Seen seen;
    uint64_t all_see = ~uint64_t(0);
    for (int32_t s = 0; s < strips; ++s) {
        uint64_t some = 0, all = ~uint64_t(0), seeing = 0;  // bit i of a part of `seeing`: query i sees one of its keys
        for (int32_t i = 0; i < strip; ++i) {
            const uint64_t keys = bits[s * strip + i];
            some |= keys, all &= keys;
            seeing |= find_parts(keys) >> (strip - 1 - i);
        }
        for (int32_t part = 0; part < parts; ++part) {
            seen.queries[part] |= part_of(seeing, part) << (s * strip);
            sums.parts += part_of(some, part) != 0;
            sums.masked_parts += part_of(some, part) != 0 && part_of(all, part) != 0xFFFF;
        }
        seen.keys[s] = some, seen.all_keys |= some, all_see &= all;
    }
    for (uint64_t queries : seen.queries) seen.all_queries |= queries;
    add_strips(seen.keys, sums.by_query);
    add_strips(seen.queries, sums.by_key);
    ++sums.blocks;
    sums.masked += ~all_see != 0;
    return seen;
}

// Adds a block in which so many tokens of either axis are alive to what listing would change. See
// make_least_listed_stats().
void add_listed(int32_t own, int32_t other, Sums::Side& sums) {
    const bool is_listed = 2 * other <= side;
    const double share = double(own) * other / area;
    if (is_listed || 2 * own <= side) sums.away.saved += 1 - share;
    if (!is_listed) return;
    sums.away.gathered += share * side;
    sums.at_home.saved += 1 - double(other) / side;
    sums.at_home.gathered += other;
}

bool has_hot(const std::vector<int64_t>& kept) {
    std::vector<int64_t> of_block(static_cast<size_t>(side));
    for (size_t first = 0; first < kept.size(); first += side) {
        const size_t tokens = std::min<size_t>(side, kept.size() - first);
        std::fill(std::copy_n(kept.begin() + int64_t(first), tokens, of_block.begin()), of_block.end(), 0);
        if (!find_hot_places(of_block, side).empty()) return true;
    }
    return false;
}

// Bit s says that strip s of a row of blocks has work.
uint8_t find_work(const uint64_t (&seen)[strips]) {
    uint8_t work = 0;
    for (int32_t s = 0; s < strips; ++s) work |= uint8_t((seen[s] != 0) << s);
    return work;
}

void count_work(uint8_t work, Sums::Side& sums) {
    sums.rows += work != 0;
    sums.part_rows += std::popcount(work);
}

class Outliner {
public:
    Outliner(const Layout& layout, const TokenLists& tokens)
        : extent_(layout.extent), tokens_(tokens), columns_(int32_t(ceil_div(extent_.seq_k, side))),
          rows_(int32_t(ceil_div(extent_.seq_q, side))), bits_(size_t(columns_) * side), is_touched_(size_t(columns_)) {
        out_.counts.row_min = extent_.seq_k;
    }

    void add_head_kind(int32_t head_kind, int64_t heads) {
        Sums sums;
        sums.by_key.kept.resize(size_t(extent_.seq_k));
        const int64_t* begin = &tokens_.begin[size_t(head_kind) * size_t(extent_.seq_q)];
        std::vector<uint8_t> work_of_column(static_cast<size_t>(columns_));
        std::vector<int64_t> blocks_of_column(static_cast<size_t>(columns_));
        for (int32_t row = 0; row < rows_; ++row) {
            check_cancelled();
            place(begin, row, sums.by_key.kept);
            uint8_t work = 0;
            for (int32_t column : touched_) {
                uint64_t* bits = &bits_[size_t(column) * side];
                const Seen seen = measure(bits, sums);
                const int32_t queries = std::popcount(seen.all_queries), keys = std::popcount(seen.all_keys);
                add_listed(queries, keys, sums.by_query);
                add_listed(keys, queries, sums.by_key);
                work |= find_work(seen.keys);
                work_of_column[size_t(column)] |= find_work(seen.queries);
                ++blocks_of_column[size_t(column)];
                std::fill_n(bits, side, 0);
                is_touched_[size_t(column)] = false;
            }
            count_work(work, sums.by_query);
            sums.by_query.longest = std::max(sums.by_query.longest, int64_t(touched_.size()));
        }
        for (uint8_t work : work_of_column) count_work(work, sums.by_key);
        for (int64_t blocks : blocks_of_column) sums.by_key.longest = std::max(sums.by_key.longest, blocks);
        for (int64_t row = 0; row < extent_.seq_q; ++row) sums.by_query.kept.push_back(begin[row + 1] - begin[row]);
        for (int64_t keys : sums.by_query.kept) count_row(keys, heads);
        for (int64_t queries : sums.by_key.kept) out_.longest_column = std::max(out_.longest_column, queries);
        add(sums, double(begin[extent_.seq_q] - begin[0]), heads);
    }

    Outline finish() {
        for (Outline::Stats* stats : {&out_.by_query, &out_.by_key})
            stats->least_listed.worked = std::min(stats->plain.worked, stats->least_listed.visited);
        return std::move(out_);
    }

private:
    // Sets the bits of a row of blocks, and finds the blocks that have any.
    void place(const int64_t* begin, int32_t row, std::vector<int64_t>& kept) {
        touched_.clear();
        const int64_t first = int64_t(row) * side, end = std::min(first + side, extent_.seq_q);
        for (int64_t query = first; query < end; ++query)
            for (int64_t at = begin[query]; at < begin[query + 1]; ++at) {
                const int32_t key = tokens_.keys[size_t(at)], column = key / side;
                bits_[size_t(column) * side + size_t(query - first)] |= uint64_t(1) << (key % side);
                ++kept[size_t(key)];
                if (is_touched_[size_t(column)]) continue;
                is_touched_[size_t(column)] = true;
                touched_.push_back(column);
            }
    }

    void count_row(int64_t keys, int64_t heads) {
        out_.counts.row_min = std::min(out_.counts.row_min, keys);
        out_.counts.row_max = std::max(out_.counts.row_max, keys);
        out_.counts.rows_empty += keys == 0 ? heads : 0;
    }

    void add(const Sums& sums, double pairs, int64_t heads) {
        Counts& counts = out_.counts;
        counts.pairs += pairs * double(heads);
        counts.visited += double(sums.blocks) * area * double(heads);
        counts.blocks_full += (sums.blocks - sums.masked) * heads;
        counts.blocks_partial += sums.masked * heads;
        counts.blocks_empty += (int64_t(rows_) * columns_ - sums.blocks) * heads;
        add(sums, sums.by_query, pairs, heads, out_.by_query);
        add(sums, sums.by_key, pairs, heads, out_.by_key);
        add_longest(sums.by_query, sums.by_key, heads, out_.by_query.plain);
        add_longest(sums.by_key, sums.by_query, heads, out_.by_key.plain);
        out_.bytes += size_t(sums.masked) * area / 8 + 2 * size_t(sums.blocks) * sizeof(Run);
    }

    static void add(const Sums& sums, const Sums::Side& own, double pairs, int64_t heads, Outline::Stats& stats) {
        const double weight = double(heads), blocks = double(sums.blocks), parts = double(sums.parts);
        const auto add = [&](LayoutStats& to, double blocks, double masked, double block_area, int64_t rows) {
            to.pairs += pairs * weight, to.visited += blocks * block_area * weight;
            to.blocks += blocks * weight, to.masked += masked * weight;
            to.rows += rows * heads;
        };
        add(stats.plain, blocks, double(sums.masked), area, own.rows);
        const Sums::Listed listed = has_hot(own.kept) ? own.away : own.at_home;
        add(stats.least_listed, blocks - listed.saved, double(sums.masked) - listed.saved, area, own.rows);
        add(stats.finer, parts, double(sums.masked_parts), outlined_part * outlined_part, own.part_rows);
        stats.plain.worked += double(own.worked) * weight;
        stats.finer.worked += double(own.worked_parts) * weight;
        stats.least_listed.gathered += listed.gathered * weight;
    }

    static void add_longest(const Sums::Side& own, const Sums::Side& across, int64_t heads, LayoutStats& stats) {
        stats.longest.row = std::max(stats.longest.row, double(own.longest));
        stats.longest.across = std::max(stats.longest.across, double(across.longest));
        stats.longest.rows_across += across.rows * heads;
    }

    const Extent& extent_;
    const TokenLists& tokens_;
    int32_t columns_, rows_;
    std::vector<uint64_t> bits_;      // of a row of blocks, a word a query of each block
    std::vector<uint8_t> is_touched_;  // [columns] in that row
    std::vector<int32_t> touched_;
    Outline out_;
};

}  // namespace

std::shared_ptr<const Outline> build_outline(const Pattern& pattern, Layout& layout) {
    const Extent& extent = layout.extent;
    if (has_closed_form(pattern, {extent})) return nullptr;
    find_head_kinds(pattern, layout);
    const double kept = most_kept * double(extent.seq_q) * double(extent.seq_k) * layout.head_kinds;
    const double most = std::min(kept, most_list_bytes / sizeof(int32_t));
    const std::optional<double> expected = expect_pairs(pattern, {extent});
    if (!expected || *expected * layout.head_kinds > most) return nullptr;
    std::optional<TokenLists> lists =
        build_token_lists(pattern, layout, *expected * double(layout.kind_of_head.size()), size_t(most));
    if (!lists) return nullptr;
    auto tokens = std::make_shared<const TokenLists>(std::move(*lists));
    const std::vector<int64_t> heads = count_heads(layout);
    Outliner outliner(layout, *tokens);
    for (int32_t c = 0; c < layout.head_kinds; ++c) outliner.add_head_kind(c, heads[size_t(c)]);
    auto outline = std::make_shared<Outline>(outliner.finish());
    outline->tokens = std::move(tokens);
    return outline;
}

}  // namespace spattn
