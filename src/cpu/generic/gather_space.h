// SPDX-License-Identifier: MIT
// The backward workspace of gather rows, and the waves that keep it small.
//
// A query row's p and ds are needed twice: for its own dq, and for dk and dv of the keys it lists, where many rows
// meet. A wave is as many query rows as fit into a store of fixed size: first their p and ds, then sums over them into
// dk and dv by owners of keys or columns, row after row. In which order sums run is the problem's alone, whoever owns
// what: bits do not depend on the number of threads.
#pragma once

#include "cpu/generic/gather_forward.h"

namespace spattn::cpu {
namespace {

constexpr int64_t wave_bytes_of_pairs = int64_t(1) << 24;  // of a wave's store: as much p and as much ds
constexpr int64_t wave_sums = (int64_t(1) << 24) / int64_t(sizeof(Real));  // of dk and dv in one of several kv heads

// kv heads [plane, plane + planes) with query rows [row, row + rows); several kv heads are whole ones.
struct Wave {
    int64_t plane, planes, row, rows;
};

template <class Number>
struct GatherSpace {
    int64_t pairs, slots;    // of the store; of kv heads
    Number *p, *ds;          // [pairs]
    Real *dk, *dv;           // [slots][seq_k][columns], [slots][seq_k][columns_v]
    int64_t* first_pair;     // [slots] where a kv head's pairs start in the store
    double* dsink;           // [batch * heads_q][seq_q], where the problem has sinks
    Real* ds_lifts;          // [batch * heads_q][seq_q], what ds of a row was multiplied by, where a form does that
    int32_t *keys, *counts;  // lists of a call, as they were read: [lists][tokens], [lists]
    int64_t tiles;           // of a wave at most
    int32_t* ends;           // of a plan's lists, where owners are ranges of keys: [owners][tiles] keys below the end
    char* scratch;
    int64_t lane_bytes;
};

// How a form stores pairs: tiles of so many heads at most, of which a listed key takes whole steps, and keys of a tile
// in whole steps, too.
template <class N, int most, int head_step, int key_step>
struct PairStore {
    using Number = N;
    static constexpr int heads_of_tile = most;
    static constexpr bool lifts_ds = false;
    static constexpr int64_t most_pairs = wave_bytes_of_pairs / int64_t(sizeof(N));
    static int64_t width(int heads) { return round_up(heads, head_step); }
    static int64_t group_width(const Problem& p) {
        int64_t sum = 0;
        for (int64_t first = 0; first < p.group(); first += most) sum += width(least(most, p.group() - first));
        return sum;
    }
    // Room for the keys of some rows, wherever their steps end.
    static int64_t room(int64_t keys, int64_t rows) { return keys + rows * (key_step - 1); }
    // Pairs of a query row at most: a plan's lists hold a key once.
    static int64_t row_pairs(const Problem& p) {
        return room(p.call_lists.at_run_time() ? p.call_lists.tokens() : p.seq_k, 1) * group_width(p);
    }
};
using HeadPairs = PairStore<Real, most_heads, lanes, 1>;  // heads in vector lanes
using DimPairs = PairStore<Real, most_heads, 1, 1>;

// kv heads whose dk and dv a wave sums at most.
inline int64_t slots_of(const Problem& p) {
    const int64_t sums = p.seq_k * (columns_of(p) + (p.value_in_key ? 0 : values_of(p)));
    return most_of(1, least_of(p.batch * p.heads_kv, wave_sums / most_of(1, sums)));
}

template <class Lane>
inline auto carve_gather(Carver& carver, const Problem& p, int num_lanes) {
    using Pairs = typename Lane::Pairs;
    using Number = typename Pairs::Number;
    const int64_t row = Pairs::row_pairs(p), planes = p.batch * p.heads_kv;
    GatherSpace<Number> space;
    space.pairs = most_of(row, least_of(Pairs::most_pairs, planes * p.seq_q * row));
    space.slots = slots_of(p);
    space.p = carver.take<Number>(space.pairs);
    space.ds = carver.take<Number>(space.pairs);
    space.dk = carver.take<Real>(space.slots * p.seq_k * columns_of(p));
    space.dv = carver.take<Real>(p.value_in_key ? 0 : space.slots * p.seq_k * values_of(p));
    space.first_pair = carver.take<int64_t>(space.slots);
    space.dsink = carver.take<double>(p.has_sink_logits ? p.batch * p.heads_q * p.seq_q : 0);
    space.ds_lifts = carver.take<Real>(Pairs::lifts_ds ? p.batch * p.heads_q * p.seq_q : 0);
    const int64_t lists = p.call_lists.at_run_time() ? space.pairs / row * p.group() : 0;
    space.keys = carver.take<int32_t>(lists * list_tokens(p));
    space.counts = carver.take<int32_t>(lists);
    const int64_t owners = Lane::most_owners(p);
    const bool has_ends = Lane::owns_ranges && !p.call_lists.at_run_time();
    space.tiles = planes * p.seq_q * p.group();
    if (has_ends) space.tiles = most_of(p.group(), least_of(space.tiles, space.pairs / owners));
    space.ends = carver.take<int32_t>(has_ends ? space.tiles * owners : 0);
    Carver lane{0};
    Lane::carve(lane, p);
    space.lane_bytes = int64_t(lane.used);
    space.scratch = carver.take<char>(space.lane_bytes * num_lanes);
    return space;
}

// Where the pairs of a wave lie. Lists of a call take the room of full ones.
template <class Pairs>
struct WaveMap {
    const CallArgs& args;
    const Problem& p;
    const GatherSpace<typename Pairs::Number>& space;
    const Tiling& tiling;
    Wave wave;

    int64_t lists_of_row() const { return tiling.shared ? 1 : p.group(); }

    // Listed keys of a head in rows [row, row + rows).
    int64_t listed(int64_t head, int64_t row, int64_t rows) const {
        if (p.call_lists.at_run_time()) return rows * p.call_lists.tokens();
        const int64_t* begin = args.tokens.begin + args.tokens.kind_of_head[head] * args.tokens.rows + row;
        return begin[rows] - begin[0];
    }
    // Pairs of a kv head, which counts over the batch, up to tile `tiles` of its group.
    int64_t pairs(int64_t plane, int64_t row, int64_t rows, int64_t tiles) const {
        const int64_t first = plane * p.group();
        int64_t sum = 0;
        for (int64_t tile = 0; tile < tiles; ++tile)
            sum += Pairs::room(listed(first + tiling.first(tile), row, rows), rows) * Pairs::width(tiling.heads(tile));
        return sum;
    }
    int64_t plane_of(const HeadTile& t) const { return t.batch * p.heads_kv + t.head_kv; }

    // The first pair of a tile of the wave: pairs of the rows before, then of the row's tiles before.
    int64_t first_pair(const HeadTile& t) const {
        const int64_t plane = plane_of(t);
        return space.first_pair[plane - wave.plane] + pairs(plane, wave.row, t.row - wave.row, tiling.tiles()) +
               pairs(plane, t.row, 1, t.index);
    }

    // Tile n of a kv head, and where it stands among the tiles of the wave.
    HeadTile tile(int64_t plane, int64_t n) const { return tiling.at(p, plane, wave.row, wave.rows, n); }
    int64_t tile_of(const HeadTile& t) const {
        return ((plane_of(t) - wave.plane) * wave.rows + t.row - wave.row) * tiling.tiles() + t.index;
    }

    // The list of a tile: as it was written down when its p was made, or the plan's own.
    int64_t list_of(const HeadTile& t) const {
        const int64_t row = (plane_of(t) - wave.plane) * wave.rows + t.row - wave.row;
        return row * lists_of_row() + (tiling.shared ? 0 : t.index);
    }
    bool writes_list(const HeadTile& t) const { return p.call_lists.at_run_time() && !(tiling.shared && t.index > 0); }
    void write_list(const HeadTile& t, Keys keys) const {
        const int64_t list = list_of(t);
        space.counts[list] = int32_t(keys.count);
        __builtin_memcpy(space.keys + list * p.call_lists.tokens(), keys.at, size_t(keys.count) * sizeof(int32_t));
    }
    Keys read_list(const HeadTile& t, int32_t* scratch) const {
        const Keys keys = read_keys(args, t.batch * p.heads_q + t.head, t.row, scratch);
        if (writes_list(t)) write_list(t, keys);
        return keys;
    }
    Keys keys(const HeadTile& t) const {
        if (!p.call_lists.at_run_time()) return read_keys(args, t.batch * p.heads_q + t.head, t.row, nullptr);
        return {space.keys + list_of(t) * p.call_lists.tokens(), space.counts[list_of(t)]};
    }

    // A row's part of its head's dsink, and their sum in the order of rows.
    void keep_dsink(const HeadTile& t, int head, double part) const {
        if (p.has_sink_logits) space.dsink[(t.batch * p.heads_q + t.head + head) * p.seq_q + t.row] = part;
    }
    double dsink_of(int64_t head) const {
        double sum = 0;
        for (int64_t b = 0; b < p.batch; ++b)
            for (int64_t row = 0; row < p.seq_q; ++row) sum += space.dsink[(b * p.heads_q + head) * p.seq_q + row];
        return sum;
    }

    // The next wave, or none: rows of one kv head that fill the store, or whole kv heads that all fit.
    bool next() {
        wave.row += wave.rows;
        if (wave.planes > 0 && wave.row >= p.seq_q) wave.plane += wave.planes, wave.row = 0;
        const int64_t planes = p.batch * p.heads_kv;
        if (wave.plane >= planes) return false;
        wave.planes = 1;
        wave.rows = take_rows();
        space.first_pair[0] = 0;
        if (wave.row > 0 || wave.rows < p.seq_q) return true;
        int64_t used = pairs(wave.plane, 0, p.seq_q, tiling.tiles());
        for (; wave.planes < space.slots && wave.plane + wave.planes < planes; ++wave.planes) {
            const int64_t more = pairs(wave.plane + wave.planes, 0, p.seq_q, tiling.tiles());
            if (used + more > space.pairs || (wave.planes + 1) * p.seq_q * tiling.tiles() > space.tiles) break;
            space.first_pair[wave.planes] = used;
            used += more;
        }
        return true;
    }

    bool fits(int64_t rows) const {
        return rows * tiling.tiles() <= space.tiles &&
               pairs(wave.plane, wave.row, rows, tiling.tiles()) <= space.pairs;
    }

    // As many rows from wave.row on as fit; one always does.
    int64_t take_rows() const {
        int64_t low = 1, high = p.seq_q - wave.row;
        while (low < high) {
            const int64_t middle = low + (high - low + 1) / 2;
            fits(middle) ? low = middle : high = middle - 1;
        }
        return low;
    }
};

}  // namespace
}  // namespace spattn::cpu
