# SPDX-License-Identifier: MIT
"""sparseattn-candle, apart from the others: candle's own crates take minutes to compile."""
from crates import SYSTEM, demand_crate, demand_tests


def test_attention_and_gradients(cargo):
    demand_tests(cargo("test", *SYSTEM, cwd=demand_crate("sparseattn-candle")), 6)
