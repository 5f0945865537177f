// SPDX-License-Identifier: MIT
// Lists of a call on a cache, which name tokens of the sequences, or blocks of them. A call makes lists of rows of keys
// from them: those that a query may see, where pages have them. So rows of kernels that read any call's lists know
// neither starts nor pages. C++17-clean.
//
//     pages of 2: 3 0 5       a query at token 4 lists 1 4 5      its keys lie in rows 7 and 10; 5 stands behind it
#pragma once

#include <algorithm>

#include "plan/call_lists.h"

namespace spattn {

// What follows from a plan alone.
struct CacheLists {
    Problem call;
    int64_t block_k;  // tokens that an entry of a list names
    int64_t most;     // of a list

    explicit CacheLists(const Problem& p)
        : call(p), block_k(std::min(p.call_lists.block_k, p.seq_k)), most(p.call_lists.most * block_k) {}

    int64_t lists() const { return call.batch * call.seq_q * call.heads_kv; }

    // The problem as rows of kernels see it. cache: of a call, if there is one yet.
    Problem inner(const CallCache& cache) const {
        Problem p = call;
        p.has_starts = p.has_parents = false, p.page_size = 0, p.ragged = 0, p.q_offset = 0;
        p.call_lists = {1, 1, most};
        if (call.page_size && cache.pages) p.seq_k = (cache.pages - 1) * cache.page_rows + call.page_size;
        return p;
    }
};

// The lists of one call, at the start of its workspace. Without that only `bytes` means something.
struct ListedKeys {
    CacheLists shape;
    int32_t* keys;    // [batch][seq_q][heads_kv][most] rows of keys, no_token in place of those that nobody may see
    int32_t* counts;  // [batch][seq_q][heads_kv]
    size_t bytes = 0;

    ListedKeys(const CacheLists& shape, void* workspace) : shape(shape) {
        CallRoom space(workspace);
        keys = space.take<int32_t>(shape.lists() * shape.most);
        counts = space.take<int32_t>(shape.lists());
        bytes = space.bytes();
    }

    CallLists view() const {
        const int64_t heads = shape.call.heads_kv, row = heads * shape.most;
        return {{keys, shape.call.seq_q * row, row, shape.most, 1, false},
                {counts, shape.call.seq_q * heads, heads, 1, 0, false}};
    }
};

}  // namespace spattn
