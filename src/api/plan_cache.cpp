// SPDX-License-Identifier: MIT
#include "api/plan_cache.h"

#include <pthread.h>

#include <mutex>

namespace spattn {

namespace {

// The caches of all contexts have one lock, held for a fraction of a microsecond. A fork() waits for it, so that no other
// thread has it when the process is copied: in the child it would be held for ever, and the lists be half changed.
std::mutex mutex;

void wait_at_fork() {
    static const int registered = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
    static_cast<void>(registered);  // there may be no memory for it: then a child is as safe as it was
}

}  // namespace

PlanCache::PlanCache(size_t plans, size_t bytes) : most_plans_(plans), most_bytes_(bytes) { wait_at_fork(); }

Ref<const spattn_plan> PlanCache::find(const std::string& key) {
    const std::lock_guard lock(mutex);
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
    const std::lock_guard lock(mutex);
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
