// SPDX-License-Identifier: MIT
// What the reference rows read: the keys of each query, straight from a pattern or from lists that come at run time.
#pragma once

#include "pattern/pattern.h"
#include "plan/call.h"

namespace spattn {

Extent extent_of(const Problem& problem);
// The extent that the pattern has a meaning on: of a cache, the whole sequence's.
Extent pattern_extent(const Problem& problem);

class PatternRows : public TokenRows {
public:
    PatternRows(const Pattern& pattern, const Problem& problem) : pattern_(pattern), extent_(extent_of(problem)) {}
    void keys(int64_t batch, int64_t head, int64_t row, std::vector<int64_t>& out) const override;

private:
    const Pattern& pattern_;
    Extent extent_;
};

// The keys that lists name and that the known part of the pattern keeps as well.
class CallListRows : public TokenRows {
public:
    CallListRows(const Pattern* known, const Problem& problem, const CallLists& lists)
        : known_(known), problem_(problem), lists_(lists) {}
    void keys(int64_t batch, int64_t head, int64_t row, std::vector<int64_t>& out) const override;

private:
    bool keeps(const Plane& plane, int64_t row, int64_t key, Intervals& scratch) const;

    const Pattern* known_;  // null: every listed key is kept
    Problem problem_;
    CallLists lists_;
};

// The rows of a pattern at which the queries of a call on a cache stand, or their lists, with keys where pages have
// them.
class CacheRows : public TokenRows {
public:
    CacheRows(const Pattern& pattern, const Problem& problem, const CallCache& cache, const CallLists& lists)
        : pattern_(pattern), problem_(problem), cache_(cache), lists_(lists) {}
    void keys(int64_t batch, int64_t head, int64_t row, std::vector<int64_t>& out) const override;

private:
    int64_t sequence_of(int64_t batch, int64_t row) const;
    void keep_ancestors(int64_t batch, int64_t begin, int64_t node, int64_t start, Intervals& keys) const;
    void list_keys(int64_t batch, int64_t head, int64_t row, int64_t token, Intervals& out) const;

    const Pattern& pattern_;
    Problem problem_;
    CallCache cache_;
    CallLists lists_;
};

}  // namespace spattn
