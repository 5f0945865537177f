// SPDX-License-Identifier: MIT
// Chapter 7 of the header, and the build's description.
#include <string>

#include "core/text.h"
#include "plan/backends.h"

using namespace spattn;

int32_t spattn_kernel_count(void) { return int32_t(all_kernels().size()); }

const char* spattn_kernel_name(int32_t row) {
    return row >= 0 && row < spattn_kernel_count() ? all_kernels()[size_t(row)].name : nullptr;
}

int32_t spattn_kernel_runs_here(int32_t row) {
    return row >= 0 && row < spattn_kernel_count() && all_kernels()[size_t(row)].runs_here();
}

const char* spattn_build_json(void) {
    static const std::string json = [] {
        std::string backends;
        for (const Backend& backend : all_backends())
            backends += text(backends.empty() ? "" : ", ", '"', backend.name, '"');
        return text("{\"version\": \"", SPATTN_VERSION_MAJOR, ".", SPATTN_VERSION_MINOR, ".", SPATTN_VERSION_PATCH,
                    "\", \"abi\": ", SPATTN_ABI, ", \"compiler\": \"", SPATTN_COMPILER, "\", \"backends\": [", backends,
                    "], \"kernels\": ", all_kernels().size(), "}");
    }();
    return json.c_str();
}
