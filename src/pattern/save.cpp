// SPDX-License-Identifier: MIT
#include "pattern/bytes.h"

namespace spattn {

namespace {
template <size_t width>
void store(uint64_t number, char* to) {
    for (size_t i = 0; i < width; ++i) to[i] = char(number >> (8 * i));
}
}  // namespace

void ByteWriter::number(int64_t number) {
    char bytes[8];
    store<8>(uint64_t(number), bytes);
    bytes_.append(bytes, 8);
}

void ByteWriter::string(const std::string& text) {
    number(int64_t(text.size()));
    bytes_ += text;
}

// As narrow as the numbers allow: equal patterns have equal bytes, whatever the caller's width was.
void ByteWriter::array(const IndexArray& array) {
    bool is_narrow = true;
    for (int64_t i = 0; i < array.size(); ++i) is_narrow &= array[i] == int32_t(array[i]);
    is_narrow ? integers<4>(array) : integers<8>(array);
}

// All room is made at once: a hundred million indices are half a gigabyte.
template <size_t width>
void ByteWriter::integers(const IndexArray& array) {
    bytes_ += char(width);
    number(array.size());
    const size_t begin = bytes_.size();
    bytes_.resize(begin + size_t(array.size()) * width);
    for (int64_t i = 0; i < array.size(); ++i) store<width>(uint64_t(array[i]), &bytes_[begin + size_t(i) * width]);
}

std::string save_pattern(const Pattern& pattern) {
    ByteWriter body, head;
    pattern.save(body);
    head.number(int64_t(hash_identity(body.bytes())));
    return std::string(magic) + head.bytes() + body.bytes();
}

size_t saved_size(const Pattern& pattern) {
    ByteWriter body;
    pattern.save(body);
    return head_size + body.bytes().size();
}

}  // namespace spattn
