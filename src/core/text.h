// SPDX-License-Identifier: MIT
// Concatenation of texts and numbers. Patterns are compared and saved by their texts, and a plan that is made in
// microseconds writes dozens of them: digits come from std::to_chars, which asks neither a stream nor the host's
// locale, where 1024 may be 1.024.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace spattn {

void append_number(std::string& out, int64_t number);
void append_number(std::string& out, uint64_t number);
void append_number(std::string& out, double number);  // six significant digits, as streams and printf's %g write them

inline void append(std::string& out, std::string_view part) { out += part; }
inline void append(std::string& out, char part) { out += part; }
inline void append(std::string& out, std::floating_point auto number) { append_number(out, double(number)); }
inline void append(std::string& out, std::signed_integral auto number) { append_number(out, int64_t(number)); }
inline void append(std::string& out, std::unsigned_integral auto number) { append_number(out, uint64_t(number)); }

template <class... Parts>
std::string text(const Parts&... parts) {
    std::string out;
    (append(out, parts), ...);
    return out;
}

}  // namespace spattn
