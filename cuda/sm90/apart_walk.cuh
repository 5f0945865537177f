// SPDX-License-Identifier: MIT
// What walks of block_backward_apart.cuh are, by key and by query, and how one or two share a kernel: tiles, rings,
// registers, tasks, and what roles tell each other in shared memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "sm90/block_backward_apart.h"
#include "sm90/gradient.cuh"
#include "sm90/pair.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/token_tiles.cuh"

namespace spattn::sm90 {

enum class Sums { dq, dk, dv, dk_dv };
// How tokens stand in tiles: one after the other; in residue classes, which come as boxes, too; or in such of which
// some are listed, and come row by row.
enum class Order { consecutive, residues, listed };

// ---- configuration ----
// What the walks of one kernel have in common. HasDp: they make dp, so that own tokens have two operands.
template <Dtype D, int HeadDim, int HeadDimV, bool HasDp, Order O>
struct ApartTiles : TileConfig<D, HeadDim / BlockBackwardApart<D, HeadDim, HeadDimV, 128, 128>::tile_ctas,
                               HeadDimV / BlockBackwardApart<D, HeadDim, HeadDimV, 128, 128>::tile_ctas> {
    static constexpr int tile_ctas = BlockBackwardApart<D, HeadDim, HeadDimV, 128, 128>::tile_ctas;
    static constexpr bool in_pair = tile_ctas == 2;
    using Base = TileConfig<D, HeadDim / tile_ctas, HeadDimV / tile_ctas>;
    using Base::head_dim, Base::head_dim_v, Base::panels, Base::row_bytes, Base::v_panels;
    static constexpr Order order = O;
    static constexpr bool has_dp = HasDp, any_order = O != Order::consecutive, copies = O == Order::listed;
    static constexpr int block_q = 128, block_k = 128;
    static constexpr int own_rows = 128, step = in_pair ? 32 : 64;  // tokens of a tile; of the other axis at a time
    static constexpr int steps = 128 / step;                        // of a block
    // Masks have words for 64 tokens, of which a step may be a half.
    static constexpr int steps_of_word = 64 / step;
    using MaskWord = std::conditional_t<step == 64, uint32_t, uint16_t>;  // a thread's bits of a step
    static constexpr int warpgroups = own_rows / Base::warpgroup_rows;
    static constexpr int warps = 4 * warpgroups, consumers = 32 * warps, threads = consumers + 128;
    static constexpr int own_bytes = own_rows * row_bytes, step_bytes = step * row_bytes;  // of a panel
    using Pair = std::conditional_t<in_pair, PairShared<warpgroups, step>, Alone>;
    // As many tiles as there is room for: own tokens of two tasks, two steps of the other axis, or three. Not in
    // residue classes, whose tasks have few steps: three took strided(128) 7 % longer, and others 2 to 4 % less.
    static constexpr int most_bytes = 227 * 1024 - 2048 - Pair::parts_bytes;
    static constexpr int second_panels = has_dp ? v_panels : 0;  // of own tokens: v or dout
    static constexpr int tile_bytes = (panels + second_panels) * own_bytes;
    static constexpr int slot_bytes = panels * step_bytes, second_slot_bytes = v_panels * step_bytes;
    static constexpr int tiles = 2 * (tile_bytes + slot_bytes + second_slot_bytes) <= most_bytes ? 2 : 1;
    static constexpr bool takes_three =
        O != Order::residues && 2 * tile_bytes + 3 * (slot_bytes + second_slot_bytes) <= most_bytes;
    static constexpr int slots = takes_three ? 3 : 2;
    static constexpr bool takes_two = tiles * tile_bytes + 2 * (slot_bytes + second_slot_bytes) <= most_bytes;
    static constexpr int second_slots = takes_three ? 3 : takes_two ? 2 : 1;
    static constexpr int producers = any_order ? tile_copiers : 32, tile_counts = copies ? tile_arrivals : 1;
    static constexpr bool has_helpers = any_order && !copies;
    static constexpr int own_tiles = copies && has_dp ? 2 : 1;  // that come one by one
    // Whether steps without a kept pair are left out, so that the last one has to be told of. Patterns whose tokens
    // stand one after the other have few, and took 3 to 5 % longer so.
    static constexpr bool leaves_out = any_order;
    static constexpr int values = step / 2;  // a thread's of s, and of sums of ds and of p
    static constexpr int of_ds = has_dp ? head_dim / 2 : 2,
                         of_p = has_dp && head_dim > joined_head_dim ? 2 : head_dim_v / 2;
    // With 232 registers next to none spill, but the compiler mixes less: at 128 columns blocks of 128 took 4 to 11 %
    // longer so than with 240. At 256 they took 2 % less.
    static constexpr int producer_registers = head_dim > 128 ? 40 : 24, consumer_registers = head_dim > 128 ? 232 : 240;
    static_assert(producer_registers + warpgroups * consumer_registers <= launch_registers(threads, 1),
                  "roles share what the launch gives");
    static_assert(head_dim_v <= head_dim, "value_in_key adds dv to dk's columns");
    static_assert(tiles * tile_bytes + slots * slot_bytes + second_slots * second_slot_bytes <= most_bytes, "no room");
};
template <Dtype D, int HeadDim, int HeadDimV, Sums S, Order O>
struct ApartConfig : ApartTiles<D, HeadDim, HeadDimV, S != Sums::dv, O> {
    using Tiles = ApartTiles<D, HeadDim, HeadDimV, S != Sums::dv, O>;
    static constexpr int quarters_word = 2 * (BlockBackwardApart<D, HeadDim, HeadDimV, 128, 128>::mask_words - 1);
    static constexpr bool by_query = S == Sums::dq, sums_p = S == Sums::dv || S == Sums::dk_dv;
};

// Own tokens are queries where sums are dq's, else keys. `first` operands make s, `second` ones dp.
struct ConsecutiveGradientMaps {
    CUtensorMap own, own_second, other, other_second;  // boxes of one 64-column panel
    CUtensorMap ds, p;                                 // where sums of ds (dq or dk) and of p (dv) go
};
struct ResidueGradientMaps {
    runtime::ResidueMaps own, own_second, other, other_second, ds, p;
};
template <Order O>
struct ApartWalk {
    std::conditional_t<O == Order::consecutive, ConsecutiveGradientMaps, ResidueGradientMaps> maps;
    TasksView tasks;
    int2* notes;  // [task][warp]
};
template <Order O>
struct ApartParams : GradientParams {
    ApartWalk<O> walks[2];  // the second may have no tasks
    uint32_t share;         // the first one's, of tasks while both have some, in units of 2^-31; rounded up

    __host__ __device__ int num_tasks() const { return walks[0].tasks.num_tasks + walks[1].tasks.num_tasks; }
};

// The share of the first of two walks, of so many tasks, where blocks take so many cycles; both meet the same blocks.
// Tasks come in proportion, so that what one walk reads the other meets in L2: with less of that, dilated and strided
// attention took 3 and 4 % longer. Where tasks of one walk are few, and long, they are all under way so early that the
// last of them end with the others: the gradients of eight heads on one over 4,096 tokens, whose tasks by key are an
// eighth as many, took 1,151 us in proportion and take 813, those of a window of 513 over 8,192 207 and 157 (H200).
inline uint32_t share_of_first(const double (&tasks)[2], const double (&cycles)[2], double workers) {
    const int longer = cycles[0] / tasks[0] >= cycles[1] / tasks[1] ? 0 : 1, shorter = 1 - longer;
    // The share of the others' tasks that begin when the last of these are under way.
    const double behind = cycles[longer] / cycles[shorter] * workers / tasks[longer];
    const double between = tasks[shorter] * (behind < 0.25 ? 1 : std::max(1 - behind, 0.0));
    const double share = tasks[longer] / (tasks[longer] + between);
    return uint32_t(std::ceil((longer == 0 ? share : 1 - share) * double(1u << 31)));
}

// Task `at` of a kernel.
struct PlaceInWalk {
    int walk, task;
    template <class Params>
    __device__ __forceinline__ PlaceInWalk(const Params& params, int at) {
        const int first = params.walks[0].tasks.num_tasks, second = params.walks[1].tasks.num_tasks;
        if (!second) {
            walk = 0, task = at;
            return;
        }
        const auto of_first_before = [&](int n) {
            return max(min(int(uint64_t(n) * params.share >> 31), first), n - second);
        };
        const int of_first = of_first_before(at);
        walk = of_first_before(at + 1) == of_first;
        task = walk ? at - of_first : of_first;
    }
};

// Calls run<C>() for the walk of a task. Each walk has code of its own, for operands and sums are known when it is
// compiled. First and Second are the same where a kernel takes one walk.
template <class First, class Second, class Run>
__device__ __forceinline__ void in_walk(int walk, Run run) {
    if constexpr (std::is_same_v<First, Second>)
        run.template operator()<First>();
    else if (walk == 0)
        run.template operator()<First>();
    else
        run.template operator()<Second>();
}

// ---- shared memory ----
struct ApartMessage : TaskMessage {
    int32_t walk;
};

// What a producer tells of a step, in a word: the mask of its part of a block, for which warpgroups that has kept
// pairs, and whether it is its task's last.
struct StepMessage {
    int32_t word;
    StepMessage() = default;
    __device__ __forceinline__ explicit StepMessage(int word) : word(word) {}
    __device__ __forceinline__ StepMessage(int mask, int part, int parts, uint32_t pairs, bool is_last)
        : word((mask == full_block ? full_block : mask * parts + part) * 8 + int(2 * pairs) + is_last) {}
    __device__ __forceinline__ int mask() const { return word >> 3; }  // full_block, or of parts of all masks
    __device__ __forceinline__ bool has_pairs(int warpgroup) const { return word >> (1 + warpgroup) & 1; }
    __device__ __forceinline__ bool is_last() const { return word & 1; }
};
static_assert(full_block == -1, "what an arithmetic shift leaves");

template <class T>
struct ApartShared {
    uint8_t own[T::tiles][T::panels + T::second_panels][T::own_bytes];  // becomes what its sums are
    uint8_t other[T::slots][T::panels][T::step_bytes];
    uint8_t other_second[T::second_slots][T::v_panels][T::step_bytes];
    float offset[T::slots][T::step], delta[T::slots][T::step];  // QueryStats, where the other tokens are queries
    ApartMessage task[T::tiles];
    StepMessage step[T::slots];
    // Full: the producer with the bytes; consumers wait. Empty: one arrival a consumer warp; the producer waits.
    uint64_t own_full[T::tiles], own_empty[T::tiles];
    uint64_t other_full[T::slots], other_empty[T::slots];
    uint64_t second_full[T::second_slots], second_empty[T::second_slots];
    int32_t next[2];  // tasks that all producers take, in turn
    typename T::Pair pair;
};

// The tokens of an own tile that are written from it.
template <class C>
__device__ __forceinline__ any::OwnTokens own_tokens(const LayoutView& layout, int tile) {
    return C::by_query ? any::own_tokens_of(layout.queries, C::block_q, layout.seq_q, tile)
                       : any::own_tokens_of(layout.keys, C::block_k, layout.seq_k, tile);
}

}  // namespace spattn::sm90
