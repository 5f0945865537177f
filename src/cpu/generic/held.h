// SPDX-License-Identifier: MIT
// Copies of rows that outlive a visit. Tiles that are neighbours in a window meet the same blocks: the tile after reads
// again what this one has just copied, and rows that lie apart are slow to fetch.
#pragma once

#include "cpu/generic/operand.h"

namespace spattn::cpu {
namespace {

// The last copies of even and of odd blocks of one operand: a window's next tile meets this one's blocks but the first.
class Held {
public:
    void place(Real* even, Real* odd) { copies_[0].rows = even, copies_[1].rows = odd; }

    // Rows of a block as `load` gives them, and as it left them if it copied the same ones before.
    template <class Load>
    Rows rows(const Elements& elements, const TensorView& x, const Place& at, int32_t block, int columns, Load load) {
        Copy& copy = copies_[block & 1];
        if (copy.block == block && copy.batch == at.batch && copy.head == at.head && copy.alive == at.alive)
            return {copy.rows, round_up(columns, lanes)};
        const Rows loaded = load(elements, x, at, columns, copy.rows);
        copy = {copy.rows, at.batch, at.head, at.alive, loaded.x == copy.rows ? block : none};
        return loaded;
    }

private:
    static constexpr int32_t none = -1;
    struct Copy {
        Real* rows = nullptr;
        int64_t batch = 0, head = 0;
        uint64_t alive = 0;
        int32_t block = none;
    };
    Copy copies_[2];
};

}  // namespace
}  // namespace spattn::cpu
