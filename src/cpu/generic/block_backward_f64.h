// SPDX-License-Identifier: MIT
// Backward in double. Its lse comes as float32, which would leave p = exp(s - lse) with seven digits. So a phase of its
// own, between the row statistics and the gradients, sums p over each row as it comes: the sum is off 1 by what the
// rounding of lse took, and its logarithm puts that back:
//
//     sum[query] = sum over keys of p + e^(z - lse),  lse += log(sum)
//
// It walks the same queues, with ones in place of K, so that p . 1 goes where ds . K will: one product in six more. The
// ds that comes with p is not used. As the sum is over all keys before the first gradient, pieces of a pattern are
// swept twice: first for the sums, which they hand on until the last makes lse of them, then for gradients.
#pragma once

#include "cpu/generic/block_backward.h"

namespace spattn::cpu {
namespace {

template <int bq, int bk>
struct SumLane : BackwardLane<bq, bk> {
    using Lane = BackwardLane<bq, bk>;
    using Lane::args, Lane::p, Lane::elements, Lane::space, Lane::lane, Lane::columns;

    SumLane(const BackwardArgs& a, const Elements& e, const BackwardSpace& s, int64_t index)
        : Lane(a, e, s, index, lanes) {}

    void take_queue(int64_t w) {
        Lane::start_queue(w);
        for (int i = 0; i < bk * lanes; ++i) lane.k[i] = 1;
        Lane::zero(lane.dp, bq * bk);
        for (int32_t t = args.tasks.begin[w]; t < args.tasks.begin[w + 1]; ++t) column(args.tasks.tasks[t]);
    }

    void column(const Task& t) {
        if (t.take == 0) return;
        const Place at = Lane::keys(t.head, t.row);
        pack_panels<bk>(elements, args.k, at, int(p.head_dim), 1, lane.k_t, lane.q);
        Lane::each_block(t, [&](int64_t head, int64_t g, int32_t row, int32_t mask) {
            visit(head, g, row, mask, at.count);
        });
    }

    void visit(int64_t head, int64_t g, int32_t row, int32_t mask, int keys) {
        const Place at = Lane::queries(head, row);
        const Rows q = load_rows(elements, args.q, at, int(p.head_dim), lane.q), ones{lane.k, lanes};
        bool is_first = true;
        Real* sums = Lane::repeats(row) ? lane.dq
                                        : Lane::touch(Lane::dq_block(Lane::queue, g, Lane::own_tile(row)), is_first);
        for (int first = 0; first < bk; first += Lane::panel)
            multiply<Left::rows, Store::set>({q.x, q.ld, Lane::panel_at(lane.k_t, first, p.head_dim), Lane::panel,
                                              lane.s + first, bk, int(p.head_dim)},
                                             at.count, Lane::panel / lanes);
        const uint64_t* bits = mask_bits(args.layout, mask);
        const typename Lane::Visit v{q, q, Lane::statistics(head, row, at), bits, sums, keys, is_first};
        Lane::template differentiate<bk / lanes>(v, {0, at.count}, 0);
        const Product product{lane.s, bk, ones.x, ones.ld, sums, columns, keys};
        is_first ? multiply<Left::rows, Store::set>(product, at.count, 1)
                 : multiply<Left::rows, Store::add>(product, at.count, 1);
        if (Lane::repeats(row)) Lane::scatter_dq(g, at);
    }

    // -lse log2(e) of one own tile, in place of what prepare() made of it.
    void refine(int64_t head, int32_t tile) {
        Lane::sum_queues(head, tile);
        const Place at = Lane::own(head, tile);
        Lane::sum_pieces(space.carried.minus_lse, Lane::pieces_around(), at, 1, lane.q, columns);
        if (!args.piece.is_last) return;
        const double sink = sink_of(args.sink_logits, at.head);
        for (int i = 0; i < at.count; ++i) {
            if (!(at.owned >> i & 1)) continue;
            const float lse = *address<float>(args.lse, at, i);
            if (lse == -INFINITY) continue;
            Real& minus_lse = args.piece.is_whole() ? space.minus_lse[(head * space.rows + tile) * bq + i]
                                               : *address<Real>(space.carried.minus_lse, at, i);
            minus_lse = Real(-log2_e * lse) - log2(lane.q[i * columns] + exp(sink - double(lse)));
        }
    }
};

template <int bq, int bk>
inline void backward_sums(void* argument, int64_t index) {
    BackwardCall& call = *(BackwardCall*)argument;
    SumLane<bq, bk> lane(*call.args, *call.elements, call.space, index);
    const int64_t end = call.space.round.end_queue;
    for (int64_t w; (w = next_of(call.next_queue, *call.args->parallel)) < end;) lane.take_queue(w);
}

template <int bq, int bk>
inline void backward_lse(void* argument, int64_t index) {
    BackwardCall& call = *(BackwardCall*)argument;
    SumLane<bq, bk> lane(*call.args, *call.elements, call.space, index);
    const int64_t tiles = call.space.tiles(), blocks = call.space.heads * tiles;
    for (int64_t i; (i = next_of(call.next_row, *call.args->parallel)) < blocks;)
        lane.refine(i / tiles, int32_t(call.space.round.first_row + i % tiles));
}

template <class T, int bq, int bk>
void block_backward_f64(const BackwardArgs& args) {
    BackwardCall call =
        begin_backward<bq, bk>(args, elements_of<T>, {(uintptr_t)args.workspace}, args.parallel->lanes());
    for (int32_t i = 0; args.piece.sweep == 0 && i < rounds_of(args.tasks); ++i) {
        begin_round(call, i);
        args.parallel->run(backward_sums<bq, bk>, &call);
        args.parallel->run(backward_lse<bq, bk>, &call);
    }
    if (args.piece.is_whole() || args.piece.sweep == 1) complete_backward<bq, bk>(call);
}

}  // namespace
}  // namespace spattn::cpu

#define SPATTN_CPU_BLOCK_F64(arch, bq, bk) SPATTN_CPU_PAIR_OF(arch, double, f64, bq, bk, block_backward_f64, 2)
