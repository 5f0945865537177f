// SPDX-License-Identifier: MIT
#include "api/plan_cache.h"

namespace spattn {

Ref<const spattn_plan> PlanCache::find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return {};
    entries_.splice(entries_.begin(), entries_, found->second);
    return found->second->second;
}

Ref<const spattn_plan> PlanCache::keep(const std::string& key, Ref<const spattn_plan> plan) {
    if (!capacity_) return plan;
    // Declared before the lock: a plan that falls out may be the last of its kind, and is released after unlocking.
    Ref<const spattn_plan> dropped;
    const std::lock_guard lock(mutex_);
    if (const auto found = by_key_.find(key); found != by_key_.end()) return found->second->second;
    std::list<Entry> entry;  // joins the others once nothing can fail any more
    entry.emplace_front(key, plan);
    by_key_.emplace(key, entry.begin());
    entries_.splice(entries_.begin(), entry);
    if (entries_.size() > capacity_) {
        dropped = std::move(entries_.back().second);
        by_key_.erase(entries_.back().first);
        entries_.pop_back();
    }
    return plan;
}

}  // namespace spattn
