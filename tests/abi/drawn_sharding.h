// SPDX-License-Identifier: MIT
// Ranks that hold one sequence together, drawn at random: patterns, shapes, who holds which tokens. They run one after
// the other in one process, and what goes from one to another is copied.
#pragma once

#include "abi/abi.h"
#include "drawn.h"

namespace abi {

// Where ranks run.
struct RankDevice {
    spattn_device device;
    std::function<void*(size_t)> allocate;
    std::function<void(void*)> release;
    std::function<void(void*, const void*, size_t)> copy;  // either way, and done on return
};
const RankDevice& host_ranks();

class DrawnSharding {
public:
    DrawnSharding(drawn::Random& random, int64_t longest);  // longest: tokens

    std::string name() const;
    Sharding make(const spattn_context* context, int32_t rank) const;

    // Keys and values arrive where they are seen and nowhere else, and gradients are added up where their tokens are.
    void check_exchange(const spattn_context* context, const RankDevice& on) const;
    // Results and gradients are those of one plan for all tokens, which `truth`, a context of the host, makes.
    void check_attention(const spattn_context* context, const RankDevice& on, const spattn_context* truth) const;

private:
    int32_t ranks() const { return int32_t(tokens_.size()); }
    void draw_tokens(drawn::Random& random);
    // [rank][token]: whether a query of the rank sees a token that is sent together with this one.
    std::vector<std::vector<bool>> find_seen() const;

    bool has_values() const { return !(problem_.flags & SPATTN_PLAN_VALUE_IN_KEY); }

    // Who has scales of float8: nobody, each head one that all ranks know, or each row one, which is sent with it.
    enum class Scaled { never, heads, rows };

    spattn_problem problem_ = sized<spattn_problem>();
    Scaled scaled_ = Scaled::never;
    drawn::Model model_;
    std::vector<std::vector<int64_t>> tokens_;  // that each rank holds, in its order
    spattn_enum split_ = SPATTN_SPLIT_CONTIGUOUS;
    std::vector<int64_t> ranges_;  // [ranges, 3], or nothing: then split_ says it
    int64_t spacing_;              // between neighbouring elements of what ranks hold
    uint32_t seed_;
};

}  // namespace abi
