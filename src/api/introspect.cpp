// SPDX-License-Identifier: MIT
// Chapter 8 of the header, and the build's description.
#include <string>

#include "api/guard.h"
#include "core/text.h"
#include "plan/backends.h"

using namespace spattn;

namespace {

std::string describe_build() {
    std::string backends;
    for (const Backend& backend : all_backends())
        backends += text(backends.empty() ? "" : ", ", '"', backend.name, '"');
    return text("{\"version\": \"", SPATTN_VERSION_MAJOR, ".", SPATTN_VERSION_MINOR, ".", SPATTN_VERSION_PATCH,
                "\", \"abi\": ", SPATTN_ABI, ", \"compiler\": \"", SPATTN_COMPILER, "\", \"backends\": [", backends,
                "], \"kernels\": ", all_kernels().size(), "}");
}

}  // namespace

// The tables are made at the first use, which may find no memory: then there are no rows yet, and nothing is thrown at
// C.
int32_t spattn_kernel_count(void) {
    int32_t count = 0;
    guard(__func__, [&] { count = int32_t(all_kernels().size()); });
    return count;
}

const char* spattn_kernel_name(int32_t row) {
    return row >= 0 && row < spattn_kernel_count() ? all_kernels()[size_t(row)].name : nullptr;
}

int32_t spattn_kernel_runs_here(int32_t row) {
    bool runs = false;
    guard(__func__, [&] {
        if (row < 0 || row >= int32_t(all_kernels().size())) return;
        const Kernel& kernel = all_kernels()[size_t(row)];
        for (const Backend& backend : all_backends())
            for (int i = 0; backend.device == kernel.device && i < backend.count(); ++i) runs |= kernel.runs_here(i);
    });
    return runs;
}

const char* spattn_build_json(void) {
    const char* result = "{}";
    guard(__func__, [&] {
        static const auto& json = *new std::string(describe_build());  // never destroyed, as the tables of rows
        result = json.c_str();
    });
    return result;
}
