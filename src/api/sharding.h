// SPDX-License-Identifier: MIT
// The sharding handle: who holds which tokens, what goes between this rank and each other, and the plan of its queries.
#pragma once

#include "api/plan.h"
#include "plan/sharding.h"

namespace spattn {

// Keys and values go there, and their gradients come back.
enum class Way { there, back };

// The part of a token in the buffers, in bytes: its keys of all batch entries and heads, its values, scales of both.
struct TokenPart {
    int64_t element;         // of keys and values
    int64_t values, scales;  // where they begin
    int64_t bytes;           // of all
};

}  // namespace spattn

struct spattn_sharding : spattn::RefCounted {
    bool has_scales(spattn::Way way) const { return sends_scales && way == spattn::Way::there; }
    spattn_dtype dtype(spattn::Way way) const {
        return problem.float8_operands && way == spattn::Way::there ? spattn::dtype_float8
                                                                   : spattn::dtype_row(problem.dtype).wire;
    }
    spattn::TokenPart token_part(spattn::Way way) const;

    spattn::Problem problem;  // of all tokens
    bool sends_scales;        // one of each row, beside what it is the scale of
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
