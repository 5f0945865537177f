// SPDX-License-Identifier: MIT
// Layouts of one pattern in the forms that kernels may read, each compiled once.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "layout/listed.h"
#include "layout/packed.h"
#include "layout/token_lists.h"
#include "plan/kernel.h"
#include "plan/outline.h"

namespace spattn {

// Which tokens stand together in a block.
enum class Order {
    plain,    // consecutive ones
    residue,  // those of a residue class: dilated patterns become dense ones
    packed,   // hot ones in tiles of their own, the rest where it is
    listed    // blocks that are nearly empty are listed token by token, for the pass at hand
};

constexpr int32_t nominal_block = 64;  // where no row asks for one: counts, and what hot tokens are scattered over

struct Form {
    int32_t block_q, block_k;
    Order order;
    Owner owner;  // told apart where listed
};

struct Lowered {
    Form form;
    std::shared_ptr<const Layout> layout;
    Counts counts;
    std::shared_ptr<const Outline> outline = nullptr;  // not null: the layout is only outlined and has no lists

    size_t bytes() const { return outline ? outline->bytes : layout->bytes(); }
};

class Lowering {
public:
    Lowering(const Pattern& pattern, const Problem& problem);

    const Lowered& at(const Form& form);
    // Enough to count and to price: instead of a layout an outline where nothing is lowered yet and one may be made.
    const Lowered& counted(const Form& form);
    // Why this form should not be lowered: more lists than a plan should hold. Empty where it may.
    std::string refuse(const Form& form) const;
    // The pattern as lists of tokens, for gather rows.
    std::shared_ptr<const TokenLists> tokens();
    // Every key that a query sees lies this many tokens from its position, or a multiple: 1 where nothing is known.
    int32_t modulus() const { return modulus_; }
    // Whether hot tokens are so few and scattered that packing them may pay.
    bool has_packed() const { return hot_.has_value(); }
    // A layout or outline that is there already, in the same order and of blocks that these divide, or null.
    const Lowered* coarser(const Form& form) const;
    // A layout with packed tokens that is there already, of blocks that these divide or equal, or null.
    const Lowered* packed(const Form& form) const;
    // Some layout or outline that is there already, or null.
    const Lowered* any() const { return all_.empty() ? nullptr : &all_.front(); }

    // The layout's masks in the order of this row, shared by rows with the same order.
    std::shared_ptr<const std::vector<uint64_t>> masks(const Lowered& lowered, const Kernel& kernel);

private:
    struct Ordered {
        const Layout* layout;
        PermuteMask permute;
        std::shared_ptr<const std::vector<uint64_t>> masks;
    };

    const Lowered* find(const Form& form) const;
    bool outline(const Form& form);  // whether it could be done
    Layout build(const Form& form);

    const Pattern& pattern_;
    Extent extent_;
    int32_t modulus_;
    std::optional<HotTokens> hot_;
    std::shared_ptr<const TokenLists> tokens_;
    std::deque<Lowered> all_;  // references stay good while it grows
    std::vector<Ordered> ordered_;
};

}  // namespace spattn
