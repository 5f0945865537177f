// SPDX-License-Identifier: MIT
// Lists of single keys, for kernels that gather rows of k and v: made by the plan, or given to each call. C++17-clean.
#pragma once

#include <algorithm>
#include <cstdint>

namespace spattn {

// The keys of query row r of kind c are keys[begin[c * rows + r] .. begin[c * rows + r + 1]), rising. As in a
// LayoutView, heads and batch entries that see the same keys are of one kind.
struct TokenListsView {
    const int64_t* begin;     // [head_kinds * rows + 1]
    const int32_t* keys;
    const int32_t* kind_of_head;  // [batch * heads_q]
    int64_t rows;                 // seq_q
    int32_t head_kinds;
    int64_t listed;               // keys of all lists
};

// The shape of lists that come at run time: each block of queries lists up to `most` blocks of keys. Lists of single
// tokens have blocks of 1.
struct ListShape {
    int64_t block_q = 1, block_k = 1, most = 0;  // most 0: the plan has the lists
    bool at_run_time() const { return most > 0; }
    int64_t tokens() const { return most * block_k; }  // the most that a row may list
};

// A tensor of indices, int32 or int64, or of how many of them count. Strides are in elements; counts have no `entry`.
struct IndexView {
    const void* data;
    int64_t batch, row, head, entry;
    bool is_wide;  // int64

    int64_t at(int64_t b, int64_t r, int64_t h, int64_t e) const {
        const int64_t i = b * batch + r * row + h * head + e * entry;
        return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    }
};

// Lists that come at run time: for each (batch, block of queries, kv head) the blocks of keys to see, a block as often
// as it is listed. Entries below 0 or beyond the keys are absent.
struct CallLists {
    IndexView indices, counts;  // counts may have no data: then all entries count

    int64_t count(int64_t b, int64_t r, int64_t h, int64_t most) const {
        if (!counts.data) return most;
        const int64_t n = counts.at(b, r, h, 0);
        return n < 0 ? 0 : n < most ? n : most;
    }
};

// A call on a cache: where the queries of each sequence begin among its keys, and which pages these lie in.
struct CallCache {
    IndexView starts;          // [sequences]; no data where the plan says where queries begin
    IndexView page_table;      // [sequences, seq_k / page_size], in `batch` and `entry`; no data without pages
    IndexView query_offsets;   // [sequences + 1] of the call's queries, those of each sequence; no data unless ragged
    IndexView parents;         // [batch, seq_q], in `batch` and `entry`; no data unless queries are trees
    int64_t pages, page_rows;  // page_rows: rows of k, or of v, from the first of a page to that of the next

    // The page that a token lies in; -1 where its page does not exist.
    int64_t page_of(int64_t b, int64_t token, int64_t page_size) const {
        const int64_t page = page_table.at(b, 0, 0, token / page_size);
        return page < 0 || page >= pages ? -1 : page;
    }
    // The row of k that a token lies in. What pages that do not exist hold means nothing, and is not read.
    int64_t place_of(int64_t b, int64_t token, int64_t page_size) const {
        return std::max<int64_t>(page_of(b, token, page_size), 0) * page_rows + token % page_size;
    }

    // Which of the call's queries are those of a sequence: [begin, end), empty where offsets fall.
    struct Queries {
        int64_t begin, end;
    };
    Queries queries_of(int64_t sequence, int64_t seq_q) const {
        if (!query_offsets.data) return {0, seq_q};
        const int64_t begin = query_offsets.at(sequence, 0, 0, 0), end = query_offsets.at(sequence + 1, 0, 0, 0);
        return {std::clamp<int64_t>(begin, 0, seq_q), std::clamp<int64_t>(end, 0, seq_q)};
    }
    // The parent of a query, by number among those of its sequence, the first of which is query `begin` of its batch
    // entry; -1 of a root.
    int64_t parent_of(int64_t batch, int64_t begin, int64_t number) const {
        const int64_t parent = parents.at(batch, 0, 0, begin + number);
        return parent < 0 || parent >= number ? -1 : parent;
    }
    // The one of so many sequences that a row of the call is of: the last that begins at or before it, where it has not
    // ended; -1 where the row is nobody's.
    int64_t sequence_of(int64_t row, int64_t sequences, int64_t seq_q) const {
        int64_t first = 0, end = sequences;
        while (end - first > 1) {
            const int64_t middle = (first + end) / 2;
            (queries_of(middle, seq_q).begin <= row ? first : end) = middle;
        }
        const Queries own = queries_of(first, seq_q);
        return row >= own.begin && row < own.end ? first : -1;
    }
};

}  // namespace spattn
