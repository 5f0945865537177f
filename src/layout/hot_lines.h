// SPDX-License-Identifier: MIT
// Lists of the plain blocks of one axis over tiles of hot tokens of the other: the staircase in which causal, say, cuts
// a few columns that every query would see. Closed forms are asked for whole stretches of blocks and tokens at once,
// which are halved until they say all or nothing:
//
//     hot keys   ........        ....|....        blocks that say the same share a list; where one block and a few keys
//                ####....   ->   ####|....        are left undecided, the rows themselves are asked
//                ########        ----+----
//                ########        ####|####
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"
#include "layout/listed.h"
#include "layout/tables.h"

namespace spattn {

class HotLines {
public:
    // `hot` are tokens of the axis that does not own the lists, rising. `own` says which tokens of the other are away;
    // masks go to the table of `whole`, whose blocks these are.
    HotLines(const Pattern& among, Owner owner, const std::vector<int64_t>& hot, const Axis& own, const Layout& whole,
             MaskTable& masks);

    // A list for each plain block, of one plane after the other.
    void add(const Plane& plane);
    Lists finish() { return std::move(lists_); }

private:
    enum class Kind : uint8_t { empty, full, mixed };
    struct Range {  // of hot tokens
        int32_t begin, end;
    };

    void descend(int32_t first, int32_t count, const std::vector<Range>& undecided);
    void divide(int32_t first, int32_t count, Range range, std::vector<Range>& left);
    Block block_of(int32_t first, int32_t count, Range range) const;
    void settle(Range range, bool is_full);
    void ask_rows(int32_t line, Range range);
    void list(int32_t first, int32_t count);
    Slice list(int32_t line);
    bool find_present(int32_t line);
    int32_t intern(int32_t tile);

    const Pattern& among_;
    Owner owner_;
    const std::vector<int64_t>& hot_;
    const Axis& own_;
    const Layout& whole_;
    MaskTable& masks_;
    int32_t own_block_, other_block_, words_;
    int64_t own_tokens_;
    Plane plane_;
    std::vector<Kind> kinds_;         // of tiles, as far as they are decided
    std::vector<uint64_t> columns_;   // [tokens of tiles][words] rows that see the token, where its tile is mixed
    std::vector<uint64_t> present_;   // [words] rows of the block at hand that are worked on there
    std::vector<uint64_t> filled_, bits_;
    Intervals intervals_;
    Key key_;
    Lists lists_;
    SliceTable slices_;
};

}  // namespace spattn
