// SPDX-License-Identifier: MIT
// Blocked attention, forward, where few queries ask, as in decoding: dims in vector lanes, and the heads of a group in
// one tile.
//
//     for each block of keys:  for each query and head:  s[key] = q . k        rows of k come from memory once for all
//                              m, l, p                                         online softmax along s
//                              for each query and head:  out += p[key] v       and so do rows of v, a block's sum at once
//
// A tile has as many places as its heads leave of 64 rows, and only those that have a query cost anything: one query of
// one head takes a sixteenth of the products that it takes in block_forward.h's smallest tiles. In a masked block each
// query meets the keys that it sees and no others, so that nothing has to be kept from the sums. Queries are read where
// they lie, wherever in a tile they begin (LayoutView::spans).
//
// What binds, on a Zen 4 with two threads and head_dim 128: keys and values come in at 14 to 16 GB/s where four heads share
// them, and at 12 in float32 and 8 in bfloat16 where eight do, so products bind there. Rows of the next keys are fetched
// beside the products of those at hand.
#pragma once

#include "cpu/generic/block_forward.h"
#include "cpu/generic/cost.h"
#include "cpu/generic/gathered_rows.h"

namespace spattn::cpu {
namespace {

constexpr int few_rows = 64, few_keys = 64;  // of a tile, and of a block
constexpr int keys_at_once = 16;             // of a block, by all rows, while as many others are fetched

// m, l and the largest score of each row, and its sums: a lane's running state, and what a part leaves.
struct FewState {
    Real *m, *l, *top, *out;  // out [few_rows][columns_v]
};
inline int64_t few_state_floats(const Problem& p) { return few_rows * (values_of(p) + 3); }
inline FewState few_state_at(Real* at) {
    return {at, at + few_rows, at + 2 * few_rows, at + 3 * few_rows};
}

struct FewSpace {
    Real *parts, *scratch;
    int64_t lane_floats;
};
struct FewScratch {
    Real *state, *q, *s;  // FewState, [few_rows][columns], [few_rows][few_keys and what dots() writes beyond]
    Real* near;           // [few_rows][columns_v]: what a block has added so far (move_sums)
    Real *k, *v;          // [few_keys][columns]: rows that are not read where they lie
    static constexpr int stride = few_keys + lanes;  // of s

    FewScratch(Carver&& carver, const Problem& p) : FewScratch(carver, p) {}
    FewScratch(Carver& carver, const Problem& p) {
        state = carver.take<Real>(few_state_floats(p));
        q = carver.take<Real>(few_rows * columns_of(p));
        s = carver.take<Real>(few_rows * stride);
        near = carver.take<Real>(few_rows * values_of(p));
        k = carver.take<Real>(few_keys * columns_of(p));
        v = carver.take<Real>(few_keys * values_of(p));
    }
};

inline FewSpace carve_few(Carver& carver, const Problem& p, const TasksView& tasks, int num_lanes) {
    Carver lane{0};
    FewScratch(lane, p);
    FewSpace space;
    space.parts = carver.take<Real>(tasks.num_parts * few_state_floats(p));
    space.lane_floats = int64_t(lane.used / sizeof(Real));
    space.scratch = carver.take<Real>(space.lane_floats * num_lanes);
    return space;
}

struct Numbers {  // one after the other
    int32_t of[keys_at_once];
    constexpr Numbers() : of() {
        for (int i = 0; i < keys_at_once; ++i) of[i] = i;
    }
};
constexpr Numbers numbers;

struct FewLane {
    using Space = FewSpace;

    const ForwardArgs& args;
    const Problem& p;
    const Elements& elements;
    const KeySource k_from, v_from;
    FewSpace space;
    FewScratch lane;
    FewState state;
    const int heads, columns, columns_v;
    const SoftcapFactors cap;  // read where the problem has one

    FewLane(const ForwardArgs& a, const Elements& e, const FewSpace& s, int64_t index)
        : args(a), p(*a.problem), elements(e), k_from(KeySource::keys(a, e)), v_from(KeySource::values(a, e)), space(s),
          lane(Carver{(uintptr_t)(s.scratch + index * s.lane_floats)}, p), state(few_state_at(lane.state)),
          heads(a.tasks.tile_heads), columns(columns_of(p)), columns_v(values_of(p)), cap(softcap_factors(p)) {}

    // The places of a tile, of the first of its heads. Those without a query are neither alive nor owned. A tile without
    // any has an empty span, which may be anywhere beside its places.
    Place queries(int32_t head, int32_t row) const {
        const LayoutView& layout = args.layout;
        const int64_t batch = head / p.heads_q;
        TileView tile = tile_at(layout.queries, layout.block_q, p.seq_q, row);
        uint64_t alive = alive_of(layout.live_queries, layout.by_query.rows, layout.kind_of_head[head], row, tile);
        uint64_t owned = owned_of(layout.queries, tile, row);
        if (layout.spans) {
            const QuerySpan& span = layout.spans[batch * layout.by_query.rows + row];
            const bool is_empty = span.begin == span.end;
            tile = {span.first, 1, is_empty ? 0 : span.end - span.first, nullptr};
            owned = is_empty ? 0 : all_rows << (span.begin - span.first);
        }
        owned &= tile.count > 0 ? all_rows >> (64 - tile.count) : 0;
        return {tile, batch, head % p.heads_q, alive & owned, owned};
    }
    static Place of_head(Place at, int head) {
        at.head += head;
        return at;
    }
    Place keys(const Place& q, int32_t head_kind, int32_t block) const {
        const LayoutView& layout = args.layout;
        const TileView tile = keys_at(layout.keys, few_keys, p.seq_k, block);
        const uint64_t alive = alive_of(layout.live_keys, layout.by_key.rows, head_kind, block, tile);
        return {tile, q.batch, q.head / p.group(), alive, 0};
    }

    // each(place, row of the state, head in the tile), for those places that are in the set.
    template <class Each>
    void each_row(uint64_t places, Each each) {
        each_bit(places, [&](int place) {
            for (int head = 0; head < heads; ++head) each(place, place * heads + head, head);
        });
    }

    void task(const Task& t) {
        const Place q = queries(t.head, t.row);
        const int32_t head_kind = args.layout.kind_of_head[t.head];
        start(q);
        const ListsView& lists = args.layout.by_query;
        Walk w = walk(lists, slice_of(lists, head_kind, t.row), t.skip, t.take);
        for (bool more = q.alive && w.next(); more;) {
            const Place at = keys(q, head_kind, w.block);
            const uint64_t* bits = mask_bits(args.layout, w.mask);
            if (bits && see_all(q, at, bits)) bits = nullptr;
            more = w.next();
            visit(q, at, bits, more ? keys(q, head_kind, w.block) : Place{});
        }
        t.part == whole_row ? finish(q) : keep(q, t.part);
    }

    void start(const Place& q) {
        const Real factor = p.softcap != 0 ? cap.in : Real(p.scale * log2_e);
        each_row(q.owned, [&](int, int row, int) {
            state.m[row] = lowest, state.l[row] = 0.f, state.top[row] = -INFINITY;
            for (int c = row * columns_v; c < (row + 1) * columns_v; c += lanes)
                store(state.out + c, set1(0.f)), store(lane.near + c, set1(0.f));
        });
        each_row(q.alive, [&](int place, int row, int head) {
            Place one = of_head(q, head);
            one.tokens = nullptr, one.first = q.tokens ? q.tokens[place] : q.first + place * q.stride;
            one.count = 1, one.alive = 1;
            Real* const to = lane.q + row * columns;
            copy_rows(elements, args.q, one, int(p.head_dim), to);
            for (int c = 0; c < columns; c += lanes) store(to + c, load(to + c) * set1(factor));
        });
    }

    // A tile of fewer queries than it has places masks all of its blocks, although no query may lack a key.
    static bool see_all(const Place& q, const Place& at, const uint64_t* bits) {
        uint64_t seen = all_rows >> (64 - at.count);
        each_bit(q.alive, [&](int place) { seen &= bits[place]; });
        return seen == all_rows >> (64 - at.count);
    }

    // ---- a block ----

    void visit(const Place& q, const Place& at, const uint64_t* bits, const Place& next) {
        const Rows k = load_keys(k_from, at, int(p.head_dim), lane.k, load_padded);
        if (bits) {
            each_seen(q.alive, bits, k, [&](const GatheredRows& rows, int row) {
                dots(lane.q + row * columns, rows, columns, scores(row));
                soften(row, rows.count);
            });
        } else {
            in_steps(at.count, k, k_from, next, p.head_dim, [&](const GatheredRows& rows, int first) {
                each_row(q.alive, [&](int, int row, int) {
                    dots(lane.q + row * columns, rows, columns, scores(row) + first);
                });
            });
            each_row(q.alive, [&](int, int row, int) { soften(row, at.count); });
        }
        const Rows v = load_keys(v_from, at, int(p.head_dim_v), lane.v, load_padded);
        if (bits) {
            each_seen(q.alive, bits, v, [&](const GatheredRows& rows, int row) {
                add_weighted_rows(scores(row), rows, columns_v, near(row));
                move_sums(near(row), state.out + row * columns_v, columns_v);
            });
        } else {
            in_steps(at.count, v, v_from, next, p.head_dim_v, [&](const GatheredRows& rows, int first) {
                each_row(q.alive, [&](int, int row, int) {
                    add_weighted_rows(scores(row) + first, rows, columns_v, near(row));
                });
            });
            each_row(q.alive, [&](int, int row, int) {
                move_sums(near(row), state.out + row * columns_v, columns_v);
            });
        }
    }

    Real* scores(int row) const { return lane.s + row * FewScratch::stride; }
    Real* near(int row) const { return lane.near + row * columns_v; }

    // work(rows, row of the state): of a masked block, the keys that a query sees.
    template <class Work>
    void each_seen(uint64_t places, const uint64_t* bits, const Rows& x, Work work) {
        each_bit(places, [&](int place) {
            int32_t seen[few_keys];
            int count = 0;
            each_bit(bits[place], [&](int key) { seen[count++] = key; });
            const GatheredRows rows{x.x, x.ld, seen, count};
            for (int head = 0; count > 0 && head < heads; ++head) work(rows, place * heads + head);
        });
    }

    // work(rows, number of the first): of a full block, some keys at once, while as many of the next are fetched.
    template <class Work>
    void in_steps(int count, const Rows& x, const KeySource& from, const Place& next, int64_t dims, Work work) {
        for (int first = 0; first < count; first += keys_at_once) {
            for (int i = first; from.x.column == 1 && i < least(next.count, first + keys_at_once); ++i)
                if (next.alive >> i & 1) prefetch_row(from.elements.address(from.x, next, i), dims * from.elements.bytes);
            work({x.x + first * x.ld, x.ld, numbers.of, least(count - first, keys_at_once)}, first);
        }
    }

    // Scores of a row become p.
    void soften(int row, int count) {
        Real* const s = scores(row);
        const int end = round_up(count, lanes);
        if (p.softcap != 0) cap_scores(s, end, cap.out);
        for (int i = count; i < end; ++i) s[i] = -INFINITY;
        Vec top = set1(-INFINITY), sum = set1(0.f);
        for (int i = 0; i < end; i += lanes) top = max(load(s + i), top);
        const Real most = highest(top);
        if (most > state.top[row]) state.top[row] = most;
        if (most > state.m[row] + lag) raise(row, most);
        const Vec m = set1(state.m[row]);
        for (int i = 0; i < end; i += lanes) {
            const Vec e = exp2(load(s + i) - m);
            store(s + i, e);
            sum = sum + e;
        }
        state.l[row] += total(sum);
    }

    void raise(int row, Real top) {
        const Real keep = Real(::exp2(double(state.m[row]) - double(top)));
        state.m[row] = top, state.l[row] *= keep;
        Real* const out = state.out + row * columns_v;
        for (int c = 0; c < columns_v; c += lanes) store(out + c, load(out + c) * set1(keep));
    }

    // ---- ends ----

    void keep(const Place& q, int32_t part) {
        const FewState to = few_state_at(space.parts + part * few_state_floats(p));
        each_row(q.owned, [&](int, int row, int) {
            to.m[row] = state.m[row], to.l[row] = state.l[row], to.top[row] = state.top[row];
            __builtin_memcpy(to.out + row * columns_v, state.out + row * columns_v, size_t(columns_v) * sizeof(Real));
        });
    }

    // Parts of a row, in order: each is brought to the highest maximum and added.
    void join(const Join& j) {
        const Place q = queries(j.head, j.row);
        start(q);
        for (int i = 0; i < j.parts; ++i) {
            const FewState part = few_state_at(space.parts + (j.first_part + i) * few_state_floats(p));
            each_row(q.owned, [&](int, int row, int) {
                const double m = part.m[row] > state.m[row] ? part.m[row] : state.m[row];
                const Real mine = Real(::exp2(double(state.m[row]) - m)), share = Real(::exp2(double(part.m[row]) - m));
                state.m[row] = Real(m), state.l[row] = state.l[row] * mine + part.l[row] * share;
                if (part.top[row] > state.top[row]) state.top[row] = part.top[row];
                Real *const out = state.out + row * columns_v, *const more = part.out + row * columns_v;
                for (int c = 0; c < columns_v; c += lanes)
                    store(out + c, fma(load(more + c), set1(share), load(out + c) * set1(mine)));
            });
        }
        finish(q);
    }

    void finish(const Place& q) {
        each_row(q.owned, [&](int place, int row, int head) {
            const Place at = of_head(q, head);
            const RowEnd end = end_row(state.m[row], state.l[row], sink_of(args.sink_logits, at.head));
            elements.store_row(state.out + row * columns_v, int(p.head_dim_v), end.factor, args.out, at, place);
            if (args.lse.data) *address<float>(args.lse, at, place) = end.lse();
            if (args.max_logits.data)
                *address<float>(args.max_logits, at, place) = float(double(state.top[row]) * ln_2);
        });
    }
};

inline void few_forward_of(const ForwardArgs& args, const Elements& elements) {
    Carver carver{(uintptr_t)args.workspace};
    run_forward<FewLane>(args, elements, carve_few(carver, *args.problem, args.tasks, args.parallel->lanes()));
}
template <class T>
void few_forward(const ForwardArgs& args) {
    few_forward_of(args, elements_of<T>);
}

inline size_t few_workspace(const Problem& p, const LayoutView&, const TasksView& tasks, int num_lanes) {
    Carver carver{0};
    carve_few(carver, p, tasks, num_lanes);
    return carver.used;
}

// A group gets the row whose tiles have the most heads of those that divide it: there are such for 1 to 8, and for 16.
template <int heads>
const char* few_forward_fits(const Problem& p) {
    constexpr int most = 16;
    if (p.group() % heads) return "groups that its tiles' heads do not divide";
    for (int more = heads + 1; more <= most; ++more)
        if (p.group() % more == 0 && (more <= 8 || more == most)) return "groups for more heads a tile";
    return nullptr;
}

// Clocks of a vector of a pair's products, of a pair besides, of a query row, and of one that meets a masked block; and
// of a float of a block, wherever it comes from. Read off 1 to 64 queries over 4,096 keys, in groups of 8, and windows of
// 16 (Zen 4): right for choosing among rows, no promise.
constexpr double few_vector = 1.25, few_pair = 2.5, few_row = 250, few_masked = 250, few_float = 0.3;

template <class T, int heads>
Cost few_cost(const Problem& p, const LayoutStats& stats, const Machine& machine) {
    const double dims = double(columns_of(p) + values_of(p));
    const double cap = p.softcap != 0 ? softcap_share : 0;
    const size_t key_bytes = p.float8_cache ? sizeof(Float8) : sizeof(T);
    double clocks = stats.pairs * (few_vector * dims / lanes + few_pair + softmax_clocks * (1 + cap) / lanes);
    clocks += stats.blocks / heads * few_keys * dims * (few_float + (key_bytes < sizeof(float) ? widen : 0));
    const double rows = p.seq_q < few_rows / heads ? double(p.seq_q * heads) : few_rows;  // of a tile
    clocks += double(p.batch * p.heads_q * p.seq_q) * few_row + stats.masked / heads * rows * few_masked;
    const double rows_k = double(p.sequences()) * double(p.heads_kv) * double(p.seq_k);
    const double compute_us = clocks / (1e3 * machine.clock * machine.lanes),
                 memory_us = rows_k * dims * double(key_bytes) / (1e3 * machine.bandwidth);
    return compute_us > memory_us ? Cost{compute_us, "compute"} : Cost{memory_us, "memory"};
}

}  // namespace
}  // namespace spattn::cpu
