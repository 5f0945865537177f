// SPDX-License-Identifier: MIT
// Bytes back to patterns. Whatever the bytes are, the reader stays within them, allocates in proportion to them and
// nests no deeper than patterns may; what constructors refuse is an error of the bytes.
#include <cstring>

#include "core/error.h"
#include "pattern/bytes.h"
#include "pattern/mask.h"

namespace spattn {
namespace {

constexpr int most_depth = 200;

class Reader {
public:
    Reader(const void* bytes, size_t size) : bytes_(static_cast<const unsigned char*>(bytes)), size_(size) {}

    PatternRef whole() {
        if (size_ < head_size || std::memcmp(bytes_, magic.data(), magic.size()) != 0) {
            refuse(0, "no saved pattern; expected SPATTNP1 and what spattn_pattern_save wrote");
        }
        at_ = magic.size();
        const auto hash = uint64_t(number());
        const std::string_view body(reinterpret_cast<const char*>(bytes_) + head_size, size_ - head_size);
        if (hash_identity(body) != hash)
            refuse(magic.size(), "a hash of other bytes; expected bytes as they were saved");
        PatternRef result = node(0);
        if (at_ != size_) refuse(at_, "more bytes; expected the end");
        return result;
    }

private:
    // ---- errors ----

    template <class Make>
    auto made(size_t start, Make make) {
        try {
            return make();
        } catch (const Error& error) {
            if (error.argument == "bytes") throw;
            refuse(start, error);
        }
    }

    [[noreturn, gnu::noinline]] void refuse(size_t at, const std::string& what) {
        fail(SPATTN_E_FORMAT, "bytes", text("byte ", at, ": ", what));
    }

    [[noreturn, gnu::noinline]] void refuse(size_t start, const Error& error) {
        refuse(start, error.argument + ' ' + error.message);
    }

    // ---- nodes ----

    // Each level of a pattern takes a frame of this function and one of composition(), and a thread may have a stack of
    // 128 KiB, as musl gives. So what is no way down to the next level has its arrays and texts in frames of its own.
    PatternRef node(int depth) {
        const size_t start = at_;
        if (depth > most_depth) refuse_depth(depth);
        need(1);
        const auto tag = Node(bytes_[at_++]);
        switch (tag) {
            case Node::text:
            case Node::csr:
            case Node::bsr:
            case Node::mask:
            case Node::xref:
                return end_node(start, tag);
            case Node::union_of:
            case Node::intersection_of:
            case Node::difference_of:
            case Node::transpose:
            case Node::per_head:
            case Node::per_batch:
            case Node::per_document:
            case Node::rows:
            case Node::columns:
            case Node::grid:
                return composition(start, tag, depth);
        }
        refuse_tag(start, tag);
    }

    [[noreturn, gnu::noinline]] void refuse_depth(int depth) {
        refuse(at_, text("a pattern at level ", depth, "; expected at most ", most_depth));
    }
    [[noreturn, gnu::noinline]] void refuse_tag(size_t at, Node tag) {
        refuse(at, text("tag ", int(tag), "; expected 1 to ", int(Node::grid)));
    }
    [[noreturn, gnu::noinline]] void refuse_parts(size_t at, int64_t count) {
        refuse(at, text(count, " parts; expected a number that fits the tag and the bytes left"));
    }

    // One that has no parts.
    [[gnu::noinline]] PatternRef end_node(size_t start, Node tag) {
        switch (tag) {
            case Node::csr:
                return csr(start);
            case Node::bsr:
                return bsr(start);
            case Node::mask:
                return mask(start);
            case Node::xref:
                return xref(start);
            default:
                return leaf(start);
        }
    }

    PatternRef composition(size_t start, Node tag, int depth) {
        const size_t at = at_;
        const int64_t count = number();
        const bool is_single = tag == Node::transpose || tag == Node::per_document || tag == Node::rows ||
                               tag == Node::columns;
        const int64_t least = tag == Node::difference_of ? 2 : 1;
        // Every part takes a byte and more.
        if (count < least || (is_single && count != 1) || uint64_t(count) > size_ - at_) {
            refuse_parts(at, count);
        }
        Patterns parts;
        for (int64_t i = 0; i < count; ++i) parts.push_back(node(depth + 1));
        return made(start, [&] { return compose(tag, std::move(parts)); });
    }

    [[gnu::noinline]] PatternRef compose(Node tag, Patterns parts) {
        switch (tag) {
            case Node::union_of:
                return make_union(std::move(parts));
            case Node::intersection_of:
                return make_intersection(std::move(parts));
            case Node::transpose:
                return make_transpose(parts[0]);
            case Node::per_head:
                return make_per_head(std::move(parts), map());
            case Node::per_batch:
                return make_per_batch(std::move(parts), map());
            case Node::grid: {
                std::vector<int64_t> sizes = numbers();
                return make_grid(std::move(sizes), numbers(), std::move(parts));
            }
            case Node::per_document: {
                std::vector<int64_t> cu_q = numbers();
                return make_per_document(parts[0], std::move(cu_q), numbers());
            }
            case Node::rows:
            case Node::columns: {
                const int64_t tokens = number();
                return (tag == Node::rows ? make_rows : make_columns)(parts[0], numbers(), tokens);
            }
            default:
                return make_difference(std::move(parts));
        }
    }

    PatternRef leaf(size_t start) {
        const size_t at = at_;
        const int64_t length = number();
        if (length < 0 || uint64_t(length) > size_ - at_)
            refuse(at, text("a text of ", length, " bytes; expected at most those left"));
        const std::string text(reinterpret_cast<const char*>(bytes_) + at_, size_t(length));
        at_ += size_t(length);
        return made(start, [&] { return parse_pattern(text); });
    }

    PatternRef csr(size_t start) {
        const int64_t seq_k = number();
        IndexArray row_ptr = indices(), col_idx = indices();
        return made(start, [&] { return make_csr(std::move(row_ptr), std::move(col_idx), seq_k, false); });
    }

    PatternRef bsr(size_t start) {
        const int64_t block_q = number(), block_k = number(), seq_q = number(), seq_k = number();
        IndexArray row_ptr = indices(), col_idx = indices();
        return made(start, [&] {
            return make_bsr(std::move(row_ptr), std::move(col_idx), block_q, block_k, seq_q, seq_k, false);
        });
    }

    PatternRef xref(size_t start) {
        const size_t at = at_;
        const std::vector<int64_t> params = numbers();
        if (params.size() != 9) refuse(at, text(params.size(), " numbers of an xref; expected 9"));
        std::vector<int64_t> ids = numbers(), symbols = numbers();
        return made(start, [&] { return make_xref(std::move(ids), std::move(symbols), xref_params(params)); });
    }

    PatternRef mask(size_t start) {
        const int64_t batch = number(), heads = number(), seq_q = number(), seq_k = number();
        const MaskSizes sizes{batch, heads, seq_q, seq_k};
        made(start, [&] { return check_mask_sizes(sizes, "mask"); });
        const int64_t words = (seq_k + 63) / 64, rows = int64_t(size_ - at_) / 8 / words;
        if (rows / seq_q < sizes.planes()) refuse(at_, "the end is near; expected the rows of a mask");
        auto bits = std::make_unique<BitRows>(sizes);
        for (int64_t row = 0; row < sizes.planes() * seq_q; ++row) {
            for (int64_t word = 0; word < words; ++word) read_word(*bits, sizes, row, word);
        }
        return made(start, [&] { return make_mask(std::move(bits), sizes); });
    }

    void read_word(BitRows& bits, const MaskSizes& sizes, int64_t row, int64_t word) {
        const size_t at = at_;
        const auto keys = uint64_t(number());
        const int64_t left = sizes.seq_k - word * 64;
        if (left < 64 && keys >> left) refuse(at, "a key beyond the row; expected zeros");
        bits.set_word(row / sizes.seq_q, row % sizes.seq_q, word, keys);
    }

    // ---- numbers ----

    void need(uint64_t bytes) {
        if (bytes > size_ - at_) refuse(at_, "the end; expected more bytes");
    }

    template <int width>
    uint64_t integer() {
        uint64_t value = 0;
        for (int i = 0; i < width; ++i) value |= uint64_t(bytes_[at_++]) << (8 * i);
        return value;
    }

    int64_t number() {
        need(8);
        return int64_t(integer<8>());
    }

    // The numbers of an array, which follow.
    struct Array {
        int width;
        int64_t count;
    };

    Array array() {
        need(1);
        const size_t at = at_;
        const int width = bytes_[at_++];
        if (width != 4 && width != 8) refuse(at, text("integers of ", width, " bytes; expected 4 or 8"));
        const int64_t count = number();
        if (count < 0 || uint64_t(count) > (size_ - at_) / uint64_t(width)) {
            refuse(at, text(count, " integers; expected at most those left"));
        }
        return {width, count};
    }

    template <class Number>
    std::vector<Number> read(const Array& array) {
        std::vector<Number> out(static_cast<size_t>(array.count));
        for (Number& value : out) value = array.width == 4 ? Number(int32_t(integer<4>())) : Number(integer<8>());
        return out;
    }

    std::vector<int64_t> numbers() { return read<int64_t>(array()); }

    // As narrow as they were saved: they may be a hundred million.
    IndexArray indices() {
        const Array indices = array();
        if (indices.width == 4) return read<int32_t>(indices);
        return read<int64_t>(indices);
    }

    std::vector<int32_t> map() {
        const size_t at = at_;
        std::vector<int32_t> out;
        for (int64_t value : numbers()) {
            out.push_back(int32_t(value));
            if (value != out.back()) refuse(at, text("place ", value, "; expected the place of a part"));
        }
        return out;
    }

    const unsigned char* bytes_;
    size_t size_, at_ = 0;
};

}  // namespace

PatternRef load_pattern(const void* bytes, size_t size) { return Reader(bytes, size).whole(); }

}  // namespace spattn
