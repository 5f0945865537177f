// SPDX-License-Identifier: MIT
#include "pattern/bytes.h"

namespace spattn {

namespace {
template <size_t width>
void store(uint64_t number, char* to) {
    for (size_t i = 0; i < width; ++i) to[i] = char(number >> (8 * i));
}
}  // namespace

char* ByteWriter::room(size_t size) {
    size_ += size;
    if (keeps_ == Keeps::size) return nullptr;
    bytes_.resize(size_);
    return &bytes_[size_ - size];
}

void ByteWriter::node(Node node) {
    if (char* const to = room(1)) *to = char(node);
}

void ByteWriter::number(int64_t number) {
    if (char* const to = room(8)) store<8>(uint64_t(number), to);
}

void ByteWriter::string(const std::string& text) {
    number(int64_t(text.size()));
    if (char* const to = room(text.size())) text.copy(to, text.size());
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
    if (char* const to = room(1)) *to = char(width);
    number(array.size());
    char* const to = room(size_t(array.size()) * width);
    if (!to) return;
    for (int64_t i = 0; i < array.size(); ++i) store<width>(uint64_t(array[i]), to + size_t(i) * width);
}

std::string save_pattern(const Pattern& pattern) {
    ByteWriter body(ByteWriter::Keeps::bytes), head(ByteWriter::Keeps::bytes);
    pattern.save(body);
    head.number(int64_t(hash_identity(body.bytes())));
    return std::string(magic) + head.bytes() + body.bytes();
}

size_t saved_size(const Pattern& pattern) {
    ByteWriter body(ByteWriter::Keeps::size);
    pattern.save(body);
    return head_size + body.size();
}

}  // namespace spattn
