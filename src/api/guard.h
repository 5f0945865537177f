// SPDX-License-Identifier: MIT
// The boundary: whatever C++ throws becomes a status and a thread-local text.
#pragma once

#include <exception>
#include <new>

#include "core/error.h"

namespace spattn {

// Remembers a failure of `function` for spattn_last_error; returns its status. Does not throw: where the text itself
// cannot be stored, a fixed one is.
spattn_status remember(const char* function, const Error& error) noexcept;
spattn_status remember(const char* function, spattn_status status, const char* message) noexcept;

// Runs the body of a public function.
template <class Body>
spattn_status guard(const char* function, Body&& body) noexcept {
    try {
        body();
        return SPATTN_OK;
    } catch (const Error& error) {
        return remember(function, error);
    } catch (const std::bad_alloc&) {
        return remember(function, SPATTN_E_HOST_MEMORY, "host memory is exhausted");
    } catch (const std::exception& error) {
        return remember(function, SPATTN_E_INTERNAL, error.what());
    } catch (...) {
        return remember(function, SPATTN_E_INTERNAL, "an unknown exception reached the boundary");
    }
}

// As guard, for functions that make a handle: *result is null unless the body returns one (a Ref, whose count it gets).
template <class Handle, class Body>
spattn_status guard_result(const char* function, Handle** result, Body&& body) noexcept {
    if (result) *result = nullptr;
    return guard(function, [&] {
        require(result != nullptr, SPATTN_E_NULL, "result", "is NULL; accepted: where to write the handle");
        // Handles are const inside and opaque outside: the ABI has no function that changes one.
        *result = const_cast<Handle*>(body().take());
    });
}

}  // namespace spattn
