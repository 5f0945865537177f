// SPDX-License-Identifier: MIT
// Patterns as bytes, little-endian on every machine, readable for ever:
//
//   file     = "SPATTNP1" hash node           hash: 8 bytes, hash_identity of the node's bytes
//   node     = tag, then by tag
//     text                                   string: what parse reads; every pattern of a name and numbers
//     union_of, intersection_of, difference_of, transpose
//                                            number of parts, nodes
//     per_head, per_batch                    number of parts, nodes, array: the map
//     grid                                   number of parts, nodes, arrays: sizes, tile
//     per_document                           1, node, arrays cu_q, cu_k
//     rows, columns                          1, node, seq_q or seq_k, array: begin and end of each range
//     csr                                    seq_k, arrays row_ptr, col_idx
//     bsr                                    block_q, block_k, seq_q, seq_k, arrays row_ptr, col_idx
//     mask                                   batch, heads, seq_q, seq_k, then ceil(seq_k / 64) numbers a row: bits
//     xref                                   arrays: numbers of its text, ids, symbols
//   tag      = 1 byte;  number = 8 bytes;  string = number of bytes, bytes
//   array    = width (1 byte: 4 or 8), number of integers, integers of that width
#pragma once

#include <string>
#include <string_view>

#include "pattern/pattern.h"

namespace spattn {

enum class Node : uint8_t {
    text = 1,
    union_of = 2,
    intersection_of = 3,
    difference_of = 4,
    transpose = 5,
    per_head = 6,
    per_batch = 7,
    per_document = 8,
    csr = 9,
    bsr = 10,
    mask = 11,
    xref = 12,
    rows = 13,
    columns = 14,
    grid = 15
};

constexpr std::string_view magic = "SPATTNP1";
constexpr size_t head_size = magic.size() + 8;

// The bytes of nodes or, where nobody wants them, their number alone: of long lists half a gigabyte.
class ByteWriter {
public:
    enum class Keeps { bytes, size };
    explicit ByteWriter(Keeps keeps) : keeps_(keeps) {}

    void node(Node node);
    void number(int64_t number);
    // number_of(i) for each i below `count`, asked only where bytes are kept.
    template <class Number>
    void numbers(int64_t count, Number number_of) {
        if (keeps_ == Keeps::size)
            size_ += 8 * size_t(count);
        else
            for (int64_t i = 0; i < count; ++i) number(number_of(i));
    }
    void string(const std::string& text);
    void array(const IndexArray& array);
    const std::string& bytes() const { return bytes_; }
    size_t size() const { return size_; }

private:
    char* room(size_t size);  // where the next so many bytes go; null where they are not kept
    template <size_t width>
    void integers(const IndexArray& array);

    const Keeps keeps_;
    size_t size_ = 0;
    std::string bytes_;
};

}  // namespace spattn
