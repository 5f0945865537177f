// SPDX-License-Identifier: MIT
#include "api/device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "core/tensor.h"
#include "core/threads.h"

namespace spattn {
namespace {

// The backend's own memory, or the caller's hooks in its place.
class DeviceMemory : public Memory {
public:
    DeviceMemory(const Backend& backend, spattn_device id, const spattn_context_options& options)
        : backend_(backend), id_(id), alloc_(options.alloc), free_(options.free), user_(options.alloc_user) {}

    bool is_heap() const override { return id_.type == SPATTN_CPU && !alloc_; }
    void copy_in(void* to, const void* from, size_t bytes, void* stream) const override {
        backend_.copy_in(id_.index, to, from, bytes, stream);
    }
    void clear(void* memory, size_t bytes, void* stream) const override {
        backend_.clear(id_.index, memory, bytes, stream);
    }

protected:
    void* allocate(size_t bytes, void* stream) const override {
        if (!alloc_) return backend_.allocate(id_.index, bytes, stream);
        void* memory = alloc_(user_, id_, bytes, alignment, stream);
        if (!memory) fail(out_of_memory(), "", text("the context's alloc returned NULL for ", bytes, " bytes"));
        if (reinterpret_cast<uintptr_t>(memory) % alignment) {
            free_(user_, id_, memory, bytes, stream);
            fail(SPATTN_E_CALLBACK, "",
                 text("the context's alloc returned memory that is not aligned to ", alignment, " bytes"));
        }
        return memory;
    }
    void free(void* memory, size_t bytes, void* stream) const override {
        free_ ? free_(user_, id_, memory, bytes, stream) : backend_.release(id_.index, memory, bytes, stream);
    }

private:
    static constexpr size_t alignment = 256;
    spattn_status out_of_memory() const {
        return id_.type == SPATTN_CPU ? SPATTN_E_HOST_MEMORY : SPATTN_E_DEVICE_MEMORY;
    }

    const Backend& backend_;
    spattn_device id_;
    spattn_alloc_fn alloc_;
    spattn_free_fn free_;
    void* user_;
};

// Backends that nobody wishes for are asked nothing: a process whose driver of GPUs has begun can have no children that
// use it.
const Backend& choose_backend(spattn_device wish) {
    for (const Backend& backend : all_backends()) {
        if (wish.type == 0 && backend.count() > 0) return backend;
        if (wish.type != backend.device) continue;
        if (wish.index >= 0 && wish.index < backend.count()) return backend;
        const int count = backend.count();
        fail(wish.type == SPATTN_CUDA && count == 0 ? SPATTN_E_NO_GPU : SPATTN_E_DEVICE, "options.device",
             text("is number ", wish.index, " of ", backend.name, "; accepted: ",
                  count ? text("0 to ", count - 1) : "others, as this machine has none"));
    }
    std::string offered;
    for (const Backend& backend : all_backends())
        offered += (offered.empty() ? "" : ", ") + text(backend.name, " with ", backend.count(), " devices");
    fail(wish.type == SPATTN_CUDA ? SPATTN_E_NO_GPU : SPATTN_E_DEVICE, "options.device",
         text("is ", describe_device(wish), "; this build offers: ", offered));
}

// SPATTN_LOG=error|info|debug, for contexts without a log function.
spattn_enum environment_log_level() {
    const char* level = std::getenv("SPATTN_LOG");
    if (!level) return SPATTN_LOG_OFF;
    if (!std::strcmp(level, "debug")) return SPATTN_LOG_DEBUG;
    if (!std::strcmp(level, "info")) return SPATTN_LOG_INFO;
    return std::strcmp(level, "error") ? SPATTN_LOG_OFF : SPATTN_LOG_ERROR;
}

void log_to_stderr(void*, spattn_enum, const char* line) { std::fprintf(stderr, "sparseattn: %s\n", line); }

}  // namespace

Device::Device(const spattn_context_options& options)
    : backend_(&choose_backend(options.device)),
      id_(options.device.type ? options.device : spattn_device{backend_->device, 0}),
      memory_(make_ref<DeviceMemory>(*backend_, id_, options)),
      parallel_(options.parallel_for
                    ? make_host_parallel(options.parallel_for, options.parallel_for_user, options.cpu_threads)
                    : make_thread_pool(options.cpu_threads)),
      cancel_(options.cancel), cancel_user_(options.cancel_user), log_(options.log), log_user_(options.log_user),
      log_level_(options.log_level ? options.log_level : spattn_enum(SPATTN_LOG_INFO)) {
    if (!log_) {
        log_level_ = environment_log_level();
        log_ = log_to_stderr;
    }
}

void Device::log(spattn_enum level, const std::string& line) const noexcept {
    if (logs(level)) log_(log_user_, level, line.c_str());
}

}  // namespace spattn
