# SPDX-License-Identifier: MIT
"""The demo, the bench and the selftest with tensors of torch, as they run on a GPU."""

import numpy as np
import pytest

import sparseattn as sa
from sparseattn import selftest
from sparseattn.demo import device, reading, speed

pytest.importorskip("torch")


def test_both_devices_find_the_same():
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 30, 2, 16), dtype=np.float32)
    pattern = sa.parse("causal & window(5,0)")
    host, tensors = device.Device(), device.TorchDevice("cpu", "float32")
    for where in (host, tensors):
        run = where.plan(pattern, heads_q=2, heads_kv=2, seq_q=30, head_dim=16)
        (out, lse), seconds = where.timed(run, *map(where.place, (q, k, v)))
        found = where.gradients(pattern, *map(where.place, (q, k, v, dout)))
        assert seconds > 0 and len(found) == 5
        for one, other in zip(found, (out, lse)):
            np.testing.assert_array_equal(where.fetch(one), where.fetch(other))
        where.found = [where.fetch(x) for x in found]
    for one, other in zip(host.found, tensors.found):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_exact_is_float32():
    where = device.TorchDevice("cpu")
    assert where.dtype == "bfloat16" and where.exact().dtype == "float32"
    assert selftest.worst_error("causal & window(9,0)", where.exact(), seq=50) < selftest.BOUND
    assert selftest.worst_error("causal & window(9,0)", where, seq=50) > selftest.BOUND


def test_speed_is_measured():
    operands = reading.Operands(*(np.ones((20, heads, 8), np.float32) for heads in (3, 1, 1)))
    where = device.TorchDevice("cpu")
    seconds = speed.measure([sa.causal()], operands, [16, 32], where, lambda share: None, backward=True)
    assert seconds.shape == (1, 2) and (seconds > 0).all()


def test_what_is_missing_is_a_sentence():
    with pytest.raises(SystemExit, match="cuda:99.*sees .* GPUs"):
        device.find("cuda:99")
