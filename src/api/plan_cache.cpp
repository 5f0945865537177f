// SPDX-License-Identifier: MIT
#include "api/plan_cache.h"

namespace spattn {

Ref<const spattn_plan> PlanCache::find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return {};
    entries_.splice(entries_.begin(), entries_, found->second);
    return found->second->plan;
}

Ref<const spattn_plan> PlanCache::keep(const std::string& key, Ref<const spattn_plan> plan) {
    if (keeps_none()) return plan;
    const size_t bytes = plan->bytes() + 2 * key.size();  // a key stands in its entry and in the map
    std::list<Entry> entry;  // joins the others once nothing can fail any more
    entry.push_front({key, plan, bytes});
    // Declared before the lock: plans that fall out may be the last of their kind, and are released after unlocking.
    std::list<Entry> dropped;
    const std::lock_guard lock(mutex_);
    if (const auto found = by_key_.find(key); found != by_key_.end()) return found->second->plan;
    by_key_.emplace(key, entry.begin());
    entries_.splice(entries_.begin(), entry);
    bytes_ += bytes;
    while (is_over()) {
        by_key_.erase(entries_.back().key);
        bytes_ -= entries_.back().bytes;
        dropped.splice(dropped.begin(), entries_, std::prev(entries_.end()));
    }
    return plan;
}

}  // namespace spattn
