// SPDX-License-Identifier: MIT
//
//     by key     sT = k qT,  pT = exp2(scale_log2 sT - lse),  dv += pT dout;  dpT = v doutT,  dk += dsT q
//     by query   s and dp once more,  dq += ds k
//
// Each sum has one owner and one order, so that bits are the same in every call, for seven products where the sums of
// dq in memory would need five (block_backward.cuh). With head_dim above 128 registers hold one sum: dk and dv are made
// by a walk each, which makes eight products.
//
//   One kernel serves all: two warpgroups own 64 tokens each of a tile of 128, keys or queries, and meet the tokens of
//   the other axis 64 at a time, which a producer warp loads by TMA. Own tokens are the rows of all products, so that p
//   and ds are a operands as they stand, and nothing goes through shared memory but what comes and what leaves.
//
//               tensor   | dp | sum of p | sum of ds | next s |
//               the rest   p    ds
//
//   walks     up to head_dim 128 tasks of both walks come in turn in one launch: what one has read the other meets in
//             L2, there is one tail, and a small problem waits for one launch less
//
//   columns   beyond 256 two CTAs share a tile, as in the forward: they exchange their parts of s and of dp, and each makes
//             its columns of the sums. Steps have 32 tokens then, and tokens stand in their own order
//
//   orders    as in the forward, tokens may stand in any order; and a pattern may be run in pieces, each of which takes
//             on the float sums of the one before. Sums of homes leave as boxes, others row by row. Where tokens stand
//             in any order a block is often empty in parts: steps without a kept pair are not loaded, and a warpgroup
//             passes over those that have none for it
//
//   isolation as in block_backward.cuh: rows that are not finite are noted and made again from kept pairs.
//
// What binds. A 64 x 128 block is 512 cycles of the tensor unit for each product, and the first two read both operands
// from shared memory at its full rate. Steps come two or three ahead, so what the producer does between a slot that is
// free and its boxes counts. Residue classes wait for that most: in 24 registers it spills some at each step. Of
// block_diagonal512_16k 12 % are ends and begins of tasks, when the other warpgroup has the tensor unit; dilated_16k
// keeps the way between the halves of L2 busy for 79 % of its time (ncu). Measured (H200, bf16, L2 cold, TFLOP/s of 10
// pairs d, whatever is made twice, 2026-11, GEMM 800): random blocks (bsr128_10_16k) 474, window1k_16k 395,
// block_diagonal512_16k 395, head_dim 192/128 424, 256 453; dilated_16k 74, strided_16k 89, longnet_128k 213,
// landmark_64k 273, global_tokens_64k 264; as a union in pieces sparse_transformer_16k 92. With a launch for each walk,
// every step loaded and sums of pieces read one by one it was 459 for random blocks and 345 for block_diagonal512_16k;
// 54, 65, 195, 263, 238 and 48 in other orders. Pairs, head_dim 512, 8 heads on 4: full_16k 234, causal_16k 238,
// window1k_16k 190, where torch's memory-efficient kernel reaches 44 and 39; of shared memory they want as much, 352 KiB
// for 32 tokens.
//
// Tried and dropped: sums as members of what is made for each task (ptxas takes those of both walks for alive at once,
// and serializes the products); 40 registers a producer (the same, in any order of tokens); what belongs to own queries
// read under the first scores instead of before them (block diagonals the same, residue classes +2 to +4 %); the next
// task's first scores begun before sums leave (block_diagonal512_16k 434 -> 432 us, residue classes +5 to +38 %: ends
// shrink, and waits for products grow by as much).
#pragma once

#include <algorithm>
#include <type_traits>

#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/apart_consumer.cuh"
#include "sm90/apart_producer.cuh"

namespace spattn::sm90 {

// ---- kernel: one walk, or two side by side ----
template <class First, class Second>
__device__ __forceinline__ void produce(ApartProducerState<typename First::Tiles>&& state) {
    const auto& params = state.params;
    for (int at = int(blockIdx.x) / First::tile_ctas; at < params.num_tasks(); at = state.take_next()) {
        const PlaceInWalk place(params, at);
        in_walk<First, Second>(place.walk, [&]<class C>() {
            ApartProducer<C>{state, params.walks[std::is_same_v<C, First> ? 0 : 1]}.run(place.task);
        });
    }
    if (!state.helps) state.announce_end();
}

template <class First, class Second>
__device__ __forceinline__ void consume(ApartConsumerState<typename First::Tiles>&& state) {
    const auto& shared = state.shared;
    for (;;) {
        state.wait(&state.shared.own_full[state.tile.index], state.tile.phase);
        const ApartMessage task = shared.task[state.tile.index];
        __syncwarp();  // all lanes have read the message before its tile can be released
        if (task.count == end_of_work) break;
        in_walk<First, Second>(__shfl_sync(~0u, task.walk, 0),
                               [&]<class C>() { state.template of<C, First>().run(task); });
        state.tile.advance();
    }
    state.template of<First, First>().repair_noted();
    if constexpr (!std::is_same_v<First, Second>) state.template of<Second, First>().repair_noted();
}

template <class First, class Second>
__global__ void __launch_bounds__(First::threads, 1)
    apart_kernel(const __grid_constant__ ApartParams<First::order> params) {
    using T = typename First::Tiles;
    static_assert(std::is_same_v<T, typename Second::Tiles>, "walks share rings");
    ApartShared<T>& shared = *ptx::swizzled_shared<ApartShared<T>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < T::tiles; ++i) {
            ptx::mbarrier_init(&shared.own_full[i], T::own_tiles * T::tile_counts);
            ptx::mbarrier_init(&shared.own_empty[i], T::warps);
        }
        for (int i = 0; i < T::slots; ++i) {
            ptx::mbarrier_init(&shared.other_full[i], T::tile_counts);
            ptx::mbarrier_init(&shared.other_empty[i], T::warps);
        }
        for (int i = 0; i < T::second_slots; ++i) {
            ptx::mbarrier_init(&shared.second_full[i], T::tile_counts);
            ptx::mbarrier_init(&shared.second_empty[i], T::warps);
        }
        shared.pair.init();
        ptx::fence_mbarrier_init();
    }
    sync_tile<T>();
    const int warpgroup =
        __shfl_sync(~0u, threadIdx.x / 128, 0);  // a shuffle, so that the compiler sees one value a warp
    if (warpgroup == T::warpgroups) {
        ptx::give_registers<T::producer_registers>();
        const int thread = int(threadIdx.x) - T::consumers;
        if (thread < T::producers) {
            if (T::has_helpers && thread >= 32)
                produce<First, Second>({params, shared, thread % 32, false, true});
            else
                produce<First, Second>({params, shared, thread % 32, thread == 0 && tile_rank<T>() == 0, false});
        }
    } else {
        ptx::take_registers<T::consumer_registers>();
        consume<First, Second>({params, shared, warpgroup, int(threadIdx.x % 128)});
    }
    if constexpr (T::in_pair) ptx::cluster_sync();  // the other CTA may have something to send to this one yet
}

// ---- launch ----
template <Dtype D, int HeadDim, int HeadDimV, Order O>
struct ApartLaunch {
    const BackwardArgs& args;
    const Problem& p;
    const BlockBackwardApartSpace space;

    explicit ApartLaunch(const BackwardArgs& args)
        : args(args), p(*args.problem), space(p, args.layout, args.tasks, args.second_tasks, tile_ctas) {}

    static constexpr int tile_ctas = BlockBackwardApart<D, HeadDim, HeadDimV, 128, 128>::tile_ctas;
    int most_tiles() const { return runtime::count_processors(args.device) / tile_ctas; }  // that are worked on at once

    // Counters, unless all tasks are worked on at once.
    void clear() const {
        if (args.tasks.num_tasks + args.second_tasks.num_tasks > most_tiles())
            runtime::clear(workspace() + space.counters, space.notes - space.counters, args.stream);
    }

    template <Sums S>
    using Config = ApartConfig<D, HeadDim, HeadDimV, S, O>;

    // One walk, or two side by side, as number `kernel` of this call.
    template <Sums First, Sums Second = First>
    void run(int kernel, bool has_second = First != Second) const {
        using C = Config<First>;
        ApartParams<O> params;
        fill(params, args);
        set<C>(params.walks[0], 0);
        const int64_t of_first = params.walks[0].tasks.num_tasks;
        params.walks[1] = {};
        if (has_second) set<Config<Second>>(params.walks[1], of_first);
        const int tasks = params.num_tasks(), tiles = std::min(tasks, most_tiles());
        params.share = of_first && of_first < tasks ? share_of_dk_dv(of_first, tasks - of_first, tiles) : 0;
        if (tiles < tasks) params.next_task = reinterpret_cast<unsigned*>(workspace() + space.counters) + kernel;
        runtime::launch(apart_kernel<C, Config<Second>>,
                        {unsigned(tiles * tile_ctas), unsigned(C::threads), sizeof(ApartShared<typename C::Tiles>),
                         unsigned(tile_ctas)},
                        args.stream, params);
    }

    static uint32_t share_of_dk_dv(int64_t tasks, int64_t of_dq, int workers) {
        constexpr double products[2] = {2 * HeadDim + 2 * HeadDimV, 2 * HeadDim + HeadDimV};
        return share_of_first({double(tasks), double(of_dq)}, products, workers);
    }

    char* workspace() const { return static_cast<char*>(args.workspace); }

    // notes: of walks before.
    template <class C>
    void set(ApartWalk<O>& walk, size_t notes) const {
        make_maps<C>(walk.maps);
        walk.tasks = C::by_query ? args.second_tasks : args.tasks;
        walk.notes = reinterpret_cast<int2*>(workspace() + space.notes) + notes * C::warps * tile_ctas;
    }

    template <class C>
    void make_maps(ConsecutiveGradientMaps& maps) const {
        const auto map = [&](const TensorView& x, const runtime::Sizes& sizes, int rows) {
            return runtime::make_tensor_map(x, sizes, D, rows);
        };
        make_operands<C>(maps, map, map);
        make_sums<C>(maps, map, map);
    }
    template <class C>
    void make_maps(ResidueGradientMaps& maps) const {
        const auto of = [&](const AxisView& axis) {
            return [&](const TensorView& x, const runtime::Sizes& sizes, int rows) {
                return runtime::make_residue_maps(x, sizes, D, rows, axis.modulus);
            };
        };
        const auto of_queries = of(args.layout.queries), of_keys = of(args.layout.keys);
        make_operands<C>(maps, of_queries, of_keys);
        make_sums<C>(maps, of_queries, of_keys);
    }
    template <class C, class Maps, class QueryMap, class KeyMap>
    void make_operands(Maps& maps, QueryMap query_map, KeyMap key_map) const {
        const int of_q = C::by_query ? C::own_rows : C::step, of_k = C::by_query ? C::step : C::own_rows;
        const auto q = query_map(args.q, runtime::q_sizes(p), of_q);
        const auto dout = query_map(args.dout, runtime::out_sizes(p), of_q);
        const auto k = key_map(args.k, runtime::k_sizes(p), of_k);
        const auto v = key_map(args.v, runtime::v_sizes(p), of_k);
        maps.own = C::by_query ? q : k, maps.own_second = C::by_query ? dout : v;
        maps.other = C::by_query ? k : q, maps.other_second = C::by_query ? v : dout;
    }

    template <class C, class Maps, class QueryMap, class KeyMap>
    void make_sums(Maps& maps, QueryMap query_map, KeyMap key_map) const {
        if (C::has_dp)
            maps.ds = C::by_query ? query_map(args.dq, runtime::q_sizes(p), C::warp_rows)
                                  : key_map(args.dk, runtime::k_sizes(p), C::warp_rows);
        if (C::sums_p && !p.value_in_key) maps.p = key_map(args.dv, runtime::v_sizes(p), C::warp_rows);
    }

    template <Sums First, Sums Second = First>
    static void prepare() {
        runtime::prepare(apart_kernel<Config<First>, Config<Second>>,
                         sizeof(ApartShared<typename Config<First>::Tiles>));
    }
};

template <Dtype D, int HeadDim, int HeadDimV, Order O>
void run_apart(const BackwardArgs& args) {
    const ApartLaunch<D, HeadDim, HeadDimV, O> launch(args);
    launch.clear();
    any::BlockBackward<D>::rows(args);
    // Queries that stand in several tiles have several sums.
    const bool has_queries = !args.layout.queries.listed || args.layout.queries.away;
    if constexpr (HeadDim <= joined_head_dim) {
        launch.template run<Sums::dk_dv, Sums::dq>(0, has_queries);
    } else {
        launch.template run<Sums::dk>(0);
        launch.template run<Sums::dv>(1);
        if (has_queries) launch.template run<Sums::dq>(2);
    }
    any::BlockBackward<D>::join_keys(args);
    if (has_queries)
        any::BlockBackward<D>::join_queries(args);
    else
        any::BlockBackward<D>::by_query(args);
    any::BlockBackward<D>::sinks(args);
}

template <Dtype D, int HeadDim, int HeadDimV, Order O>
void prepare_apart() {
    using Launch = ApartLaunch<D, HeadDim, HeadDimV, O>;
    if constexpr (HeadDim <= joined_head_dim) {
        Launch::template prepare<Sums::dk_dv, Sums::dq>();
    } else {
        Launch::template prepare<Sums::dk>();
        Launch::template prepare<Sums::dv>();
        Launch::template prepare<Sums::dq>();
    }
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardApart<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs& args) {
    static_assert(BlockQ == 128 && BlockK == 128, "tiles of own tokens are blocks");
    const AxisView &queries = args.layout.queries, &keys = args.layout.keys;
    if constexpr (any_order) {
        if (queries.listed + keys.listed > 0) return run_apart<D, HeadDim, HeadDimV, Order::listed>(args);
        if (!args.piece.is_whole() || !is_consecutive(queries) || !is_consecutive(keys))
            return run_apart<D, HeadDim, HeadDimV, Order::residues>(args);
    }
    run_apart<D, HeadDim, HeadDimV, Order::consecutive>(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardApart<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    prepare_apart<D, HeadDim, HeadDimV, Order::consecutive>();
    if constexpr (any_order) {
        prepare_apart<D, HeadDim, HeadDimV, Order::residues>();
        prepare_apart<D, HeadDim, HeadDimV, Order::listed>();
    }
    runtime::prepare_tensor_maps();
}

}  // namespace spattn::sm90
