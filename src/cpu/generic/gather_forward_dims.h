// SPDX-License-Identifier: MIT
// The form of gather_forward.h whose lanes are dims.
//
// A key moves 4 (head_dim + head_dim_v) bytes for as many flops, so what binds is where its rows come from, and lists
// that are scattered name them in an order that no cache foresees. So query rows are worked on in waves, and a wave
// takes the keys range by range, as many as the cache near by holds:
//
//     for each range: for each row: s[pair] = q . k             rows of k alone pass through the cache
//     for each row:   m = max s, p = exp2(s - m), l = sum p     its scores lie side by side, and all are known
//     for each range: for each row: out += p[pair] v            rows of v alone, summed by chunks of the list
//
// A row whose scores outgrow the store is a wave by itself, its list in parts, with the online softmax of the block
// kernels from part to part. Sums run in the order of the list, however it is cut: bits do not depend on waves, and
// these may depend on the number of threads.
#pragma once

#include "cpu/generic/gather_forward.h"
#include "cpu/generic/gathered_rows.h"

namespace spattn::cpu {
namespace {

constexpr int64_t wave_bytes = int64_t(1) << 21;   // of q and the sums of a wave's rows
constexpr int64_t wave_scores = (int64_t(1) << 21) / int64_t(sizeof(Real));  // of its store: 2 MiB
constexpr int64_t range_bytes = int64_t(1) << 19;  // of a range's rows of k, or of v
constexpr int64_t waves_a_lane = 4;                // so that lanes end together
constexpr int64_t rows_ahead = 2;                  // whose cells are on their way
constexpr int64_t least_cell = 4;  // keys of a row in a range on average: fewer do not pay for q and out once more

struct DimsForward {
    static constexpr int heads_of_tile = most_heads;
    static constexpr bool reads_float8 = true;
    // A query row of the wave, and the part of its list that is worked on.
    struct Row {
        const int32_t* keys;
        int64_t pair, left;         // where scores of the first head lie; keys from the part on
        int32_t heads, stride, at;  // between scores of two heads; the first among heads of the wave
        int32_t count, done;        // keys of the part; of these, below the range
    };
    struct Scratch {
        Real *q, *k, *v, *s;  // [heads][columns], [lanes][columns], [lanes][columns_v], [pairs]
        GatherState state;    // [heads], out [heads][columns_v]
        Real* near;           // [heads][columns_v]: what a chunk of a list has added so far (move_sums)
        Row* rows;            // [heads]
        int32_t* keys;
        int64_t heads, pairs;  // of a wave at most, all rows together
    };
    static Scratch carve(Carver& carver, const Problem& p, int num_lanes) {
        Scratch lane;
        lane.heads = heads_of_wave(p, num_lanes), lane.pairs = pairs_of_wave(p, lane.heads);
        lane.q = carver.take<Real>(lane.heads * columns_of(p));
        lane.k = carver.take<Real>(int64_t(lanes) * columns_of(p));
        lane.v = carver.take<Real>(int64_t(lanes) * values_of(p));
        lane.s = carver.take<Real>(lane.pairs);
        lane.state.out = carver.take<Real>(lane.heads * values_of(p));
        lane.near = carver.take<Real>(lane.heads * values_of(p));
        lane.state.m = carver.take<Real>(lane.heads);
        lane.state.l = carver.take<Real>(lane.heads);
        lane.state.top = carver.take<Real>(lane.heads);
        lane.rows = carver.take<Row>(lane.heads);
        lane.keys = carver.take<int32_t>(list_tokens(p));
        return lane;
    }

    // There is scratch for one list of a call: rows that bring their lists go one by one.
    static int64_t heads_of_wave(const Problem& p, int num_lanes) {
        const int64_t heads = most_tile_heads(p), bytes = (columns_of(p) + 2 * values_of(p)) * int64_t(sizeof(Real));
        const int64_t share = p.batch * p.heads_q * p.seq_q / (num_lanes * waves_a_lane);
        return p.call_lists.at_run_time() ? heads : most_of(heads, least_of(share, wave_bytes / bytes));
    }
    static int64_t range_keys(const Problem& p) {
        return most_of(lanes, range_bytes / (most_of(columns_of(p), values_of(p)) * int64_t(sizeof(Real))));
    }
    // A part of a call's list is no longer than a range: values that are columns of keys are then met where scores have
    // left them.
    static int64_t pairs_of_wave(const Problem& p, int64_t heads) {
        const int64_t longest = p.call_lists.at_run_time() ? least_of(list_tokens(p), range_keys(p)) : p.seq_k;
        return most_of(least_of(heads * stride_of(longest), wave_scores), most_tile_heads(p) * stride_of(lanes));
    }
    // Whole vectors for a row's scores, and for what dots() writes beyond them.
    static int64_t stride_of(int64_t keys) { return (keys + dots_beyond + lanes - 1) / lanes * lanes; }
    static int64_t tiles_at_once(const Problem& p, const Tiling& tiling, int num_lanes) {
        return heads_of_wave(p, num_lanes) / tiling.heads(0);
    }

    const ForwardArgs& args;
    const Problem& p;
    const Elements& elements;
    const KeySource k_from, v_from;
    Scratch lane;
    GatheredRows k, v;
    const int columns, columns_v;
    const SoftcapFactors cap;  // read where the problem has one
    HeadTile place{};          // of the wave: its batch entry and kv head
    int64_t rows = 0, pairs = 0, listed = 0, low = 0, high = 0;  // of the wave; its lists are in [low, high)

    DimsForward(const ForwardArgs& a, const Elements& e, uintptr_t scratch)
        : args(a),
          p(*a.problem),
          elements(e),
          k_from(KeySource::keys(a, e)),
          v_from(KeySource::values(a, e)),
          columns(columns_of(p)),
          columns_v(values_of(p)),
          cap(softcap_factors(p)) {
        Carver carver{scratch};
        lane = carve(carver, p, a.parallel->lanes());
    }

    // Tiles [begin, end) of a kv head, in as many waves as their scores need.
    void take(const Tiling& tiling, int64_t plane, int64_t begin, int64_t end) {
        const auto tile = [&](int64_t n) { return tiling.at(p, plane, 0, p.seq_q, n); };
        for (place = tile(begin); begin < end; begin += rows) {
            rows = pairs = listed = high = 0, low = p.seq_k;
            for (int64_t heads = 0; begin + rows < end && add_row(tile(begin + rows), heads);)
                heads += lane.rows[rows++].heads;
            while (next_part()) {
                each_cell([this](const Row& row, int from, int count) { score(row, from, count); });
                for (int64_t i = 0; i < rows; ++i)
                    for (int head = 0; head < lane.rows[i].heads; ++head) softmax(lane.rows[i], head);
                each_cell([this](const Row& row, int from, int count) { add_values(row, from, count); });
            }
            for (int64_t i = 0; i < rows; ++i) finish(tile(begin + i), lane.rows[i].at);
        }
    }

    // False where the store has no room for the row's scores.
    bool add_row(const HeadTile& t, int64_t at) {
        if (rows > 0 && p.call_lists.at_run_time()) return false;
        const Keys keys = read_keys(args, t.batch * p.heads_q + t.head, t.row, lane.keys);
        const int64_t stride = stride_of(keys.count), room = lane.pairs / t.heads / lanes * lanes;
        if (rows > 0 && pairs + stride * t.heads > lane.pairs) return false;
        lane.rows[rows] = {keys.at, pairs, keys.count, t.heads, int32_t(least_of(stride, room)), int32_t(at), 0, 0};
        pairs += stride * t.heads;
        const GatherState& state = lane.state;
        for (int64_t i = at * columns_v; i < (at + t.heads) * columns_v; ++i) state.out[i] = lane.near[i] = 0.f;
        for (int64_t i = at; i < at + t.heads; ++i) state.m[i] = lowest, state.l[i] = 0.f, state.top[i] = -INFINITY;
        if (keys.count == 0) return true;
        listed += keys.count;
        low = least_of(low, keys.at[0]), high = most_of(high, keys.at[keys.count - 1] + int64_t(1));
        load_queries(t, lane.q + at * columns);
        return true;
    }

    void load_queries(const HeadTile& t, Real* q) {
        copy_rows(elements, heads_as_rows(args.q), place_of(t), int(p.head_dim), q);
        const Vec scale = set1(query_factor(p));
        for (int i = 0; i < t.heads * columns; i += lanes) store(q + i, load(q + i) * scale);
    }

    // Lists that fit into the store have one part.
    bool next_part() {
        bool any = false;
        for (int64_t i = 0; i < rows; ++i) {
            Row& row = lane.rows[i];
            row.keys += row.count, row.left -= row.count;
            row.count = int32_t(least_of(row.left, row.stride - dots_beyond));
            any |= row.count > 0;
        }
        return any;
    }

    // A cell: the keys that a row has in a range. Lists and scores of a wave do not fit near by beside a range: those
    // of the cells to come are on their way.
    template <class Work>
    void each_cell(const Work& work) {
        const int64_t wanted = (high - low + range_keys(p) - 1) / range_keys(p);
        const int64_t ranges = rows > 1 ? least_of(wanted, listed / (rows * least_cell)) : 1;
        if (ranges <= 1) {
            for (int64_t i = 0; i < rows; ++i) work(lane.rows[i], 0, lane.rows[i].count);
            return;
        }
        const int64_t range = (high - low + ranges - 1) / ranges;
        for (int64_t i = 0; i < rows; ++i) lane.rows[i].done = 0;
        for (int64_t end = low + range; end < high + range; end += range)
            for (int64_t i = 0; i < rows; ++i) {
                if (i + rows_ahead < rows) prefetch_cell(lane.rows[i + rows_ahead]);
                Row& row = lane.rows[i];
                const int from = row.done;
                row.done = count_below(row.keys, from, row.count, end);
                work(row, from, row.done - from);
            }
    }

    void prefetch_cell(const Row& row) const {
        prefetch(row.keys + row.done);
        prefetch(row.keys + row.done + line_bytes / sizeof(int32_t));
        for (int head = 0; head < row.heads; ++head) prefetch(lane.s + row.pair + head * row.stride + row.done);
    }

    void score(const Row& row, int from, int count) {
        for (int i = from, end = from + count; i < end; i += k.count) {
            load_keys(k, k_from, int(p.head_dim), row, i, least(end - i, list_chunk), end, lane.k);
            Real* s = lane.s + row.pair + i;
            for (int head = 0; head < row.heads; ++head)
                dots(lane.q + (row.at + head) * columns, k, columns, s + head * row.stride);
        }
    }

    void add_values(const Row& row, int from, int count) {
        for (int i = from, end = from + count; i < end; i += v.count) {
            const int chunk_end = least((i / list_chunk + 1) * list_chunk, row.count);
            load_keys(v, v_from, int(p.head_dim_v), row, i, least(end, chunk_end) - i, end, lane.v);
            const bool is_last = i + v.count == chunk_end;
            for (int head = 0; head < row.heads; ++head) {
                Real* const near = lane.near + (row.at + head) * columns_v;
                add_weighted_rows(lane.s + row.pair + head * row.stride + i, v, columns_v, near);
                if (is_last) move_sums(near, lane.state.out + (row.at + head) * columns_v, columns_v);
            }
        }
    }

    // `count` keys from i on of those that end at `end`: all at once, or `lanes` where they are copied. A list of a call
    // knows no ranges: `lanes` keys at once, what comes next in it is fetched from afar.
    void load_keys(GatheredRows& to, const KeySource& from, int dims, const Row& row, int i, int count, int end,
                   Real* scratch) {
        const bool all = GatheredRows::in_place(from.elements, from.x, dims) && !p.call_lists.at_run_time();
        to.load(from, place_of(place, row.keys + i, all ? count : least(lanes, count)), dims, scratch);
        if (p.call_lists.at_run_time() && from.x.column == 1)
            for (int next = i + lanes; next < least(end, i + 2 * lanes); ++next)
                prefetch_row(from.elements.address(from.x, place_of(place, row.keys + next, 1)),
                             int64_t(dims) * from.elements.bytes);
    }

    // Scores of a part become p.
    void softmax(const Row& row, int head) {
        Real* s = lane.s + row.pair + head * row.stride;
        const int count = round_up(row.count, lanes);
        if (p.softcap != 0) cap_scores(s, count, cap.out);
        for (int i = row.count; i < count; ++i) s[i] = -INFINITY;
        Vec top = set1(-INFINITY);
        for (int i = 0; i < count; i += lanes) top = max(load(s + i), top);
        raise(row.at + head, highest(top));
        const Vec m = set1(lane.state.m[row.at + head]);
        for (int i = 0; i < count;) {
            Vec sum = set1(0.f);
            for (const int end = least(count, i + list_chunk * lanes); i < end; i += lanes) {
                const Vec e = exp2(load(s + i) - m);
                store(s + i, e);
                sum = sum + e;
            }
            lane.state.l[row.at + head] += total(sum);
        }
    }

    void raise(int64_t head, Real top) {
        const GatherState& state = lane.state;
        Real &m = state.m[head], &l = state.l[head];
        state.top[head] = top > state.top[head] ? top : state.top[head];
        if (!(top > m)) return;
        const Vec keep = exp2(set1(m) - set1(top));
        m = top;
        if (l == 0) return;  // there are no sums yet
        Real each[lanes], *out = state.out + head * columns_v;
        store(each, keep);
        l *= each[0];
        for (int c = 0; c < columns_v; c += lanes) store(out + c, load(out + c) * keep);
    }

    void finish(const HeadTile& t, int64_t first) {
        const TensorView out = heads_as_rows(args.out);
        const GatherState state{lane.state.out + first * columns_v, lane.state.m + first, lane.state.l + first,
                                lane.state.top + first};
        for (int i = 0; i < t.heads; ++i) {
            const Place at = {{t.head + i, 1, 1, nullptr}, t.batch, t.row, all_rows, all_rows};
            const Real factor = end_head(args, t, i, state);
            store_rows(elements, state.out + i * columns_v, columns_v, factor, int(p.head_dim_v), out, at);
        }
    }
};

}  // namespace
}  // namespace spattn::cpu
