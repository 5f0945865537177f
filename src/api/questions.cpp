// SPDX-License-Identifier: MIT
// Chapter 4g of the header: questions a person asks of a pattern. Answers come from the rows of keys, not from layouts.
#include <cstring>

#include "api/args.h"
#include "api/guard.h"
#include "api/stats.h"
#include "layout/image.h"
#include "layout/layout.h"
#include "layout/quadrants.h"
#include "pattern/key_walk.h"

using namespace spattn;

namespace {

// The extent, on which the pattern has a meaning.
Question ask(const spattn_pattern* pattern, const spattn_extent* extent) {
    required(pattern, "pattern");
    if (pattern->runtime())
        fail(SPATTN_E_UNSUPPORTED, "pattern",
             text("has its lists given at run time, so its keys are not known; accepted: patterns without runtime_"
                  "tokens and runtime_blocks"));
    const Question question = read_extent(extent, "extent");
    pattern->check(question.extent);
    return question;
}

// What lets the caller end work on the question while it lives.
CancelScope scope_of(const Question& q) { return {q.cancel, q.cancel_user, "extent.cancel"}; }

// Some keys of a row of a mask. Those that lie tight are filled at once.
void write_keys(const Interval& keys, uint8_t value, uint8_t* row, int64_t stride) {
    visit_pieces(keys, [&](const Interval& piece) {
        if (stride == 1) std::memset(row + piece.begin, value, size_t(piece.end - piece.begin));
        else
            for (int64_t k = piece.begin; k < piece.end; ++k) row[k * stride] = value;
    });
}

void write_mask(const Pattern& pattern, const Extent& extent, const HostTensor& out) {
    Intervals kept;
    for (Plane plane{extent}; plane.batch < extent.batch; ++plane.batch) {
        for (plane.head = 0; plane.head < extent.heads; ++plane.head) {
            auto* rows = static_cast<uint8_t*>(out.data) + plane.batch * out.strides[0] + plane.head * out.strides[1];
            for (int64_t row = 0; row < extent.seq_q; ++row) {
                uint8_t* const keys = rows + row * out.strides[2];
                write_keys({0, extent.seq_k}, 0, keys, out.strides[3]);
                for (KeyWalk walk(pattern, plane, row, {0, extent.seq_k}, kept); walk.next();)
                    for (const Interval& i : kept) write_keys(i, 1, keys, out.strides[3]);
            }
        }
    }
}

template <class Index>
void write_columns(const Interval& kept, void* columns, int64_t stride, int64_t at) {
    auto* to = static_cast<Index*>(columns);
    visit_pieces(kept, [&](const Interval& piece) {
        for (int64_t k = piece.begin; k < piece.end; ++k) to[at++ * stride] = Index(k);
    });
}

// Where a row of CSR goes; either tensor may be absent.
struct CsrTarget {
    const HostTensor* row_ptr;
    const HostTensor* col_idx;
};

// Visits all rows: the number of kept pairs; writes what is asked for.
int64_t walk_csr(const Pattern& pattern, const Plane& plane, const CsrTarget& csr) {
    const auto write =
        csr.col_idx && csr.col_idx->dtype.bits == 32 ? write_columns<int32_t> : write_columns<int64_t>;
    int64_t pairs = 0;
    Intervals kept;
    for (int64_t row = 0; row <= plane.extent.seq_q; ++row) {
        if (csr.row_ptr) static_cast<int64_t*>(csr.row_ptr->data)[row * csr.row_ptr->strides[0]] = pairs;
        if (row == plane.extent.seq_q) break;
        for (KeyWalk walk(pattern, plane, row, {0, plane.extent.seq_k}, kept); walk.next();)
            for (const Interval& i : kept) {
                if (csr.col_idx) write(i, csr.col_idx->data, csr.col_idx->strides[0], pairs);
                pairs += i.end - i.begin;
            }
    }
    return pairs;
}

// The lists of longer patterns take gigabytes, only to be counted; and where no number of periods is a block, all of them
// differ, and lists of a twentieth of that length take seconds.
constexpr int64_t most_listed_rows = int64_t(1) << 16, most_rows_that_differ = int64_t(1) << 12;

// Every block and every row may be of the same kind, whose number has 64 bits.
void require_countable(const Question& q) {
    const Extent& e = q.extent;
    const int64_t blocks = multiply_saturated(ceil_div(e.seq_q, q.block_q), ceil_div(e.seq_k, q.block_k));
    const int64_t planes = multiply_saturated(e.batch, e.heads);
    if (multiply_saturated(planes, std::max(blocks, e.seq_q)) == forever)
        fail(SPATTN_E_RANGE, "extent",
             text("has ", planes, " planes of ", blocks, " blocks and ", e.seq_q, " rows; accepted: up to 2^63 - 2 in all"));
}

spattn_stats make_pattern_stats(const Pattern& pattern, const Question& q) {
    const Extent& e = q.extent;
    require_countable(q);
    const auto stats_of = [&](const Counts& counts) { return make_stats(counts, e.batch * e.heads, e.seq_q, e.seq_k); };
    const int64_t most_rows = q.block_k % pattern.period() ? most_rows_that_differ : most_listed_rows;
    if (std::max(ceil_div(e.seq_q, q.block_q), ceil_div(e.seq_k, q.block_k)) > most_rows)
        if (const auto counts = count_quadrants(pattern, e, q.block_q, q.block_k)) return stats_of(*counts);
    const Layout layout = build_layout(pattern, e, q.block_q, q.block_k);
    spattn_stats stats = stats_of(count(layout));
    stats.layout_bytes = int64_t(layout.bytes());
    return stats;
}

}  // namespace

extern "C" {

spattn_status spattn_pattern_stats(const spattn_pattern* pattern, const spattn_extent* extent, spattn_stats* result) {
    return guard(__func__, [&] {
        const Question q = ask(pattern, extent);
        required(result, "result");
        const CancelScope scope = scope_of(q);
        write_struct(result, make_pattern_stats(*pattern, q), "result");
    });
}

spattn_status spattn_pattern_keeps(const spattn_pattern* pattern, const spattn_extent* extent, int64_t batch,
                                   int64_t head, int64_t q, int64_t k, int32_t* result) {
    return guard(__func__, [&] {
        const Question question = ask(pattern, extent);
        const Extent& e = question.extent;
        const CancelScope scope = scope_of(question);
        require_range(batch, 0, e.batch - 1, "batch");
        require_range(head, 0, e.heads - 1, "head");
        require_range(q, 0, e.seq_q - 1, "q");
        require_range(k, 0, e.seq_k - 1, "k");
        required(result, "result");
        Intervals kept;
        pattern->keys({e, batch, head}, q, {k, k + 1}, kept);
        *result = !kept.empty();
    });
}

spattn_status spattn_pattern_to_mask(const spattn_pattern* pattern, const spattn_extent* extent,
                                     const spattn_tensor* out) {
    return guard(__func__, [&] {
        const Question question = ask(pattern, extent);
        const Extent& e = question.extent;
        const CancelScope scope = scope_of(question);
        const std::array<int64_t, 4> shape{e.batch, e.heads, e.seq_q, e.seq_k};
        write_mask(*pattern, e, read_host_tensor(out, "out", shape, {dtype_bool, dtype_u8}));
    });
}

spattn_status spattn_pattern_to_image(const spattn_pattern* pattern, const spattn_extent* extent, int64_t head,
                                      const spattn_tensor* coverage) {
    return guard(__func__, [&] {
        const Question question = ask(pattern, extent);
        const Extent& e = question.extent;
        const CancelScope scope = scope_of(question);
        require_range(head, 0, e.heads - 1, "head");
        const HostTensor to = read_host_tensor(coverage, "coverage", std::array<int64_t, 2>{-1, -1}, {dtype_f32});
        const int64_t height = to.shape[0], width = to.shape[1];
        if (height < 1 || height > e.seq_q || width < 1 || width > e.seq_k) {
            fail(SPATTN_E_SHAPE, "coverage",
                 text("is [", height, ", ", width, "]; accepted: from [1, 1] to [", e.seq_q, ", ", e.seq_k,
                      "], the extent"));
        }
        draw_image(*pattern, {e, 0, head}, height, width, [&](int64_t y, int64_t x, int64_t cells, float share) {
            float* row = static_cast<float*>(to.data) + y * to.strides[0];
            for (int64_t i = x; i < x + cells; ++i) row[i * to.strides[1]] = share;
        });
    });
}

spattn_status spattn_pattern_to_csr(const spattn_pattern* pattern, const spattn_extent* extent, int64_t head,
                                    const spattn_tensor* row_ptr, const spattn_tensor* col_idx, int64_t* nnz) {
    return guard(__func__, [&] {
        const Question question = ask(pattern, extent);
        const Extent& e = question.extent;
        const CancelScope scope = scope_of(question);
        require_range(head, 0, e.heads - 1, "head");
        required(nnz, "nnz");
        HostTensor rows, columns;
        CsrTarget csr{};
        if (row_ptr) {
            rows = read_host_tensor(row_ptr, "row_ptr", std::array<int64_t, 1>{e.seq_q + 1}, {dtype_i64});
            csr.row_ptr = &rows;
        }
        if (!col_idx) {
            *nnz = walk_csr(*pattern, {e, 0, head}, csr);
            return;
        }
        columns = read_host_tensor(col_idx, "col_idx", std::array<int64_t, 1>{-1}, {dtype_i32, dtype_i64});
        // Counted before anything is written: a column list that is too short stays as it was.
        *nnz = walk_csr(*pattern, {e, 0, head}, {});
        if (columns.shape[0] < *nnz) {
            fail(SPATTN_E_SHAPE, "col_idx", text("has room for ", columns.shape[0], "; accepted: ", *nnz, " and more"));
        }
        csr.col_idx = &columns;
        walk_csr(*pattern, {e, 0, head}, csr);
    });
}

}  // extern "C"
