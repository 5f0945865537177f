// SPDX-License-Identifier: MIT
// A call on a cache: its layout, its queries where the layout's rows have them, a copy of float8 keys and values for rows
// that read none, and what came of queries back. Lanes share batch entries' heads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/cache_append.h"
#include "cpu/cache_lists.h"
#include "cpu/copied_row.h"
#include "cpu/share.h"
#include "cpu/tree_masks.h"
#include "cpu/widened_row.h"
#include "plan/cache.h"

namespace spattn::cpu {
namespace {

// The rows of one head of an entry in a tensor of the call, and in the copy; 1 column: of floats that have no such axis.
class Copied {
public:
    Copied(const TensorView& call, const TensorView& copy, int64_t columns, int64_t element)
        : call_(call), copy_(copy), columns_(columns), element_(element) {}

    void to_copy(int64_t batch, int64_t head, int64_t row, int64_t at) const {
        char* const to = address(copy_, batch, head, at);
        const char* const from = address(call_, batch, head, row);
        copy_row({from, call_.column, to, 1, columns_, element_});
    }
    void to_call(int64_t batch, int64_t head, int64_t row, int64_t at) const {
        char* const to = address(call_, batch, head, row);
        const char* const from = address(copy_, batch, head, at);
        copy_row({from, 1, to, call_.column, columns_, element_});
    }
    void clear(int64_t batch, int64_t head, int64_t at) const {
        std::memset(address(copy_, batch, head, at), 0, size_t(columns_ * element_));
    }
    void clear_call(int64_t head, int64_t row) const {
        char* const to = address(call_, 0, head, row);
        for (int64_t column = 0; column < columns_; ++column)
            std::memset(to + column * call_.column * element_, 0, size_t(element_));
    }

private:
    char* address(const TensorView& x, int64_t batch, int64_t head, int64_t row) const {
        return static_cast<char*>(x.data) + (batch * x.batch + head * x.head + row * x.row) * element_;
    }

    const TensorView &call_, &copy_;
    int64_t columns_, element_;
};

class CacheCall {
public:
    CacheCall(const ForwardArgs& args, const CacheLayout& made)
        : args_(args), p_(*args.problem), made_(made), element_(dtype_row(p_.dtype).bytes) {}

    void lay_out() {
        if (made_.copies) share(*args_.parallel, *this, made_.batch * made_.heads, &CacheCall::copy_queries);
        share(*args_.parallel, *this, made_.is_ragged ? made_.heads : 0, &CacheCall::empty_nobodys);
        if (!args_.has_layout) make_layout();
    }
    void widen() {
        share(*args_.parallel, *this, made_.sequences, &CacheCall::mark_seen);
        share(*args_.parallel, *this, made_.sequences * p_.heads_kv, &CacheCall::widen_rows);
    }
    void bring_back() { share(*args_.parallel, *this, made_.batch * made_.heads, &CacheCall::copy_results); }

private:
    void make_layout() {
        if (made_.own_tiles)
            std::copy_n(made_.known.masks, int64_t(made_.known.num_masks) * made_.known.mask_words, made_.masks);
        share(*args_.parallel, *this, made_.kinds, &CacheCall::make_lists);
        share(*args_.parallel, *this, made_.listed ? made_.sequences : 0, &CacheCall::name_tokens);
        for (int64_t head = 0; head < made_.batch * made_.heads; ++head)
            made_.kind_of_head[head] = int32_t(head / made_.heads_of_kind);
        for (int64_t n = 0; n < made_.batch * made_.rows; ++n) made_.spans[n] = span_of(n);
        for (int32_t n = 0; n < made_.from.num_joins; ++n) made_.joins[n] = join_of(made_.from.joins[n]);
        for (int32_t n = 0; n < made_.from.num_tasks; ++n) made_.tasks[n] = task_of(made_.from.tasks[n]);
    }

    int64_t start_of(int64_t sequence) const { return made_.start_of(args_.cache.starts.at(sequence, 0, 0, 0)); }
    int64_t first_row(int64_t sequence) const { return floor_div(start_of(sequence), made_.tile_q); }
    CallCache::Queries queries_of(int64_t sequence) const { return args_.cache.queries_of(sequence, made_.seq_q); }

    // A tile of a batch entry's queries: of which sequence, in which row of the plan's layout, and which query its first
    // place has. It has those of [begin, end); row is -1 where these are none, or beyond the sequence.
    struct Tile {
        int64_t sequence, row, first, begin, end;
    };
    Tile tile_of(int64_t batch, int64_t number) const {
        const int64_t sequence = made_.is_ragged ? sequence_of(number) : batch;
        const CallCache::Queries queries = queries_of(sequence);
        const int64_t of_sequence = number - made_.first_tile(sequence, queries.begin);
        const int64_t row = first_row(sequence) + of_sequence;
        const int64_t first = queries.begin - start_of(sequence) + row * made_.tile_q;
        const int64_t begin = std::max(first, queries.begin), end = std::min(first + made_.tile_q, queries.end);
        const bool has_keys = begin < end && row >= 0 && row < made_.known.by_query.rows;
        return {sequence, has_keys ? row : -1, first, begin, std::max(begin, end)};
    }
    QuerySpan span_of(int64_t n) const {
        const Tile tile = tile_of(n / made_.rows, n % made_.rows);
        return {int32_t(tile.first), int32_t(tile.begin), int32_t(tile.end)};
    }
    // The last that has its first tile at or before this one.
    int64_t sequence_of(int64_t tile) const {
        int64_t first = 0, end = made_.sequences;
        while (end - first > 1) {
            const int64_t middle = (first + end) / 2;
            (made_.first_tile(middle, queries_of(middle).begin) <= tile ? first : end) = middle;
        }
        return first;
    }

    void copy_queries(int64_t plane) {
        const int64_t batch = plane / made_.heads, head = plane % made_.heads;
        const Copied q(args_.q, made_.q, p_.head_dim, element_);
        for (int32_t number = 0; number < made_.rows; ++number) {
            const Tile tile = tile_of(batch, number);
            for (int64_t i = 0; i < made_.tile_q; ++i) {
                const int64_t row = tile.first + i, at = int64_t(number) * made_.tile_q + i;
                row >= tile.begin && row < tile.end ? q.to_copy(batch, head, row, at) : q.clear(batch, head, at);
            }
        }
    }

    void copy_results(int64_t plane) {
        const int64_t batch = plane / made_.heads, head = plane % made_.heads;
        const Copied out(args_.out, made_.out, p_.head_dim_v, element_);
        const Copied lse(args_.lse, made_.lse, 1, sizeof(float));
        const Copied max_logits(args_.max_logits, made_.max_logits, 1, sizeof(float));
        for (int32_t number = 0; number < made_.rows; ++number) {
            const Tile tile = tile_of(batch, number);
            for (int64_t row = tile.begin; row < tile.end; ++row) {
                const int64_t at = number * int64_t(made_.tile_q) + row - tile.first;
                out.to_call(batch, head, row, at);
                if (args_.lse.data) lse.to_call(batch, head, row, at);
                if (args_.max_logits.data) max_logits.to_call(batch, head, row, at);
            }
        }
    }

    void empty_nobodys(int64_t head) {
        for (int64_t row = 0; row < queries_of(0).begin; ++row) empty_query(head, row);
        for (int64_t row = queries_of(made_.sequences - 1).end; row < made_.seq_q; ++row) empty_query(head, row);
    }
    // A query of no sequence, which sees nothing but a sink.
    void empty_query(int64_t head, int64_t row) const {
        const TensorView& sinks = args_.sink_logits;
        const float sink = sinks.data ? static_cast<const float*>(sinks.data)[head * sinks.head] : -INFINITY;
        const auto set = [&](const TensorView& x, float value) {
            if (x.data) static_cast<float*>(x.data)[head * x.head + row * x.row] = value;
        };
        Copied(args_.out, made_.out, p_.head_dim_v, element_).clear_call(head, row);
        set(args_.lse, sink), set(args_.max_logits, -INFINITY);
    }

    int64_t known_kind(int64_t sequence, int64_t head) const {
        return made_.known.head_kinds == 1 ? 0 : made_.known.kind_of_head[sequence * made_.heads + head];
    }

    void make_lists(int64_t kind) {
        const int64_t first_head = kind * made_.heads_of_kind, batch = first_head / made_.heads;
        const ListsView& known = made_.known.by_query;
        for (int32_t at = 0; at < made_.rows; ++at) {
            const int64_t n = kind * made_.rows + at;
            const Tile tile = tile_of(batch, at);
            const int32_t begin = int32_t(n * made_.room), first_block = int32_t(made_.first_listed(tile.sequence));
            Run* to = made_.runs + begin;
            if (tile.row >= 0) {
                const int64_t row =
                    known_kind(tile.sequence, first_head % made_.heads) * known.rows + tile.row;
                const KnownRow runs(known, made_.of_plan.stems, row);
                const OwnTiles own = own_tiles(tile.sequence);
                const int32_t own_mask = int32_t(made_.known.num_masks + n * made_.own_tiles) - own.begin;
                for (int32_t i = 0; i < runs.count(); ++i)
                    each_part(runs.run(i), own, own_mask, [&](Run part) {
                        part.first += first_block;
                        *to++ = part;
                    });
                if (own.begin < own.end) make_tree_masks(tile, batch, own, runs, own_mask);
            }
            made_.slices[n] = {begin, int32_t(to - made_.runs)};
        }
    }

    // The tiles of keys that have keys of a sequence's own: [begin, end), none where its queries are no trees.
    struct OwnTiles {
        int32_t begin, end;
    };
    OwnTiles own_tiles(int64_t sequence) const {
        if (!made_.own_tiles) return {0, 0};
        const CallCache::Queries queries = queries_of(sequence);
        const int64_t start = start_of(sequence), first = std::max<int64_t>(start, 0);
        const int64_t end = std::min(start + queries.end - queries.begin, made_.seq_k);
        if (first >= end) return {0, 0};
        return {int32_t(first / made_.tile_k), int32_t(ceil_div(end, made_.tile_k))};
    }
    // act(part) for the parts of a run before own tiles, each of these with its mask, and after them.
    template <class Act>
    static void each_part(const Run& run, const OwnTiles& own, int32_t own_mask, Act act) {
        const int32_t end = run.first + run.count;
        const int32_t own_begin = std::max(run.first, own.begin), own_end = std::min(end, own.end);
        if (own_begin >= own_end) return act(run);
        if (run.first < own_begin) act(Run{run.first, own_begin - run.first, run.mask});
        for (int32_t at = own_begin; at < own_end; ++at) act(Run{at, 1, own_mask + at});
        if (own_end < end) act(Run{own_end, end - own_end, run.mask});
    }
    // own_mask: the number of a tile's mask less that of the tile.
    void make_tree_masks(const Tile& tile, int64_t batch, const OwnTiles& own, const KnownRow& runs, int32_t own_mask) {
        const int64_t begin = queries_of(tile.sequence).begin, start = start_of(tile.sequence);
        const int64_t nodes = std::min(tile.end - begin, made_.seq_k - start);  // those behind see nothing
        TreeMasks masks(made_, args_.cache, batch, begin, tile.first - begin, nodes);
        int32_t i = runs.count();
        for (int32_t at = own.end; at-- > own.begin;) {
            while (i > 0 && runs.run(i - 1).first > at) --i;
            const bool has_tile = i > 0 && at < runs.run(i - 1).first + runs.run(i - 1).count;
            masks.make(int64_t(at) * made_.tile_k - start, has_tile ? runs.run(i - 1).mask : no_pair,
                       made_.masks + (own_mask + at) * int64_t(made_.known.mask_words));
        }
    }

    // How many of a sequence's tokens the call's queries may see, and what tiles have beside them.
    int64_t seen_tokens(int64_t sequence) const {
        const CallCache::Queries queries = queries_of(sequence);
        const int64_t end = round_up(start_of(sequence) + queries.end - queries.begin, made_.tile_q);
        return std::clamp<int64_t>(end, 0, made_.seq_k);
    }
    void name_tokens(int64_t sequence) {
        if (!made_.page_size && sequence > 0) return;  // all have the same
        int64_t end = 0;
        for (int64_t of = made_.page_size ? sequence : 0; of < (made_.page_size ? sequence + 1 : made_.sequences); ++of)
            end = std::max(end, seen_tokens(of));
        const int64_t tiles = ceil_div(end, made_.tile_k);
        int64_t listed = 0;  // A window lists far fewer than there are; many queries list a tile several times.
        if (made_.page_size) each_run(sequence, [&](int64_t, int64_t count) { listed += count; });
        if (!made_.page_size || listed > tiles) return name_tiles(sequence, 0, tiles);
        each_run(sequence, [&](int64_t first, int64_t count) { name_tiles(sequence, first, first + count); });
    }
    void name_tiles(int64_t sequence, int64_t first, int64_t end) {
        int32_t* to = made_.tokens + (made_.first_listed(sequence) + first) * made_.tile_k;
        for (int64_t token = first * made_.tile_k; token < end * made_.tile_k; ++token)
            *to++ = token >= made_.seq_k ? no_token
                    : made_.page_size   ? int32_t(args_.cache.place_of(sequence, token, made_.page_size))
                                        : int32_t(token);
    }

    // act(first, count) for the tiles of each run that a sequence's queries have. Where offsets fall, its rows of tiles may
    // be another sequence's.
    template <class Act>
    void each_run(int64_t sequence, Act act) const {
        const int64_t batch = made_.is_ragged ? 0 : sequence, kinds = made_.kinds / made_.batch;
        const CallCache::Queries queries = queries_of(sequence);
        const int64_t before = floor_mod(start_of(sequence), made_.tile_q);
        const int64_t tiles = ceil_div(before + queries.end - queries.begin, made_.tile_q);
        const int64_t begin = made_.first_tile(sequence, queries.begin);
        const int64_t end = std::min<int64_t>(begin + tiles, made_.rows);
        for (int64_t row = begin; row < end; ++row) {
            if (made_.is_ragged && sequence_of(row) != sequence) continue;
            for (int64_t kind = batch * kinds; kind < (batch + 1) * kinds; ++kind) {
                const Slice slice = made_.slices[kind * made_.rows + row];
                for (int32_t i = slice.begin; i < slice.end; ++i)
                    act(made_.runs[i].first - made_.first_listed(sequence), made_.runs[i].count);
            }
        }
    }

    // Which tiles of a sequence's keys its queries see.
    void mark_seen(int64_t sequence) {
        uint8_t* const seen = made_.seen + sequence * made_.tiles_k;
        std::fill_n(seen, made_.tiles_k, uint8_t(0));
        each_run(sequence, [&](int64_t first, int64_t count) { std::fill_n(seen + first, count, uint8_t(1)); });
    }
    // Those of a head of a sequence that a query sees; zeros where there is no token, for tiles have these places, too.
    void widen_rows(int64_t plane) {
        const int64_t sequence = plane / p_.heads_kv, head = plane % p_.heads_kv;
        for (int64_t tile = 0; tile < made_.tiles_k; ++tile) {
            if (!made_.seen[sequence * made_.tiles_k + tile]) continue;
            const int64_t first = (made_.first_listed(sequence) + tile) * made_.tile_k;
            for (int64_t place = first; place < first + made_.tile_k; ++place) widen_token(sequence, head, place);
        }
    }
    void widen_token(int64_t sequence, int64_t head, int64_t place) const {
        const int64_t entry = made_.page_size ? 0 : sequence;
        const int32_t token = made_.tokens[place];
        const auto widen = [&](const TensorView& from, const TensorView& scales, const TensorView& to, int64_t columns) {
            char* const row = static_cast<char*>(to.data) + place_in(to, entry, head, place) * element_;
            if (token == no_token) return void(std::memset(row, 0, size_t(columns * element_)));
            const int64_t of_scale = place_in(scales, entry, head, token);
            widen_row(static_cast<const uint8_t*>(from.data) + place_in(from, entry, head, token), from.column,
                      scales.data ? static_cast<const float*>(scales.data)[of_scale] : 1, columns, p_.dtype,
                      row);
        };
        widen(args_.k, args_.k_scales, made_.k, p_.head_dim);
        if (!p_.value_in_key) widen(args_.v, args_.v_scales, made_.v, p_.head_dim_v);
    }
    static int64_t place_in(const TensorView& x, int64_t entry, int64_t head, int64_t row) {
        return entry * x.batch + head * x.head + row * x.row;
    }
    int64_t blocks_of(int64_t head, int32_t tile) const {
        const Tile at = tile_of(head / made_.heads, tile);
        const int64_t rows = made_.known.by_query.rows;
        return at.row < 0 ? 0 : made_.of_plan.row_blocks[known_kind(at.sequence, head % made_.heads) * rows + at.row];
    }

    // A row that is split has as many parts as it has blocks for.
    Join join_of(Join join) const {
        const int64_t parts = ceil_div(blocks_of(join.head, join.row), CacheLayout::least_blocks);
        join.parts = int32_t(std::min<int64_t>(join.parts, parts));
        return join;
    }

    // A task's share of its row, which for parts that the row has not is nothing.
    Task task_of(const Task& from) const {
        const int64_t blocks = blocks_of(from.head, from.row);
        if (from.part == whole_row) return {from.head, from.row, 0, int32_t(blocks), whole_row};
        const Join& join = made_.joins[made_.of_plan.join_of_part[from.part]];
        const int64_t number = from.part - join.first_part;
        if (number >= join.parts) return {from.head, from.row, 0, 0, from.part};
        const int64_t skip = blocks * number / join.parts, end = blocks * (number + 1) / join.parts;
        return {from.head, from.row, int32_t(skip), int32_t(end - skip), from.part};
    }

    const ForwardArgs& args_;
    const Problem& p_;
    const CacheLayout& made_;
    const int64_t element_;
};

}  // namespace

CacheSteps cache_steps() {
    return {[](const ForwardArgs& args, const CacheLayout& to) { CacheCall(args, to).lay_out(); },
            [](const ForwardArgs& args, const CacheLayout& from) { CacheCall(args, from).bring_back(); },
            [](const ForwardArgs& args, const CacheLayout& to) { CacheCall(args, to).widen(); },
            list_keys_of_cache, append_to_cache, [](int32_t) {}};
}

}  // namespace spattn::cpu
