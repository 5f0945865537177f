// SPDX-License-Identifier: MIT
// One call with its n-th allocation failing, for all n: it ends with its own status or SPATTN_E_HOST_MEMORY, says so,
// keeps the header's rules about results, leaks nothing, and works when called again.
#pragma once

#include "abi/abi.h"
#include "fault/memory.h"

namespace fault {

// `call` may allocate nothing of its own; `verify` sees what it left and gives handles back.
struct Case {
    std::string function;
    std::function<spattn_status()> call;
    std::function<void(spattn_status)> verify;
    spattn_status status = SPATTN_OK;            // where memory suffices
    std::function<void()> prepare = [] {};
};

// What a thread remembers of its last failure is memory too. After the same failure it is always as much.
inline void settle() {
    auto extent = abi::sized<spattn_extent>();
    spattn_stats unsized{};
    extent.seq_q = extent.seq_k = 1;
    spattn_pattern* pattern = nullptr;
    spattn_pattern_causal(&pattern);
    extent.q_offset = int64_t(1) << 60;
    extent.flags = SPATTN_EXTENT_Q_OFFSET;
    CHECK_EQ(spattn_pattern_stats(pattern, &extent, &unsized), SPATTN_E_RANGE);
    spattn_pattern_release(pattern);
}

inline void demand_reported(const Case& c, spattn_status status) {
    auto error = abi::sized<spattn_error>();
    CHECK_EQ(spattn_last_error(&error), SPATTN_OK);
    CHECK_EQ(error.status, status);
    CHECK_EQ(std::string(error.function), c.function);
    CHECK(*error.message != '\0');
}

inline bool attempt(const Case& c, long n, memory::Fault fault) {
    c.prepare();
    settle();
    const long before = memory::live;
    memory::arm(n, fault);
    const spattn_status status = c.call();
    const bool had_fault = memory::disarm();
    if (status != c.status) {
        CHECK_EQ(status, SPATTN_E_HOST_MEMORY);
        CHECK(had_fault);
    }
    if (status != SPATTN_OK) demand_reported(c, status);
    c.verify(status);
    settle();
    CHECK_EQ(memory::live, before);
    const spattn_status again = c.call();
    CHECK_EQ(again, c.status);
    c.verify(again);
    return had_fault;
}

// Late allocations of long calls stand where earlier ones stood, in loops: one in seven fails, with SPATTN_TEST_EVERY
// one of so many of those, and with SPATTN_TEST_ALL_FAULTS each.
inline bool is_wanted(long n) {
    static const bool all = std::getenv("SPATTN_TEST_ALL_FAULTS");
    return all || n <= 100 || n % (7 * long(check::every())) == 0;
}

// Returns the number of allocations that were made to fail.
inline long sweep(const std::string& name, const Case& c) {
    long faults = 0;
    for (auto fault : {memory::Fault::once, memory::Fault::from_then_on}) {
        for (long n = 1;; ++n) {
            if (!is_wanted(n)) continue;
            check::context = name + (fault == memory::Fault::once ? ", only allocation " : ", all from allocation ") +
                             std::to_string(n);
            if (!attempt(c, n, fault)) break;
            ++faults;
        }
    }
    check::context.clear();
    return faults;
}

}  // namespace fault
