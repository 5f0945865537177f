// SPDX-License-Identifier: MIT
// Finds equal content by hash, so that a layout stores it once. A look-up allocates nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spattn {

// One multiplication a word is quick, and enough of a hash once finish_hash() has spread the bits.
inline uint64_t add_to_hash(uint64_t hash, uint64_t word) {
    return (((hash << 23) | (hash >> 41)) ^ word) * 0x9E3779B97F4A7C15u;
}

inline uint64_t finish_hash(uint64_t hash) {
    hash = (hash ^ (hash >> 31)) * 0xBF58476D1CE4E5B9u;
    return hash ^ (hash >> 32);
}

inline uint64_t hash_words(const uint64_t* words, size_t count) {
    // Long content is hashed in four chains, so that four multiplications are under way at a time.
    uint64_t chains[4] = {count, 1, 2, 3};
    size_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (size_t c = 0; c < 4; ++c) chains[c] = add_to_hash(chains[c], words[i + c]);
    for (; i < count; ++i) chains[0] = add_to_hash(chains[0], words[i]);
    for (size_t c = 1; c < 4; ++c) chains[0] = add_to_hash(chains[0], chains[c]);
    return finish_hash(chains[0]);
}

// A hash table with open addressing, from hashes to ids in the caller's storage. The caller compares the content.
class HashIndex {
public:
    static constexpr int32_t missing = -1;

    // The id under `hash` for which same(id) holds.
    template <class Same>
    int32_t find(uint64_t hash, Same same) const {
        if (cells_.empty()) return missing;
        for (size_t at = hash & (cells_.size() - 1);; at = (at + 1) & (cells_.size() - 1)) {
            const Cell& cell = cells_[at];
            if (cell.id == missing || (cell.hash == uint32_t(hash) && same(cell.id))) return cell.id;
        }
    }

    void insert(uint64_t hash, int32_t id) {
        if (2 * (used_ + 1) > cells_.size()) grow();
        place({uint32_t(hash), id});
        ++used_;
    }

private:
    struct Cell {  // small ones: fewer pages are touched for the first time
        uint32_t hash = 0;
        int32_t id = missing;
    };

    void place(Cell cell) {
        size_t at = cell.hash & (cells_.size() - 1);
        while (cells_[at].id != missing) at = (at + 1) & (cells_.size() - 1);
        cells_[at] = cell;
    }

    void grow() {
        std::vector<Cell> old(std::max<size_t>(128, 2 * cells_.size()));
        old.swap(cells_);
        for (const Cell& cell : old)
            if (cell.id != missing) place(cell);
    }

    std::vector<Cell> cells_;  // a power of two, at most half full
    size_t used_ = 0;
};

// Remembers a value for each sequence of numbers. Ids count up from 0.
template <class Value>
class KeyMemo {
public:
    // The id of `key`; values[id] is `initial` where the key was not there before. Neighbours mostly ask for the same.
    int32_t at(const std::vector<int64_t>& key, Value initial) {
        if (last_ == HashIndex::missing || !is_same(last_, key)) last_ = find(key, initial);
        return last_;
    }

    std::vector<Value> values;

private:
    bool is_same(int32_t id, const std::vector<int64_t>& key) const {
        const size_t begin = size_t(begin_[id]);
        if (size_t(begin_[id + 1]) - begin != key.size()) return false;
        for (size_t i = 0; i < key.size(); ++i)  // keys are short: a call of memcmp would take longer
            if (words_[begin + i] != key[i]) return false;
        return true;
    }

    int32_t find(const std::vector<int64_t>& key, Value initial) {
        const uint64_t hash = hash_words(reinterpret_cast<const uint64_t*>(key.data()), key.size());
        const int32_t found = index_.find(hash, [&](int32_t id) { return is_same(id, key); });
        if (found != HashIndex::missing) return found;
        const int32_t id = int32_t(values.size());
        words_.insert(words_.end(), key.begin(), key.end());
        begin_.push_back(int64_t(words_.size()));
        values.push_back(initial);
        index_.insert(hash, id);
        return id;
    }

    HashIndex index_;
    std::vector<int64_t> words_;
    std::vector<int64_t> begin_{0};
    int32_t last_ = HashIndex::missing;
};

}  // namespace spattn
