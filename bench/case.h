// SPDX-License-Identifier: MIT
// The case table and the patterns its texts mean.
#pragma once

#include <string>
#include <vector>

#include "abi.h"

namespace bench {

struct Case {
    std::string name, pattern;
    int64_t batch, heads_q, heads_kv, seq, head_dim;
    bool large;
    int64_t seq_k = 0, head_dim_v = 0;  // 0: as seq and head_dim
    int64_t top = 0;                    // not 0: each call brings lists of so many keys, and values are columns of keys
    int64_t keys() const { return seq_k ? seq_k : seq; }
    int64_t values() const { return head_dim_v ? head_dim_v : head_dim; }
};

// A pattern whose plans have goals, in milliseconds and MiB at 128K and 1M tokens. A goal of 0 is not asked for.
struct PlanCase {
    std::string name, pattern;
    int64_t heads;
    double ms_128k, mib_128k, ms_1m, mib_1m;
};

const std::vector<Case>& cases();
const std::vector<PlanCase>& plan_cases();

// The text with its number lists written out for a sequence of seq tokens.
std::string expand(const std::string& text, int64_t seq);

Handle<spattn_pattern> make_pattern(const std::string& text, int64_t seq);

// Shell patterns of * and ?; an empty list matches everything.
bool matches(const std::vector<std::string>& globs, const std::string& name);

}  // namespace bench
