// SPDX-License-Identifier: MIT
// Who runs the tasks of a CPU kernel: our threads, the host's, or the caller alone.
#pragma once

#include <cstdint>

namespace spattn {

// A kernel asks for `lanes()` concurrent bodies and lets each pull tasks from a counter, so that scratch belongs to a
// lane and never to a thread.
class Parallel {
public:
    virtual ~Parallel() = default;
    virtual int lanes() const = 0;
    // Runs body(argument, lane) once for every lane in [0, lanes()), on any threads; returns when all are done.
    virtual void run(void (*body)(void* argument, int64_t lane), void* argument) = 0;
    // The same of work that the caller does sooner than others wake up. Not inline, as is_cancelled.
    virtual void run_briefly(void (*body)(void* argument, int64_t lane), void* argument);  // run, unless overridden
    // Whether lanes should take no further task: run() then fails once they have ended. Lanes ask before each task.
    // Not inline: objects of archs must not share a weak copy.
    virtual bool is_cancelled();  // false, where nobody overrides it
};

}  // namespace spattn
