# SPDX-License-Identifier: MIT
"""Attention of NumPy arrays against the oracle: layouts, dtypes, threads, and every way to call it wrongly."""

import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import oracle
import pytest
from conftest import ctrl_c

import sparseattn as sa
import sparseattn.dlpack
from sparseattn import _plans

TEXT = "causal & (sink(2) | window(20,0) | strided(7))"


def operands(batch=2, seq_q=70, seq_k=70, heads_q=4, heads_kv=2, head_dim=24, head_dim_v=40, seed=0):
    """q, k, v, dout in bshd."""
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, seq_q, heads_q, head_dim),
        (batch, seq_k, heads_kv, head_dim),
        (batch, seq_k, heads_kv, head_dim_v),
        (batch, seq_q, heads_q, head_dim_v),
    ]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def swap(x):
    """bshd <-> bhsd."""
    return x.swapaxes(1, 2)


def truth(q, k, v, dout, text, scale=None, dlse=None, q_offset=None):
    """out, lse, dq, dk, dv of bshd arrays, by the oracle."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    extent = oracle.Extent(q.shape[1], k.shape[1], q.shape[0], q.shape[2], q_offset)
    mask = oracle.to_mask(text, extent)
    q, k, v, dout = (swap(x.astype(np.float64)) for x in (q, k, v, dout))
    out, lse = oracle.attention_forward(q, k, v, mask, scale)
    dq, dk, dv = oracle.attention_backward(q, k, v, mask, scale, dout, dlse)
    return swap(out), lse, swap(dq), swap(dk), swap(dv)


def assert_close(found, expected, bound=1e-5):
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv", "dsink_logits"), found, expected):
        finite = np.isfinite(other)
        np.testing.assert_array_equal(np.isfinite(one.astype(np.float64)), finite, err_msg=name)
        error = np.abs(one[finite].astype(np.float64) - other[finite]).max(initial=0)
        assert error < bound * np.abs(other[finite]).max(initial=1), name


def run(q, k, v, dout, text=TEXT, dlse=None, **options):
    out, lse = sa.attention(q, k, v, text, return_lse=True, **options)
    return out, lse, *sa.attention_backward(q, k, v, out, lse, dout, text, dlse=dlse, **options)


@pytest.mark.parametrize(
    "text", [TEXT, "full", "window(3,2)", "causal & bigbird(16,3,1,1,3)", "block_diagonal(9) - sink(3)"]
)
@pytest.mark.parametrize("reference", [False, True])
def test_forward_and_backward(text, reference):
    arrays = operands()
    assert_close(run(*arrays, text, reference=reference), truth(*arrays, text))


@pytest.mark.parametrize(
    "sizes",
    [
        dict(seq_q=5, seq_k=90),
        dict(seq_q=90, seq_k=33),
        dict(heads_q=6, heads_kv=1),
        dict(head_dim=1),
        dict(seq_q=1, seq_k=1),
        dict(head_dim=3, head_dim_v=5),
    ],
)
def test_sizes(sizes):
    arrays = operands(**sizes)
    assert_close(run(*arrays), truth(*arrays, TEXT))


def test_options_reach_the_library():
    arrays = operands(seq_q=10, seq_k=40)
    dlse = np.random.default_rng(2).standard_normal((2, 4, 10), dtype=np.float32)
    for scale, q_offset in ((0.3, 7), (0.0, 0), (None, -3)):
        expected = truth(*arrays, TEXT, scale, dlse, q_offset)
        assert_close(run(*arrays, dlse=dlse, scale=scale, q_offset=q_offset), expected)


def test_axes_and_views():
    arrays = operands()
    expected = truth(*arrays, TEXT)
    found = run(*(np.ascontiguousarray(swap(x)) for x in arrays), axes="bhsd")
    assert_close([swap(x) if x.ndim == 4 else x for x in found], expected)
    padded = [np.repeat(x, 2, axis=1)[:, ::2] for x in arrays]  # strides of every other row
    backwards = [np.ascontiguousarray(x[:, ::-1])[:, ::-1] for x in arrays]  # negative strides
    fortran = [np.asfortranarray(x) for x in arrays]
    for others in (padded, backwards, fortran, [swap(swap(x).copy()) for x in arrays]):
        assert_close(run(*others), expected)


def test_misaligned_and_read_only_inputs_are_read():
    q, k, v, dout = operands()
    memory = np.empty(q.nbytes + 1, np.uint8)
    odd = memory[1:].view(np.float32).reshape(q.shape)
    odd[...] = q
    q.flags.writeable = k.flags.writeable = False
    np.testing.assert_array_equal(sa.attention(odd, k, v, TEXT), sa.attention(q, k, v, TEXT))
    assert run(q, k, v, dout)[2].shape == q.shape


def test_out_is_written_in_place():
    q, k, v, _ = operands()
    wide = np.full((2, 70, 8, 40), 7, np.float32)
    out = wide[:, :, ::2]
    assert sa.attention(q, k, v, TEXT, out=out) is out
    np.testing.assert_array_equal(out, sa.attention(q, k, v, TEXT))
    assert (wide[:, :, 1::2] == 7).all()
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        sa.attention(q, k, v, TEXT, out=out)
    with pytest.raises(sa.ArgumentError) as caught:
        sa.attention(q, q, q, TEXT, out=q)
    assert caught.value.argument == "out" and caught.value.status == "SPATTN_E_LAYOUT"


@pytest.mark.parametrize("dtype, bound", [(ml_dtypes.bfloat16, 2e-2), (np.float16, 2e-3)])
def test_narrow_dtypes(dtype, bound):
    arrays = [x.astype(dtype) for x in operands()]
    found = run(*arrays)
    assert {x.dtype for x in (found[0], *found[2:])} == {np.dtype(dtype)} and found[1].dtype == np.float32
    assert_close(found, truth(*arrays, TEXT), bound)


def test_rows_without_keys():
    q, k, v, dout = operands()
    out, lse, dq, dk, dv = run(q, k, v, dout, "window(3,0) - sink(10)")
    assert (out[:, :10] == 0).all() and np.isneginf(lse[:, :, :10]).all() and (dq[:, :10] == 0).all()
    assert (dk[:, :10] == 0).all() and (dv[:, :10] == 0).all() and np.isfinite(lse[:, :, 10:]).all()


@pytest.mark.parametrize(
    "change, kind, argument",
    [
        (dict(q=np.zeros((2, 70, 4, 24), np.int32)), sa.DTypeError, "q"),
        (dict(k=np.zeros((2, 70, 2, 24))), sa.DTypeError, "k"),
        (dict(k=np.zeros((2, 70, 2, 24), np.float16)), sa.DTypeError, "k"),
        (dict(q=np.zeros((2, 70, 4, 24), ">f4")), sa.DTypeError, "q"),
        (dict(q=np.zeros((2, 70, 4, 24), object)), sa.DTypeError, "q"),
        (dict(q=np.zeros((70, 4, 24), np.float32)), sa.ShapeError, "q"),
        (dict(k=np.zeros((2, 70, 2, 25), np.float32)), sa.ShapeError, "k"),
        (dict(v=np.zeros((2, 71, 2, 24), np.float32)), sa.ShapeError, "v"),
        (dict(head_dim_v=39), sa.ShapeError, "v"),
        (dict(k=np.zeros((2, 70, 3, 24), np.float32)), sa.ArgumentError, "problem.heads_kv"),
        (dict(axes="sbhd"), sa.ArgumentError, "problem.axes"),
        (dict(scale=float("nan")), sa.ArgumentError, "problem.scale"),
        (dict(out=np.zeros((2, 70, 4, 24), np.float32)), sa.ShapeError, "out"),
        (dict(q=None), sa.DTypeError, "q"),
        (dict(k=None), sa.DTypeError, "k"),
        (dict(k="text"), sa.DTypeError, "k"),
        (dict(q=np.ma.zeros((2, 70, 4, 24), np.float32)), sa.DTypeError, "q"),
        (dict(axes=3), sa.ArgumentError, "problem.axes"),
        (dict(scale="large"), sa.DTypeError, "problem.scale"),
        (dict(scale=""), sa.DTypeError, "problem.scale"),
        (dict(softcap=np.ones(3)), sa.DTypeError, "problem.softcap"),
        (dict(softcap=[1, 2]), sa.DTypeError, "problem.softcap"),
        (dict(q_offset=1.5), sa.DTypeError, "problem.q_offset"),
        (dict(q_offset=1 << 70), sa.ArgumentError, "problem.q_offset"),
        (dict(q_offset=[]), sa.DTypeError, "problem.q_offset"),
        (dict(axes=["bshd"]), sa.ArgumentError, "problem.axes"),
        (dict(v=None, head_dim_v=[16]), sa.DTypeError, "problem.head_dim_v"),
        (dict(v=None, head_dim_v="16"), sa.DTypeError, "problem.head_dim_v"),
        (dict(context="cpu"), sa.DTypeError, "context"),
        (dict(pattern="wind"), sa.FormatError, "text"),
        (dict(pattern="causal\0 junk"), sa.FormatError, "text"),
    ],
)
def test_errors_are_typed_and_name_the_argument(change, kind, argument):
    q, k, v, _ = operands()
    given = {"q": q, "k": k, "v": v, "pattern": TEXT, **change}
    with pytest.raises(kind) as caught:
        sa.attention(**given)
    assert caught.value.argument == argument


def test_plans_say_what_they_do():
    q, k, v, dout = operands()
    with pytest.raises(sa.ShapeError, match="accepted: head_dim_v 39"):
        sa.plan(TEXT, q, k, v, head_dim_v=39)
    forward_only = sa.plan(TEXT, q, k, v)
    with pytest.raises(sa.ArgumentError):
        forward_only.backward(q, k, v, dout, np.zeros((2, 4, 70), np.float32), dout)
    with pytest.raises(sa.ArgumentError):
        forward_only.workspace(backward=True)
    plan = sa.plan(TEXT, q, k, v, backward=True)
    assert plan.workspace() >= 0 and plan.workspace(backward=True) >= 0
    pairs = sa.parse(TEXT).stats(sa.Extent(70, batch=2, heads=4)).pairs
    assert plan.stats().pairs == pairs and plan.stats().flops_forward == 2 * (24 + 40) * pairs
    assert plan.kernel() in sa.kernels() and plan.kernel(backward=True) in sa.kernels()
    assert plan.kernel() in plan.explain() and TEXT in plan.explain()
    assert len(plan.explain(all=True).splitlines()) > len(plan.explain().splitlines())
    with pytest.raises(sa.ArgumentError):
        forward_only.kernel(backward=True)


def test_tf32_changes_nothing_on_a_cpu():
    q, k, v, dout = operands()
    allowed, exact = (sa.plan(TEXT, q, k, v, backward=True, tf32=tf32) for tf32 in (True, False))
    assert allowed.kernel() == exact.kernel() and allowed.kernel(backward=True) == exact.kernel(backward=True)
    assert "f32 or TF32" in allowed.explain() and "TF32" not in exact.explain()
    half = sa.Plan(TEXT, heads_q=2, seq_q=8, head_dim=8, dtype=np.float16, tf32=True)
    assert "TF32" not in half.explain()
    for one, other in zip(run(q, k, v, dout, tf32=True), run(q, k, v, dout)):
        np.testing.assert_array_equal(one, other)


def test_plan_outlives_pattern_and_context():
    arrays = operands()
    plan = sa.plan(sa.parse(TEXT), *arrays[:3], context=sa.Context(threads=1, plan_cache=-1))
    gc.collect()
    np.testing.assert_array_equal(plan.forward(*arrays[:3]), sa.attention(*arrays[:3], TEXT))


def test_kept_plans_are_limited_in_bytes(monkeypatch):
    """Of masks that are new in each call, as many stay as have room; a small plan leaves them all there."""
    monkeypatch.setattr(_plans, "_BYTES_A_PLAN", 2048)  # 64 times that is room for three masks of 32 KiB
    context, q = sa.Context("cpu", threads=1), np.ones((1, 512, 1, 8), np.float32)
    random, kept = np.random.default_rng(0), []
    for _ in range(12):
        pattern = sa.mask(random.random((512, 512)) < 0.5)
        kept.append(weakref.ref(pattern))
        sa.attention(q, q, q, pattern, context=context)
        del pattern
        sa.attention(q, q, q, "causal", context=context)
    alive = [pattern() is not None for pattern in kept]
    assert 1 <= sum(alive) <= 3 and alive[-1]


def test_a_plan_beyond_the_room_is_kept(monkeypatch):
    monkeypatch.setattr(_plans, "_BYTES_A_PLAN", 1)
    context, q = sa.Context("cpu", threads=1), np.ones((1, 512, 1, 8), np.float32)
    pattern = sa.mask(np.random.default_rng(0).random((512, 512)) < 0.5)
    for _ in range(3):
        sa.attention(q, q, q, pattern, context=context)
    assert context._look_up.cache_info().hits == 2


def test_results_do_not_depend_on_threads():
    arrays = operands(seq_q=300, seq_k=300)
    for one, other in zip(
        run(*arrays, context=sa.Context(threads=1)), run(*arrays, context=sa.Context("cpu", threads=3))
    ):
        np.testing.assert_array_equal(one, other)


def test_python_threads_share_a_plan():
    arrays = [operands(seed=seed) for seed in range(4)]
    plan = sa.plan(TEXT, *arrays[0][:3], backward=True)
    expected = [run(*some) for some in arrays]
    wrong = []

    def work(n):
        q, k, v, dout = arrays[n]
        for _ in range(20):
            out, lse = plan.forward(q, k, v, return_lse=True)
            found = (out, lse, *plan.backward(q, k, v, out, lse, dout))
            wrong.extend(n for one, other in zip(found, expected[n]) if not np.array_equal(one, other))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_a_forked_child_computes_the_same():
    q, k, v, _ = operands()
    expected = sa.attention(q, k, v, TEXT)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(sa.attention(q, k, v, TEXT), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


MASKS_OF_KEYS = {
    "padding": np.arange(40) < np.array([40, 13])[:, None, None, None],
    "padding in front": np.arange(40) >= np.array([0, 13])[:, None, None, None],
    "holes": np.arange(40)[None] % 3 > 0,
    "by head": np.random.default_rng(8).random((2, 4, 1, 40)) < 0.6,
    "nothing": np.zeros((1, 40), bool),
}


@pytest.mark.parametrize("name", MASKS_OF_KEYS)
def test_a_mask_of_keys_serves_all_queries(name):
    mask, random = MASKS_OF_KEYS[name], np.random.default_rng(9)
    q, k = (random.standard_normal((2, 40, heads, 16), np.float32) for heads in (4, 2))
    whole = np.broadcast_to(mask, (2, 4, 40, 40))
    expected, lse = sa.attention(q, k, k, whole, return_lse=True)
    np.testing.assert_array_equal(sa.attention(q, k, k, mask), expected)
    np.testing.assert_array_equal(sa.plan(mask, q, k, k).forward(q, k, k), expected)
    np.testing.assert_array_equal(sparseattn.dlpack.attention(q, k, k, mask), expected)
    found = sa.attention_backward(q, k, k, expected, lse, expected, mask)
    for one, other in zip(found, sa.attention_backward(q, k, k, expected, lse, expected, whole)):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("keys", [39, 41])
def test_a_mask_of_other_keys_is_refused(keys):
    q = np.zeros((2, 40, 4, 16), np.float32)
    for mask in (np.ones((2, 1, 1, keys), bool), np.ones((1, keys), bool), np.ones((2, 4, 1, keys), bool)):
        for attend in (sa.attention, sparseattn.dlpack.attention, lambda q, k, v, mask: sa.plan(mask, q, k, v)):
            with pytest.raises(sa.ShapeError) as caught:
                attend(q, q, q, mask)
            assert caught.value.argument == "pattern" and f"{keys}]" in str(caught.value)


def test_a_refused_call_leaves_no_operand_behind():
    q, k, v, refused = np.random.default_rng(3).standard_normal((4, 1, 64, 2, 16), np.float32)
    plan = sa.plan("causal", q, k, v)
    right = plan.forward(q, k, v)
    for other in (np.asfortranarray(refused), refused.astype(np.float64)):
        with pytest.raises(sa.DTypeError):
            plan.forward(other, k, v.astype(">f4"))
        np.testing.assert_array_equal(plan.forward(q, k, v), right)


def test_plans_and_contexts_say_what_they_are():
    context = sa.Context("cpu", threads=2)
    assert repr(context) == "Context(device='cpu', threads=2, plan_cache=0)"
    plan = sa.Plan("causal", heads_q=4, heads_kv=2, seq_q=8, head_dim=16, context=context)
    assert repr(plan) == f"<Plan of causal: q [1, 8, 4, 16], k [1, 8, 2, 16], float32, axes bshd, {plan.kernel()}>"


def test_dtypes_that_are_refused_are_told_from_what_the_argument_takes():
    q, k, v, _ = operands()
    floats = "float32, float16, bfloat16 of ml_dtypes, float64"
    for argument, accepted, call in [
        ("q", f"{floats}, float8_e4m3fn of ml_dtypes", lambda: sa.attention(q.astype(complex), k, v, TEXT)),
        ("k", f"{floats}, float8_e4m3fn of ml_dtypes", lambda: sa.attention(q, k.astype(">f4"), v, TEXT)),
        ("out", floats, lambda: sa.attention(q, k, v, TEXT, out=np.empty((2, 70, 4, 24), complex))),
        ("sink_logits", "float32", lambda: sa.attention(q, k, v, TEXT, sink_logits=np.zeros(4, complex))),
        ("row_ptr", "int32, int64", lambda: sa.csr(np.zeros(5, complex), np.zeros(0, int), 4)),
        ("mask", "bool, uint8", lambda: sa.mask(np.zeros((4, 4), complex))),
    ]:
        with pytest.raises(sa.DTypeError, match=f"{argument} .*accepted: {accepted}, in the machine") as caught:
            call()
        assert caught.value.argument == argument


@pytest.mark.parametrize(
    "made",
    [
        sa.Context("cpu"),
        sa.Plan("causal", heads_q=2, seq_q=8, head_dim=8),
        sa.Sharding("causal", 2, 1, seq=64, heads_q=2, head_dim=8),
    ],
    ids=lambda made: type(made).__name__,
)
def test_copies_are_the_thing_itself_and_nothing_is_pickled(made):
    assert copy.copy(made) is copy.deepcopy({"in": made})["in"] is made
    with pytest.raises(TypeError, match=f"a {type(made).__name__} is not pickled; accepted: patterns"):
        pickle.dumps([made])


@pytest.mark.parametrize(
    "call, kind, argument",
    [
        (lambda: sa.Plan("full", heads_q=2.0, seq_q=8, head_dim=8), sa.DTypeError, "problem.heads_q"),
        (lambda: sa.Plan("full", heads_q=2, seq_q=8, head_dim=8, scale="1"), sa.DTypeError, "problem.scale"),
        (lambda: sa.Plan("full", heads_q=2, seq_q=8, head_dim=8, dtype="floaty"), sa.DTypeError, "problem.dtype"),
        (lambda: sa.Plan("full", heads_q=2, seq_q=8, head_dim=8, dtype=None), sa.DTypeError, "problem.dtype"),
        (lambda: sa.Plan("full", heads_q=2, seq_q=8, head_dim=8, context=3), sa.DTypeError, "context"),
        (lambda: sa.Plan("full", heads_q=2, seq_q=8, head_dim=8, starts=np.zeros(1, int)), sa.DTypeError, "starts"),
        (lambda: sa.Plan("full", heads_q=2, seq_q=8, head_dim=8, sink_logits=np.ones(2)), sa.DTypeError, "sink_logits"),
        (lambda: sa.Context("cpu", threads="4"), sa.DTypeError, "options.cpu_threads"),
        (lambda: sa.Context("cpu", threads=1 << 40), sa.ArgumentError, "options.cpu_threads"),
        (lambda: sa.Context("cpu", plan_cache=1 << 70), sa.ArgumentError, "options.plan_cache"),
    ],
)
def test_numbers_are_typed_and_named(call, kind, argument):
    with pytest.raises(kind, match="accepted: ") as caught:
        call()
    assert caught.value.argument == argument


def test_contexts_refuse_what_is_not_there():
    for device in ("tpu", "cuda:x", "cuda:²", "cuda:9999999999", "cpu:", 3):
        with pytest.raises(sa.ArgumentError) as caught:
            sa.Context(device)
        assert caught.value.argument == "options.device"
    with pytest.raises(sa.ArgumentError) as caught:
        sa.Context("cpu", threads=-1)
    assert caught.value.argument == "options.cpu_threads"
    assert sa.default_context() is sa.default_context()


def test_introspection():
    assert sa.version() == sa.__version__ and sa.version().count(".") == 2
    assert json.loads(sa.build_json()) and any(sa.kernels().values())


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_q": 0}, {"seq_k": 0}, {"batch": 0, "seq_q": 0, "seq_k": 0}])
@pytest.mark.parametrize("more", [{}, {"sink_logits": np.float32([3, -1, 90, 0])}])
def test_empty_batches(sizes, more):
    q, k, v, dout = operands(**sizes)
    out, lse = sa.attention(q, k, v, TEXT, return_lse=True, **more)
    assert out.shape == dout.shape and not out.any()
    z = more.get("sink_logits", np.full(4, -np.inf))
    np.testing.assert_array_equal(lse, np.broadcast_to(z[None, :, None], lse.shape))
    gradients = sa.attention_backward(q, k, v, out, lse, dout, TEXT, **more)
    for gradient, array in zip(gradients, (q, k, v, z)):
        assert gradient.shape == array.shape and not gradient.any()


@pytest.mark.parametrize("backward", [False, True])
def test_ctrl_c_ends_a_run(backward):
    """The reference kernels would take a minute."""
    q, k, v, dout = operands(batch=1, seq_q=4096, seq_k=4096)
    plan = sa.plan("full", q, k, v, reference=True, backward=True)
    lse = np.zeros((1, 4, 4096), np.float32)
    with ctrl_c():
        plan.backward(q, k, v, dout, lse, dout) if backward else plan.forward(q, k, v)
    q, k, v, dout = operands()
    assert np.isfinite(sa.attention(q, k, v, TEXT)).all()  # the context lives on


def test_ctrl_c_ends_what_makes_a_plan():
    """Lists at random, of which no two are alike: some twenty seconds."""
    seq, rng = 1 << 18, np.random.default_rng(0)
    keys = np.arange(32) * (seq // 32) + rng.integers(0, seq // 32, (seq, 32))
    pattern = sa.csr(np.arange(seq + 1) * 32, keys.ravel(), seq)
    with ctrl_c():
        sa.Plan(pattern, heads_q=1, seq_q=seq, head_dim=64, backward=True)
    q, k, v, dout = operands()
    assert np.isfinite(sa.attention(q, k, v, TEXT)).all()  # the context lives on


@pytest.mark.parametrize("milliseconds", [0, 3, 10, 20, 40])
def test_ctrl_c_ends_an_import(milliseconds):
    """At whatever it is: a process that has not imported the package by then is ended by the signal, at once."""
    hear = "from signal import *; signal(SIGINT, default_int_handler); pthread_sigmask(SIG_UNBLOCK, [SIGINT])\n"
    program = "import numpy, sys; print('begin', flush=True); import sparseattn; print('end', flush=True); input()"
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    child = subprocess.Popen([sys.executable, "-c", hear + program], **pipes, text=True)
    assert child.stdout.readline() == "begin\n"
    time.sleep(milliseconds / 1000)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=30)  # who goes on reads the end of what it waits for: an EOFError
    assert child.returncode == -signal.SIGINT and "KeyboardInterrupt" in said, said


def test_runs_beside_the_main_thread_are_asked_too():
    q, k, v, _ = operands(batch=1, seq_q=1024, seq_k=1024)
    plan, found = sa.plan("full", q, k, v, reference=True), []
    worker = threading.Thread(target=lambda: found.append(plan.forward(q, k, v)))
    worker.start()
    worker.join()
    assert found and np.isfinite(found[0]).all()
