// SPDX-License-Identifier: MIT
// Masks of a call on a cache whose queries are nodes of trees. Their own keys lie in a few tiles, and of each a row of
// tiles of queries has a mask: what the plan's keeps, and of own keys those on a query's way to its root.
//
//     a tile of keys, the last first     the parents of its keys come to shared memory
//     a thread a query                   goes up as long as its way is in the tile
//     a thread 32 bits of the mask       finds them where the order of the row has them, and cuts them to the plan's
#pragma once

#include "any/cache_call.cuh"

namespace spattn::any {

__device__ __forceinline__ int first_tree_mask(const CacheLayout& cache, int64_t row) {
    return int(cache.known.num_masks + row * cache.own_tiles);
}

// A row's, by a CTA. batch: the entry that has its queries; known: the row in the plan's layout; own_mask: the number of a
// tile's mask less that of the tile.
__device__ __forceinline__ void make_tree_masks(const CacheParams& params, const CacheParams::Tile& tile, int64_t batch,
                                                const CacheParams::OwnTiles& own, const RowOfPlan& known,
                                                int own_mask) {
    constexpr int bits = 16;  // of a word that no two rows share: tiles have multiples of 16 keys
    static_assert(most_tree_side <= cache_threads, "a thread a query");
    static_assert(bit_of_all % bits == 14 && bit_of_none % bits == 15, "bits of the word behind all others");
    __shared__ uint16_t kept[most_tree_pairs / bits + 1];
    __shared__ int parents[most_tree_side], plan_mask;
    const CacheLayout& cache = params.cache;
    const int thread = int(threadIdx.x), tile_k = cache.tile_k, words = tile_k / bits;
    const unsigned behind = unsigned(cache.tile_q * words);
    const int64_t start = params.start_of(tile.sequence);
    const int first = params.first_query(tile.sequence), nodes = params.end_query(tile.sequence) - first;
    if (thread == 0) kept[behind] = 1u << 14;
    int node = tile.first + thread - first;  // where the way of this thread's query has come to
    const bool is_behind = tile.first + thread >= tile.end || start + node >= cache.seq_k;  // who sees nothing, either way
    if (thread >= cache.tile_q || is_behind) node = -1;
    const bool is_query = node >= 0;
    for (int at = own.end - 1; at >= own.begin; --at) {
        const int first_node = int(int64_t(at) * tile_k - start);  // whose key is the tile's first; less than 0: before all
        if (thread == 0) plan_mask = no_pair;
        for (int key = thread; key < tile_k; key += cache_threads) {
            const int number = first_node + key;
            int64_t parent = -1;
            if (number > 0 && number < nodes) parent = integer_at(cache.cache.parents, batch, first + number);
            parents[key] = parent < number ? int(max(parent, int64_t(-1))) : -1;
        }
        __syncthreads();  // parents are there
        for (int i = thread; i < known.count(); i += cache_threads) {
            const Run run = known.run(i);
            if (run.first <= at && at < run.first + run.count) plan_mask = run.mask;
        }
        if (thread < cache.tile_q) {
            uint16_t* const row = kept + thread * words;
            for (int word = 0; word < words; ++word) {
                const int before = min(max(-first_node - word * bits, 0), bits);  // keys that are no query's
                row[word] = is_query ? uint16_t((1u << before) - 1) : uint16_t(0);
            }
            while (node >= max(first_node, 0)) {
                const int key = node - first_node;
                row[key / bits] |= uint16_t(1u << key % bits);
                node = parents[key];
            }
        }
        __syncthreads();  // all that is kept is there, and what the plan says
        if (plan_mask != no_pair) {
            const int64_t mask_words = cache.known.mask_words;
            uint32_t* const to = reinterpret_cast<uint32_t*>(cache.masks + int64_t(own_mask + at) * mask_words);
            const uint32_t* const plan =
                plan_mask == full_block
                    ? nullptr
                    : reinterpret_cast<const uint32_t*>(cache.known.masks + int64_t(plan_mask) * mask_words);
            for (int word = thread; word < 2 * int(mask_words); word += cache_threads) {
                const uint16_t* const places = cache.of_plan.bit_places + 32 * word;
                uint32_t made = 0;
                for (int i = 0; i < 32; ++i) {
                    const unsigned from = places[i];
                    made |= uint32_t(kept[min(from / bits, behind)] >> from % bits & 1) << i;
                }
                to[word] = plan ? made & plan[word] : made;
            }
        }
        __syncthreads();  // before the next tile's come to their places
    }
}

}  // namespace spattn::any
