// SPDX-License-Identifier: MIT
// bigbird(block,window,global,random,seed): with I = p / block and J = k / block: 2 |I - J| < window, or J < global, or
// I < global, or J in R(I); nothing for p < 0. BigBird (https://arxiv.org/abs/2007.14062).
#include "core/error.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

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

// The blocks J that block row I sees, as intervals.
struct BlockRow {
    Params params{};
    int64_t blocks = -1, row = 0;  // ceil(seq_k / block), I
    Intervals seen;
};

// Where J belongs in sorted intervals: the first that ends after it.
Intervals::const_iterator find(const Intervals& seen, int64_t j) {
    return std::upper_bound(seen.begin(), seen.end(), j, [](int64_t x, const Interval& i) { return x < i.end; });
}

// Draws R(I) into row.seen, which holds the rest. Where every block left is wanted, drawing would find them slowly.
void draw(BlockRow& row) {
    int64_t left = row.blocks;
    for (const Interval& i : row.seen) {
        left -= std::max<int64_t>(0, std::min(i.end, row.blocks) - std::max<int64_t>(i.begin, 0));
    }
    if (row.params.random >= left) {
        row.seen.insert(row.seen.begin() + 1, {0, row.blocks});  // after [lowest, global)
        return;
    }
    uint64_t state = row.params.seed + uint64_t(row.row) * golden;
    for (int64_t drawn = 0; drawn < row.params.random;) {
        const int64_t j = int64_t(splitmix64(state) % uint64_t(row.blocks));
        const auto place = find(row.seen, j);
        if (place != row.seen.end() && place->begin <= j) continue;
        row.seen.insert(place, {j, j + 1});
        ++drawn;
    }
}

// Joins neighbours of sorted intervals in place.
void join(Intervals& intervals) {
    size_t last = 0;
    for (const Interval& i : intervals) {
        if (i.begin <= intervals[last].end) {
            intervals[last].end = std::max(intervals[last].end, i.end);
        } else {
            intervals[++last] = i;
        }
    }
    intervals.resize(last + 1);
}

void fill(BlockRow& row) {
    const auto& [block, window, global, random, seed] = row.params;
    row.seen.assign(1, {lowest, row.row < global ? forever : global});
    if (row.row < global) return;
    const int64_t reach = (window - 1) / 2;
    if (window > 0) Cutter({lowest, forever}, row.seen).add(row.row - reach, add_saturated(row.row, reach + 1));
    join(row.seen);
    if (random > 0) draw(row);
    join(row.seen);
}

// A pattern holds no cache, since handles are shared between threads: each thread keeps the rows it met last.
const Intervals& block_row(const Params& params, int64_t seq_k, int64_t row) {
    thread_local BlockRow recent[64];
    BlockRow& slot = recent[row % 64];
    const int64_t blocks = seq_k / params.block + (seq_k % params.block != 0);
    if (slot.row == row && slot.blocks == blocks && slot.params == params) return slot.seen;
    slot.blocks = -1;  // not valid while being filled: allocation may throw
    slot.params = params;
    slot.row = row;
    BlockRow filled = std::move(slot);
    filled.blocks = blocks;
    fill(filled);
    slot = std::move(filled);
    return slot.seen;
}

// Whether J is seen, and the first block from J on where that changes.
struct Stretch {
    bool is_seen;
    int64_t end;
};
Stretch stretch(const Intervals& seen, int64_t j) {
    const auto i = find(seen, j);
    if (i == seen.end()) return {false, forever};
    return i->begin <= j ? Stretch{true, i->end} : Stretch{false, i->begin};
}

class Bigbird : public Leaf {
public:
    explicit Bigbird(const Params& p)
        : Leaf(text("bigbird(", p.block, ',', p.window, ',', p.global, ',', p.random, ',', p.seed, ')')), params_(p) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override;
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override;

private:
    Params params_;
};

void Bigbird::keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const {
    const int64_t p = plane.position(row);
    if (p < 0) return;
    const Intervals& seen = block_row(params_, plane.extent.seq_k, p / params_.block);
    Cutter cutter(clip, out);
    for (auto i = find(seen, floor_div(clip.begin, params_.block)); i != seen.end(); ++i) {
        const int64_t begin = multiply_saturated(i->begin, params_.block);
        if (begin >= clip.end) return;
        cutter.add(begin, multiply_saturated(i->end, params_.block));
    }
}

// The mask is where borders of blocks cross the block asked for, then one bit for each (I, J) inside. Where no row's
// answer changes from one J to the next, the borders of the keys do not matter and one bit a row will do.
Coverage Bigbird::classify(const Plane& plane, const Block& block, Key& key, bool& known) const {
    const int64_t size = params_.block, p = plane.position(block.row), last = p + block.rows - 1;
    if (last < 0) return {Coverage::empty, forever};
    const Interval rows{std::max<int64_t>(p, 0) / size, last / size + 1};
    const Interval columns{floor_div(block.key, size), floor_div(block.key + block.keys - 1, size) + 1};
    int64_t same_until = forever;  // in blocks J
    for (int64_t i = rows.begin; i < rows.end; ++i) {
        same_until = std::min(same_until, stretch(block_row(params_, plane.extent.seq_k, i), columns.begin).end);
    }
    const bool is_even = same_until >= columns.end;
    const int64_t width = is_even ? 1 : columns.end - columns.begin;
    const size_t mark = key.size();
    key.push_back(std::min(size - floor_mod(p, size), block.rows));
    key.push_back(std::max<int64_t>(-p, 0));  // rows before position 0
    key.push_back(is_even ? -1 : std::min(size - floor_mod(block.key, size), block.keys));
    int64_t ones = 0;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
        const Intervals& seen = block_row(params_, plane.extent.seq_k, i);
        for (int64_t j = 0; j < width; ++j) {
            if (j % 32 == 0) key.push_back(0);
            const bool is_seen = stretch(seen, columns.begin + j).is_seen;
            key.back() |= int64_t(is_seen) << (j % 32);
            ones += is_seen;
        }
    }
    const int64_t repeat = is_even ? blocks_until(multiply_saturated(same_until, size), block.key, block.keys) : 1;
    if (ones > 0 && (p < 0 || ones < width * (rows.end - rows.begin))) {
        known &= key.size() - mark <= 256;  // tiny blocks inside large ones: longer to compare than to make
        if (key.size() - mark > 256) key.resize(mark);
        return {Coverage::partial, repeat};
    }
    key.resize(mark);
    return {ones ? Coverage::full : Coverage::empty, repeat};
}

// Rows of one block are alike, and so are all rows of global blocks.
bool Bigbird::row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const {
    const int64_t first = floor_div(plane.position(row), params_.block);
    const int64_t last = floor_div(plane.position(row) + rows - 1, params_.block);
    const bool is_global = first >= 0 && last < params_.global;
    if (last >= 0 && first != last && !is_global) return false;
    key.push_back(last < 0 ? -2 : is_global ? -1 : first);
    return true;
}

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
