# SPDX-License-Identifier: MIT
"""sparseattn.attention sends arrays to the module of their library, and the result lies in the library of q."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, Array

import sparseattn as sa

TEXT = "causal & (sink(2) | window(9,0))"
OPTIONS = {"scale": 0.3, "softcap": 2.0, "q_offset": 1, "deterministic": True, "tf32": True}


def operands():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 40, heads, 24), np.float32) for heads in (4, 2, 2)]


def library(name):
    """The class of its arrays, what makes one of NumPy's, and what makes NumPy's of one."""
    if name == "numpy":
        return np.ndarray, np.asarray, np.asarray
    if name == "dlpack":
        return Array, Array, np.from_dlpack
    if name == "torch":
        torch = pytest.importorskip("torch")
        return torch.Tensor, torch.from_numpy, lambda x: x.numpy()
    jax = pytest.importorskip("jax")
    return jax.Array, jax.numpy.asarray, np.asarray


@pytest.mark.parametrize("name", ["torch", "jax", "dlpack"])
def test_results_lie_in_the_library_of_q(name):
    kind, convert, back = library(name)
    sinks = np.float32([0.5, -2, 1, 3])
    x = operands()
    out, lse = sa.attention(*x, TEXT, return_lse=True, sink_logits=sinks, **OPTIONS)
    expected = out, lse, *sa.attention_backward(*x, out, lse, x[0], TEXT, dlse=lse, sink_logits=sinks, **OPTIONS)
    q, k, v = map(convert, x)
    options = {"sink_logits": convert(sinks), **OPTIONS}
    out, lse = sa.attention(q, k, v, TEXT, return_lse=True, **options)
    found = out, lse, *sa.attention_backward(q, k, v, out, lse, q, TEXT, dlse=lse, **options)
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected):
        assert isinstance(one, kind)
        np.testing.assert_allclose(back(one), other, rtol=2e-5, atol=2e-6)
    assert isinstance(sa.attention(q, k, None, TEXT, head_dim_v=8), kind)
    assert sa.attention_backward(q, k, None, out, lse, q, TEXT)[2] is None


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "dlpack"])
def test_masks_of_each_library(name):
    kind, convert, back = library(name)
    x, mask = operands(), sa.parse(TEXT).to_mask(40)
    out = sa.attention(*map(convert, x), convert(mask))
    assert isinstance(out, kind)
    np.testing.assert_allclose(back(out), sa.attention(*x, TEXT), rtol=2e-5, atol=2e-6)


def numbers(values, dtype):
    return np.array([-np.inf if x is None else x for x in values], dtype)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "dlpack"])
def test_vectors_of_every_language(name):
    kind, convert, back = library(name)
    vectors = json.loads((ROOT / "tests" / "vectors" / "attention.json").read_text())
    assert len(vectors) > 20
    for case in vectors:

        def array(name, heads, seq, dim, case=case):
            shape = case["batch"], case[heads], case[seq], case[dim]
            return convert(numbers(case[name], np.float32).reshape(shape))

        q, k = array("q", "heads_q", "seq_q", "head_dim"), array("k", "heads_kv", "seq_k", "head_dim")
        v, dout = array("v", "heads_kv", "seq_k", "head_dim_v"), array("dout", "heads_q", "seq_q", "head_dim_v")
        options = {name: case.get(name) for name in ("scale", "q_offset", "softcap")} | {"axes": "bhsd"}
        if "sink_logits" in case:
            options["sink_logits"] = convert(numbers(case["sink_logits"], np.float32))
        out, lse = sa.attention(q, k, v, case["text"], return_lse=True, **options)
        dlse = convert(numbers(case["dlse"], np.float32).reshape(back(lse).shape)) if "dlse" in case else None
        found = out, lse, *sa.attention_backward(q, k, v, out, lse, dout, case["text"], dlse=dlse, **options)
        wanted = [name for name in ("out", "lse", "dq", "dk", "dv", "dsink_logits") if name in case]
        # Scores of hundreds have few digits behind the point in float32.
        bound = 1e-5 if abs(case["scale"]) < 8 else 1e-4
        for name, one in zip(wanted, found, strict=True):
            right = numbers(case[name], np.float64)
            size = max(1, np.abs(right[np.isfinite(right)]).max(initial=0))
            assert isinstance(one, kind)
            np.testing.assert_allclose(back(one).ravel(), right, rtol=0, atol=bound * size, err_msg=case["text"])


def test_numpy_has_what_it_had():
    q, k, v = operands()
    expected = sa.attention(q, k, v, TEXT)
    assert type(expected) is np.ndarray
    for kind in (np.ndarray, np.memmap):  # a subclass is NumPy's, too
        np.testing.assert_array_equal(sa.attention(q.view(kind), k, v, TEXT), expected)
    found = sa.attention(q.tolist(), k.astype(np.float64), v.astype(np.float64), TEXT)
    assert type(found) is np.ndarray and found.dtype == np.float64


def test_no_library_is_imported_for_that():
    program = """
import sys
import numpy as np
import sparseattn as sa
q = np.zeros((1, 8, 1, 8), np.float32)
sa.attention(q, q, q, "causal")
sa.attention(q.tolist(), q.astype(float), q.astype(float), "causal")
print(sorted({"torch", "jax", "cupy"} & {name.partition(".")[0] for name in sys.modules}))
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("name", ["torch", "jax", "dlpack"])
@pytest.mark.parametrize("argument", ["out", "return_max_logits", "context"])
def test_what_a_library_has_not_is_refused(name, argument):
    _, convert, _ = library(name)
    q, k, v = map(convert, operands())
    given = {"out": q, "return_max_logits": True, "context": sa.Context("cpu")}[argument]
    if (name, argument) == ("torch", "context"):
        sa.attention(q, k, v, TEXT, context=given)
        return
    with pytest.raises(sa.UnsupportedError, match=f"argument {argument}.*sparseattn.{name}") as caught:
        sa.attention(q, k, v, TEXT, **{argument: given})
    assert caught.value.argument == argument


def test_plans_of_tensors_compute_with_tensors():
    torch = pytest.importorskip("torch")
    x, counted = operands(), {}
    for kind, convert in ((np.ndarray, np.asarray), (torch.Tensor, torch.from_numpy)):
        q, k, v = map(convert, x)
        plan = sa.plan(TEXT, q, k, v, backward=True, scale=0.3)
        out, lse = plan.forward(q, k, v, return_lse=True)
        found = [out, lse, *plan.backward(q, k, v, out, lse, q)]
        assert all(isinstance(one, kind) for one in found) and plan.stats().pairs > 0 and plan.kernel() in sa.kernels()
        counted[kind] = [np.asarray(one) for one in found]
    for one, other in zip(*counted.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    mask = torch.from_numpy(sa.parse(TEXT).to_mask(40))
    assert torch.equal(sa.plan(mask, q, k, v, scale=0.3).forward(q, k, v), out)
    in_keys = sa.plan(TEXT, q, k, None, head_dim_v=8).forward(q, k)
    assert torch.equal(in_keys, sa.attention(q, k, None, TEXT, head_dim_v=8))


def test_plans_of_tensors_read_the_tensors_of_each_call():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, operands())
    plan, plain = sa.plan(TEXT, q, k, v), sa.plan(TEXT, *operands())
    spread = torch.zeros(2, 40, 2, 48)[..., ::2].copy_(k)
    owed = torch.complex(torch.zeros_like(q), -q).conj().imag
    for x in ((q, k, v), (q * 2, k, v), (q, spread, v), (q, k, v.flip(1)), (owed, k, v), (owed * 3, k, v), (q, v, k)):
        expected = plain.forward(*(one.resolve_neg().numpy() for one in x))
        np.testing.assert_array_equal(plan.forward(*x).numpy(), expected)
    for wrong, kind in ((k.double(), sa.DTypeError), (k[:, :39], sa.ShapeError), (k.numpy(), sa.DTypeError)):
        with pytest.raises(kind) as caught:
            plan.forward(q, wrong, v)
        assert caught.value.argument == "k"
        np.testing.assert_array_equal(plan.forward(q, k, v).numpy(), plain.forward(*operands()))


def test_plans_of_tensors_refuse_to_lose_gradients():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, operands())
    plan = sa.plan(TEXT, q.requires_grad_(), k, v)
    with pytest.raises(sa.ArgumentError, match="accepted: sparseattn.torch.attention, or .*no_grad") as caught:
        plan.forward(q, k, v)
    assert caught.value.argument == "q"
    with torch.no_grad():
        assert torch.equal(plan.forward(q, k, v), sa.attention(q, k, v, TEXT))


@pytest.mark.parametrize("name", ["jax", "dlpack"])
def test_plans_of_other_libraries_are_refused(name):
    _, convert, _ = library(name)
    with pytest.raises(sa.UnsupportedError, match=f"accepted: .*NumPy.*sparseattn.{name}.attention") as caught:
        sa.plan(TEXT, *map(convert, operands()))
    assert caught.value.argument == "q"


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_mixed_libraries_are_refused(name):
    _, convert, _ = library(name)
    q, k, v = operands()
    with pytest.raises(sa.DTypeError) as caught:
        sa.attention(convert(q), [1.0], convert(v), TEXT)
    assert caught.value.argument == "k"


def test_a_library_that_cannot_make_arrays_is_refused():
    class Mute(Array):
        __module__ = "subprocess"

    with pytest.raises(sa.UnsupportedError, match="subprocess has neither from_dlpack nor asarray") as caught:
        sa.attention(*map(Mute, operands()), TEXT)
    assert caught.value.argument == "q"


def test_torch_differentiates_and_compiles_it():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, operands())
    q.requires_grad_()

    def loss(q, k, v):
        return sa.attention(q, k, v, TEXT).square().sum()

    (expected,) = torch.autograd.grad(loss(q, k, v), q)
    out, lse = sa.attention(q, k, v, TEXT, return_lse=True)
    (found, _, _) = sa.attention_backward(q, k, v, out, lse, 2 * out, TEXT)
    torch.testing.assert_close(found, expected)
    (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v), q)
    torch.testing.assert_close(found, expected)


def test_compiled_code_may_be_the_first_that_meets_torch():
    pytest.importorskip("torch")
    program = """
import torch
import sparseattn as sa
q = torch.randn(1, 8, 1, 8)
found = torch.compile(lambda q: sa.attention(q, q, q, "causal"), fullgraph=True, backend="eager")(q)
print(torch.equal(found, sa.attention(q, q, q, "causal")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_jax_traces_it():
    jax = pytest.importorskip("jax")
    q, k, v = map(jax.numpy.asarray, operands())
    loss = lambda q: (sa.attention(q, k, v, TEXT) ** 2).sum()
    out, lse = sa.attention(q, k, v, TEXT, return_lse=True)
    expected = sa.attention_backward(q, k, v, out, lse, 2 * out, TEXT)[0]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(q), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["torch", "jax", "dlpack"])
@pytest.mark.parametrize("argument", ["out", "lse", "dout", "dlse"])
def test_errors_of_backward_name_the_argument(name, argument):
    _, convert, _ = library(name)
    q, k, v = map(convert, operands())
    out, lse = sa.attention(q, k, v, TEXT, return_lse=True)
    given = {"out": out, "lse": lse, "dout": out, "dlse": lse, argument: convert(np.zeros((2, 3), np.float32))}
    with pytest.raises(sa.ShapeError) as caught:
        sa.attention_backward(q, k, v, pattern=TEXT, **given)
    assert caught.value.argument == argument
