// SPDX-License-Identifier: MIT
// Patterns drawn at random, through the public constructors: every family, alone as people use it and in any algebra.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "numbers.h"

namespace random_test {

struct Releaser {
    void operator()(spattn_pattern* p) const { spattn_pattern_release(p); }
    void operator()(spattn_context* c) const { spattn_context_release(c); }
    void operator()(spattn_plan* p) const { spattn_plan_release(p); }
};
using Pattern = std::unique_ptr<spattn_pattern, Releaser>;
using Context = std::unique_ptr<spattn_context, Releaser>;
using Plan = std::unique_ptr<spattn_plan, Releaser>;

// Throws with the library's text: what is drawn is legal.
void demand(spattn_status status, const std::string& what);
Pattern parse(const std::string& text);

struct Extents {
    int64_t batch, heads, seq_q, seq_k;
    int64_t longest_list = 1;  // of those that come with a call, in a large problem
};

struct DrawnPattern {
    Pattern pattern;
    Pattern known;  // what chooses among the keys of run-time lists, or none
    bool varies_by_batch = false, varies_by_head = false;
    int64_t list_block_q = 0, list_block_k = 0, list_most = 0;  // of lists that come with a call
};
// sparse: only such as keep few pairs of many tokens. large: also such as are used on thousands of tokens.
enum class Lengths { small, sparse, large };
// is_group: lists that come with a call. on_cache: for such a call.
DrawnPattern draw_pattern(Random& random, const Extents& extents, Lengths lengths, bool is_group, bool on_cache);

std::string text_of(const spattn_pattern* pattern);  // cut where it is too long for a line

}  // namespace random_test
