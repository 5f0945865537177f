// SPDX-License-Identifier: MIT
// A call on a cache: its layout, its queries where the layout's rows have them, and what came of them back. Lanes share
// batch entries' heads.
#include <algorithm>
#include <cstring>

#include "cpu/share.h"
#include "plan/cache.h"

namespace spattn::cpu {
namespace {

// The rows of one head of an entry in a tensor of the call, and in the copy; 1 column: of floats that have no such axis.
class Copied {
public:
    Copied(const TensorView& call, const TensorView& copy, int64_t columns, int64_t element)
        : call_(call), copy_(copy), columns_(columns), element_(element) {}

    void to_copy(int64_t batch, int64_t head, int64_t row, int64_t at) const {
        char* const to = address(copy_, batch, head, at);
        const char* const from = address(call_, batch, head, row);
        each_element([&](int64_t column) { return to + column * element_; },
                     [&](int64_t column) { return from + column * call_.column * element_; });
    }
    void to_call(int64_t batch, int64_t head, int64_t row, int64_t at) const {
        char* const to = address(call_, batch, head, row);
        const char* const from = address(copy_, batch, head, at);
        each_element([&](int64_t column) { return to + column * call_.column * element_; },
                     [&](int64_t column) { return from + column * element_; });
    }
    void clear(int64_t batch, int64_t head, int64_t at) const {
        std::memset(address(copy_, batch, head, at), 0, size_t(columns_ * element_));
    }

private:
    char* address(const TensorView& x, int64_t batch, int64_t head, int64_t row) const {
        return static_cast<char*>(x.data) + (batch * x.batch + head * x.head + row * x.row) * element_;
    }
    template <class To, class From>
    void each_element(To to, From from) const {
        const bool is_dense = columns_ == 1 || call_.column == 1;
        if (is_dense) std::memcpy(to(0), from(0), size_t(columns_ * element_));
        for (int64_t column = 0; !is_dense && column < columns_; ++column)
            std::memcpy(to(column), from(column), size_t(element_));
    }

    const TensorView &call_, &copy_;
    int64_t columns_, element_;
};

class CacheCall {
public:
    CacheCall(const ForwardArgs& args, const CacheLayout& made)
        : args_(args), p_(*args.problem), made_(made), element_(dtype_row(p_.dtype).bytes) {}

    void lay_out() {
        if (made_.copies) share(*args_.parallel, *this, made_.batch * made_.heads, &CacheCall::copy_queries);
        share(*args_.parallel, *this, made_.kinds, &CacheCall::make_lists);
        share(*args_.parallel, *this, made_.listed ? made_.batch : 0, &CacheCall::name_tokens);
        for (int64_t head = 0; head < made_.batch * made_.heads; ++head)
            made_.kind_of_head[head] = int32_t(head / made_.heads_of_kind);
        for (int64_t b = 0; b < made_.batch; ++b) made_.before[b] = int32_t(before(b));
        for (int32_t n = 0; n < made_.from.num_joins; ++n) made_.joins[n] = join_of(made_.from.joins[n]);
        for (int32_t n = 0; n < made_.from.num_tasks; ++n) made_.tasks[n] = task_of(made_.from.tasks[n]);
    }
    void bring_back() { share(*args_.parallel, *this, made_.batch * made_.heads, &CacheCall::copy_results); }

private:
    int64_t start_of(int64_t batch) const { return made_.start_of(args_.cache.starts.at(batch, 0, 0, 0)); }
    int64_t first_row(int64_t batch) const { return floor_div(start_of(batch), made_.tile_q); }
    int64_t before(int64_t batch) const { return start_of(batch) - first_row(batch) * made_.tile_q; }
    // The plan's row of a tile of an entry's queries, or -1 where it has none.
    int64_t row_of(int64_t batch, int32_t tile) const {
        const int64_t row = first_row(batch) + tile;
        return row < made_.known.by_query.rows && made_.has_queries(tile, before(batch)) ? std::max<int64_t>(row, -1) : -1;
    }

    void copy_queries(int64_t plane) {
        const int64_t batch = plane / made_.heads, head = plane % made_.heads;
        const int64_t places = before(batch);
        const Copied q(args_.q, made_.q, p_.head_dim, element_);
        for (int64_t at = 0; at < int64_t(made_.rows) * made_.tile_q; ++at) {
            const int64_t row = at - places;
            row >= 0 && row < made_.seq_q ? q.to_copy(batch, head, row, at) : q.clear(batch, head, at);
        }
    }

    void copy_results(int64_t plane) {
        const int64_t batch = plane / made_.heads, head = plane % made_.heads;
        const int64_t places = before(batch);
        const Copied out(args_.out, made_.out, p_.head_dim_v, element_);
        const Copied lse(args_.lse, made_.lse, 1, sizeof(float));
        const Copied max_logits(args_.max_logits, made_.max_logits, 1, sizeof(float));
        for (int64_t row = 0; row < made_.seq_q; ++row) {
            out.to_call(batch, head, row, places + row);
            if (args_.lse.data) lse.to_call(batch, head, row, places + row);
            if (args_.max_logits.data) max_logits.to_call(batch, head, row, places + row);
        }
    }

    int64_t known_kind(int64_t head) const {
        return made_.known.head_kinds == 1 ? 0 : made_.known.kind_of_head[head];
    }

    void make_lists(int64_t kind) {
        const int64_t head = kind * made_.heads_of_kind, batch = head / made_.heads;
        const ListsView& known = made_.known.by_query;
        const int32_t first_tile = int32_t(made_.first_listed(batch));
        for (int32_t at = 0; at < made_.rows; ++at) {
            const int64_t n = kind * made_.rows + at, row = row_of(batch, at);
            const int32_t begin = int32_t(n * made_.room);
            Run* to = made_.runs + begin;
            if (row >= 0) {
                const Slice slice = known.slices[known_kind(head) * known.rows + row];
                for (int32_t i = slice.begin; i < slice.end; ++i) {
                    *to = known.runs[i];
                    to++->first += first_tile;
                }
            }
            made_.slices[n] = {begin, int32_t(to - made_.runs)};
        }
    }

    // Those that the call's queries may see.
    void name_tokens(int64_t batch) {
        if (!made_.page_size && batch > 0) return;  // entries have the same
        int64_t end = 0;
        for (int64_t of = made_.page_size ? batch : 0; of < (made_.page_size ? batch + 1 : made_.batch); ++of)
            end = std::max(end, (first_row(of) + made_.rows) * made_.tile_q);
        end = std::min(end, made_.seq_k);
        int32_t* to = made_.tokens + made_.first_listed(batch) * made_.tile_k;
        for (int64_t token = 0; token < round_up(end, made_.tile_k); ++token)
            *to++ = token >= made_.seq_k ? no_token
                    : made_.page_size   ? int32_t(args_.cache.place_of(batch, token, made_.page_size))
                                        : int32_t(token);
    }

    int64_t blocks_of(int64_t head, int32_t tile) const {
        const int64_t rows = made_.known.by_query.rows, row = row_of(head / made_.heads, tile);
        return row >= 0 ? made_.of_plan.row_blocks[known_kind(head) * rows + row] : 0;
    }

    // A row that is split has as many parts as it has blocks for.
    Join join_of(Join join) const {
        const int64_t parts = ceil_div(blocks_of(join.head, join.row), CacheLayout::least_blocks);
        join.parts = int32_t(std::min<int64_t>(join.parts, parts));
        return join;
    }

    // A task's share of its row, which for parts that the row has not is nothing.
    Task task_of(const Task& from) const {
        const int64_t blocks = blocks_of(from.head, from.row);
        if (from.part == whole_row) return {from.head, from.row, 0, int32_t(blocks), whole_row};
        const Join& join = made_.joins[made_.of_plan.join_of_part[from.part]];
        const int64_t number = from.part - join.first_part;
        if (number >= join.parts) return {from.head, from.row, 0, 0, from.part};
        const int64_t skip = blocks * number / join.parts, end = blocks * (number + 1) / join.parts;
        return {from.head, from.row, int32_t(skip), int32_t(end - skip), from.part};
    }

    const ForwardArgs& args_;
    const Problem& p_;
    const CacheLayout& made_;
    const int64_t element_;
};

}  // namespace

CacheSteps cache_steps() {
    return {[](const ForwardArgs& args, const CacheLayout& to) { CacheCall(args, to).lay_out(); },
            [](const ForwardArgs& args, const CacheLayout& from) { CacheCall(args, from).bring_back(); },
            [](int32_t) {}};
}

}  // namespace spattn::cpu
