// SPDX-License-Identifier: MIT
// The results of a call against attention in double precision, on sampled rows and keys.
#pragma once

#include "attention.h"

namespace bench {

// Largest absolute error divided by the largest absolute value of the sampled truth: for forward the worse of out and
// lse, for backward the worst of dq, dk and dv. Infinity where a result is not a number. A zero truth is compared
// absolutely.
double max_error(const Attention& attention, Pass pass);

// What an implementation that computes in fp32 stays under.
double error_bound(Dtype dtype);

}  // namespace bench
