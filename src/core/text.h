// SPDX-License-Identifier: MIT
// Text for people: concatenation without a format library.
#pragma once

#include <sstream>
#include <string>

namespace spattn {

template <class... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

}  // namespace spattn
