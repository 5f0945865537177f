// SPDX-License-Identifier: MIT
// per_document([cu_q],[cu_k],P): query row i of document t sees cu_k[t] + P(i - cu_q[t]), with P on that document's own
// extent, aligned to its end. Batches of sequences of several lengths, packed one after the other, are written so.
#include "core/error.h"
#include "pattern/composite.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

class PerDocument : public Composite {
public:
    PerDocument(PatternRef inner, std::vector<int64_t> cu_q, std::vector<int64_t> cu_k)
        : Composite({std::move(inner)}, of_inner), cu_q_(std::move(cu_q)), cu_k_(std::move(cu_k)) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override;
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override;
    void check(const Extent& extent) const override;
    bool counts_rows() const override { return true; }
    size_t bytes() const override { return Composite::bytes() + 2 * cu_q_.size() * sizeof(int64_t); }
    std::string print() const override;
    std::string identity() const override;

    void save(ByteWriter& out) const override {
        save_parts(Node::per_document, out);
        out.array(cu_q_);
        out.array(cu_k_);
    }

private:
    const Pattern& inner() const { return *parts()[0]; }
    int64_t documents() const { return int64_t(cu_q_.size()) - 1; }

    // The document of a row; -1 before the first, documents() after the last. Documents without a row have none.
    int64_t document(int64_t row) const {
        return std::upper_bound(cu_q_.begin(), cu_q_.end(), row) - cu_q_.begin() - 1;
    }
    Interval key_range(int64_t t) const { return {cu_k_[size_t(t)], cu_k_[size_t(t) + 1]}; }

    // A document as the inner pattern sees it.
    Plane own(const Plane& plane, int64_t t) const {
        const int64_t queries = cu_q_[size_t(t) + 1] - cu_q_[size_t(t)], keys = cu_k_[size_t(t) + 1] - cu_k_[size_t(t)];
        return {{plane.extent.batch, plane.extent.heads, queries, keys, keys - queries}, plane.batch, plane.head};
    }

    Coverage classify_document(const Plane& plane, int64_t t, const Block& block, Key& key, bool& known) const;

    std::vector<int64_t> cu_q_, cu_k_;
};

void PerDocument::keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const {
    const int64_t t = document(row);
    if (t < 0 || t >= documents()) return;
    const auto [begin, end] = key_range(t);
    const Interval cut{std::max(clip.begin, begin) - begin, std::min(clip.end, end) - begin};
    if (cut.begin >= cut.end) return;
    const size_t mark = out.size();
    inner().keys(own(plane, t), row - cu_q_[size_t(t)], cut, out);
    for (size_t i = mark; i < out.size(); ++i) out[i] = {out[i].begin + begin, out[i].end + begin};
}

// Rows of one document. The mask is the inner mask of an extent like this one, cut to the document's keys.
Coverage PerDocument::classify_document(const Plane& plane, int64_t t, const Block& block, Key& key,
                                        bool& known) const {
    const auto [begin, end] = key_range(t);
    const int64_t block_end = block.key + block.keys;
    if (begin == end || block.key >= end) return {Coverage::empty, forever};
    if (block_end <= begin) return {Coverage::empty, blocks_until(begin, block.key, block.keys)};
    const Interval inside{std::max(begin - block.key, int64_t(0)), std::min(end - block.key, block.keys)};
    const bool is_cut = inside.end - inside.begin < block.keys;
    const Plane mine = own(plane, t);
    const size_t mark = key.size();
    key.insert(key.end(), {mine.extent.seq_q, mine.extent.seq_k, inside.begin, inside.end});
    bool sure = true;
    const Block local{block.row - cu_q_[size_t(t)], block.rows, block.key - begin, block.keys};
    Coverage coverage = inner().classify(mine, local, key, sure);
    if (coverage.kind == Coverage::empty) {
        key.resize(mark);
        return coverage;
    }
    if (is_cut) {
        key.push_back(coverage.kind);
        coverage = {Coverage::partial, 1};
    }
    coverage.repeat = std::min(coverage.repeat, blocks_until(end, block.key, block.keys));
    known &= sure || coverage.kind != Coverage::partial;
    if (coverage.kind == Coverage::full) key.resize(mark);
    return coverage;
}

// A block may hold rows of several documents, whose keys lie apart: then it is full for none.
Coverage PerDocument::classify(const Plane& plane, const Block& block, Key& key, bool& known) const {
    const int64_t last_row = block.row + block.rows - 1, first = std::max<int64_t>(document(block.row), 0);
    const int64_t last = std::min(document(last_row), documents() - 1);
    const size_t mark = key.size();
    Coverage whole{Coverage::empty, forever};
    for (int64_t t = first; t <= last; ++t) {
        const Interval rows{std::max(cu_q_[size_t(t)], block.row), std::min(cu_q_[size_t(t) + 1], last_row + 1)};
        if (rows.begin >= rows.end) continue;
        const size_t before = key.size();
        key.insert(key.end(), {rows.begin - block.row, rows.end - block.row});
        const Block part{rows.begin, rows.end - rows.begin, block.key, block.keys};
        const Coverage coverage = classify_document(plane, t, part, key, known);
        whole.repeat = std::min(whole.repeat, coverage.repeat);
        if (part.rows == block.rows && coverage.kind != Coverage::partial) {
            key.resize(mark);
            return coverage;
        }
        if (coverage.kind == Coverage::empty) {
            key.resize(before);
            continue;
        }
        whole.kind = Coverage::partial;
        key.push_back(coverage.kind);
    }
    if (key.size() - mark > 512) known = false;  // many short documents: longer to compare than to make
    return whole;
}

// Rows of one document are alike where the inner rows are.
bool PerDocument::row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const {
    const int64_t t = document(row);
    if (t != document(row + rows - 1)) return false;
    key.push_back(t);
    if (t < 0 || t >= documents()) return true;
    return inner().row_key(own(plane, t), row - cu_q_[size_t(t)], rows, key);
}

void PerDocument::check(const Extent& extent) const {
    if (cu_q_.back() > extent.seq_q || cu_k_.back() > extent.seq_k) {
        fail(
            SPATTN_E_SHAPE, "pattern",
            text("per_document reaches to ", cu_q_.back(), " queries and ", cu_k_.back(), " keys where the extent has ",
                 extent.seq_q, " and ", extent.seq_k, "; accepted: documents that lie within the extent"));
    }
    for (int64_t t = 0; t < documents(); ++t) {
        const Extent mine = own({extent}, t).extent;
        if (mine.seq_q > 0 && mine.seq_k > 0) inner().check(mine);
    }
}

std::string PerDocument::print() const {
    const bool is_short = cu_q_.size() + cu_k_.size() <= printed_numbers;
    const auto print_list = [&](const std::vector<int64_t>& cu) { return is_short ? list(cu) : hash_of(list(cu)); };
    return "per_document([" + print_list(cu_q_) + "], [" + print_list(cu_k_) + "], " + inner().print() + ')';
}

std::string PerDocument::identity() const {
    return "per_document([" + list(cu_q_) + "],[" + list(cu_k_) + "]," + inner().identity() + ')';
}

void check_cu(const std::vector<int64_t>& cu, const char* argument) {
    if (cu.empty()) fail(SPATTN_E_SHAPE, argument, "has no number; accepted: [documents + 1], the first >= 0");
    if (cu[0] < 0) fail(SPATTN_E_RANGE, argument, text("starts with ", cu[0], "; accepted: 0 and more"));
    for (size_t t = 1; t < cu.size(); ++t) {
        if (cu[t] >= cu[t - 1]) continue;
        fail(
            SPATTN_E_RANGE, argument,
            text("falls from ", cu[t - 1], " to ", cu[t], " at index ", t, "; accepted: numbers that do not decrease"));
    }
}

}  // namespace

PatternRef make_per_document(PatternRef inner, std::vector<int64_t> cu_q, std::vector<int64_t> cu_k) {
    check_cu(cu_q, "cu_q");
    check_cu(cu_k, "cu_k");
    if (cu_q.size() != cu_k.size()) {
        fail(SPATTN_E_SHAPE, "cu_k",
             text("has ", cu_k.size(), " numbers where cu_q has ", cu_q.size(), "; accepted: equal numbers"));
    }
    return make_ref<PerDocument>(std::move(inner), std::move(cu_q), std::move(cu_k));
}

}  // namespace spattn
