// SPDX-License-Identifier: MIT
// The C ABI with owners and exceptions; the bench sees nothing else of the library.
#pragma once

#include <memory>
#include <stdexcept>

#include <sparseattn/sparseattn.h>

namespace bench {

struct Release {
    void operator()(const spattn_context* context) const { spattn_context_release(context); }
    void operator()(const spattn_pattern* pattern) const { spattn_pattern_release(pattern); }
    void operator()(const spattn_plan* plan) const { spattn_plan_release(plan); }
};
template <class T>
using Handle = std::unique_ptr<T, Release>;

// A call that the library refused.
struct Refused : std::runtime_error {
    explicit Refused(spattn_status status)
        : std::runtime_error(std::string(spattn_status_name(status)) + ": " + spattn_last_error_text()),
          status(status) {}
    spattn_status status;
};

inline void require(spattn_status status) {
    if (status != SPATTN_OK) throw Refused(status);
}

}  // namespace bench
