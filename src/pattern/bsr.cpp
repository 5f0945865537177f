// SPDX-License-Identifier: MIT
// bsr([row_ptr],[col_idx],block_q,block_k,seq_q,seq_k): row i sees the blocks of keys that block row i / block_q lists.
#include "core/error.h"
#include "pattern/bytes.h"
#include "pattern/index_pattern.h"
#include "pattern/sparse_rows.h"

namespace spattn {
namespace {

struct Sizes {
    int64_t block_q, block_k, seq_q, seq_k;
};

class Bsr : public IndexPattern {
public:
    Bsr(SparseRows rows, const Sizes& s)
        : IndexPattern("bsr", s.seq_q, s.seq_k, rows.inline_text(),
                       text(',', s.block_q, ',', s.block_k, ',', s.seq_q, ',', s.seq_k), rows.digest()),
          rows_(std::move(rows)),
          block_q_(s.block_q),
          block_k_(s.block_k) {}

    void keys(const Plane&, int64_t row, Interval clip, Intervals& out) const override {
        if (has_row(row)) rows_.keys(row / block_q_, block_k_, cut(clip), out);
    }
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override;

    bool borrows() const override { return rows_.borrows(); }
    size_t bytes() const override { return rows_.bytes(); }

    void save(ByteWriter& out) const override {
        out.node(Node::bsr);
        for (int64_t size : {block_q_, block_k_, seq_q(), seq_k()}) out.number(size);
        out.array(rows_.row_ptr());
        out.array(rows_.col_idx());
    }

private:
    Coverage classify_inside(const Block& block, Interval rows, Interval keys, Key& key, bool& known) const;

    SparseRows rows_;
    int64_t block_q_, block_k_;
};

Coverage Bsr::classify(const Plane& plane, const Block& block, Key& key, bool& known) const {
    bool is_inside = true;
    Key unused;
    const Coverage outside = IndexPattern::classify(plane, block, unused, is_inside);
    if (outside.kind == Coverage::empty) return outside;
    const Interval rows{std::max<int64_t>(block.row, 0), std::min(block.row + block.rows, seq_q())};
    const size_t mark = key.size();
    const Coverage coverage = classify_inside(block, rows, cut({block.key, block.key + block.keys}), key, known);
    if (coverage.kind != Coverage::partial) key.resize(mark);
    return coverage;
}

// rows and keys: the part of the block that lies in the extent. The mask is that part, where borders of blocks cross
// it, and one bit for each of our blocks inside; one bit a row where no row's answer changes.
Coverage Bsr::classify_inside(const Block& block, Interval rows, Interval keys, Key& key, bool& known) const {
    const Interval own_rows{rows.begin / block_q_, (rows.end - 1) / block_q_ + 1};
    const Interval own_columns{keys.begin / block_k_, (keys.end - 1) / block_k_ + 1};
    const size_t mark = key.size();
    key.insert(key.end(), {rows.begin - block.row, rows.end - block.row, keys.begin - block.key, keys.end - block.key,
                           block_q_ - rows.begin % block_q_, block_k_ - keys.begin % block_k_});
    int64_t same_until = forever, bits = 0, ones = 0;
    const auto push = [&](bool is_seen) {
        if (bits % 32 == 0) key.push_back(0);
        key.back() |= int64_t(is_seen) << (bits++ % 32);
        ones += is_seen;
    };
    for (int64_t row = own_rows.begin; row < own_rows.end; ++row) {
        const Stretch first = rows_.stretch(row, own_columns.begin);
        same_until = std::min(same_until, first.end);
        push(first.is_seen);
    }
    const bool is_even = same_until >= own_columns.end;
    const int64_t end =
        ones ? std::min(multiply_saturated(same_until, block_k_), seq_k()) : multiply_saturated(same_until, block_k_);
    const bool is_cut = rows.end - rows.begin < block.rows || keys.end - keys.begin < block.keys;
    if (is_even && ones == 0) return {Coverage::empty, blocks_until(end, block.key, block.keys)};
    if (is_even && ones == bits && !is_cut) return {Coverage::full, blocks_until(end, block.key, block.keys)};
    if (is_even) {
        key[mark + 5] = -1;  // where borders cross the keys does not matter
        return {Coverage::partial, block.key < 0 ? 1 : blocks_until(end, block.key, block.keys)};
    }
    known &=
        (own_rows.end - own_rows.begin) * (own_columns.end - own_columns.begin) <= 4096;  // else longer than the mask
    for (int64_t row = own_rows.begin; known && row < own_rows.end; ++row) {
        for (int64_t column = own_columns.begin + 1; column < own_columns.end; ++column) {
            push(rows_.stretch(row, column).is_seen);
        }
    }
    return {Coverage::partial, 1};
}

// Rows of one block are alike.
bool Bsr::row_key(const Plane&, int64_t row, int64_t rows, Key& key) const {
    if (!has_row(row) || !has_row(row + rows - 1) || row / block_q_ != (row + rows - 1) / block_q_) return false;
    key.push_back(row / block_q_);
    return true;
}

}  // namespace

PatternRef make_bsr(IndexArray row_ptr, IndexArray col_idx, int64_t block_q, int64_t block_k, int64_t seq_q,
                    int64_t seq_k, bool is_trusted) {
    require_range(block_q, 1, most_tokens, "block_q");
    require_range(block_k, 1, most_tokens, "block_k");
    require_range(seq_q, 1, most_tokens, "seq_q");
    require_range(seq_k, 1, most_tokens, "seq_k");
    const int64_t block_rows = ceil_div(seq_q, block_q);
    if (row_ptr.size() != block_rows + 1) {
        fail(SPATTN_E_SHAPE, "row_ptr",
             text("has ", row_ptr.size(), " numbers; accepted: ceil(seq_q / block_q) + 1 = ", block_rows + 1));
    }
    SparseRows rows(std::move(row_ptr), std::move(col_idx), ceil_div(seq_k, block_k), is_trusted);
    return make_ref<Bsr>(std::move(rows), Sizes{block_q, block_k, seq_q, seq_k});
}

}  // namespace spattn
