// SPDX-License-Identifier: MIT
// Lowering compiles one pattern into layouts, in each form that a kernel row asks for, and each form once.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "layout/orders/packed.h"
#include "layout/token_lists.h"
#include "plan/kernel.h"
#include "plan/outline.h"

namespace spattn {

// An order says which tokens stand together in a block.
enum class Order {
    plain,      // consecutive tokens
    residue,    // tokens of one residue class, so that dilated patterns become dense
    packed,     // hot tokens fill tiles of their own, the others stay in plain blocks
    listed,     // tokens of blocks that are nearly empty are gathered into listed tiles, for one pass
    dispatched  // queries are copied for each block that a call's lists name; the known part stays in plain blocks
};

// The block of rows that read no layout: their pairs are counted on such blocks. Hot tokens count as scattered if they
// lie in many of them.
constexpr int32_t nominal_block = 64;

struct Form {
    int32_t block_q, block_k;
    Order order;
    Owner owner;  // two forms that differ in this alone are the same form, but in the order `listed`
};

struct Lowered {
    Form form;
    std::shared_ptr<const Layout> layout;
    Counts counts;
    std::shared_ptr<const Outline> outline = nullptr;  // if there is one, it stands for the lists, which are not made

    size_t bytes() const { return outline ? outline->bytes : layout->bytes(); }
};

class Lowering {
public:
    Lowering(const Pattern& pattern, const Problem& problem);

    // The layout of this form, made now if it is not there yet.
    const Lowered& at(const Form& form);
    // What suffices to count pairs and to price a row: the layout, or an outline of it where that is quicker to make.
    const Lowered& counted(const Form& form);
    // Why this form should not be lowered: its lists would be larger than a plan should hold. Empty where it may be.
    std::string refuse(const Form& form) const;
    // The pattern as lists of tokens, for gather rows.
    std::shared_ptr<const TokenLists> tokens();
    // Distances from a query's position to the keys that it sees are multiples of this; 1 where nothing is known.
    int32_t modulus() const { return modulus_; }
    // Whether hot tokens are so few and scattered that packing them may pay.
    bool has_packed() const { return hot_.has_value(); }
    // What is there already in the same order, with larger blocks that the form's divide; null where nothing is.
    const Lowered* coarser(const Form& form) const;
    // What is there already with packed tokens, in blocks that the form's divide or equal; null where nothing is.
    const Lowered* packed(const Form& form) const;
    // Anything that is there already, or null.
    const Lowered* any() const { return all_.empty() ? nullptr : &all_.front(); }

    // The layout's masks as this row wants their bits, with their cuts where its tiles join listed blocks (CutMasks). Rows
    // that want the same share them.
    std::shared_ptr<const std::vector<uint64_t>> masks(const Lowered& lowered, const Kernel& kernel, int joined);

private:
    struct Ordered {
        const Layout* layout;
        PermuteMask permute;
        int joined;
        std::shared_ptr<const std::vector<uint64_t>> masks;
    };

    const Lowered* find(const Form& form) const;
    Layout build_plain(const Form& form);
    Layout build_residue(const Form& form);
    bool outline(const Form& form);  // appends an outline of the form; false where none may be made
    Layout build(const Form& form);

    const Pattern& pattern_;
    Extent extent_;
    bool is_on_cache_;
    int32_t modulus_;
    std::optional<HotTokens> hot_;
    std::shared_ptr<const TokenLists> tokens_;
    std::deque<Lowered> all_;  // references stay good while it grows
    std::vector<Ordered> ordered_;
};

}  // namespace spattn
