// SPDX-License-Identifier: MIT
// A row of blocks as the plain layout has it and, below, what becomes of it:
//
//     ..1.....  1.......  11111.11  ......1.        one block stays, of the three others 3 tokens are listed
//     ......1.  1.......  1111111.  ........
//
//     tokens 2 6 8 30 - - - -       11111.11        the listed tile takes as much work as one block
//            1 . 1 1                1111111.
//            . 1 1 .
//
// Equal listed tiles are one tile: where all rows see the same few tokens (global keys, landmarks), the tile is made
// once.
#include "layout/orders/listed.h"

#include <algorithm>

#include "core/cancel.h"
#include "layout/live.h"
#include "layout/orders/hot_axis.h"

namespace spattn {
namespace {

// Listing the tokens that are alive fills at most half the tile that the block would be.
bool is_sparse(const Side& side, int32_t alive) { return 2 * alive <= side.other_block(); }

// The blocks of one owning tile. Most have a mask of the plain layout; the others bring columns of their own.
struct Assembled {
    struct Stretch {
        int32_t first, count, mask;  // a mask of the plain layout, or own_columns
        size_t at;                   // with own_columns: where in `columns` they begin
    };
    static constexpr int32_t own_columns = absent_block;
    std::vector<Stretch> stretches;
    std::vector<uint64_t> columns;

    void clear() { stretches.clear(), columns.clear(); }
};

class Lister {
public:
    Lister(const Layout& plain, Owner owner) : plain_(plain), owner_(owner), side_(plain, owner), masks_(out_) {}

    Layout build() {
        start();
        const Lists& lists = side_.lists();
        const int32_t hot_tiles = int32_t(own_.tokens.size()) / side_.own_block();
        for (int32_t c = 0; c < plain_.head_kinds; ++c) {
            for (int32_t tile = 0; tile < hot_tiles; ++tile) {
                assemble_hot(c, tile);
                emit();
            }
            for (int32_t row = 0; row < lists.rows; ++row) home(lists.slices[size_t(c) * lists.rows + row], row);
        }
        finish(hot_tiles + lists.rows);
        return std::move(out_);
    }

private:
    // A block of the new lists. Until the number of listed tiles is known, these and homes count from 0 each.
    struct Entry {
        bool is_home;
        int32_t first, count, mask;
    };

    void start() {
        out_.extent = plain_.extent;
        out_.block_q = plain_.block_q, out_.block_k = plain_.block_k;
        out_.mask_words = plain_.mask_words;
        out_.head_kinds = plain_.head_kinds, out_.kind_of_head = plain_.kind_of_head;
        own_ = make_hot_axis(find_hot_tokens(side_), side_.own_block(), side_.lists().rows);
        other_.residue_tiles = owner_ == Owner::queries ? plain_.by_key.rows : plain_.by_query.rows;
        same_.assign(size_t(plain_.num_masks) + 1, unknown);
        known_.assign(side_.lists().runs.size() + 1, {unknown, unknown});
    }

    // Where no token of a row of blocks is away, rows with the same list become the same entries, made once.
    void home(Slice slice, int32_t row) {
        const uint64_t* away = own_.away.empty() ? nullptr : &own_.away[size_t(row) * side_.words()];
        if (away && side_.is_alive(away)) {
            assemble_rest(slice, away);
            emit();
            return;
        }
        Slice& known = known_[slice.begin == slice.end ? side_.lists().runs.size() : size_t(slice.begin)];
        if (known.begin == unknown) {
            assembled_.clear();
            for (int32_t r = slice.begin; r < slice.end; ++r) {
                const Run& run = side_.lists().runs[r];
                assembled_.stretches.push_back({run.first, run.count, run.mask, 0});
            }
            emit();
            known = rows_.back();
        } else {
            rows_.push_back(known);
        }
    }

    // What is left of the blocks of a row once the tokens that are away are taken out.
    void assemble_rest(Slice slice, const uint64_t* away) {
        assembled_.clear();
        for (int32_t r = slice.begin; r < slice.end; ++r) {
            const Run& run = side_.lists().runs[r];
            const size_t at = add_columns(run.first, run.count);
            const uint64_t* from = side_.columns(run.mask);
            for (int32_t i = 0; i < side_.other_block() * side_.words(); ++i)
                assembled_.columns[at + size_t(i)] = from[i] & ~away[i % side_.words()];
        }
    }

    size_t add_columns(int32_t first, int32_t count) {
        const size_t at = assembled_.columns.size();
        assembled_.stretches.push_back({first, count, Assembled::own_columns, at});
        assembled_.columns.resize(at + size_t(side_.other_block()) * side_.words());
        return at;
    }

    // The blocks of a tile of hot tokens: each of its rows comes from the home of one token.
    void assemble_hot(int32_t head_kind, int32_t tile) {
        assembled_.clear();
        std::vector<int64_t> columns_of(size_t(other_.residue_tiles), -1);
        const Lists& lists = side_.lists();
        const int32_t block = side_.own_block();
        for (int32_t i = 0; i < block; ++i) {
            const int32_t token = own_.tokens[size_t(tile) * block + size_t(i)];
            if (token == no_token) break;
            const Slice slice = lists.slices[size_t(head_kind) * lists.rows + size_t(token / block)];
            for (int32_t r = slice.begin; r < slice.end; ++r) {
                const Run& run = lists.runs[r];
                for (int32_t other = run.first; other < run.first + run.count; ++other) {
                    check_cancelled();
                    if (columns_of[other] < 0) columns_of[other] = int64_t(add_columns(other, 1));
                    copy_row(side_.columns(run.mask), token % block, size_t(columns_of[other]), i);
                }
            }
        }
        std::sort(assembled_.stretches.begin(), assembled_.stretches.end(),
                  [](const Assembled::Stretch& a, const Assembled::Stretch& b) { return a.first < b.first; });
    }

    void copy_row(const uint64_t* from, int32_t row, size_t to, int32_t new_row) {
        const int32_t words = side_.words();
        for (int32_t other = 0; other < side_.other_block(); ++other)
            assembled_.columns[to + size_t(other * words + new_row / 64)] |=
                (from[other * words + row / 64] >> (row % 64) & 1) << (new_row % 64);
    }

    // Appends the assembled row: columns of sparse blocks go to listed tiles, all other blocks stay blocks.
    void emit() {
        check_cancelled();
        const int32_t begin = int32_t(entries_.size());
        filling_.clear(), filled_.clear();
        homes_.clear();
        for (const Assembled::Stretch& stretch : assembled_.stretches) {
            const bool is_same = stretch.mask != Assembled::own_columns;
            const uint64_t* from = is_same ? side_.columns(stretch.mask) : &assembled_.columns[stretch.at];
            const int32_t alive = is_same ? side_.alive(stretch.mask) : side_.count_alive(from);
            if (alive == 0) continue;
            check_cancelled();
            if (is_sparse(side_, alive))
                for (int32_t b = stretch.first; b < stretch.first + stretch.count; ++b) list(b, from);
            else
                homes_.push_back({true, stretch.first, stretch.count,
                                  is_same ? intern_same(stretch.mask) : intern(from)});
        }
        if (!filling_.empty()) close_tile();
        std::sort(entries_.begin() + begin, entries_.end(),
                  [](const Entry& a, const Entry& b) { return a.first < b.first; });
        entries_.insert(entries_.end(), homes_.begin(), homes_.end());
        rows_.push_back({begin, int32_t(entries_.size())});
    }

    void list(int32_t block, const uint64_t* from) {
        const int32_t words = side_.words();
        for (int32_t i = 0; i < side_.other_block(); ++i) {
            if (!side_.is_alive(from + i * words)) continue;
            filling_.push_back(block * side_.other_block() + i);
            filled_.insert(filled_.end(), from + i * words, from + (i + 1) * words);
            if (int32_t(filling_.size()) == side_.other_block()) close_tile();
        }
    }

    void close_tile() {
        const size_t block = size_t(side_.other_block());
        filling_.resize(block, no_token);
        filled_.resize(block * size_t(side_.words()));
        uint64_t hash = block;
        for (int32_t token : filling_) hash = add_to_hash(hash, uint32_t(token));
        hash = finish_hash(hash);
        int32_t tile = tiles_.find(hash, [&](int32_t id) {
            return std::equal(filling_.begin(), filling_.end(), other_.tokens.begin() + int64_t(size_t(id) * block));
        });
        if (tile == HashIndex::missing) {
            tile = int32_t(other_.tokens.size() / block);
            other_.tokens.insert(other_.tokens.end(), filling_.begin(), filling_.end());
            tiles_.insert(hash, tile);
        }
        entries_.push_back({false, tile, 1, intern(filled_.data())});
        filling_.clear(), filled_.clear();
    }

    int32_t intern(const uint64_t* columns) {
        pack_columns(columns, owner_, out_, bits_);
        return masks_.intern(bits_.data());
    }

    // The new id of a mask of the plain layout.
    int32_t intern_same(int32_t mask) {
        if (mask == full_block) return full_block;
        if (same_[mask] == unknown) same_[mask] = masks_.intern(&plain_.masks[size_t(mask) * plain_.mask_words]);
        return same_[mask];
    }

    void finish(int32_t own_tiles) {
        const int32_t listed = int32_t(other_.tokens.size()) / side_.other_block();
        Lists own;
        own.rows = own_tiles;
        SliceTable table(own);
        for (const Slice& row : rows_) {
            for (int32_t e = row.begin; e < row.end; ++e) {
                const Entry& entry = entries_[e];
                table.add({entry.is_home ? listed + entry.first : entry.first, entry.count, entry.mask});
            }
            own.slices.push_back(table.finish());
        }
        Lists other = transpose_lists(own, plain_.head_kinds, listed + other_.residue_tiles);
        const bool by_query = owner_ == Owner::queries;
        out_.by_query = by_query ? std::move(own) : std::move(other);
        out_.by_key = by_query ? std::move(other) : std::move(own);
        out_.queries = by_query ? std::move(own_) : std::move(other_);
        out_.keys = by_query ? std::move(other_) : std::move(own_);
        build_live(out_);
    }

    static constexpr int32_t unknown = -3;

    const Layout& plain_;
    Owner owner_;
    Side side_;
    Layout out_;
    MaskTable masks_;
    Axis own_, other_;
    std::vector<int32_t> same_;  // new ids of plain masks
    std::vector<Slice> known_;   // [runs + 1] entries that the slice beginning at a run became; the last: an empty one
    Assembled assembled_;
    std::vector<int32_t> filling_;  // tokens of the listed tile that is being filled,
    std::vector<uint64_t> filled_;  // and their columns
    HashIndex tiles_;
    std::vector<Entry> entries_, homes_;
    std::vector<Slice> rows_;  // entries of each own tile, kind of heads after kind
    std::vector<uint64_t> bits_;
};

}  // namespace

Layout list_tiles(const Layout& plain, Owner owner) { return Lister(plain, owner).build(); }

}  // namespace spattn
