// SPDX-License-Identifier: MIT
// mask([values],sizes): row i sees the keys where its row of the mask is not 0. A size of 1 of batch or heads serves
// all. predicate() samples a caller's function into the same.
#include "pattern/mask.h"

#include <bit>

#include "core/error.h"
#include "pattern/bytes.h"
#include "pattern/index_pattern.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

// The content of a plane, whatever stores it.
std::string digest(const MaskRows& rows, const MaskSizes& sizes, int64_t plane) {
    constexpr int64_t none = -1;
    Digest digest;
    const auto add = [&](int64_t row, int64_t begin, int64_t end) {
        digest.add(uint64_t(row));
        digest.add(uint64_t(begin) << 32 | uint64_t(end));
    };
    for (int64_t row = 0; row < sizes.seq_q; ++row) {
        int64_t begin = none;  // of the interval that is not over yet
        for (int64_t at = 0; at < ceil_div(sizes.seq_k, 64); ++at) {
            const uint64_t word = rows.word(plane, row, at);
            // A bit for each key where intervals begin or end.
            for (uint64_t edges = word ^ (word << 1 | uint64_t(begin != none)); edges; edges &= edges - 1) {
                const int64_t key = 64 * at + std::countr_zero(edges);
                if (begin != none) add(row, begin, key);
                begin = begin == none ? key : none;
            }
        }
        if (begin != none) add(row, begin, sizes.seq_k);
    }
    return digest.hex();
}

// Leading sizes of 1 say nothing and are left out.
std::string describe(const MaskSizes& s) {
    std::string out;
    if (s.batch > 1) out += text(',', s.batch);
    if (s.batch > 1 || s.heads > 1) out += text(',', s.heads);
    return out + text(',', s.seq_q, ',', s.seq_k);
}

std::string values(const MaskRows& rows, const MaskSizes& s) {
    const int64_t pairs = multiply_saturated(multiply_saturated(s.planes(), s.seq_q), s.seq_k);
    if (pairs > int64_t(printed_numbers)) return {};
    std::string out;
    for (int64_t i = 0; i < pairs; ++i) {
        const int64_t row = i / s.seq_k, key = i % s.seq_k;
        const bool is_kept = rows.find(row / s.seq_q, row % s.seq_q, {key, key + 1}, true) == key;
        out += std::string(i ? "," : "[") + (is_kept ? '1' : '0');
    }
    return out + ']';
}

std::vector<std::string> digests(const MaskRows& rows, const MaskSizes& sizes) {
    std::vector<std::string> out;
    for (int64_t plane = 0; plane < sizes.planes(); ++plane) out.push_back(digest(rows, sizes, plane));
    return out;
}

std::string join(const std::vector<std::string>& parts) {
    if (parts.size() == 1) return parts[0];
    std::string all;
    for (const std::string& part : parts) all += part;
    Digest digest;
    for (unsigned char byte : all) digest.add(byte);
    return digest.hex();
}

class Mask : public IndexPattern {
public:
    Mask(std::unique_ptr<const MaskRows> rows, const MaskSizes& sizes, const std::vector<std::string>& digests)
        : IndexPattern("mask", sizes.seq_q, sizes.seq_k, values(*rows, sizes), describe(sizes), join(digests)),
          rows_(std::move(rows)),
          sizes_(sizes) {
        std::map<std::string, int32_t> first;
        for (const std::string& digest : digests)
            same_.push_back(first.try_emplace(digest, int32_t(same_.size())).first->second);
    }

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        if (!has_row(row)) return;
        const Interval within = cut(clip);
        const int64_t mine = chosen(plane);
        Cutter cutter(within, out);
        for (int64_t key = within.begin; key < within.end;) {
            const int64_t begin = rows_->find(mine, row, {key, within.end}, true);
            key = rows_->find(mine, row, {begin, within.end}, false);
            cutter.add(begin, key);
        }
    }

    void selection(const Plane& plane, Key& key) const override { key.push_back(chosen(plane)); }

    bool borrows() const override { return rows_->borrows(); }
    size_t bytes() const override { return rows_->bytes(); }

    // Rows of 64-bit words, the first key in the lowest bit.
    void save(ByteWriter& out) const override {
        out.node(Node::mask);
        for (int64_t size : {sizes_.batch, sizes_.heads, sizes_.seq_q, sizes_.seq_k}) out.number(size);
        const int64_t words = ceil_div(sizes_.seq_k, 64);
        for (int64_t plane = 0; plane < sizes_.planes(); ++plane)
            out.numbers(sizes_.seq_q * words,
                        [&](int64_t i) { return int64_t(rows_->word(plane, i / words, i % words)); });
    }

    void check(const Extent& extent) const override {
        IndexPattern::check(extent);
        check_count(sizes_.batch, extent.batch, "batch entries");
        check_count(sizes_.heads, extent.heads, "heads");
    }

private:
    int32_t chosen(const Plane& plane) const {
        const int64_t batch = sizes_.batch > 1 ? plane.batch : 0, head = sizes_.heads > 1 ? plane.head : 0;
        return same_[size_t(batch * sizes_.heads + head)];
    }

    static void check_count(int64_t count, int64_t wanted, const char* what) {
        if (count == 1 || count == wanted) return;
        fail(SPATTN_E_SHAPE, "pattern",
             text("mask is for ", count, ' ', what, " where the extent has ", wanted,
                  "; accepted: equal numbers, or 1 for all"));
    }

    std::unique_ptr<const MaskRows> rows_;
    MaskSizes sizes_;
    std::vector<int32_t> same_;  // for each plane the first equal one: planes that see the same share their lists
};

}  // namespace

BitRows::BitRows(const MaskSizes& sizes)
    : seq_q_(sizes.seq_q),
      words_(sizes.seq_k / 64 + 1),
      bits_(size_t(sizes.planes()) * size_t(seq_q_) * size_t(words_)) {}

int64_t BitRows::find(int64_t plane, int64_t row, Interval range, bool value) const {
    const uint64_t* words = &bits_[size_t((plane * seq_q_ + row) * words_)];
    const uint64_t flip = value ? 0 : ~uint64_t(0);
    for (int64_t key = range.begin; key < range.end; key = (key | 63) + 1) {
        const uint64_t rest = (words[key >> 6] ^ flip) >> (key & 63);
        if (rest) return std::min(key + std::countr_zero(rest), range.end);
    }
    return range.end;
}

int64_t ByteRows::find(int64_t plane, int64_t row, Interval range, bool value) const {
    const uint8_t* bytes = this->row(plane, row);
    int64_t key = range.begin;
    while (key < range.end && (bytes[key] != 0) != value) ++key;
    return key;
}

PatternRef make_mask(std::unique_ptr<const MaskRows> rows, const MaskSizes& sizes) {
    const std::vector<std::string> contents = digests(*rows, sizes);
    return make_ref<Mask>(std::move(rows), sizes, contents);
}

PatternRef make_mask(const std::vector<int64_t>& values, const std::vector<int64_t>& shape) {
    if (shape.size() < 2 || shape.size() > 4) {
        fail(SPATTN_E_SHAPE, "mask", text("has ", shape.size(), " sizes; accepted: [[batch,] heads,] seq_q, seq_k"));
    }
    MaskSizes sizes{1, 1, shape[shape.size() - 2], shape.back()};
    if (shape.size() > 2) sizes.heads = shape[shape.size() - 3];
    if (shape.size() > 3) sizes.batch = shape[0];
    check_mask_sizes(sizes, "mask");
    if (multiply_saturated(sizes.planes(), sizes.seq_q * sizes.seq_k) != int64_t(values.size())) {
        fail(SPATTN_E_SHAPE, "mask",
             text("has ", values.size(), " values; accepted: as many as the product of its sizes"));
    }
    auto rows = std::make_unique<BitRows>(sizes);
    for (int64_t i = 0; i < int64_t(values.size()); ++i) {
        const int64_t row = i / sizes.seq_k;
        if (values[size_t(i)]) rows->set(row / sizes.seq_q, row % sizes.seq_q, i % sizes.seq_k);
    }
    return make_mask(std::move(rows), sizes);
}

void check_mask_sizes(const MaskSizes& sizes, const char* argument) {
    require_range(sizes.batch, 1, 1 << 20, argument);
    require_range(sizes.heads, 1, 1 << 20, argument);
    require_range(sizes.seq_q, 1, most_tokens, argument);
    require_range(sizes.seq_k, 1, most_tokens, argument);
}

}  // namespace spattn
