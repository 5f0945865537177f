// SPDX-License-Identifier: MIT
#include "pattern/bytes.h"

namespace spattn {

void ByteWriter::string(const std::string& text) {
    number(int64_t(text.size()));
    bytes_ += text;
}

// As narrow as the numbers allow: equal patterns have equal bytes, whatever the caller's width was.
void ByteWriter::array(const IndexArray& array) {
    bool is_narrow = true;
    for (int64_t i = 0; i < array.size(); ++i) is_narrow &= array[i] == int32_t(array[i]);
    const int width = is_narrow ? 4 : 8;
    integer(uint64_t(width), 1);
    number(array.size());
    for (int64_t i = 0; i < array.size(); ++i) integer(uint64_t(array[i]), width);
}

std::string save_pattern(const Pattern& pattern) {
    ByteWriter body, head;
    pattern.save(body);
    head.number(int64_t(hash_identity(body.bytes())));
    return "SPATTNP1" + head.bytes() + body.bytes();
}

}  // namespace spattn
