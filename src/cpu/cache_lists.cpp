// SPDX-License-Identifier: MIT
#include "cpu/cache_lists.h"

#include <algorithm>

#include "cpu/share.h"

namespace spattn::cpu {
namespace {

class KeysOfCache {
public:
    KeysOfCache(const ForwardArgs& args, const ListedKeys& made)
        : args_(args), p_(*args.problem), shape_(made.shape), made_(made) {}

    void list() { share(*args_.parallel, *this, p_.batch * made_.count, &KeysOfCache::list_query); }

private:
    void list_query(int64_t number) {
        const int64_t batch = number / made_.count, row = made_.first + number % made_.count;
        const int64_t sequence = p_.ragged ? args_.cache.sequence_of(row, p_.ragged, p_.seq_q) : batch;
        const int64_t token = sequence < 0 ? -1 : token_of(sequence, row);
        for (int64_t head = 0; head < shape_.heads; ++head) {
            const int64_t list = number * shape_.heads + head;
            if (shape_.of_pattern()) {
                list_pattern(list, batch, row, head, sequence, token);
                continue;
            }
            const int64_t count = token < 0 ? 0 : args_.call_lists.count(batch, row, head, p_.call_lists.most);
            made_.counts[list] = int32_t(count * shape_.block_k);
            int32_t* to = made_.keys + list * shape_.most;
            for (int64_t entry = 0; entry < count; ++entry) {
                const int64_t block = args_.call_lists.indices.at(batch, row, head, entry);
                for (int64_t key = 0; key < shape_.block_k; ++key) *to++ = row_of(sequence, token, block, key);
            }
        }
    }

    // What the plan's layout, of blocks of consecutive tokens, keeps of a token.
    void list_pattern(int64_t list, int64_t batch, int64_t row, int64_t head, int64_t sequence, int64_t token) {
        int32_t* const keys = made_.keys + list * shape_.most;
        int32_t* to = keys;
        const LayoutView& known = args_.layout;
        if (token < 0) return void(made_.counts[list] = 0);
        const int64_t begin = row - (token - start_of(sequence));
        const int64_t kind = known.kind_of_head[sequence * p_.heads_q + head * p_.group()];
        const KnownRow runs(known.by_query, made_.stems, kind * known.by_query.rows + token / known.block_q);
        for (int32_t r = 0; r < runs.count(); ++r) {
            const Run run = runs.run(r);
            const int64_t end = int64_t(run.first + run.count) * known.block_k;
            for (int64_t key = int64_t(run.first) * known.block_k; key < end; ++key)
                if (keeps(known, run.mask, token % known.block_q, key % known.block_k))
                    *to++ = is_seen(batch, begin, sequence, token, key) ? place_of(sequence, key) : no_token;
        }
        made_.counts[list] = int32_t(to - keys);
    }

    static bool keeps(const LayoutView& known, int32_t mask, int64_t query, int64_t key) {
        if (mask == full_block) return true;
        const int64_t bit = query * known.block_k + key;
        return known.masks[int64_t(mask) * known.mask_words + bit / 64] >> bit % 64 & 1;
    }

    // Where queries are nodes of trees, of their own keys those on the way to the root alone. begin: the first query of
    // the sequence.
    bool is_seen(int64_t batch, int64_t begin, int64_t sequence, int64_t token, int64_t key) const {
        const int64_t start = start_of(sequence);
        if (!p_.has_parents || key < start) return true;
        int64_t node = token - start;
        while (node > key - start) node = args_.cache.parent_of(batch, begin, node);
        return node == key - start;
    }

    int64_t start_of(int64_t sequence) const {
        return std::clamp<int64_t>(args_.cache.starts.at(sequence, 0, 0, 0), -p_.seq_q, p_.seq_k);
    }

    // Which token of its sequence a query is; -1 outside of it.
    int64_t token_of(int64_t sequence, int64_t row) const {
        const int64_t token = start_of(sequence) + row - args_.cache.queries_of(sequence, p_.seq_q).begin;
        return token < p_.seq_k ? std::max<int64_t>(token, -1) : -1;
    }

    int32_t row_of(int64_t sequence, int64_t token, int64_t block, int64_t number) const {
        if (block < 0 || block > token / shape_.block_k) return no_token;
        const int64_t key = block * shape_.block_k + number;
        return key > token ? no_token : place_of(sequence, key);
    }
    int32_t place_of(int64_t sequence, int64_t key) const {
        return int32_t(p_.page_size ? args_.cache.place_of(sequence, key, p_.page_size) : key);
    }

    const ForwardArgs& args_;
    const Problem& p_;
    const CacheLists& shape_;
    const ListedKeys& made_;
};

}  // namespace

void list_keys_of_cache(const ForwardArgs& args, const ListedKeys& to) { KeysOfCache(args, to).list(); }

}  // namespace spattn::cpu
