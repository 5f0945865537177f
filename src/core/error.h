// SPDX-License-Identifier: MIT
// One way to fail: fail() in cold host code, caught once at the ABI (api/guard.h).
#pragma once

#include <exception>
#include <source_location>
#include <string>

#include "core/text.h"
#include "sparseattn/sparseattn.h"

namespace spattn {

using Where = std::source_location;

struct Error : std::exception {
    Error(spattn_status status, std::string argument, std::string message, int native_code, int line)
        : status(status), native_code(native_code), line(line), argument(std::move(argument)),
          message(std::move(message)) {}
    const char* what() const noexcept override { return message.c_str(); }

    spattn_status status;
    int native_code;       // cudaError_t where status is 4xxx
    int line;              // of the fail() that threw
    std::string argument;  // "q", "problem.head_dim"; empty where no argument is to blame
    std::string message;   // what was given, what is accepted
};

// argument names the public argument; message says what was given and what is accepted.
[[noreturn]] inline void fail(spattn_status status, std::string argument, std::string message,
                              Where where = Where::current()) {
    throw Error(status, std::move(argument), std::move(message), 0, int(where.line()));
}

// For cheap messages only: the text is built whether or not it is needed.
inline void require(bool ok, spattn_status status, const char* argument, const char* message,
                    Where where = Where::current()) {
    if (!ok) fail(status, argument, message, where);
}

// value must lie in [low, high].
inline void require_range(int64_t value, int64_t low, int64_t high, const char* argument,
                          Where where = Where::current()) {
    if (value < low || value > high)
        fail(SPATTN_E_RANGE, argument, text("is ", value, "; accepted: ", low, " to ", high), where);
}

}  // namespace spattn
