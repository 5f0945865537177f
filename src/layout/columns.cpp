// SPDX-License-Identifier: MIT
#include "layout/columns.h"

#include "core/cancel.h"
#include "layout/tables.h"

namespace spattn {
namespace {

// Finds each list that is not empty once; nothing where they are more than half as many as rows. Equal lists share a
// slice, so where a slice begins tells it apart.
std::optional<std::vector<Slice>> find_distinct(const Slice* slices, int32_t rows, size_t runs) {
    std::vector<bool> is_known(runs);
    std::vector<Slice> distinct;
    distinct.reserve(size_t(rows) / 2);
    Pace pace;
    for (int32_t row = 0; row < rows; ++row) {
        pace.step();
        if (slices[row].begin == slices[row].end || is_known[slices[row].begin]) continue;
        if (2 * (distinct.size() + 1) > size_t(rows)) return {};
        is_known[slices[row].begin] = true;
        distinct.push_back(slices[row]);
    }
    return distinct;
}

// Identifies a kind of columns: the sum of one random number for each (list, mask) that a column is in. With 128 bits,
// two kinds never have the same sum by chance.
struct Signature {
    uint64_t low = 0, high = 0;
    bool operator==(const Signature&) const = default;
};

std::vector<Signature> sign_columns(const std::vector<Slice>& lists, const std::vector<Run>& runs, int32_t columns) {
    auto signatures = make_table<Signature>(size_t(columns) + 1);  // first as differences between neighbours
    Pace pace;
    for (size_t list = 0; list < lists.size(); ++list)
        for (int32_t r = lists[list].begin; r < lists[list].end; ++r) {
            pace.step();
            const uint64_t hash = add_to_hash(list + 1, uint32_t(runs[r].mask));
            const uint64_t low = finish_hash(hash), high = finish_hash(~hash);
            Signature &first = signatures[runs[r].first], &end = signatures[runs[r].first + runs[r].count];
            first.low += low, first.high += high;
            end.low -= low, end.high -= high;
        }
    for (int32_t c = 1; c < columns; ++c) {
        pace.step();
        signatures[c].low += signatures[c - 1].low;
        signatures[c].high += signatures[c - 1].high;
    }
    return signatures;
}

// Numbers kinds as they first appear; firsts_before[c] of them appear left of column c.
std::vector<int32_t> number_kinds(const std::vector<Signature>& signatures, std::vector<int32_t>& kind_of) {
    const int32_t columns = int32_t(signatures.size()) - 1;
    std::vector<int32_t> firsts_before = make_table<int32_t>(signatures.size()), firsts;
    HashIndex index;
    Pace pace;
    for (int32_t c = 0; c < columns; ++c) {
        pace.step();
        firsts_before[c] = int32_t(firsts.size());
        const auto is_same = [&](int32_t kind) { return signatures[firsts[kind]] == signatures[c]; };
        int32_t kind = index.find(signatures[c].low, is_same);
        if (kind == HashIndex::missing) {
            kind = int32_t(firsts.size());
            firsts.push_back(c);
            index.insert(signatures[c].low, kind);
        }
        kind_of.push_back(kind);
    }
    firsts_before[columns] = int32_t(firsts.size());
    return firsts_before;
}

}  // namespace

std::optional<ColumnKinds> find_column_kinds(const Slice* slices, int32_t rows, const std::vector<Run>& runs,
                                             int32_t columns) {
    const std::optional<std::vector<Slice>> distinct = find_distinct(slices, rows, runs.size());
    if (!distinct) return {};
    ColumnKinds result;
    const std::vector<int32_t> before = number_kinds(sign_columns(*distinct, runs, columns), result.kind_of);
    result.kinds = before.back();

    result.lists.rows = rows;
    SliceTable table(result.lists);
    std::vector<Slice> narrow = make_table<Slice>(runs.size());  // of the slice that begins at a run
    for (Slice slice : *distinct) {
        for (int32_t r = slice.begin; r < slice.end; ++r) {
            const int32_t first = before[runs[r].first], end = before[runs[r].first + runs[r].count];
            if (first < end) table.add({first, end - first, runs[r].mask});
        }
        narrow[slice.begin] = table.finish();
    }
    for (int32_t row = 0; row < rows; ++row)
        result.lists.slices.push_back(slices[row].begin == slices[row].end ? Slice{0, 0} : narrow[slices[row].begin]);
    return result;
}

}  // namespace spattn
