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

    void list() { share(*args_.parallel, *this, p_.batch * p_.seq_q, &KeysOfCache::list_query); }

private:
    void list_query(int64_t number) {
        const int64_t batch = number / p_.seq_q, row = number % p_.seq_q;
        const int64_t sequence = p_.ragged ? args_.cache.sequence_of(row, p_.ragged, p_.seq_q) : batch;
        const int64_t token = sequence < 0 ? -1 : token_of(sequence, row);
        for (int64_t head = 0; head < p_.heads_kv; ++head) {
            const int64_t list = number * p_.heads_kv + head;
            const int64_t count = token < 0 ? 0 : args_.call_lists.count(batch, row, head, p_.call_lists.most);
            made_.counts[list] = int32_t(count * shape_.block_k);
            int32_t* to = made_.keys + list * shape_.most;
            for (int64_t entry = 0; entry < count; ++entry) {
                const int64_t block = args_.call_lists.indices.at(batch, row, head, entry);
                for (int64_t key = 0; key < shape_.block_k; ++key) *to++ = row_of(sequence, token, block, key);
            }
        }
    }

    // Which token of its sequence a query is; -1 outside of it.
    int64_t token_of(int64_t sequence, int64_t row) const {
        const int64_t start = std::clamp<int64_t>(args_.cache.starts.at(sequence, 0, 0, 0), -p_.seq_q, p_.seq_k);
        const int64_t token = start + row - args_.cache.queries_of(sequence, p_.seq_q).begin;
        return token < p_.seq_k ? std::max<int64_t>(token, -1) : -1;
    }

    int32_t row_of(int64_t sequence, int64_t token, int64_t block, int64_t number) const {
        if (block < 0 || block > token / shape_.block_k) return no_token;
        const int64_t key = block * shape_.block_k + number;
        if (key > token) return no_token;
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
