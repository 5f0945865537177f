// SPDX-License-Identifier: MIT
#include "core/text.h"

#include <charconv>

namespace spattn {

namespace {
template <class Number, class... Format>
void append_digits(std::string& out, Number number, Format... format) {
    char digits[32];  // more than any 64-bit number takes
    const char* const end = std::to_chars(digits, digits + sizeof digits, number, format...).ptr;
    out += std::string_view(digits, size_t(end - digits));
}
}  // namespace

void append_number(std::string& out, int64_t number) { append_digits(out, number); }
void append_number(std::string& out, uint64_t number) { append_digits(out, number); }
void append_number(std::string& out, double number) { append_digits(out, number, std::chars_format::general, 6); }

}  // namespace spattn
