# SPDX-License-Identifier: MIT
"""sparseattn-candle, apart from the others: candle's own crates take minutes to compile."""
from crates import SYSTEM, demand_dependencies, demand_tests


def test_attention_and_gradients(cargo):
    demand_tests(cargo("test", *SYSTEM, cwd=demand_dependencies("sparseattn-candle")), 6)
