// SPDX-License-Identifier: MIT
// Bytes as a composition of patterns and an extent: every question is answered as the definitions do, pair by pair.
#include <cmath>

#include "fuzz/fuzz.h"

using namespace fuzz;
using drawn::Builder, drawn::Model, drawn::Rectangle;

namespace {

spattn_extent make_extent(const Rectangle& e, int64_t block_q, int64_t block_k) {
    spattn_extent extent{};
    extent.struct_size = sizeof extent;
    extent.flags = SPATTN_EXTENT_Q_OFFSET;
    extent.batch = e.batch, extent.heads = e.heads, extent.seq_q = e.seq_q, extent.seq_k = e.seq_k;
    extent.q_offset = e.q_offset;
    extent.block_q = block_q, extent.block_k = block_k;
    return extent;
}

spattn_tensor view(void* data, spattn_dtype dtype, const int64_t* shape, int32_t axes) {
    return {data, {SPATTN_CPU, 0}, axes, dtype, shape, nullptr, 0};
}

std::vector<uint8_t> mask_of(const spattn_pattern* pattern, const spattn_extent& e) {
    std::vector<uint8_t> mask(size_t(e.batch * e.heads * e.seq_q * e.seq_k), 7);
    const int64_t shape[] = {e.batch, e.heads, e.seq_q, e.seq_k};
    const spattn_tensor out = view(mask.data(), {SPATTN_BOOL, 8, 1}, shape, 4);
    demand(spattn_pattern_to_mask(pattern, &e, &out) == SPATTN_OK, "to_mask answers", print(pattern));
    return mask;
}

// What stats must say, counted from the mask.
struct Counted {
    double pairs = 0;
    int64_t touched = 0, empty = 0, row_min, row_max = 0, rows_empty = 0;
};
Counted count(const std::vector<uint8_t>& mask, const spattn_extent& e) {
    Counted c;
    c.row_min = e.seq_k;
    for (int64_t plane = 0; plane < e.batch * e.heads; ++plane) {
        const uint8_t* rows = mask.data() + plane * e.seq_q * e.seq_k;
        for (int64_t q = 0; q < e.seq_q; ++q) {
            const int64_t kept = std::count(rows + q * e.seq_k, rows + (q + 1) * e.seq_k, 1);
            c.pairs += double(kept);
            c.row_min = std::min(c.row_min, kept);
            c.row_max = std::max(c.row_max, kept);
            c.rows_empty += kept == 0;
        }
        for (int64_t q = 0; q < e.seq_q; q += e.block_q) {
            for (int64_t k = 0; k < e.seq_k; k += e.block_k) {
                bool is_touched = false;
                for (int64_t row = q; row < std::min(q + e.block_q, e.seq_q); ++row) {
                    for (int64_t key = k; key < std::min(k + e.block_k, e.seq_k); ++key)
                        is_touched |= rows[row * e.seq_k + key];
                }
                ++(is_touched ? c.touched : c.empty);
            }
        }
    }
    return c;
}

void check_stats(const spattn_pattern* pattern, const spattn_extent& e, const std::vector<uint8_t>& mask,
                 const std::string& text) {
    spattn_stats stats{};
    stats.struct_size = sizeof stats;
    demand(spattn_pattern_stats(pattern, &e, &stats) == SPATTN_OK, "stats answers", text);
    const Counted c = count(mask, e);
    demand(stats.pairs == c.pairs, "stats.pairs", text);
    demand(stats.row_min == c.row_min && stats.row_max == c.row_max, "stats.row_min, row_max", text);
    demand(stats.rows_empty == c.rows_empty, "stats.rows_empty", text);
    demand(stats.blocks_full + stats.blocks_partial == c.touched && stats.blocks_empty == c.empty, "stats of blocks",
           text);
}

void check_csr(const spattn_pattern* pattern, const spattn_extent& e, int64_t head, const std::vector<uint8_t>& mask,
               const std::string& text) {
    std::vector<int64_t> row_ptr(size_t(e.seq_q + 1)), col_idx(size_t(e.seq_q * e.seq_k)), expected{0};
    const int64_t rows = e.seq_q + 1, columns = e.seq_q * e.seq_k;
    const spattn_tensor row_tensor = view(row_ptr.data(), {SPATTN_INT, 64, 1}, &rows, 1),
                        col_tensor = view(col_idx.data(), {SPATTN_INT, 64, 1}, &columns, 1);
    int64_t nnz = -1;
    demand(spattn_pattern_to_csr(pattern, &e, head, &row_tensor, &col_tensor, &nnz) == SPATTN_OK, "to_csr answers",
           text);
    std::vector<int64_t> kept;
    for (int64_t q = 0; q < e.seq_q; ++q) {
        for (int64_t k = 0; k < e.seq_k; ++k) {
            if (mask[size_t((head * e.seq_q + q) * e.seq_k + k)]) kept.push_back(k);
        }
        expected.push_back(int64_t(kept.size()));
    }
    col_idx.resize(size_t(std::clamp<int64_t>(nnz, 0, columns)));
    demand(row_ptr == expected && col_idx == kept, "to_csr", text);
}

void check_image(const spattn_pattern* pattern, const spattn_extent& e, int64_t height, int64_t width,
                 const std::vector<uint8_t>& mask, const std::string& text) {
    std::vector<float> image(size_t(height * width), -1);
    const int64_t shape[] = {height, width};
    const spattn_tensor out = view(image.data(), {SPATTN_FLOAT, 32, 1}, shape, 2);
    demand(spattn_pattern_to_image(pattern, &e, 0, &out) == SPATTN_OK, "to_image answers", text);
    for (int64_t y = 0; y < height; ++y) {
        for (int64_t x = 0; x < width; ++x) {
            double kept = 0, pairs = 0;
            for (int64_t q = y * e.seq_q / height; q < (y + 1) * e.seq_q / height; ++q) {
                for (int64_t k = x * e.seq_k / width; k < (x + 1) * e.seq_k / width; ++k) {
                    kept += mask[size_t(q * e.seq_k + k)];
                    ++pairs;
                }
            }
            demand(std::fabs(image[size_t(y * width + x)] - kept / pairs) < 1e-6, "to_image", text);
        }
    }
}

// Under &, lists of the call: no question has an answer, text and bytes come back. Under |, they are refused.
void check_with_lists(const spattn_pattern* pattern, const spattn_extent& e, spattn_pattern* made_lists,
                      const std::string& text) {
    const Pattern lists(made_lists);
    const spattn_pattern* parts[] = {pattern, lists.get()};
    spattn_pattern* made = nullptr;
    demand(spattn_pattern_union(parts, 2, &made) == SPATTN_E_UNSUPPORTED && !made, "lists under |", text);
    const spattn_status status = spattn_pattern_intersection(parts, 2, &made);
    demand(status == (made ? SPATTN_OK : SPATTN_E_UNSUPPORTED), "lists under &", text);
    const Pattern both(made);
    if (!both) return;
    spattn_stats stats{};
    stats.struct_size = sizeof stats;
    int32_t keeps = 0;
    int64_t nnz = 0;
    demand(spattn_pattern_stats(made, &e, &stats) == SPATTN_E_UNSUPPORTED, "stats of lists", text);
    demand(spattn_pattern_keeps(made, &e, 0, 0, 0, 0, &keeps) == SPATTN_E_UNSUPPORTED, "keeps of lists", text);
    demand(spattn_pattern_to_csr(made, &e, 0, nullptr, nullptr, &nnz) == SPATTN_E_UNSUPPORTED, "csr of lists", text);
    demand_round_trip(made);
    demand_saved(made);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    Bytes bytes(input, std::min<size_t>(size, 512));
    Rectangle e{bytes.number(1, 2), bytes.number(1, 3), bytes.number(1, 24), bytes.number(1, 24), 0};
    e.q_offset = bytes.number(0, 2) ? e.seq_k - e.seq_q : bytes.number(-30, 30);
    const spattn_extent extent = make_extent(e, bytes.number(1, 12), bytes.number(1, 12));
    const int64_t height = bytes.number(1, e.seq_q), width = bytes.number(1, e.seq_k),
                  head = bytes.number(0, e.heads - 1);
    const int64_t q = bytes.number(0, e.seq_q - 1), k = bytes.number(0, e.seq_k - 1);
    const Model model = Builder(bytes, e).build(4);
    const std::string text = print(model.pattern.get()) + " on " + std::to_string(e.seq_q) + " x " +
                             std::to_string(e.seq_k) + " offset " + std::to_string(e.q_offset) + " blocks " +
                             std::to_string(extent.block_q) + " x " + std::to_string(extent.block_k);
    const std::vector<uint8_t> mask = model_mask(model.sees, e);
    demand(mask_of(model.pattern.get(), extent) == mask, "to_mask", text);
    int32_t keeps = -1;
    demand(spattn_pattern_keeps(model.pattern.get(), &extent, 0, head, q, k, &keeps) == SPATTN_OK, "keeps answers",
           text);
    demand(keeps == mask[size_t((head * e.seq_q + q) * e.seq_k + k)], "keeps", text);
    check_stats(model.pattern.get(), extent, mask, text);
    check_csr(model.pattern.get(), extent, head, mask, text);
    check_image(model.pattern.get(), extent, height, width, mask, text);
    if (const Pattern again = demand_round_trip(model.pattern.get())) {
        demand(mask_of(again.get(), extent) == mask, "what is read back means the same", text);
    }
    demand(mask_of(demand_saved(model.pattern.get()).get(), extent) == mask, "what is loaded means the same", text);
    spattn_pattern* lists = nullptr;
    demand((bytes.number(0, 1) ? spattn_pattern_runtime_tokens(bytes.number(1, 9), &lists)
                               : spattn_pattern_runtime_blocks(bytes.number(1, 9), bytes.number(1, 9), 2, &lists)) ==
               SPATTN_OK,
           "lists are made", text);
    check_with_lists(model.pattern.get(), extent, lists, text);
    return 0;
}
