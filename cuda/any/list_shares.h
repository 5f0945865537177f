// SPDX-License-Identifier: MIT
// How lists of keys are shared among processors. Their lengths may differ a thousandfold, as those of sequences do that
// are decoded together, and only the device knows them.
//
// CTAs side by side that have tiles of the same lists are a group. There are three ways:
//
//   in turn   each group has whole lists, one after the other
//   evenly    each list has as many parts as there are groups for it
//   shares    each group has as many blocks of keys, whole lists and parts of those that shares end in: of each group at
//             most the first list and the last one
//
// Another kernel joins the parts of a list.
//
// Measured (H200, 128 heads of 576/512, one token each, 2026-11): 128K tokens beside 127 sequences of 2K take 290 us, in
// turn 3,600; 64 sequences of 512 to 16K 320 and 486; 31 of 8K beside one of 32K, 16 heads, 139 and 281. Where all are as
// long, to find that out and to join nothing takes 2 to 9 us.
// Tried and dropped: lengths added up by all warps of a CTA, which is more code to fetch (3 us more); joins by a fourth of
// the CTAs with four rows in turn, so that those without a row are fewer (10 us more where lists are split).
#pragma once

#include <algorithm>

#include "any/divisor.h"
#include "any/gather_lists.h"
#include "any/partials.h"
#include "core/math.h"
#include "ptx/host_device.h"

namespace spattn::any {

struct ListShares {
    // In blocks of keys: what a task takes beside its own, the least part of a list, and what it takes to join parts.
    static constexpr int task_blocks = 3, least_part = 2, join_blocks = 8;

    int width;      // CTAs of a group
    int groups;
    int units;      // that groups take whole or in parts: lists, or some tiles of them
    bool splits;    // whether a list may be long enough
    int parts;      // that each list has, evenly; 0: the device finds the best way
    int most;       // of such parts
    unsigned turns; // of a group, of whole lists
    Divisor by_groups, by_most;

    // A plan's, so that a workspace has room for whatever its calls bring. ctas: that run at the same time. cluster: of
    // those in one, which divide tiles.
    static ListShares of(const ListRows& rows, const ListSizes& sizes, int ctas, int cluster) {
        // As far as the host knows: of lists that a plan made, the mean stands for all.
        const int64_t lists = std::max<int64_t>(sizes.planes * sizes.lists, 1);
        const int64_t keys = sizes.most ? sizes.most * sizes.block_k : ceil_div(sizes.entries, lists);
        const int64_t longest = ceil_div(keys, int64_t(gather_tile));
        const bool is_filled = rows.tiles <= ctas && ctas % rows.tiles <= ctas / 16;
        const int width = is_filled ? rows.tiles : cluster;
        const int64_t units = rows.tasks / width;
        constexpr int64_t most_blocks = int64_t(1) << 31;  // of all lists, that the device adds up
        const bool splits = can_split(longest) && units * (longest + task_blocks) < most_blocks;
        const int64_t parts = splits ? divide_up(longest, least_part) : 1;
        const int groups = int(std::max<int64_t>(std::min<int64_t>(units * parts, ctas / width), 1));
        const int most = int(std::max<int64_t>(groups / std::max<int64_t>(units, 1), 1));
        const int even = !splits ? 1 : units == 1 ? groups : 0;
        const unsigned turns = unsigned(divide_up(units, groups));
        return {width, groups, int(units), splits, even, most, turns, Divisor(groups), Divisor(most)};
    }

    // A call's whose lists all have so many blocks.
    ListShares of_equal(int64_t blocks) const {
        ListShares shares = *this;
        if (!splits || parts) return shares;
        shares.parts = best_parts(int(blocks), int(units * (blocks + task_blocks)));
        shares.splits = shares.parts != 1;
        return shares;
    }

    // The best way for lists of which the longest has so many blocks, and all together with their tasks so many: as many
    // parts of each, or 0 for shares. Lists in turn are best where others hardly take less: those of neighbouring
    // queries, which name the same keys, then are at work at the same time, and there is nothing to join.
    SPATTN_HOST_DEVICE int best_parts(int longest, int total) const {
        const unsigned own = unsigned(longest + task_blocks), share = unsigned(share_of(total));
        const unsigned in_turn = turns * own < share + own ? turns * own : share + own;
        const unsigned shared = share + task_blocks;  // a share's first list, too, has a task
        const unsigned evenly = most > 1 ? unsigned(longest / by_most + 1 + task_blocks) : in_turn;
        const unsigned best = evenly < shared ? evenly : shared;
        if (in_turn <= best + best / 16 + join_blocks) return 1;
        return evenly <= shared + shared / 16 ? most : 0;
    }
    SPATTN_HOST_DEVICE int share_of(int total) const { return total / by_groups + 1; }
    // Where each may have so many parts, those of a list of so many blocks.
    SPATTN_HOST_DEVICE static int parts_of(int blocks, int most) {
        const int parts = can_split(blocks) ? blocks / least_part : 1;
        return parts < most ? parts : most;
    }
    SPATTN_HOST_DEVICE static constexpr bool can_split(int64_t blocks) {
        return blocks + task_blocks > least_part + join_blocks;
    }

    // Lists are noted by their numbers where these are few, and else by that of the group that has the first part.
    SPATTN_HOST_DEVICE bool are_noted_by_unit() const { return units <= groups; }
    SPATTN_HOST_DEVICE int notes() const { return !splits ? 0 : are_noted_by_unit() ? units : groups; }

    int ctas() const { return groups * width; }
    // Parts of lists at most: one that a group's share begins in, and one that it ends in.
    int most_parts() const { return splits ? 2 * groups : 0; }
};

// A list that was split; or one that was not, or a group whose share ends in none, which have one part.
struct SplitList {
    int32_t unit, group, parts;  // group: that has the first part
    int32_t unused;              // so that one load has all of it
};

// What a workspace holds. A plan and its calls count the same CTAs.
struct SharedLists {
    ListShares shares;
    size_t rows, notes, bytes;  // rows: of all parts' tiles; notes: where they lie

    SharedLists(const Problem& p, const ListRows& of_lists, const ListSizes& sizes, int ctas, int cluster = 1)
        : shares(ListShares::of(of_lists, sizes, ctas, cluster)),
          rows(size_t(shares.most_parts()) * size_t(shares.width) * gather_tile),
          notes(size_t(round_up(int64_t(Partials<float>::bytes(rows, p.head_dim_v)), int64_t(alignof(SplitList) * 4)))),
          bytes(notes + size_t(shares.notes()) * sizeof(SplitList)) {}

    // Lists that a call brings are taken for equally long if it does not say how long they are, or if none keeps others
    // waiting for long: to find out takes some microseconds.
    ListShares of_call(const ListSizes& sizes, const CallLists& lists) const {
        constexpr int64_t short_list = 64;  // blocks
        const int64_t most = ceil_div(sizes.most * sizes.block_k, int64_t(gather_tile));
        return sizes.most && (!lists.counts.data || most <= short_list) ? shares.of_equal(most) : shares;
    }

    // [part][tile of a group][row of a tile]
    Partials<float> partials(const ForwardArgs& args) const {
        return Partials<float>::at(args.workspace, rows, args.problem->head_dim_v);
    }
    SplitList* noted(const ForwardArgs& args) const {
        return reinterpret_cast<SplitList*>(static_cast<char*>(args.workspace) + notes);
    }
};

}  // namespace spattn::any
