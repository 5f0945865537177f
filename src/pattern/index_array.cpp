// SPDX-License-Identifier: MIT
#include "pattern/index_array.h"

#include <cstdio>

namespace spattn {

std::string Digest::hex() const {
    char out[34];
    std::snprintf(out, sizeof out, "#%016llx%016llx", static_cast<unsigned long long>(a_),
                  static_cast<unsigned long long>(b_));
    return out;
}

std::string list(const IndexArray& numbers) {
    std::string out;
    for (int64_t i = 0; i < numbers.size(); ++i) {
        if (i > 0) out += ',';
        out += std::to_string(numbers[i]);
    }
    return out;
}

}  // namespace spattn
