// SPDX-License-Identifier: MIT
// The plans that a context keeps.
#pragma once

#include <list>
#include <mutex>
#include <string>
#include <unordered_map>

#include "api/plan.h"

namespace spattn {

// The most recently used plans by (pattern, problem).
class PlanCache {
public:
    explicit PlanCache(size_t capacity) : capacity_(capacity) {}
    bool keeps_none() const { return capacity_ == 0; }
    Ref<const spattn_plan> find(const std::string& key);
    // Keeps `plan`, or returns the plan that another thread has kept under the key meanwhile.
    Ref<const spattn_plan> keep(const std::string& key, Ref<const spattn_plan> plan);

private:
    using Entry = std::pair<std::string, Ref<const spattn_plan>>;
    size_t capacity_;
    std::mutex mutex_;
    std::list<Entry> entries_;  // most recently used first
    std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
};

}  // namespace spattn
