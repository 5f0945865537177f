// SPDX-License-Identifier: MIT
// Lists the tiles of hot tokens that each plain block of the other axis sees. A hot key alone would be seen by every
// query; with causal around it the lists become a staircase. The pattern's closed form is asked for many blocks and hot
// tokens at once, and these are halved until it says all or nothing:
//
//     hot keys   ........        ....|....        blocks with the same answers share a list; where one block and a few
//                ####....   ->   ####|....        hot tokens are left undecided, the pattern's rows are asked
//                ########        ----+----
//                ########        ####|####
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"
#include "layout/tables.h"

namespace spattn {

class HotLines {
public:
    // `hot` are tokens of the axis that does not own the lists, rising. `own` is the axis that does, and says which of
    // its tokens are away. Masks go to `masks`, the table of `whole`, whose block sizes hold.
    HotLines(const Pattern& among, Owner owner, const std::vector<int64_t>& hot, const Axis& own, const Layout& whole,
             MaskTable& masks);

    // Appends a list for each plain block of this plane.
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
    std::vector<uint64_t> columns_;   // [tokens of tiles][words] own tokens that keep a pair with it, in mixed tiles
    std::vector<uint64_t> present_;   // [words] own tokens that are at home in the block at hand
    std::vector<uint64_t> filled_, bits_;
    Intervals intervals_;
    Key key_;
    Lists lists_;
    SliceTable slices_;
};

}  // namespace spattn
