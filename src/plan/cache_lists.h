// SPDX-License-Identifier: MIT
// Lists of keys on a cache. Where a call brings lists they name tokens of the sequences, or blocks of them; else the
// plan's pattern says which tokens a query sees. A call makes lists of rows of keys of that: those that a query may
// see, where pages have them. So rows of kernels that read any call's lists know neither starts nor pages, and serve
// what no row of blocks has tiles for, as latent attention of 576 columns. C++17-clean.
//
//     pages of 2: 3 0 5       a query at token 4 lists 1 4 5      its keys lie in rows 7 and 10; 5 stands behind it
//
// Where a prompt's queries would have more lists than a workspace should hold, some of them come after the others.
#pragma once

#include <algorithm>

#include "plan/call_lists.h"

namespace spattn {

// A side of the blocks of the layout that such lists are made from: rows of its masks have 64 bits.
constexpr int32_t list_block = 64;

// What follows from a plan alone.
struct CacheLists {
    Problem call;
    int64_t block_k;  // tokens that an entry of a call's list names
    int64_t most;     // of a list
    int64_t heads;    // of a query that have lists of their own: kv heads, or one for all
    int64_t queries;  // of each batch entry that have lists at once: those of a round

    // A call brings the lists.
    explicit CacheLists(const Problem& p)
        : call(p), block_k(std::min(p.call_lists.block_k, p.seq_k)), most(p.call_lists.most * block_k),
          heads(p.heads_kv), queries(p.seq_q) {}
    // They are made of a pattern, no row of which keeps more keys than this. see_alike: all heads do.
    CacheLists(const Problem& p, int64_t longest, bool see_alike)
        : call(p), block_k(1), most(std::max<int64_t>(longest, 1)), heads(see_alike ? 1 : p.heads_kv), queries(1) {
        queries = std::clamp(int64_t(round_bytes / bytes()), int64_t(1), std::max<int64_t>(p.seq_q, 1));
    }

    bool of_pattern() const { return call.is_of_sequences(); }
    int64_t rounds() const { return ceil_div(call.seq_q, queries); }
    int64_t lists() const { return call.batch * queries * heads; }  // of a round
    double bytes() const { return double(lists()) * double(most) * sizeof(int32_t); }
    // A round takes no more than the first, unless one query of each sequence needs it, and that no more than the second.
    static constexpr double round_bytes = double(int64_t(1) << 28), most_bytes = double(int64_t(1) << 30);

    // The problem of so many queries as rows of kernels see it. cache: of a call, if there is one yet.
    Problem inner(const CallCache& cache, int64_t count) const {
        Problem p = call;
        p.has_starts = p.has_parents = false, p.page_size = 0, p.ragged = 0, p.q_offset = 0;
        p.seq_q = count, p.call_lists = {1, 1, most};
        if (call.page_size && cache.pages) p.seq_k = (cache.pages - 1) * cache.page_rows + call.page_size;
        return p;
    }
};

// The lists of a call's round, at the start of its workspace. Without that only `bytes` means something.
struct ListedKeys {
    CacheLists shape;
    int64_t first, count;  // queries of each batch entry
    int32_t* keys;    // [batch][count][heads][most] rows of keys, no_token in place of those that nobody may see
    int32_t* counts;  // [batch][count][heads]
    const Slice* stems = nullptr;  // of the layout that they are made from (plan/cache.h)
    size_t bytes = 0;

    ListedKeys(const CacheLists& shape, int64_t round, void* workspace)
        : shape(shape), first(round * shape.queries), count(std::min(shape.queries, shape.call.seq_q - first)) {
        CallRoom space(workspace);
        keys = space.take<int32_t>(shape.lists() * shape.most);
        counts = space.take<int32_t>(shape.lists());
        bytes = space.bytes();
    }

    int64_t lists() const { return shape.call.batch * count * shape.heads; }
    CallLists view() const {
        const int64_t heads = shape.heads, row = heads * shape.most, own = heads > 1 || shape.call.heads_kv == 1;
        return {{keys, count * row, row, own * shape.most, 1, false}, {counts, count * heads, heads, own, 0, false}};
    }
};

}  // namespace spattn
