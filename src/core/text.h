// SPDX-License-Identifier: MIT
// Text of anything that streams write: concatenation without a format library. Patterns are compared and saved by their
// texts, so numbers are the same in every host: one whose locale groups digits would write 1.024 for 1024.
#pragma once

#include <locale>
#include <sstream>
#include <string>

namespace spattn {

template <class... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out.exceptions(std::ios_base::badbit);  // else a stream that finds no memory drops the rest and says nothing
    (out << ... << parts);
    return out.str();
}

}  // namespace spattn
