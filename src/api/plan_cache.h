// SPDX-License-Identifier: MIT
// The plans that a context keeps.
#pragma once

#include <list>
#include <string>
#include <unordered_map>

#include "api/plan.h"

namespace spattn {

// The most recently used plans by (pattern, problem): up to so many, of up to so many bytes in all. The last one stays,
// whatever its size, or a loop over one huge mask would make its plan in every turn.
class PlanCache {
public:
    PlanCache(size_t plans, size_t bytes);
    bool keeps_none() const { return most_plans_ == 0; }
    Ref<const spattn_plan> find(const std::string& key);
    // Keeps `plan`, or returns the plan that another thread has kept under the key meanwhile.
    Ref<const spattn_plan> keep(const std::string& key, Ref<const spattn_plan> plan);

private:
    struct Entry {
        std::string key;
        Ref<const spattn_plan> plan;
        size_t bytes;
    };
    bool is_over() const { return entries_.size() > most_plans_ || (bytes_ > most_bytes_ && entries_.size() > 1); }

    const size_t most_plans_, most_bytes_;
    std::list<Entry> entries_;  // most recently used first
    size_t bytes_ = 0;          // of all entries
    std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
};

}  // namespace spattn
