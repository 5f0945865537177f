# SPDX-License-Identifier: MIT
"""Arrays of any library with DLPack: the result is NumPy's, and lies in the library that came in."""

import sys

import numpy as np
import pytest
from conftest import Array, from_dlpack

import sparseattn as sa
import sparseattn.dlpack as sad

TEXT = "causal & (sink(2) | window(9,0)) - global_keys(0)"


def operands(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = [(2, 40, heads, 24) for heads in (4, 2, 2)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_a_library_that_knows_only_dlpack(dtype):
    q, k, v = operands(dtype)
    out, lse = sad.attention(*map(Array, (q, k, v)), TEXT, return_lse=True)
    expected, expected_lse = sa.attention(q, k, v, TEXT, return_lse=True)
    assert type(out) is Array and type(lse) is Array
    np.testing.assert_array_equal(np.from_dlpack(out), expected)
    np.testing.assert_array_equal(np.from_dlpack(lse), expected_lse)
    gradients = sad.attention_backward(*map(Array, (q, k, v)), out, lse, Array(q), TEXT)
    for one, other in zip(gradients, sa.attention_backward(q, k, v, expected, expected_lse, q, TEXT), strict=True):
        assert type(one) is Array
        np.testing.assert_array_equal(np.from_dlpack(one), other)


def test_strides_and_options():
    q, k, v = (x.swapaxes(1, 2) for x in operands())
    sinks = np.float32([0.5, -2, 1, 3])
    options = {"axes": "bhsd", "softcap": 2.0, "scale": 0.3, "q_offset": 1}
    out, lse = sad.attention(*map(Array, (q, k, v)), TEXT, sink_logits=Array(sinks), return_lse=True, **options)
    expected, expected_lse = sa.attention(q, k, v, TEXT, sink_logits=sinks, return_lse=True, **options)
    np.testing.assert_array_equal(np.from_dlpack(out), expected)
    found = sad.attention_backward(q, k, v, out, lse, Array(q), TEXT, sink_logits=sinks, **options)
    right = sa.attention_backward(q, k, v, expected, expected_lse, q, TEXT, sink_logits=sinks, **options)
    for one, other in zip(found, right, strict=True):
        np.testing.assert_array_equal(one, other)
    assert type(found[0]) is np.ndarray  # q was NumPy's


def test_values_in_keys_and_lists():
    q, k, _ = operands()
    np.testing.assert_array_equal(
        np.from_dlpack(sad.attention(Array(q), Array(k), None, TEXT, head_dim_v=16)),
        sa.attention(q, k, None, TEXT, head_dim_v=16),
    )
    indices = np.broadcast_to(np.arange(40)[None, :, None, None], (2, 40, 2, 1)).copy()
    out = sad.attention(*map(Array, (q, k, k)), sa.runtime_tokens(1), indices=Array(indices))
    np.testing.assert_array_equal(np.from_dlpack(out), sa.attention(q, k, k, "window(0,0)"))


def test_torch():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in operands())
    out = sad.attention(q, k, v, TEXT)
    assert type(out) is torch.Tensor
    np.testing.assert_array_equal(out.numpy(), sa.attention(*operands(), TEXT))
    with pytest.raises(sa.DTypeError, match="argument k cannot be read.*grad"):
        sad.attention(q, k.requires_grad_(), v, TEXT)


def test_jax():
    jax = pytest.importorskip("jax")
    q, k, v = (jax.device_put(x, jax.devices("cpu")[0]) for x in operands())
    out = sad.attention(q, k, v, TEXT)
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), sa.attention(*operands(), TEXT))


def test_cupy():
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("CuPy has no CUDA device here")
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            q, k, v = map(cupy.asarray, operands())
            out, lse = sad.attention(q, k, v, TEXT, return_lse=True)
            gradients = sad.attention_backward(q, k, v, out, lse, q, TEXT)
            assert all(isinstance(x, cupy.ndarray) for x in (out, lse, *gradients))
            found = [x.get() for x in (out, lse, *gradients)]
        x = operands()
        expected = sa.attention(*x, TEXT, return_lse=True)
        for one, other in zip(found, (*expected, *sa.attention_backward(*x, *expected, x[0], TEXT)), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "change, kind, argument",
    [
        (dict(q=[1.0]), sa.DTypeError, "q"),
        (dict(v=[1.0]), sa.DTypeError, "v"),
        (dict(k=None), sa.DTypeError, "k"),
        (dict(q=Array(np.zeros((2, 40, 4, 24), np.int32))), sa.DTypeError, "q"),
        (dict(k=Array(np.zeros((2, 40, 2, 24), np.float64))), sa.DTypeError, "k"),
        (dict(q=Array(np.zeros((40, 4, 24), np.float32))), sa.ShapeError, "q"),
        (dict(v=Array(np.zeros((2, 41, 2, 24), np.float32))), sa.ShapeError, "v"),
        (dict(pattern="wind"), sa.FormatError, "text"),
    ],
)
def test_errors_are_typed_and_name_the_argument(change, kind, argument):
    q, k, v = map(Array, operands())
    with pytest.raises(kind) as caught:
        sad.attention(**{"q": q, "k": k, "v": v, "pattern": TEXT, **change})
    assert caught.value.argument == argument


def test_other_devices_are_refused():
    class Elsewhere(Array):
        def __dlpack_device__(self):
            return 10, 0  # ROCm's

    q, k, v = operands()
    with pytest.raises(sa.ArgumentError, match="DLPack type 10"):
        sad.attention(Elsewhere(q), k, v, TEXT)


def test_memory_is_given_back():
    q, k, v = operands()
    before = sys.getrefcount(q)
    for _ in range(10):
        sad.attention(q, k, v, TEXT)
    assert sys.getrefcount(q) == before
