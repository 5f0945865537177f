// SPDX-License-Identifier: MIT
// Text of anything that streams write: concatenation without a format library.
#pragma once

#include <sstream>
#include <string>

namespace spattn {

template <class... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    out.exceptions(std::ios_base::badbit);  // else a stream that finds no memory drops the rest and says nothing
    (out << ... << parts);
    return out.str();
}

}  // namespace spattn
