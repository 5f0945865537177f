# SPDX-License-Identifier: MIT
"""A plan, a forward and a backward pass, and a check of the gradient by small differences. The same program in C, C++
and Rust lies beside this one."""
import numpy as np
import sparseattn as sa

HEADS, SEQ, DIM = 2, 256, 16
numbers = np.arange(3 * SEQ * HEADS * DIM, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(8)
q, k, v = (numbers / np.float32(1 << 23) - 1).astype(np.float32).reshape(3, 1, SEQ, HEADS, DIM)

pattern = sa.causal() & (sa.sink(4) | sa.window(31, 0))
plan = sa.plan(pattern, q, k, v, backward=True)


def loss():
    """Half the sum of squares of out, whose gradient at out is out itself."""
    return 0.5 * np.sum(plan.forward(q, k, v).astype(np.float64) ** 2)


out, lse = plan.forward(q, k, v, return_lse=True)
dq, dk, dv = plan.backward(q, k, v, out, lse, out)

STEP = np.float32(0.01)
q.flat[1000] += STEP
above = loss()
q.flat[1000] -= 2 * STEP
numeric = (above - loss()) / (2 * STEP)
print(f"dq[1000] = {dq.flat[1000]:.5f}, by differences {numeric:.5f}")
assert abs(numeric - dq.flat[1000]) < 1e-3
