// SPDX-License-Identifier: MIT
// Layouts of one pattern for the block sizes that kernels ask for, each compiled once.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "layout/token_lists.h"
#include "plan/kernel.h"

namespace spattn {

struct Lowered {
    std::shared_ptr<const Layout> layout;
    Counts counts;
};

class Lowering {
public:
    Lowering(const Pattern& pattern, const Problem& problem);

    const Lowered& at(int32_t block_q, int32_t block_k);
    // Why these blocks should not be lowered: more lists than a plan should hold. Empty where they may.
    std::string refuse(int32_t block_q, int32_t block_k) const;
    // The pattern as lists of tokens, for gather rows.
    std::shared_ptr<const TokenLists> tokens();
    // Some layout that is there already, or null.
    const Lowered* any() const { return all_.empty() ? nullptr : &all_.front(); }

    // The layout's masks in the order of this row, shared by rows with the same order.
    std::shared_ptr<const std::vector<uint64_t>> masks(const Lowered& lowered, const Kernel& kernel);

private:
    struct Ordered {
        const Layout* layout;
        PermuteMask permute;
        std::shared_ptr<const std::vector<uint64_t>> masks;
    };

    const Pattern& pattern_;
    Extent extent_;
    std::shared_ptr<const TokenLists> tokens_;
    std::deque<Lowered> all_;  // references stay good while it grows
    std::vector<Ordered> ordered_;
};

// What a row's cost model is told of a layout.
LayoutStats make_layout_stats(const Lowered& lowered, bool by_key);
// What a gather row's is told, whose lists the plan makes or a run brings.
LayoutStats make_gather_stats(const Problem& problem, const Lowered& lowered);
LayoutStats make_listed_stats(const Problem& problem);
// Of a pattern with lists at run time, as if all were full.
Counts count_listed(const Problem& problem);
// As make_layout_stats if blocks of this size could be had without waste: no layout costs less.
LayoutStats make_least_stats(const Problem& problem, const Counts& counts, const Kernel& kernel);

}  // namespace spattn
