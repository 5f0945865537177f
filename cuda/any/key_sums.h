// SPDX-License-Identifier: MIT
// What the host may know of sums of keys' rows (key_sums.cuh).
#pragma once

#include <cstdint>

#include "any/block_backward.h"
#include "core/math.h"
#include "plan/call.h"

namespace spattn::any {

// What a kernel does about such sums.
enum class Adding { floats, bounds, integers };

constexpr int bound_words = 8, sums_chunk = 8;

// The sums of all keys, [batch, heads_kv, seq_k]. Integers alone have bounds and quanta.
struct KeySums {
    float* sums;       // a row each; its integers have 32 bits, too
    int columns;       // of a row, a multiple of sums_chunk: those beyond the operand's stay 0
    uint64_t* bounds;  // bound_words each
    float* quanta;     // what terms are multiplied by before they become integers
};

// What a workspace holds, as offsets: at its start lse and delta as BlockBackward::rows leaves them, then the sums of
// dk and dv, a row for each key of each kv head, and what a deterministic plan needs for them.
struct KeySumsSpace {
    struct Sums {
        size_t sums, bounds, quanta;
    };
    Sums dk, dv;            // where values are columns of keys, sums of dv are columns of those of dk
    size_t begin, cleared;  // what is 0 at first: so many bytes from there on
    size_t bytes;           // the whole

    explicit KeySumsSpace(const Problem& p) {
        constexpr int64_t alignment = 256;
        const size_t keys = size_t(p.batch * p.heads_kv * p.seq_k);
        begin = bytes = size_t(round_up(int64_t(BackwardSpace<float>::bytes(p, {}, {}, {})), alignment));
        const auto add = [&](size_t row_bytes) {
            const size_t at = bytes;
            bytes = size_t(round_up(int64_t(at + keys * row_bytes), alignment));
            return at;
        };
        const size_t bound = p.deterministic ? bound_words * sizeof(uint64_t) : 0;
        const size_t quantum = p.deterministic ? sizeof(float) : 0;
        dk.sums = add(columns_of(p.head_dim) * sizeof(float)), dk.bounds = add(bound);
        dv.sums = add(p.value_in_key ? 0 : columns_of(p.head_dim_v) * sizeof(float));
        dv.bounds = add(p.value_in_key ? 0 : bound);
        cleared = bytes - begin;
        dk.quanta = add(quantum), dv.quanta = add(quantum);
    }

    KeySums dk_at(void* workspace, const Problem& p) const { return at(workspace, dk, p.head_dim); }
    KeySums dv_at(void* workspace, const Problem& p) const {
        return p.value_in_key ? dk_at(workspace, p) : at(workspace, dv, p.head_dim_v);
    }

private:
    static size_t columns_of(int64_t head_dim) { return size_t(round_up(head_dim, sums_chunk)); }
    static KeySums at(void* workspace, const Sums& sums, int64_t head_dim) {
        char* const memory = static_cast<char*>(workspace);
        return {reinterpret_cast<float*>(memory + sums.sums), int(columns_of(head_dim)),
                reinterpret_cast<uint64_t*>(memory + sums.bounds), reinterpret_cast<float*>(memory + sums.quanta)};
    }
};

// Kernel::added_by_arrival of rows that add to these sums.
inline const char* keys_added_by_arrival(const Problem& p) {
    if (p.deterministic) return nullptr;
    return p.value_in_key ? "dk" : "dk and dv";
}

}  // namespace spattn::any
