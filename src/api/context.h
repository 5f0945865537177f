// SPDX-License-Identifier: MIT
// Contexts: where plans run, with whose memory, threads and log.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/memory.h"
#include "core/parallel.h"
#include "core/ref.h"
#include "plan/backends.h"

namespace spattn {

// What a plan needs of its context. The handle below adds the plan cache; plans keep only this alive, or cache and
// plans would keep each other alive for ever.
class Device : public RefCounted {
public:
    explicit Device(const spattn_context_options& options);

    const Backend& backend() const { return *backend_; }
    spattn_device id() const { return id_; }
    Machine machine() const { return backend_->machine(id_.index, parallel_->lanes()); }
    Ref<const Memory> memory() const { return memory_; }
    Parallel& parallel() const { return *parallel_; }
    void log(spattn_enum level, const std::string& line) const noexcept;

private:
    const Backend* backend_;
    spattn_device id_;
    Ref<const Memory> memory_;
    std::unique_ptr<Parallel> parallel_;
    spattn_log_fn log_;
    void* log_user_;
    spattn_enum log_level_;
};

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

struct spattn_context : spattn::RefCounted {
    spattn_context(spattn::Ref<const spattn::Device> device, size_t plans) : device(std::move(device)), cache(plans) {}
    spattn::Ref<const spattn::Device> device;
    mutable spattn::PlanCache cache;  // locks itself
};
