// SPDX-License-Identifier: MIT
// Owners of gather_backward.h that are columns: 64 of dK or of dV, for all keys.
#pragma once

#include "cpu/generic/gather_backward.h"

namespace spattn::cpu {
namespace {

constexpr int owned_columns = 64;

inline int64_t column_slices(int64_t columns) { return (columns + owned_columns - 1) / owned_columns; }
inline int64_t most_column_owners(const Problem& p) {
    return column_slices(p.head_dim) + (p.value_in_key ? 0 : column_slices(p.head_dim_v));
}

// The slice of one owner. Key number i has its sums at sums + i * ld.
struct OwnedColumns {
    bool of_keys;              // of dK
    int first, count, values;  // values: columns that receive p dO: none of dK, unless values lie in keys
    Real* sums;
    int64_t ld;
};

// add(row of the wave, columns) adds what a query row has for them.
template <class Map, class AddRow>
inline void own_columns(const BackwardArgs& args, const Elements& elements, const Map& map, int64_t plane,
                        int64_t owner, AddRow add) {
    const Problem& p = map.p;
    const bool of_keys = owner < column_slices(p.head_dim);
    const int first = int(of_keys ? owner : owner - column_slices(p.head_dim)) * owned_columns;
    const int64_t ld = of_keys ? columns_of(p) : values_of(p), slot = plane - map.wave.plane;
    const int count = least(owned_columns, (of_keys ? p.head_dim : p.head_dim_v) - first);
    const int values = !of_keys || p.value_in_key ? least(count, p.head_dim_v - first) : 0;
    Real* sums = (of_keys ? map.space.dk : map.space.dv) + slot * p.seq_k * ld + first;
    if (map.wave.row == 0)
        for (int64_t key = 0; key < p.seq_k; ++key) zero(sums + key * ld, round_up(count, lanes));
    for (int64_t row = 0; row < map.wave.rows; ++row) add(row, OwnedColumns{of_keys, first, count, values, sums, ld});
    if (map.wave.row + map.wave.rows < p.seq_q) return;
    TensorView x = of_keys ? args.dk : args.dv;
    x.data = (char*)x.data + first * x.column * elements.bytes;
    const Place at{{0, 1, 0, nullptr}, plane / p.heads_kv, plane % p.heads_kv, 0, 0};
    for (int64_t key = 0; key < p.seq_k; ++key) elements.store_row(sums + key * ld, count, 1.f, x, at, int(key));
}

}  // namespace
}  // namespace spattn::cpu
