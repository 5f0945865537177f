// SPDX-License-Identifier: MIT
// A machine and kernel rows that exist nowhere, so that plans do not depend on the CPU that runs the test.
#pragma once

#include "plan/plan.h"

namespace spattn::imaginary {

inline Machine machine(int lanes = 8) { return {"imaginary", lanes, 2.0, 6.25 * lanes}; }

size_t carries(const Problem& p);

Kernel forward_row(const char* name, int block, Dtype dtype = Dtype::f32);
Kernel backward_row(const char* name, int block, Dtype dtype = Dtype::f32);
std::vector<Kernel> kernels();

Problem problem(int64_t seq_q, int64_t seq_k, int64_t head_dim = 64);

}  // namespace spattn::imaginary
