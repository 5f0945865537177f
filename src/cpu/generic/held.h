// SPDX-License-Identifier: MIT
// Copies of rows that outlive a visit. Tiles that are neighbours in a window meet the same blocks: the tile after reads
// again what this one has just copied, and rows that lie apart are slow to fetch.
#pragma once

namespace spattn::cpu {
namespace {

// Copies of the block of one operand that is in use and of one other: a window's next tile meets this one's blocks but
// the first.
class Held {
public:
    void place(Real* one, Real* other) { copies_[0].rows = one, copies_[1].rows = other; }

    // Rows of a block as `load` gives them, and as it left them if it copied the same ones before.
    template <class Load>
    Rows rows(const TensorView& x, const Place& at, int32_t block, int columns, Load load) {
        const int found = find(at, block);
        used_ = found < 0 ? 1 - used_ : found;
        Copy& copy = copies_[used_];
        if (found >= 0) return {copy.rows, round_up(columns, lanes)};
        const Rows loaded = load(x, at, columns, copy.rows);
        copy = {copy.rows, at.batch, at.head, at.alive, loaded.x == copy.rows ? block : none};
        return loaded;
    }

    // Will be asked for next: rows that lie apart are copied ahead.
    template <class T>
    void fetch(const TensorView& x, const Place& at, int32_t block, int columns, Ahead<T>& ahead) {
        if (!lies_apart(at) || find(at, block) >= 0) return;
        Copy& copy = copies_[1 - used_];
        copy = {copy.rows, at.batch, at.head, at.alive, block};
        ahead.add(x, at, columns, copy.rows);
    }

private:
    static constexpr int32_t none = -1;
    struct Copy {
        Real* rows = nullptr;
        int64_t batch = 0, head = 0;
        uint64_t alive = 0;
        int32_t block = none;
    };

    int find(const Place& at, int32_t block) const {
        for (int i = 0; i < 2; ++i) {
            const Copy& c = copies_[i];
            if (c.block == block && c.batch == at.batch && c.head == at.head && c.alive == at.alive) return i;
        }
        return -1;
    }

    Copy copies_[2];
    int used_ = 1;
};

}  // namespace
}  // namespace spattn::cpu
