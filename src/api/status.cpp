// SPDX-License-Identifier: MIT
// Chapter 2 of the header: versions, status names and the last failure of a thread.
#include <string>

#include "api/args.h"
#include "api/guard.h"
#include "core/of_thread.h"

namespace spattn {
namespace {

struct LastError {
    spattn_status status = SPATTN_OK;
    int native_code = 0, line = 0;
    const char* function = "";
    std::string message, argument;

    const char* text() const {
        return status && message.empty() ? "there was no memory for the message" : message.c_str();
    }
};

LastError& last_error() { return of_thread<LastError>(); }

struct StatusName {
    spattn_status status;
    const char* name;
};
#define SPATTN_STATUS(name) {name, #name}
constexpr StatusName status_names[] = {
    SPATTN_STATUS(SPATTN_OK),
    SPATTN_STATUS(SPATTN_E_ARGUMENT),
    SPATTN_STATUS(SPATTN_E_NULL),
    SPATTN_STATUS(SPATTN_E_STRUCT_SIZE),
    SPATTN_STATUS(SPATTN_E_SHAPE),
    SPATTN_STATUS(SPATTN_E_DTYPE),
    SPATTN_STATUS(SPATTN_E_DEVICE),
    SPATTN_STATUS(SPATTN_E_LAYOUT),
    SPATTN_STATUS(SPATTN_E_RANGE),
    SPATTN_STATUS(SPATTN_E_WORKSPACE),
    SPATTN_STATUS(SPATTN_E_STATE),
    SPATTN_STATUS(SPATTN_E_UNSUPPORTED),
    SPATTN_STATUS(SPATTN_E_NO_KERNEL),
    SPATTN_STATUS(SPATTN_E_NO_GPU),
    SPATTN_STATUS(SPATTN_E_DRIVER_TOO_OLD),
    SPATTN_STATUS(SPATTN_E_UNKNOWN_FIELD),
    SPATTN_STATUS(SPATTN_E_RESOURCE),
    SPATTN_STATUS(SPATTN_E_HOST_MEMORY),
    SPATTN_STATUS(SPATTN_E_DEVICE_MEMORY),
    SPATTN_STATUS(SPATTN_E_CUDA),
    SPATTN_STATUS(SPATTN_E_CAPTURE),
    SPATTN_STATUS(SPATTN_E_FORMAT),
    SPATTN_STATUS(SPATTN_E_CALLBACK),
    SPATTN_STATUS(SPATTN_E_CANCELLED),
    SPATTN_STATUS(SPATTN_E_INTERNAL),
};
#undef SPATTN_STATUS

}  // namespace

spattn_status remember(const char* function, const Error& error) noexcept {
    LastError& last = last_error();
    try {
        std::string message = text(function, ": ", error.argument.empty() ? "" : text("argument ", error.argument, " "),
                                   error.message);
        last.argument = error.argument;
        last.message = std::move(message);
        last.status = error.status;
        last.native_code = error.native_code;
        last.line = error.line;
        last.function = function;
        return error.status;
    } catch (...) {
        return remember(function, error.status, "");
    }
}

spattn_status remember(const char* function, spattn_status status, const char* message) noexcept {
    LastError& last = last_error();
    last.status = status;
    last.native_code = last.line = 0;
    last.function = function;
    last.argument.clear();
    last.message.clear();
    try {
        last.message = text(function, ": ", message);
    } catch (...) {
        // The status still tells.
    }
    return status;
}

}  // namespace spattn

using namespace spattn;

uint32_t spattn_version(void) {
    return SPATTN_VERSION_MAJOR * 10000 + SPATTN_VERSION_MINOR * 100 + SPATTN_VERSION_PATCH;
}

uint32_t spattn_abi(void) { return SPATTN_ABI; }

const char* spattn_status_name(spattn_status status) {
    for (const StatusName& row : status_names)
        if (row.status == status) return row.name;
    return "SPATTN_E_UNKNOWN";
}

const char* spattn_last_error_text(void) { return last_error().text(); }

spattn_status spattn_last_error(spattn_error* result) {
    return guard(__func__, [&] {
        const LastError& last = last_error();
        spattn_error error{};
        error.status = last.status;
        error.native_code = last.native_code;
        error.line = last.line;
        error.message = last.text();
        error.argument = last.argument.c_str();
        error.function = last.function;
        write_struct(result, error, "result");
    });
}
