// SPDX-License-Identifier: MIT
// What becomes of the lift of gradients of scores where fp16 ends.
#pragma once

#include <cmath>

#include "ptx/warpgroup.cuh"

namespace spattn::tile {

// In shared memory: what is left of the lift, and the largest of each of the warps that make gradients of scores.
template <int Warps>
struct SharedLiftOf {
    float lift, most[Warps];
};
using SharedLift = SharedLiftOf<4>;

// fp16 ends at 65504. Where ds goes beyond, it is lifted by less, and so is all of it that the task still makes. By the
// threads of these warps, who meet at named barrier 1; `lift` is what each of them knows of it.
template <int Values, int Warps>
__device__ __forceinline__ void fit(float (&ds)[Values], float& lift, SharedLiftOf<Warps>& shared, int thread) {
    constexpr float largest = 65504, fitting = 32768;
    float most = 0;
#pragma unroll
    for (float& x : ds) x *= lift, most = fmaxf(most, fabsf(x) < INFINITY ? fabsf(x) : 0);
    if (ptx::named_barrier_any(1, 32 * Warps, most > largest)) {
        for (int n = 16; n; n /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, n));
        if (thread % 32 == 0) shared.most[thread / 32] = most;
        ptx::named_barrier_sync(1, 32 * Warps);  // the largest of all warps are there
        for (float x : shared.most) most = fmaxf(most, x);
        const float less = exp2f(-ceilf(log2f(most / fitting)));
#pragma unroll
        for (float& x : ds) x *= less;
        lift *= less;
    }
    if (thread == 0) shared.lift = lift;
}

}  // namespace spattn::tile
