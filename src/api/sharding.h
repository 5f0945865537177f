// SPDX-License-Identifier: MIT
// The sharding handle: who holds which tokens, what goes between this rank and each other, and the plan of its queries.
#pragma once

#include "api/plan.h"
#include "plan/sharding.h"

struct spattn_sharding : spattn::RefCounted {
    // The part of a token in the buffers: its keys of all batch entries and heads, then its values.
    int64_t token_elements() const {
        return problem.batch * problem.heads_kv * (problem.head_dim + (problem.value_in_key ? 0 : problem.head_dim_v));
    }
    int64_t token_bytes() const { return token_elements() * spattn::dtype_row(problem.dtype).bytes; }

    spattn::Problem problem;  // of all tokens
    spattn::Holdings holdings;
    spattn::Intervals seen;   // the tokens of the keys that the plan takes
    int64_t keys;             // how many these are
    spattn::ExchangeLists lists;
    struct {
        const int32_t *own_keys, *sent, *received, *shared, *shared_keys, *first_place, *places;
    } placed{};  // the lists, where the device reads them
    spattn::Memory::Block block;
    spattn::Ref<const spattn_plan> plan;
};
