// SPDX-License-Identifier: MIT
#pragma once

#include "check.h"
#include "core/error.h"

// make() ends with this error, which names the argument and says what is accepted; a text's, what was expected.
template <class Make>
void refuses(spattn_status status, const char* argument, Make make) {
    check::context = argument;
    try {
        make();
        CHECK(!"made");
    } catch (const spattn::Error& error) {
        CHECK_EQ(error.status, status);
        CHECK_EQ(error.argument, argument);
        const auto says = [&](const char* word) { return error.message.find(word) != std::string::npos; };
        CHECK(says("accepted") || (status == SPATTN_E_FORMAT && says("expected")));
    }
    check::context.clear();
}
