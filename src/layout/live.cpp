// SPDX-License-Identifier: MIT
// A block's live tokens are the OR of the live tokens of the masks in its list. Places beyond the sequence end are
// dead, so a block that sticks out always has a set.
#include "layout/live.h"

#include <algorithm>

#include "core/cancel.h"
#include "layout/index.h"
#include "layout/tables.h"

namespace spattn {
namespace {

// Finds the set of each slice. Equal slices share theirs.
class LiveBuilder {
public:
    LiveBuilder(int32_t block, const std::vector<uint64_t>& summaries, Live& live)
        : last_word_(~uint64_t(0) >> (64 * words_for(block) - block)), summaries_(summaries), live_(live),
          set_(words_for(block)) {
        live.words = words_for(block);
    }

    void build(const Lists& lists) {
        live_.set_of.reserve(lists.slices.size());
        std::vector<int32_t> known(lists.runs.size() + 1, unknown);
        Pace pace;
        for (const Slice& slice : lists.slices) {
            pace.step();
            const bool is_empty = slice.begin == slice.end;
            int32_t& answer = known[is_empty ? lists.runs.size() : size_t(slice.begin)];
            if (answer == unknown) answer = find(lists, slice);
            live_.set_of.push_back(answer);
        }
    }

private:
    static constexpr int32_t unknown = -2;

    int32_t find(const Lists& lists, Slice slice) {
        for (int32_t i = slice.begin; i < slice.end; ++i)
            if (lists.runs[i].mask == full_block) return all_live;
        check_cancelled();
        std::fill(set_.begin(), set_.end(), 0);
        for (int32_t i = slice.begin; i < slice.end; ++i) {
            const uint64_t* of_mask = &summaries_[size_t(lists.runs[i].mask) * set_.size()];
            for (size_t w = 0; w < set_.size(); ++w) set_[w] |= of_mask[w];
            if (is_all()) return all_live;
        }
        return intern();
    }

    bool is_all() const {
        for (size_t w = 0; w + 1 < set_.size(); ++w)
            if (~set_[w]) return false;
        return set_.back() == last_word_;
    }

    int32_t intern() {
        const uint64_t hash = hash_words(set_.data(), set_.size());
        const int32_t found = index_.find(hash, [&](int32_t id) {
            return std::equal(set_.begin(), set_.end(), live_.sets.begin() + int64_t(id) * live_.words);
        });
        if (found != HashIndex::missing) return found;
        const int32_t id = int32_t(live_.sets.size() / set_.size());
        live_.sets.insert(live_.sets.end(), set_.begin(), set_.end());
        index_.insert(hash, id);
        return id;
    }

    const uint64_t last_word_;  // of a set that has every token
    const std::vector<uint64_t>& summaries_;  // [masks * words]
    Live& live_;
    std::vector<uint64_t> set_;
    HashIndex index_;
};

// Finds the queries (rows) and keys of a mask that keep any pair.
void summarize(const Layout& layout, const uint64_t* bits, uint64_t* rows, uint64_t* keys) {
    const int32_t words = words_for(layout.block_k);
    for (int32_t row = 0; row < layout.block_q; ++row) {
        uint64_t any = 0;
        for (int32_t w = 0; w < words; ++w) {
            const int count = std::min(64, layout.block_k - 64 * w);
            const uint64_t part = get_bits(bits, int64_t(row) * layout.block_k + 64 * w, count);
            keys[w] |= part;
            any |= part;
        }
        rows[row / 64] |= uint64_t(any != 0) << (row % 64);
    }
}

}  // namespace

void build_live(Layout& layout) {
    const size_t words_q = words_for(layout.block_q), words_k = words_for(layout.block_k);
    std::vector<uint64_t> rows(layout.num_masks * words_q), keys(layout.num_masks * words_k);
    for (size_t mask = 0; mask < size_t(layout.num_masks); ++mask) {
        check_cancelled();
        summarize(layout, &layout.masks[mask * layout.mask_words], &rows[mask * words_q], &keys[mask * words_k]);
    }
    LiveBuilder(layout.block_q, rows, layout.live_queries).build(layout.by_query);
    LiveBuilder(layout.block_k, keys, layout.live_keys).build(layout.by_key);
}

}  // namespace spattn
