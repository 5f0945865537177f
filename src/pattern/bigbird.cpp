// SPDX-License-Identifier: MIT
// bigbird(block,window,global,random,seed): with I = p / block and J = k / block: 2 |I - J| < window, or J < global, or
// I < global, or J in R(I); nothing for p < 0. BigBird (https://arxiv.org/abs/2007.14062).
#include <array>

#include "core/cancel.h"
#include "core/error.h"
#include "core/of_thread.h"
#include "pattern/block_rows.h"

namespace spattn {
namespace {

constexpr uint64_t golden = 0x9E3779B97F4A7C15;

uint64_t splitmix64(uint64_t& state) {  // https://prng.di.unimi.it/splitmix64.c
    uint64_t z = state += golden;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

struct Params {
    int64_t block, window, global, random;
    uint64_t seed;
    bool operator==(const Params&) const = default;
};

int64_t count_blocks(const Params& params, int64_t seq_k) { return ceil_div(seq_k, params.block); }

// The blocks J that block row I sees, as intervals.
struct BlockRow {
    Params params{};
    int64_t seq_k = -1, row = 0;  // row: I
    Intervals seen;
    int64_t blocks() const { return count_blocks(params, seq_k); }
};

// Draws as often as blocks are wanted, which can be none too often, and lists in `fresh` those that the row does not see
// yet: sorted, each once.
void draw_some(int64_t wanted, int64_t blocks, const Intervals& seen, uint64_t& state, Intervals& fresh) {
    fresh.clear();
    for (int64_t i = 0; i < wanted; ++i) {
        check_cancelled();
        const int64_t j = int64_t(splitmix64(state) % uint64_t(blocks));
        if (!is_member(seen, j)) fresh.push_back({j, j + 1});
    }
    std::sort(fresh.begin(), fresh.end(), is_earlier);
    const auto is_same = [](const Interval& a, const Interval& b) { return a.begin == b.begin; };
    fresh.erase(std::unique(fresh.begin(), fresh.end(), is_same), fresh.end());
}

// Draws R(I) into row.seen, which holds the rest. Where every block left is wanted, drawing would find them slowly.
void draw(BlockRow& row) {
    const int64_t blocks = row.blocks();
    int64_t left = blocks;
    for (const Interval& i : row.seen) {
        left -= std::max<int64_t>(0, std::min(i.end, blocks) - std::max<int64_t>(i.begin, 0));
    }
    if (row.params.random >= left) {
        row.seen.insert(row.seen.begin() + 1, {0, blocks});  // after [lowest, global)
        return;
    }
    uint64_t state = row.params.seed + uint64_t(row.row) * golden;
    Intervals fresh;
    for (int64_t wanted = row.params.random; wanted > 0; wanted -= int64_t(fresh.size())) {
        draw_some(wanted, blocks, row.seen, state, fresh);
        if (fresh.empty()) continue;
        const auto middle = row.seen.insert(row.seen.end(), fresh.begin(), fresh.end());
        std::inplace_merge(row.seen.begin(), middle, row.seen.end(), is_earlier);
    }
}

void fill(BlockRow& row) {
    const auto& [block, window, global, random, seed] = row.params;
    row.seen.assign(1, {lowest, row.row < global ? forever : global});
    if (row.row < global) return;
    const int64_t reach = (window - 1) / 2;
    if (window > 0) Cutter({lowest, forever}, row.seen).add(row.row - reach, add_saturated(row.row, reach + 1));
    join_touching(row.seen, 0);
    if (random > 0) draw(row);
    join_touching(row.seen, 0);
}

// A pattern holds no cache, since handles are shared between threads: each thread keeps the rows it met last.
const Intervals& block_row(const Params& params, int64_t seq_k, int64_t row) {
    BlockRow& slot = of_thread<std::array<BlockRow, 64>>()[size_t(row % 64)];
    if (slot.row == row && slot.seq_k == seq_k && slot.params == params) return slot.seen;
    slot.seq_k = -1;  // not valid while being filled: allocation may throw
    slot.params = params;
    slot.row = row;
    BlockRow filled = std::move(slot);
    filled.seq_k = seq_k;
    fill(filled);
    slot = std::move(filled);
    return slot.seen;
}

// Blocks that see each other by the window.
Interval window_of(const Params& params, int64_t i) {
    if (params.window == 0) return {i, i};
    const int64_t reach = (params.window - 1) / 2;
    return {i - reach, add_saturated(i, reach + 1)};
}

// ---- transposed ----

// The rows I that drew J, for each J: rows[begin[J]] .. rows[begin[J + 1]]. Global rows draw nothing.
struct Drawn {
    Params params{};
    int64_t blocks = -1;  // ceil(seq_k / block)
    std::vector<int32_t> begin, rows;
};

template <class Visit>
void visit_drawn(const Params& params, int64_t seq_k, int64_t blocks, Visit visit) {
    for (int64_t i = params.global; i < blocks; ++i) {
        check_cancelled();
        const Interval window = window_of(params, i);
        for (const Interval& seen : block_row(params, seq_k, i)) {
            const int64_t begin = std::max(seen.begin, params.global), end = std::min(seen.end, blocks);
            for (int64_t j = begin; j < std::min(end, window.begin); ++j) visit(i, j);
            for (int64_t j = std::max(begin, window.end); j < end; ++j) visit(i, j);
        }
    }
}

// As many as a thread may keep; of more, each question draws its rows again.
bool is_kept(const Params& params, int64_t blocks) {
    constexpr int64_t most = 1 << 18;
    return blocks <= most && multiply_saturated(blocks, std::min(params.random, blocks)) <= most;
}

const Drawn& drawn_rows(const Params& params, int64_t seq_k, int64_t blocks) {
    Drawn& recent = of_thread<Drawn>();
    if (recent.blocks == blocks && recent.params == params) return recent;
    recent.blocks = -1;  // not valid while being filled: allocation may throw
    recent.params = params;
    recent.begin.assign(size_t(blocks) + 2, 0);
    visit_drawn(params, seq_k, blocks, [&](int64_t, int64_t j) { ++recent.begin[size_t(j) + 2]; });
    for (size_t j = 2; j < recent.begin.size(); ++j) recent.begin[j] += recent.begin[j - 1];
    recent.rows.resize(size_t(recent.begin.back()));
    // begin[j + 1] moves from the start of J to its end.
    visit_drawn(params, seq_k, blocks,
                [&](int64_t i, int64_t j) { recent.rows[size_t(recent.begin[size_t(j) + 1]++)] = int32_t(i); });
    recent.blocks = blocks;
    return recent;
}

// The blocks I >= 0 whose rows see J, as far as `until`.
struct Column {
    Params params{};
    int64_t blocks = -1, j = 0, until = 0;
    Intervals seen;
};

void fill(Column& column, int64_t seq_k, Interval columns) {
    const Params& params = column.params;
    Intervals& seen = column.seen;
    const int64_t j = column.j, blocks = column.blocks, kept = is_kept(params, blocks) ? blocks : 0;
    const bool is_global = j < params.global;
    column.until = is_global ? forever : std::max(kept, columns.end);
    seen.assign(1, {0, is_global ? forever : params.global});
    if (is_global) return;
    const Interval window = window_of(params, j);
    seen.push_back({std::max<int64_t>(window.begin, 0), window.end});
    if (j < kept) {
        const Drawn& all = drawn_rows(params, seq_k, blocks);
        for (int32_t n = all.begin[size_t(j)]; n < all.begin[size_t(j) + 1]; ++n)
            seen.push_back({all.rows[size_t(n)], all.rows[size_t(n)] + 1});
    }
    for (int64_t i = std::max({kept, columns.begin, params.global}); j < blocks && i < columns.end; ++i) {
        check_cancelled();  // one row of a transposed pattern draws all of them
        if (is_member(block_row(params, seq_k, i), j)) seen.push_back({i, i + 1});
    }
    std::erase_if(seen, [](const Interval& i) { return i.begin >= i.end; });
    std::sort(seen.begin(), seen.end(), is_earlier);
    join_touching(seen, 0);
}

const Column& transposed_row(const Params& params, int64_t seq_k, int64_t j, Interval columns) {
    Column& slot = of_thread<std::array<Column, 64>>()[size_t(floor_mod(j, 64))];
    const int64_t blocks = count_blocks(params, seq_k);
    if (slot.j == j && slot.blocks == blocks && slot.params == params && columns.end <= slot.until &&
        is_kept(params, blocks))
        return slot;
    slot.blocks = -1;  // not valid while being filled: allocation may throw
    Column filled{params, blocks, j, 0, std::move(slot.seen)};
    fill(filled, seq_k, columns);
    slot = std::move(filled);
    return slot;
}

// Block row J sees the blocks I >= 0 whose rows see J.
class TransposedBigbird : public BlockRows {
public:
    TransposedBigbird(const std::string& text, const Params& params)
        : BlockRows("transpose(" + text + ')', params.block), params_(params) {}

    // Rows of one block are alike, and so are all that every query sees.
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        const int64_t first = block_of(plane.position(row));
        const int64_t last = block_of(plane.position(row) + rows - 1);
        if (first != last && last >= params_.global) return false;
        key.push_back(last < params_.global ? -1 : first);
        return true;
    }

protected:
    Row row(const Plane& plane, int64_t j, Interval columns) const override {
        const Column& column = transposed_row(params_, plane.extent.seq_k, j, columns);
        return {column.seen, column.until};
    }

private:
    Params params_;
};

class Bigbird : public BlockRows {
public:
    explicit Bigbird(const Params& p)
        : BlockRows(text("bigbird(", p.block, ',', p.window, ',', p.global, ',', p.random, ',', p.seed, ')'), p.block),
          params_(p) {}

    // Rows of one block are alike, and so are all rows of global blocks.
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        const int64_t first = block_of(plane.position(row));
        const int64_t last = block_of(plane.position(row) + rows - 1);
        const bool is_global = first >= 0 && last < params_.global;
        if (last >= 0 && first != last && !is_global) return false;
        key.push_back(last < 0 ? -2 : is_global ? -1 : first);
        return true;
    }
    PatternRef transposed() const override { return make_ref<TransposedBigbird>(print(), params_); }

protected:
    Row row(const Plane& plane, int64_t i, Interval) const override {
        static const Intervals none;
        return {i < 0 ? none : block_row(params_, plane.extent.seq_k, i), forever};
    }

private:
    Params params_;
};

}  // namespace

PatternRef make_bigbird(int64_t block, int64_t window_blocks, int64_t global_blocks, int64_t random_blocks,
                        uint64_t seed) {
    if (block < 1) fail(SPATTN_E_RANGE, "params.block", text("is ", block, "; accepted: 1 and more"));
    if (window_blocks < 0 || (window_blocks > 0 && window_blocks % 2 == 0)) {
        fail(SPATTN_E_RANGE, "params.window_blocks", text("is ", window_blocks, "; accepted: 0, or odd and positive"));
    }
    if (global_blocks < 0) {
        fail(SPATTN_E_RANGE, "params.global_blocks", text("is ", global_blocks, "; accepted: 0 and more"));
    }
    if (random_blocks < 0) {
        fail(SPATTN_E_RANGE, "params.random_blocks", text("is ", random_blocks, "; accepted: 0 and more"));
    }
    return make_ref<Bigbird>(Params{block, window_blocks, global_blocks, random_blocks, seed});
}

}  // namespace spattn
