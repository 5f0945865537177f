// SPDX-License-Identifier: MIT
// Rows that the next visit reads, copied while products of this one run. No hardware prefetcher follows rows that lie
// apart, each row may lie in a page that must be looked up, and they share few sets of a cache, so most would be gone
// again before they are used. So each is asked for shortly before its copy; both happen between tiles of registers.
#pragma once

#include "cpu/generic/prefetch.h"

namespace spattn::cpu {
namespace {

template <class T>
class Ahead {
public:
    void add(const TensorView& x, const Place& at, int columns, Real* rows) {
        if (at.count > 0) copies_[count_++] = {x, at, columns, rows};
    }

    // After a tile of n vectors a row: time passes with n, and strips have hardly more tiles than a visit has rows.
    void operator()(int n) {
        if (copied_.copy < count_) step(n + 1);
    }

    void finish() {
        while (copied_.copy < count_) copy_next();
        count_ = 0, asked_ = copied_ = {};
    }

private:
    static constexpr int distance = 8;  // rows from request to copy
    struct Copy {
        TensorView x;
        Place at;
        int columns;
        Real* rows;
    };
    struct Cursor {
        int copy = 0, row = 0, total = 0;
    };

    __attribute__((noinline)) void step(int rows) {
        for (int i = 0; i < rows && copied_.copy < count_; ++i) {
            if (asked_.copy < count_) ask_next();
            if (asked_.copy == count_ || asked_.total > copied_.total + distance) copy_next();
        }
    }
    void ask_next() {
        const auto& [x, at, columns, rows] = copies_[asked_.copy];
        const bool alive = at.alive >> asked_.row & 1;
        if (alive) prefetch_row<Level::l2>(address<T>(x, at, asked_.row), columns * int64_t(sizeof(T)));
        advance(asked_);
    }
    void copy_next() {
        const auto& [x, at, columns, rows] = copies_[copied_.copy];
        copy_row<T>(x, at, copied_.row, columns, rows);
        advance(copied_);
    }
    void advance(Cursor& cursor) {
        ++cursor.total;
        if (++cursor.row == copies_[cursor.copy].at.count) ++cursor.copy, cursor.row = 0;
    }

    Copy copies_[4];  // of q, k, v and dout
    int count_ = 0;
    Cursor asked_, copied_;
};

}  // namespace
}  // namespace spattn::cpu
