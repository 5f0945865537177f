// SPDX-License-Identifier: MIT
//
//     s = q kT,  p = exp2(scale_log2 s - m),  out = sum(p v) / sum(p),  lse = scale m + log(sum(p))
//
// over the blocks that a layout lists for each query block. The kernel knows runs of blocks and bit masks, no pattern.
//
//   grid      one CTA an SM, persistent; tasks in the plan's order, from a counter where there are more than two a CTA.
//             The kernel that clears it runs while this one begins. Blocks of 64 queries have CTAs of one warpgroup,
//             two or three an SM, for patterns that leave most of a larger tile empty; those of 192, at head_dim 64,
//             of three
//   producer  one warp, the walker, goes through the runs 32 at a time and fills a ring of 32 KiB tiles with k and v
//             blocks by TMA, with the next q ahead; it tells the consumers each block's mask through shared memory:
//             they read no list. A second warp clears rows of v that no query sees, before consumers may read the block
//   consumers warpgroups of 64 rows each, mostly two, scores and out in registers. Each begins s of block j + 1, then
//             p v of block j, also from one task into the next, and makes probabilities under them and under the
//             others':
//
//               tensor   | s1 | p0 v0 | the other's | s2 | p1 v1 | the other's
//               the rest      |  softmax of s1      |    |  softmax of s2
//
//             They take turns at beginning products, as in FlashAttention-3 (https://arxiv.org/abs/2407.08608): if both
//             began at once the tensor unit would serve both at half the rate, and both would wait for their scores.
//             Products of 64 columns are half as long, the exponentials are not: a third warpgroup fills the time. It
//             leaves a thread registers for the probabilities of one block, whose p v it waits for.
//             p is the a operand of p v as it stands; a masked block costs a thread one 64-bit load and predicated
//             moves (tile/fragment.h); out leaves through the q tile. A CTA of one warpgroup, whose tasks have few
//             blocks, lets it leave through the slot of the last v: so the q tile is free when the last scores are made
//   softmax   exponentials are made relative to the maximum that was found last, and their sums tell whether that was
//             good enough. Where it was not (a task's first block, rows that grow by 2^12) they are made once more from
//             the scores, which still stand. So a block takes no maximum and no exchange between lanes
//
//   orders    where tokens do not stand in their own order, a second kernel of the same parts: residue classes are
//             boxes of a tensor map whose rows are a class, for out as for the others. Listed tiles of keys that have
//             no other place were packed before the kernel begins (packed_keys.cuh), and come as boxes. Rows of what
//             else is listed, and of tiles of v with dead keys, are copied by number: the walker asks three warps for
//             them, a tile each, ahead of the slots that these wait for. They fence copies once they have landed, so that
//             consumers wait for tiles of either kind alike: two fences of theirs in each block would wait for all that
//             they have under way. out leaves row by row where a tile's rows are listed, or away from home
//
//   pieces    of a pass take on what those before left of their rows, in a third kernel of the same parts. A task's end
//             multiplies and adds it, and writes it for the next piece, or out in the end. These sums of floats follow
//             the task's last v through the ring as boxes of 32 columns, so that they are on their way while blocks are
//             worked on; results leave, as boxes again, through the slots that they came in. So a q tile is free when
//             its task's last scores are made, and that of the next task but one comes a task ahead: pieces have tasks
//             of few blocks, and would wait for memory once a task
//
//   caches    keys in pages smaller than a block are listed tiles of stretches (plan/cache.h), a box each: three warps
//             ask for them, a tile each. Queries may begin at any place of their first tile and end at any of their
//             last. The places around them may be those of other sequences: they are worked on as if they were its own,
//             and never stored
//
//   float8    of caches: a kernel of its own, with this walker, serves few queries (forward_float8.cuh). Of more of them
//             small tiles are widened as they come (forward_widener.cuh), and larger tiles read a copy of the cache as
//             elements (plan/cache.h): 2,048 queries of a prompt over 32K keys take 2.77 ms, 2.67 from bfloat16 (H200).
//             Widened tile by tile they took 5.1 by tiles of 128 x 128 with seven wideners a CTA, and 8.6 by those of
//             64 x 64
//
//   columns   beyond 256 a tile has two CTAs, which are a cluster: each has half of the columns of q, k, v and out, and
//             of scores the part that comes of its columns. They send each other these parts, and both make the same
//             probabilities of their sums (pair.cuh). The parts take the room of a second q tile, so that out leaves from
//             registers, row by row, and the next q comes when the last scores are made
//
//   heads     those of a group may share a tile, token by token, where queries are few: boxes of q and out have as many
//             heads, and masks were widened for them. Only whose a written row is differs (any::TileRows)
//
//   parts     of a split row go to memory, and a second kernel joins them (any/combine.cuh). It is launched while this
//             one runs, and its CTAs take the place of those that are done
//
//   isolation out is p v, and 0 * NaN is NaN: a row whose sums are not finite may owe that to a key that it does not
//             see. Warps note such rows and, when nothing else is left, make them again from kept pairs alone
//
// What binds. The products of a 64 x 128 block are 1024 cycles of the tensor unit, so two warpgroups cannot be faster
// than 2048 a block; full_16k takes 2200. A warpgroup's own chain is about 250 cycles of waits and descriptors, 900 to
// issue the products (wgmmas queue four or five deep, then issue blocks) and 950 for the softmax, of which the 64
// exponentials a thread are 512. Counters (ncu): the tensor pipe is busy 87 % of all cycles of full_16k, 77 % of
// bsr128_10_16k and 73 % of window1k_16k. On full_16k the 700 W cap holds the clock at 1.6 GHz, as it does GEMM's.
//
// Measured (H200, bf16, d128, L2 cold, pauses between calls, TFLOP/s on kept pairs, 2026-11, GEMM 8192^3 791 in the
// same run): full_16k 807, causal_16k 798, window1k_16k 592, window4k_128k 765, streaming_16k 575, bsr128_10_16k 725;
// full_16k at head_dim 64 617, at 256 819; landmark_64k 485, longnet_128k 438, dilated_16k 99. Single blocks instead of
// runs cost 0.5 %, a mask on every block 4 to 6 %. Blocks of 64 x 64 beside 128 x 64, 16 heads of 16K tokens, us (at
// head_dim 64), in an earlier run: block_diagonal(192) 89 and 100 (61 and 77), window(63,63) 91 and 104 (65 and 85), 8
// blocks of 64 a query block at random 160 and 190 (113 and 146).
//
// Where tasks change. A trace of window1k_16k (H100): a task of 9 blocks takes 21,400 cycles, 2,140 a block and 2,000
// more, of which the first softmax, which looks for maxima, takes 450 and the ends of rows 1,450. The walker, whose
// scheduler serves two consumer warps as well, needs 5 to 7 cycles an instruction, and keys waited for it at each
// change: for two divisions, for loops over threads around copies, and for an atomic addition whose result the compiler
// waited for at once. Without these (any/divisor.h, ptx::elect, ptx::count), and with lse written by two threads of a
// quad at once, block_diagonal512_16k takes 4 % less time, landmark_64k and global_tokens_64k 2.4 %, bigbird_128k 2 %,
// window1k_16k 1.7 %.
//
// Pairs (H200, head_dim 512, 8 heads on 4, 16K tokens, TFLOP/s): full attention 565, causal 553, window1k 400, where
// torch's memory-efficient kernel reaches 139 and 129. What binds is shared memory: for a block products read 192 KiB of
// it, 64 KiB come from L2, and parts of scores are 32 KiB that leave, 32 that come and 32 that are read, which at 128
// bytes a cycle are 2,816 of the 3,400 cycles that a block takes. Without parts full attention would reach 759, with parts
// that nobody waits for 630. Tried and dropped: turns (-2 %); one place for parts, and four slots (-8 %).
//
// Residue classes (H200, us). Their boxes were found by a division each: without these dilated_16k takes 85.2 instead
// of 90.7, strided_16k 84.5 instead of 91.6, landmark_64k and global_tokens_64k 2 % less. With out in the slot of the
// last v the walker no longer waits for q tiles: 83.8 and 81.4, logsparse_16k 158.6 instead of 161.9. What binds then
// is the way between the halves of L2, busy 87 % of the time (ncu, lts__ltcfabric2ltc_cycles_active; DRAM 65 %): each
// block of keys is read for two of queries. Blocks of 128 x 64, which read them 1.5 times, leave more empty: 90.9 and
// 91.8. Two to eight tiles of a residue class one after the other in a CTA, where idle warps copy keys that it has in its
// ring already: 86 to 93, and strided_16k, which has none to copy, 82 to 86. Heads side by side in the order of tasks:
// the same.
//
// Tried and dropped there (H100, in one run, time; the first on an H200): the next task asked for before the last block
// but one, and read before the last (0 to +0.6 %); to leave out halves of masked blocks that a warpgroup keeps no pair
// of, of which masks told: where each step asks full_16k takes 6 % more; where the producer tells which ones may be
// halves window1k_16k +2.5 %, streaming_128k -1.8 %, and ptxas has registers for few of such kernels. The next task
// found step by step under the last blocks, or announced a block ahead: +1 to +5 %, for each instruction of the walker
// counts, wherever it stands. Scores of the next task's second block begun before rows leave: window1k_16k +1 %. The
// last p v before the next task's scores, which are made while rows leave: bsr128_10_16k and causal_16k -0.6 to -1 %,
// windows and block diagonals +1 to +2 %, head_dim 64 +3 to +10 %. The last v before the next task's k: +1 to +4 %.
//
// Three warpgroups beside two at head_dim 64, TFLOP/s (H100, one run): full_16k 626 and 536, causal_16k 617 and 522,
// window4k_64k 552 and 476, window1k_16k 377 and 371, block_diagonal512_16k 336 and 360.
//
// Tried and dropped with these three (H200, full_16k at head_dim 64, 617): without turns 570; every eighth exponential
// by a polynomial of degree 3, as FlashAttention-4 makes some on Blackwell, 584, every fourth 552: with ten
// instructions each they probably take longer to issue than the unit for exponentials is waited for; 64 keys a block
// 530.
//
// Tried and dropped (full_16k or window1k_16k, in one run): three serial warpgroups of 64 rows (722 instead of 788);
// row maxima before the exponentials (-6 %); sums and packing behind the wait for p v (-3 %); p v issued between
// exponentials (0 to -3 %); four ring tiles at constant places instead of five (-3 to -6 %); descriptors that are not
// known uniform (3 R2UR an instruction: -7 %); first blocks first (-7 %: few rows of a window see its first block). 128
// keys by number, copied by 16-byte cp.async of four warps into a tile as a box would fill it, cost 1.3 blocks.
//
// Rows by number (H200): 2,048 queries of a prompt over 32K keys in pages of a token take 3,360 us; with 13 instructions
// a copy instead of 5 they took 4,390, and 3,555 where copiers looked up a tile's tokens once they had its slot. Boxes of
// whole pages take 2,650. What is left is the way of the rows: 4 instructions a copy took as long as 5.
//
// Few queries, 64 heads on 8, one query, L2 cold (H200, us): over 2,048 keys 14, of which 2.8 are an empty launch, over
// 8,192 22, over 32,768 49, over 131,072 137 (tiles of 128 rows take 25, 53 and 143); a tenth of the 64-blocks of 16,384
// keys 13, of 131,072 29 (89 when blocks with keys that nobody sees were waited for one by one, and parts looked for
// their runs one by one). Tried and dropped: 32 parts asked for at once by the kernel that joins them (+3 us over 8,192
// keys); live keys of many runs' blocks looked up at once (dilated windows +3 %).
//
// Pieces hand on sums of floats. Both pieces of Sparse Transformer's strided attention (16 heads of 16K tokens, 247 us
// on an H200) have 740 MB to move, 175 us at memory's rate, and 1.05 GB from L2 into tiles, as counted from their sizes.
// To run them head after head, while L2 holds what one hands on, would probably gain nothing: of an H100's 310 us a head
// has 19, but takes 33 where it runs alone, with all of it in L2, and four take 25 each. A piece of one head is a task
// for each CTA.
//
// On an H100 (GEMM 790), before and after, TFLOP/s: turns took full_16k at head_dim 64 from 438 to 534 and at fp16 from
// 424 to 542, window1k_16k from 563 to 579, block_diagonal512_16k from 507 to 525, and left full_16k at 812; packed
// keys took landmark_64k from 217 to 402.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "any/combine.cuh"
#include "any/divisor.h"
#include "any/partials.h"
#include "any/row_end.cuh"
#include "any/tile.cuh"
#include "core/math.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "runtime/launch.h"
#include "runtime/tensor_map.h"
#include "sm90/block_forward.h"
#include "sm90/counter.cuh"
#include "sm90/forward_consumer.cuh"
#include "sm90/forward_float8.cuh"
#include "sm90/forward_producer.cuh"
#include "sm90/packed_keys.cuh"
#include "sm90/pair.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/token_tiles.cuh"
#include "tile/fragment.h"

namespace spattn::sm90 {

template <bool AnyOrder>
struct BlockForwardParams;
template <class C>
struct ForwardShared;

// ---- configuration ----
// The kernels of these parts: of consecutive tokens; of any order of tokens in the layout's tiles; of patterns of which
// a pass has several; of a float8 cache; and of q and k of float8 that are multiplied as they are.
enum class Variant { consecutive, any_order, pieces, float8_cache, float8_products };

// Tiles are those of a CTA, which has some of the columns where two share a tile.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK, Variant V>
struct Config : TileConfig<D, HeadDim / BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::tile_ctas,
                           HeadDimV / BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::tile_ctas> {
    using Row = BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>;
    static constexpr int tile_ctas = Row::tile_ctas;
    static constexpr bool in_pair = tile_ctas == 2;
    using Base = TileConfig<D, HeadDim / tile_ctas, HeadDimV / tile_ctas>;
    using Base::head_dim, Base::head_dim_v, Base::panels, Base::row_bytes;
    static constexpr bool any_order = V == Variant::any_order || V == Variant::pieces;
    static constexpr bool in_pieces = V == Variant::pieces;
    static constexpr bool is_float8 = V == Variant::float8_cache, reads_bytes = false;
    static constexpr bool multiplies_float8 = V == Variant::float8_products;
    static constexpr bool asks_copiers = any_order || is_float8;
    using Params = BlockForwardParams<any_order>;
    using Shared = ForwardShared<Config>;
    using MaskWord = std::conditional_t<BlockK == 128, uint64_t, uint32_t>;  // a thread's bits of a block
    static constexpr int block_q = BlockQ, block_k = BlockK, warpgroups = block_q / Base::warpgroup_rows;
    // CTAs an SM. Smallest tiles have room for another: tiny_streaming takes 12.0 us instead of 13.3, as its 384 tasks
    // all run at once.
    static constexpr bool is_smallest = HeadDim == 64 && block_q == 64 && block_k == 64 && !asks_copiers;
    static constexpr int ctas = is_smallest ? 3 : Row::ctas;
    static constexpr int threads = tile::fragment_threads * (warpgroups + 1);
    static constexpr int panel_bytes = block_q * row_bytes, box_bytes = block_k * row_bytes;  // a panel of q; of k or v
    static constexpr int key_panel_columns = multiplies_float8 ? 128 : Base::panel_columns;
    static constexpr int key_panels = int(ceil_div(head_dim, key_panel_columns));
    // The columns of a product of q and k.
    static constexpr int key_step = multiplies_float8 ? 32 : 16;
    // A CTA of one warpgroup has a slot for itself once p v of it is done: out leaves through that of its last v.
    static constexpr bool out_in_v = warpgroups == 1 && !in_pieces;
    // Tasks of few blocks may end faster than q comes and out leaves: where there is room, more of them are under way.
    // Not in any order of tokens, where a third tile took more from the ring than it gave.
    static constexpr bool has_room = !any_order && !out_in_v && head_dim == 128 && block_k == 64;
    static constexpr int q_tiles = !any_order && head_dim == 64 ? 4 : has_room ? 3 : in_pair ? 1 : 2;
    // Whether warpgroups take turns at beginning products. With sums of 256 columns products outlast the softmax by
    // far, and turns cost 14 %. Keys of 192 and values of 128 columns were as fast without, or 4 % slower, as the
    // compiler happened to order instructions.
    static constexpr bool takes_turns = warpgroups >= 2 && head_dim_v <= 128;
    // A thread of three warpgroups has no registers for probabilities of 128 keys twice, nor one of three CTAs for
    // those of 64: p v of a block is waited for before those of the next are made, under the products of two others.
    static constexpr int p_arrays = warpgroups * ctas == 3 ? 1 : 2;
    static constexpr int most_bytes = (228 / ctas - 1) * 1024, barrier_bytes = 1024;  // of shared memory
    // Stages are those of float8, and so are blocks of which there are scales (forward_widener.cuh).
    static constexpr int stages = is_float8 ? 3 : 1, most_scale_blocks = 6;
    static constexpr int float8_bytes =
        is_float8 ? stages * block_k * stage_row_bytes + most_scale_blocks * 2 * block_k * int(sizeof(float)) : 0;
    using Pair = std::conditional_t<in_pair, PairShared<warpgroups, block_k>, Alone>;
    static constexpr int slots =
        (most_bytes - barrier_bytes - q_tiles * panels * panel_bytes - float8_bytes - Pair::parts_bytes) / (panels * box_bytes);
    // Factors of keys: a block's are read until its probabilities are made, which is before its v is released.
    static constexpr int factor_blocks = multiplies_float8 ? (slots + 4) / 2 : 1;
    static constexpr int scale_blocks = is_float8 ? (stages + slots + 4) / 2 : 1;
    // Whether values are scaled where they are widened, and not probabilities.
    static constexpr bool weighs_values = D == Dtype::f16;
    // Sums of floats that pieces hand on stand in the ring as boxes of a warpgroup's rows and 32 columns; out leaves
    // where they stood, as half as many boxes of 64 columns.
    static constexpr int sum_panels = head_dim_v / line_columns<float>;
    static constexpr int slot_boxes = panels * box_bytes / Base::warpgroup_bytes;
    static constexpr int sum_slots = sum_panels * warpgroups / slot_boxes;
    static constexpr int out_slots = (sum_slots + 1) / 2;
    // Whether a q tile is free when its task's last scores are made: where out does not leave through it.
    static constexpr bool frees_q = in_pieces || out_in_v || in_pair;
    static constexpr int q_releases = frees_q ? 4 * warpgroups : warpgroups;
    static constexpr int requests = 2 * helper_warps;  // that the walker may be ahead of its helpers
    static constexpr int producer_registers =
        warpgroups == 3 ? 32 : !asks_copiers ? 40 : head_dim <= 128 && (block_k == 64 || in_pieces) ? 72 : 56;
    static constexpr int consumer_registers =
        (launch_registers(threads, ctas) - producer_registers) / warpgroups / 8 * 8;
    static_assert(head_dim_v <= head_dim, "out leaves through the q tile, and v lies in tiles that hold k");
    static_assert(!out_in_v || block_q <= block_k, "out leaves through a slot");
    static_assert(!any_order || head_dim_v == head_dim, "copiers bring as many panels of v as of k");
    static_assert(!is_float8 || scale_blocks <= most_scale_blocks, "scales have room");
    static_assert(slots >= 3, "k of the next block, v of this one, and one on its way");
    static_assert(!in_pieces || slots >= sum_slots + 3, "and sums that have yet to leave");
    static_assert(!in_pieces || slots >= 2 * sum_slots + 1, "before the end is told, the last v and its sums come");
    static_assert(block_k == 64 || block_k == 128, "a thread's mask of a block is one word");
    static_assert(producer_registers + warpgroups * consumer_registers <= launch_registers(threads, ctas),
                  "roles share what the launch gives");
};

// What a launch hands to the device. Boxes are of one 64-column panel.
struct ConsecutiveMaps {
    CUtensorMap q, k, v, out;  // [batch, seq, head, head_dim]
};
struct ResidueClassMaps {
    runtime::ResidueMaps q, k, v, out;
    runtime::ResidueMaps sums;       // of pieces
    CUtensorMap packed_k, packed_v;  // of listed tiles [batch, place, head, head_dim]
};
template <bool AnyOrder>
struct BlockForwardParams {
    std::conditional_t<AnyOrder, ResidueClassMaps, ConsecutiveMaps> maps;
    TensorView q, k, v;             // the same by addresses
    TensorView k_scales, v_scales;  // of a float8 cache; k_scales: or factors of keys of float8 products, or none
    TensorView q_factors;           // likewise, floats that all scores of a query are multiplied by
    any::ForwardOutputs to;         // also, of a piece, what others left and what it leaves
    LayoutView layout;              // in device memory, as the tasks
    TasksView tasks;
    any::Partials<float> parts;
    any::TileRows tile;   // of orders that are not consecutive: of one head
    int packed_tiles;     // listed tiles of keys that stand packed: all or none
    unsigned* next_task;  // tasks taken beyond the first of each CTA; null where none has more than two
    int2* notes;          // [task][warp]
    any::Divisor heads_q, group, query_residue_tiles, key_residue_tiles;
    int head_dim, head_dim_v;
    float scale, scale_log2;  // from what stands for scores to their natural units, and to powers of two
    bool has_cap;             // scores become tanh(into_cap s) first
    float into_cap;
    bool begins_early;        // and waits for the grid ahead: the one that makes its layout, or the caller's last one
    uint32_t first_word = 0x3210;  // for ptx::replace
    TensorView sums;               // of what pieces hand on, what is as large as out
};

// ---- shared memory ----
template <class C>
struct ForwardShared {
    uint8_t q[C::q_tiles][C::panels][C::panel_bytes];  // once all scores are done, mostly its task's out
    uint8_t ring[C::slots][C::panels][C::box_bytes];   // blocks of k and v in the order of their use
    ForwardMessage task[C::q_tiles];
    int32_t mask[C::slots];        // of the block whose k lies there
    uint64_t q_full[C::q_tiles];   // the walker with the bytes of q, or a copier; consumers wait
    uint64_t q_empty[C::q_tiles];  // one arrival a consumer warpgroup, when its out has left, or one a warp when its
                                   // scores are made, where out leaves through the ring; the walker waits
    uint64_t full[C::slots];       // as q_full, for the bytes of a block; one arrival a widener, where these write it
    uint64_t empty[C::slots];      // one arrival a consumer warp; the walker waits
    std::conditional_t<C::is_float8, WidenStages<C>, Requests<C::requests>> helper;  // what the walker asks
    typename C::Pair pair;
    alignas(16) float factors[C::factor_blocks][C::multiplies_float8 ? C::block_k : 4];  // of keys of float8 products
};

// ---- the begin: what all CTAs are about to read ----
__device__ __forceinline__ void prefetch_maps(const ConsecutiveMaps& maps, int lane) {
    if (lane == 0) ptx::prefetch_tensor_map(&maps.q);
    if (lane == 1) ptx::prefetch_tensor_map(&maps.k);
    if (lane == 2) ptx::prefetch_tensor_map(&maps.v);
    if (lane == 3) ptx::prefetch_tensor_map(&maps.out);
}
// Where residues have a token more than others, these have another map, which may wait.
__device__ __forceinline__ void prefetch_maps(const ResidueClassMaps& maps, int lane) {
    if (lane == 0) ptx::prefetch_tensor_map(maps.q.longer_classes ? &maps.q.longer : &maps.q.shorter);
    if (lane == 1) ptx::prefetch_tensor_map(maps.k.longer_classes ? &maps.k.longer : &maps.k.shorter);
    if (lane == 2) ptx::prefetch_tensor_map(maps.v.longer_classes ? &maps.v.longer : &maps.v.shorter);
    if (lane == 3) ptx::prefetch_tensor_map(maps.out.longer_classes ? &maps.out.longer : &maps.out.shorter);
}

// A CTA finds its first tile through a chain of reads, each of which needs the one before and would wait for memory.
// Meanwhile one warp brings what all CTAs read into L2, of each array up to eight sectors a CTA: short ones as a whole.
template <class C>
__device__ __forceinline__ void prefetch_lists(const typename C::Params& params, int lane) {
    constexpr unsigned sector = 32, sectors = 8;  // bytes; of a CTA and array
    const LayoutView& layout = params.layout;
    const ListsView& lists = layout.by_query;
    prefetch_maps(params.maps, lane);
    const void* array = params.tasks.tasks;
    size_t bytes = sizeof(Task) * size_t(params.tasks.num_tasks);
    if (lane / sectors == 1) array = lists.slices, bytes = sizeof(Slice) * size_t(layout.head_kinds * lists.rows);
    if (lane / sectors == 2) array = lists.runs, bytes = sizeof(Run) * size_t(lists.num_runs);
    if (lane / sectors == 3)
        array = layout.masks, bytes = sizeof(uint64_t) * size_t(layout.num_masks) * size_t(layout.mask_words);
    const size_t at = size_t(sector) * (blockIdx.x + lane % sectors * gridDim.x);
    if (at < bytes) ptx::prefetch_l2(static_cast<const char*>(array) + at);
}

// ---- kernel ----
template <class C, bool HasCap>
__global__ void __launch_bounds__(C::threads, C::ctas)
    block_forward_kernel(const __grid_constant__ typename C::Params params) {
    auto& shared = *ptx::swizzled_shared<typename C::Shared>();
    constexpr int walker = 4 * C::warpgroups;
    // Shuffles, so that the compiler sees one value a warp.
    const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
    const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0), lane = int(threadIdx.x % 32);
    Task first{};
    if (warp >= walker && params.begins_early) ptx::wait_for_grid_ahead();
    if (warp == walker) first = params.tasks.tasks[blockIdx.x / C::tile_ctas];
    if (warp == walker + 1) {
        prefetch_lists<C>(params, lane);
        ptx::let_next_grid_begin();  // which joins parts, if there are some, when this one has ended
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::q_tiles; ++i) {
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.q_empty[i], C::q_releases);
        }
        for (int i = 0; i < C::slots; ++i) {
            ptx::mbarrier_init(&shared.full[i], C::is_float8 ? widener_warps : 1);
            ptx::mbarrier_init(&shared.empty[i], 4 * C::warpgroups);
        }
        shared.helper.init();
        shared.pair.init();
        ptx::fence_mbarrier_init();
    }
    sync_tile<C>();
    if (warpgroup == C::warpgroups) {
        ptx::give_registers<C::producer_registers>();
        if (warp == walker)
            Walker<C>{params, shared, lane}.run(first);
        else if constexpr (C::any_order)
            Copier<C>{{shared, warp - walker - 1, lane}, params}.run();
        else if constexpr (C::is_float8)
            Widener<C>{params, shared, warp - walker - 1, lane}.run();
        else if (params.layout.keys.stretch)
            Sender<C>{{shared, warp - walker - 1, lane}, params}.run();
        else if (warp == walker + 1 && params.layout.live_keys.set_of)
            Clearer<C>{params, shared, lane}.run();
    } else {
        ptx::take_registers<C::consumer_registers>();
        Consumer<C, HasCap>{params, shared, warpgroup, int(threadIdx.x % 128)}.run();
    }
    if constexpr (C::in_pair) ptx::cluster_sync();  // the other CTA may have something to send to this one yet
}

// The kernel for few queries on a float8 cache: forward_float8.cuh.
template <class C>
__global__ void __launch_bounds__(C::threads, C::ctas)
    float8_forward_kernel(const __grid_constant__ typename C::Params params) {
    auto& shared = *ptx::swizzled_shared<typename C::Shared>();
    const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0), lane = int(threadIdx.x % 32);
    Task first{};
    if ((warp == 0 || warp == C::consumers) && params.begins_early) ptx::wait_for_grid_ahead();
    if (warp == C::consumers) first = params.tasks.tasks[blockIdx.x];
    if (warp == 0) {
        prefetch_lists<C>(params, lane);
        ptx::let_next_grid_begin();  // which joins parts, if there are some, when this one has ended
    }
    if (threadIdx.x == 0) {
        shared.odd = 0;
        for (int i = 0; i < C::q_tiles; ++i) {
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.q_empty[i], C::q_releases);
        }
        shared.helper.init();
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (warp == C::consumers)
        Walker<C>{params, shared, lane}.run(first);
    else
        Float8Consumer<C>{params, shared, warp, lane}.run();
}

// ---- launch ----
template <class C>
void make_maps(const ForwardArgs& args, ConsecutiveMaps& maps) {
    const Problem& p = *args.problem;
    const int heads = args.tasks.tile_heads, keys = args.layout.keys.listed ? args.layout.keys.stretch : C::block_k;
    runtime::Sizes q = runtime::q_sizes(p), k = runtime::k_sizes(p);
    if (C::multiplies_float8) q.element = k.element = 1;
    maps.q = runtime::make_tensor_map(args.q, q, C::dtype, C::block_q / heads, heads);
    maps.k = runtime::make_tensor_map(args.k, k, C::dtype, keys);
    maps.v = runtime::make_tensor_map(args.v, runtime::v_sizes(p), C::dtype, keys);
    maps.out = runtime::make_tensor_map(args.out, runtime::out_sizes(p), C::dtype, tile::fragment_rows / heads, heads);
}
template <class C>
void make_maps(const ForwardArgs& args, ResidueClassMaps& maps) {
    const Problem& p = *args.problem;
    constexpr Dtype dtype = C::dtype;
    constexpr int block_q = C::block_q, block_k = C::block_k;
    const int64_t queries = args.layout.queries.modulus, keys = args.layout.keys.modulus;
    maps.q = runtime::make_residue_maps(args.q, runtime::q_sizes(p), dtype, block_q, queries);
    maps.k = runtime::make_residue_maps(args.k, runtime::k_sizes(p), dtype, block_k, keys);
    maps.v = runtime::make_residue_maps(args.v, runtime::v_sizes(p), dtype, block_k, keys);
    maps.out = runtime::make_residue_maps(args.out, runtime::out_sizes(p), dtype, tile::fragment_rows, queries);
}

template <class C>
typename C::Params make_params(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    const BlockForwardSpace space(p, args.layout, args.tasks, C::tile_ctas);
    char* const workspace = static_cast<char*>(args.workspace);
    typename C::Params params{.tile = any::TileRows(args.tasks)};
    make_maps<C>(args, params.maps);
    if constexpr (C::in_pieces) {
        params.sums = {args.piece.carried, p.heads_q * p.seq_q * p.head_dim_v, p.seq_q * p.head_dim_v, p.head_dim_v, 1};
        const runtime::Sizes sizes{p.batch, p.heads_q, p.seq_q, p.head_dim_v, sizeof(float)};
        params.maps.sums = runtime::make_residue_maps(params.sums, sizes, Dtype::f32, tile::fragment_rows,
                                                      args.layout.queries.modulus);
    }
    params.q = args.q, params.k = args.k, params.v = args.v;
    params.k_scales = args.k_scales, params.v_scales = args.v_scales, params.q_factors = args.q_scales;
    params.to = any::make_outputs<float>(args);
    params.layout = args.layout;
    params.tasks = args.tasks;
    params.parts = any::Partials<float>::at(workspace, p, args.layout, args.tasks);
    params.packed_tiles = 0;
    params.next_task = nullptr;
    params.notes = reinterpret_cast<int2*>(workspace + space.notes);
    params.heads_q = any::Divisor(p.heads_q), params.group = any::Divisor(p.group());
    params.query_residue_tiles = any::Divisor(args.layout.queries.residue_tiles);
    params.key_residue_tiles = any::Divisor(args.layout.keys.residue_tiles);
    params.head_dim = int(p.head_dim), params.head_dim_v = int(p.head_dim_v);
    const double scale = p.softcap != 0 ? p.softcap : p.scale;
    params.scale = float(scale), params.scale_log2 = float(scale * M_LOG2E);
    params.has_cap = p.softcap != 0;
    params.into_cap = params.has_cap ? float(p.scale / p.softcap) : 0;
    params.begins_early = false;
    return params;
}

template <class Params>
void pack_keys(const ForwardArgs& args, const BlockForwardSpace& space, Dtype dtype, Params& params) {
    PackedKeys keys = make_packed_keys(args, static_cast<char*>(args.workspace) + space.packed);
    keys.counter = params.next_task;
    const Problem& p = *args.problem;
    runtime::Sizes k = runtime::k_sizes(p), v = runtime::v_sizes(p);
    k.seq = v.seq = keys.places;
    params.packed_tiles = args.layout.keys.listed;
    params.maps.packed_k = runtime::make_tensor_map(keys.packed_k, k, dtype, args.layout.block_k);
    params.maps.packed_v = runtime::make_tensor_map(keys.packed_v, v, dtype, args.layout.block_k);
    launch_packing(keys, args);
}

template <class C>
void launch_forward(void (*kernel)(typename C::Params), const ForwardArgs& args) {
    auto params = make_params<C>(args);
    const BlockForwardSpace space(*args.problem, args.layout, args.tasks, C::tile_ctas);
    const int tiles = std::min(params.tasks.num_tasks, C::ctas * runtime::count_processors(args.device) / C::tile_ctas);
    const runtime::Shape shape{unsigned(tiles * C::tile_ctas), unsigned(C::threads), sizeof(typename C::Shared),
                               unsigned(C::tile_ctas)};
    const bool counts = params.tasks.num_tasks > 2 * tiles, packs = packed_places(args.layout) > 0;
    if (!counts && !packs) {
        params.begins_early = args.layout.spans != nullptr;  // calls on a cache alone have them
        params.begins_early ? runtime::launch_early(kernel, shape, args.stream, params)
                            : runtime::launch(kernel, shape, args.stream, params);
        return;
    }
    if (counts) params.next_task = reinterpret_cast<unsigned*>(static_cast<char*>(args.workspace) + space.counter);
    if constexpr (C::any_order)
        if (packs) pack_keys(args, space, C::dtype, params);
    if (!packs) runtime::launch(clear_counter_kernel, counter_shape, args.stream, params.next_task);
    runtime::launch_early(kernel, shape, args.stream, params);
}

template <class C>
void launch_either(const ForwardArgs& args) {
    launch_forward<C>(args.problem->softcap != 0 ? block_forward_kernel<C, true> : block_forward_kernel<C, false>, args);
}

template <class C>
void prepare_either() {
    runtime::prepare(block_forward_kernel<C, false>, sizeof(typename C::Shared));
    runtime::prepare(block_forward_kernel<C, true>, sizeof(typename C::Shared));
}

// A float8 cache has two kernels.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void launch_float8(const ForwardArgs& args) {
    using Few = Float8Config<D, HeadDim, HeadDimV>;
    if (has_few_rows(*args.problem, args.tasks.tile_heads))
        launch_forward<Few>(float8_forward_kernel<Few>, args);
    else
        launch_either<Config<D, HeadDim, HeadDimV, BlockQ, BlockK, Variant::float8_cache>>(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void launch_for_layout(const ForwardArgs& args) {
    using Row = BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>;
    if constexpr (Row::float8_cache)
        if (args.problem->float8_cache)
            return launch_float8<D, HeadDim, HeadDimV, BlockQ, BlockK>(args);
    if constexpr (Row::has_pieces)
        if (!args.piece.is_whole())
            return launch_either<Config<D, HeadDim, HeadDimV, BlockQ, BlockK, Variant::pieces>>(args);
    if constexpr (Row::any_order)
        if (!is_consecutive(args.layout.queries) || !come_in_boxes(args.layout.keys))
            return launch_either<Config<D, HeadDim, HeadDimV, BlockQ, BlockK, Variant::any_order>>(args);
    launch_either<Config<D, HeadDim, HeadDimV, BlockQ, BlockK, Variant::consecutive>>(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const ForwardArgs& args) {
    launch_for_layout<D, HeadDim, HeadDimV, BlockQ, BlockK>(args);
    const auto parts = any::Partials<float>::at(args.workspace, *args.problem, args.layout, args.tasks);
    any::launch_combine<D, true>(args, parts);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(clear_counter_kernel, 0);
    any::prepare_combine<D, true>();
    prepare_either<Config<D, HeadDim, HeadDimV, BlockQ, BlockK, Variant::consecutive>>();
    if constexpr (any_order) {
        runtime::prepare(pack_keys_kernel, 0);
        prepare_either<Config<D, HeadDim, HeadDimV, BlockQ, BlockK, Variant::any_order>>();
    }
    if constexpr (float8_cache) {
        using Few = Float8Config<D, HeadDim, HeadDimV>;
        static_assert(sizeof(typename Few::Shared) <= Few::most_bytes, "a CTA has no more");
        runtime::prepare(float8_forward_kernel<Few>, sizeof(typename Few::Shared));
        prepare_either<Config<D, HeadDim, HeadDimV, BlockQ, BlockK, Variant::float8_cache>>();
    }
    if constexpr (has_pieces) prepare_either<Config<D, HeadDim, HeadDimV, BlockQ, BlockK, Variant::pieces>>();
    runtime::prepare_tensor_maps();
}

}  // namespace spattn::sm90
