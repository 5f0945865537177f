// SPDX-License-Identifier: MIT
#pragma once

#include "abi/abi.h"

namespace fault {

// Numbers in [-1, 1), none of them tiny, in any dtype of rows.
void fill(abi::Tensor& tensor, uint32_t seed);

// Operands of forward and backward for one plan, with workspaces of the right size. `listed`: the keys of each row that
// a pattern of runtime_tokens gets, repeats and absent ones among them. Of a dtype of float8 all rows have scales, and
// there is no backward.
struct Operands {
    Operands(const spattn_plan* plan, const spattn_problem& p, int64_t listed = 0);
    void bring_options(const spattn_problem& p, int64_t listed);
    int64_t bytes(spattn_enum op) const;
    spattn_status forward() { return spattn_forward(plan, &forward_args); }
    spattn_status backward() { return spattn_backward(plan, &backward_args); }
    std::vector<std::vector<unsigned char>> results() const;

    const spattn_plan* plan;
    abi::Tensor q, k, v, out, lse, dout, dq, dk, dv, max_logits, sinks, dsinks, indices, q_scales, k_scales;
    abi::Tensor forward_space, backward_space;
    spattn_forward_args forward_args = abi::sized<spattn_forward_args>();
    spattn_backward_args backward_args = abi::sized<spattn_backward_args>();
};

}  // namespace fault
