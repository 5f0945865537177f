// SPDX-License-Identifier: MIT
// The context handle: a device and the plans that were made for it.
#pragma once

#include "api/device.h"
#include "api/plan_cache.h"

struct spattn_context : spattn::RefCounted {
    spattn_context(spattn::Ref<const spattn::Device> device, size_t plans, size_t bytes)
        : device(std::move(device)), cache(plans, bytes) {}
    spattn::Ref<const spattn::Device> device;
    mutable spattn::PlanCache cache;  // locks itself
};
