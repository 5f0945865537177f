// SPDX-License-Identifier: MIT
// Chapter 3 of the header.
#include "api/context.h"

#include "api/args.h"
#include "api/guard.h"
#include "core/tensor.h"

using namespace spattn;

namespace {

void check_options(const spattn_context_options& o) {
    if (o.flags) fail(SPATTN_E_UNKNOWN_FIELD, "options.flags", text("is ", o.flags, "; accepted: 0"));
    if (!o.alloc != !o.free)
        fail(SPATTN_E_NULL, o.alloc ? "options.free" : "options.alloc",
             "is NULL; accepted: alloc and free together, or neither");
    require_range(o.log_level, SPATTN_LOG_OFF, SPATTN_LOG_DEBUG, "options.log_level");
    require_range(o.cpu_threads, 0, 4096, "options.cpu_threads");
    require_range(o.plan_cache, -1, int64_t(1) << 20, "options.plan_cache");
}

constexpr size_t default_plans = 64;

// What kept plans may hold together. A plan of an analytic pattern holds some hundred KiB, one of a boolean mask of 4K x
// 4K 3 to 7 MiB: 64 of the former, or three dozen of the latter, have room, and a program that brings a mask of its own
// in every call stays at what a process can spare. Who asks for more plans gets room for them in the same proportion.
size_t bytes_for(size_t plans) { return std::max(plans, default_plans) * (size_t(4) << 20); }

}  // namespace

spattn_status spattn_context_create(const spattn_context_options* given, spattn_context** result) {
    return guard_result(__func__, result, [&] {
        spattn_context_options options{};
        if (given) options = read_struct(given, "options");
        check_options(options);
        auto device = make_ref<Device>(options);
        device->log(SPATTN_LOG_INFO,
                    text("context on ", describe_device(device->id()), ", ", device->parallel().lanes(), " threads"));
        const size_t plans = options.plan_cache ? size_t(std::max<int64_t>(options.plan_cache, 0)) : default_plans;
        return make_ref<spattn_context>(std::move(device), plans, bytes_for(plans));
    });
}

void spattn_context_retain(const spattn_context* context) {
    if (context) context->retain();
}

void spattn_context_release(const spattn_context* context) {
    if (context) context->release();
}

spattn_status spattn_device_count(int32_t* result) {
    return guard(__func__, [&] {
        int32_t& count = required(result, "result");
        int32_t gpus = 0;
        for (const Backend& backend : all_backends())
            if (backend.device != SPATTN_CPU) gpus += backend.count();
        count = gpus;
    });
}
