// SPDX-License-Identifier: MIT
// Which keys each query row of a problem sees, from the pattern's own rows and what a call brings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace random_test {

struct Problem;

class Keys {
public:
    struct Run {
        int32_t begin, end;
    };
    // The keys of one row: of a pattern in the order of their numbers, of run-time lists as often as they are listed.
    struct Row {
        const Run *first, *last;
        const Run* begin() const { return first; }
        const Run* end() const { return last; }
        bool is_empty() const { return first == last; }
        int64_t size() const;
        void list(std::vector<int32_t>& keys) const;
    };
    Row of(int64_t batch, int64_t head, int64_t row) const {
        const Plane& plane = planes_[plane_of(batch, head)];
        return {plane.runs.data() + plane.begin[size_t(row)], plane.runs.data() + plane.begin[size_t(row) + 1]};
    }
    // How many queries of a kv head's group see each key.
    std::vector<int64_t> count_queries(int64_t batch, int64_t head_kv) const;

    static Keys of_pattern(const Problem& problem);
    // What a call on a cache brings beside its tensors.
    struct CacheCall {
        std::vector<int64_t> starts;           // of each batch entry
        std::vector<int64_t> parents;          // [batch][seq_q]; empty where queries are no trees
        std::vector<int64_t> indices, counts;  // empty where the pattern says which keys a query sees
    };
    static Keys of_cache(const Problem& problem, const CacheCall& call);
    // indices: [batch][rows][heads_kv][most]
    static Keys of_lists(const Problem& problem, const std::vector<int64_t>& indices,
                         const std::vector<int64_t>& counts);

private:
    // The rows of batch entries and heads that see the same.
    struct Plane {
        std::vector<int64_t> begin{0};
        std::vector<Run> runs;
        void see(int64_t begin, int64_t end);
        void end_row() { this->begin.push_back(int64_t(runs.size())); }
    };
    Keys(const Problem& problem, int64_t batches, int64_t heads);
    size_t plane_of(int64_t batch, int64_t head) const {
        return size_t((batches_ == 1 ? 0 : batch) * heads_ + head * heads_ / heads_q_);
    }
    template <class Body>
    void make_planes(Body body);

    int64_t heads_q_, heads_kv_, seq_q_, seq_k_;
    int64_t batches_, heads_;  // that have planes of their own: 1, or all; of heads also those of keys
    std::vector<Plane> planes_;
};

// Runs of all planes, estimated from some rows of the pattern.
double estimate_runs(const Problem& problem);

}  // namespace random_test
