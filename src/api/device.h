// SPDX-License-Identifier: MIT
// Where plans run: a device with its memory, threads and log.
#pragma once

#include <memory>
#include <string>

#include "core/memory.h"
#include "core/parallel.h"
#include "core/ref.h"
#include "plan/backends.h"

namespace spattn {

// What a plan needs of its context. The context adds the plan cache; plans keep only this alive, or cache and plans
// would keep each other alive for ever.
class Device : public RefCounted {
public:
    explicit Device(const spattn_context_options& options);

    const Backend& backend() const { return *backend_; }
    spattn_device id() const { return id_; }
    Machine machine() const { return backend_->machine(id_.index, parallel_->lanes()); }
    Ref<const Memory> memory() const { return memory_; }
    Parallel& parallel() const { return *parallel_; }
    spattn_cancel_fn cancel() const { return cancel_; }  // null where runs cannot be cancelled
    void* cancel_user() const { return cancel_user_; }
    // Whether a line of this level would be read: then it is worth making.
    bool logs(spattn_enum level) const { return level <= log_level_; }
    void log(spattn_enum level, const std::string& line) const noexcept;

private:
    const Backend* backend_;
    spattn_device id_;
    Ref<const Memory> memory_;
    std::unique_ptr<Parallel> parallel_;
    spattn_cancel_fn cancel_;
    void* cancel_user_;
    spattn_log_fn log_;
    void* log_user_;
    spattn_enum log_level_;
};

}  // namespace spattn
