# SPDX-License-Identifier: MIT
"""Operands of float8_e4m3fn, each row with a scale, against the oracle on what they stand for."""

import numpy as np
import oracle
import pytest
from conftest import Array, in_process

import sparseattn as sa

ml_dtypes = pytest.importorskip("ml_dtypes")
FLOAT8, BFLOAT16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
TEXT = "causal & (sink(2) | window(20,0) | strided(7))"
PATTERNS = [
    TEXT,
    "full",
    "residue(7,3) & causal",
    "dilated(20,0,3) | block_diagonal(8)",
    "per_head([0,1,0,1],causal,window(5,5))",
]
BOUND = 2e-2  # products of elements and scales may be rounded to bfloat16, and out is of it
NAMES = ("q", "k", "v")


def quantize(x):
    """Elements, and scales of rows: what is largest in a row becomes 448."""
    scales = np.abs(x).max(-1, initial=0) / np.float32(448)
    return (x / scales[..., None]).astype(FLOAT8), scales


def one_scale_a_head(x):
    """Elements, and scales whose strides are 0 but for the heads', bshd."""
    heads = np.linspace(1 / 64, 1 / 16, x.shape[2], dtype=np.float32)
    return (x / heads[:, None]).astype(FLOAT8), np.broadcast_to(heads, x.shape[:3])


def without_scales(x):
    return x.astype(FLOAT8), None


def operands(kind=quantize, batch=2, seq_q=70, seq_k=70, heads_q=4, heads_kv=2, head_dim=24, head_dim_v=40):
    """float8 q, k and v in bshd; their scales by name; and what they stand for."""
    rng = np.random.default_rng(5)
    shapes = [(seq_q, heads_q, head_dim), (seq_k, heads_kv, head_dim), (seq_k, heads_kv, head_dim_v)]
    x = [rng.standard_normal((batch, *shape), np.float32) for shape in shapes]
    if kind is quantize:  # of many sizes, so that a scale of another row is seen
        x = [rows * np.exp2(rng.integers(-6, 1, rows.shape[:3]))[..., None].astype(np.float32) for rows in x]
    elements, scales = zip(*map(kind, x))
    stand_for = [e.astype(np.float64) * (1 if s is None else s[..., None]) for e, s in zip(elements, scales)]
    return list(elements), dict(zip((f"{name}_scales" for name in NAMES), scales)), stand_for


def truth(stand_for, text, scale=None, softcap=None, sink=None, q_offset=None):
    """out in bshd, lse and the largest scores."""
    q, k, v = (x.swapaxes(1, 2) for x in stand_for)
    mask = text
    if isinstance(text, str):
        mask = oracle.to_mask(text, oracle.Extent(q.shape[2], k.shape[2], q.shape[0], q.shape[1], q_offset))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = oracle.attention_forward(q, k, v, mask, scale, softcap, sink)
    return out.swapaxes(1, 2), lse, oracle.scores(q, k, mask, scale, softcap).max(-1, initial=-np.inf)


def assert_close(found, expected, bound=BOUND):
    assert found[0].dtype == BFLOAT16 and all(x.dtype == np.float32 for x in found[1:])
    for one, other in zip(found, expected):
        one = one.astype(np.float64)
        assert one.shape == other.shape
        np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))
        finite = np.isfinite(other)
        assert np.abs(one[finite] - other[finite]).max(initial=0) < bound * np.abs(other[finite]).max(initial=1)


def in_axes(axes, x):
    """bshd arrays, and scales, which lack the last axis, in these axes."""
    return x if axes == "bshd" or x is None else x[0] if axes == "thd" else x.swapaxes(1, 2)


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("kind", [quantize, one_scale_a_head, without_scales])
@pytest.mark.parametrize("axes", ["bshd", "bhsd"])
def test_patterns_and_axes(text, kind, axes):
    x, scales, stand_for = operands(kind)
    scales = {name: in_axes(axes, s) for name, s in scales.items()}
    found = sa.attention(
        *(in_axes(axes, e) for e in x), text, axes=axes, **scales, return_lse=True, return_max_logits=True
    )
    assert_close((in_axes(axes, found[0]), *found[1:]), truth(stand_for, text))


@pytest.mark.parametrize("kind", [quantize, one_scale_a_head, without_scales])
def test_packed_sequences(kind):
    x, scales, stand_for = operands(kind, batch=1)
    scales = {name: in_axes("thd", s) for name, s in scales.items()}
    pattern = sa.per_document("causal", [0, 25, 70])
    out, lse = sa.attention(*(e[0] for e in x), pattern, axes="thd", **scales, return_lse=True)
    assert_close((out[None], lse[None]), truth(stand_for, str(pattern)))


@pytest.mark.parametrize(
    "sizes",
    [
        dict(seq_q=5, seq_k=90),
        dict(seq_q=90, seq_k=33),
        dict(heads_q=6, heads_kv=1),
        dict(heads_kv=4),
        dict(head_dim=128, head_dim_v=128, seq_q=300, seq_k=300, batch=1),
        dict(head_dim=1, head_dim_v=3),
        dict(seq_q=1, seq_k=1),
    ],
)
@pytest.mark.parametrize("reference", [False, True])
def test_sizes(sizes, reference):
    x, scales, stand_for = operands(**sizes)
    found = sa.attention(*x, TEXT, **scales, return_lse=True, reference=reference)
    assert_close(found, truth(stand_for, TEXT))


def test_options():
    x, scales, stand_for = operands()
    sinks = np.float32([0.5, -2, 1, 3])
    options = {"scale": 0.4, "softcap": 1.5, "q_offset": 3}
    found = sa.attention(*x, TEXT, **scales, **options, sink_logits=sinks, return_lse=True)
    assert_close(found, truth(stand_for, TEXT, **options, sink=sinks))
    found = sa.attention(*x, TEXT, **scales, deterministic=True, tf32=True, return_lse=True)
    assert_close(found, truth(stand_for, TEXT))


@pytest.mark.parametrize("given", [{"q_scales"}, {"k_scales"}, {"v_scales"}, {"q_scales", "v_scales"}])
def test_scales_that_are_not_given_are_1(given):
    x, scales, _ = operands(one_scale_a_head)
    scales = {name: s if name in given else None for name, s in scales.items()}
    stand_for = [e.astype(np.float64) * (1 if s is None else s[..., None]) for e, s in zip(x, scales.values())]
    out = sa.attention(*x, TEXT, scale=1e-3, **scales)  # elements are of up to 448
    assert_close((out,), truth(stand_for, TEXT, scale=1e-3))


def test_values_in_keys():
    x, scales, stand_for = operands()
    del scales["v_scales"]
    in_keys = [*stand_for[:2], stand_for[1][..., :16]]
    found = sa.attention(x[0], x[1], None, TEXT, head_dim_v=16, **scales, return_lse=True)
    assert_close(found, truth(in_keys, TEXT))
    with pytest.raises(sa.ArgumentError, match="v_scales") as caught:
        sa.attention(x[0], x[1], None, TEXT, head_dim_v=16, v_scales=scales["k_scales"])
    assert caught.value.argument == "v_scales"


@pytest.mark.parametrize("block", [1, 8])
def test_lists_of_a_call(block):
    x, scales, stand_for = operands(seq_q=64, seq_k=64)
    rng = np.random.default_rng(2)
    rows = 64 // block
    indices = rng.integers(-1, rows + 1, (2, rows, 2, 5))
    counts = rng.integers(0, 6, (2, rows, 2))
    pattern = sa.runtime_blocks(8, 8, 5) if block == 8 else sa.runtime_tokens(5)
    times = oracle.listed(indices, counts, 4, 64, 64, block, block)
    found = sa.attention(*x, pattern, indices=indices, index_counts=counts, **scales, return_lse=True)
    assert_close(found, truth(stand_for, times))


def test_rows_without_keys():
    x, scales, stand_for = operands()
    found = sa.attention(*x, "window(3,0) - sink(10)", **scales, return_lse=True, return_max_logits=True)
    assert not found[0][:, :10].any() and np.isneginf(found[1][:, :, :10]).all()
    assert_close(found, truth(stand_for, "window(3,0) - sink(10)"))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_q": 0}, {"seq_k": 0}, {"batch": 0, "seq_q": 0, "seq_k": 0}])
@pytest.mark.parametrize("more", [{}, {"sink_logits": np.float32([3, -1, 90, 0])}])
def test_empty_batches(sizes, more):
    x, scales, _ = operands(one_scale_a_head, **sizes)
    for given in (scales, {}):
        out, lse = sa.attention(*x, TEXT, **given, return_lse=True, **more)
        assert out.shape == (*x[0].shape[:3], 40) and out.dtype == BFLOAT16 and not out.any()
        z = more.get("sink_logits", np.full(4, -np.inf))
        np.testing.assert_array_equal(lse, np.broadcast_to(z[None, :, None], lse.shape))


def test_strides_of_operands_and_scales():
    x, scales, _ = operands()
    right = sa.attention(*x, TEXT, **scales)

    def spread(array):
        memory = np.zeros((*array.shape[:1], 2 * array.shape[1], *array.shape[2:]), array.dtype)
        memory[:, ::2] = array
        return memory[:, ::2]

    def backwards(array):
        return np.ascontiguousarray(array[:, ::-1])[:, ::-1]

    for change in (spread, backwards, np.asfortranarray):
        found = sa.attention(*map(change, x), TEXT, **{name: change(s) for name, s in scales.items()})
        np.testing.assert_array_equal(found, right)


def test_out_is_written_in_place():
    x, scales, _ = operands()
    wide = np.full((2, 70, 8, 40), 7, BFLOAT16)
    out = wide[:, :, ::2]
    assert sa.attention(*x, TEXT, **scales, out=out) is out
    np.testing.assert_array_equal(out, sa.attention(*x, TEXT, **scales))
    assert (wide[:, :, 1::2] == 7).all()
    for dtype in (FLOAT8, np.float32):
        with pytest.raises(sa.DTypeError, match="out is .*accepted: bfloat16") as caught:
            sa.attention(*x, TEXT, out=np.zeros((2, 70, 4, 40), dtype))
        assert caught.value.argument == "out"


def test_plans_read_the_arrays_and_scales_of_each_call():
    x, scales, stand_for = operands()
    plan = sa.plan(TEXT, *x)
    assert plan.dtype == FLOAT8 and "from float8_e4m3fn" in plan.explain()
    changed = {name: s * 2 for name, s in scales.items()}
    twice = [2 * e for e in stand_for]
    # Without scales, scores are of up to a million, whose last digits depend on the kernel: the same one, here.
    unscaled, of_values = sa.attention(*x, TEXT), sa.attention(*x, TEXT, v_scales=scales["v_scales"])
    for _ in range(2):
        found = plan.forward(*x, **scales, return_lse=True, return_max_logits=True)
        assert_close(found, truth(stand_for, TEXT))
        assert_close((plan.forward(*x, **changed),), truth(twice, TEXT))
        np.testing.assert_array_equal(plan.forward(*x, v_scales=scales["v_scales"]), of_values)
        np.testing.assert_array_equal(plan.forward(*x), unscaled)
        np.testing.assert_array_equal(plan.forward(*(e.copy() for e in x)), unscaled)
    same = sa.Plan(
        TEXT, batch=2, heads_q=4, heads_kv=2, seq_q=70, head_dim=24, head_dim_v=40, dtype="float8_e4m3fn"
    )
    np.testing.assert_array_equal(same.forward(*x, **scales), found[0])


@pytest.mark.parametrize("text", [TEXT, "full", "residue(7,3) & causal"])
@pytest.mark.parametrize("in_keys", [False, True])
def test_gradients_are_those_of_what_rows_stand_for(text, in_keys):
    """Bit by bit those of bfloat16 of the same numbers, which has them: scales are powers of two."""
    x, scales, _ = operands()
    scales = {name: np.exp2(np.floor(np.log2(np.abs(s)))).astype(np.float32) for name, s in scales.items()}
    narrow = [(e.astype(np.float32) * s[..., None]).astype(BFLOAT16) for e, s in zip(x, scales.values())]
    options = {"head_dim_v": 16} if in_keys else {}
    if in_keys:
        x[2] = narrow[2] = scales["v_scales"] = None
    sinks = np.array([0.5, -2, 1, 3], np.float32)
    out, lse = sa.attention(*x, text, **scales, **options, sink_logits=sinks, return_lse=True)
    more = {"sink_logits": sinks, "dlse": np.sin(lse), **options}
    dout = np.cos(out.astype(np.float32)).astype(BFLOAT16)
    expected = sa.attention_backward(*narrow, out, lse, dout, text, **more)
    plan = sa.plan(text, *x, backward=True, sink_logits=True, **options)
    for found in (
        sa.attention_backward(*x, out, lse, dout, text, **scales, **more),
        plan.backward(*x, out, lse, dout, dlse=more["dlse"], sink_logits=sinks, **scales),
    ):
        assert len(found) == 4 and found[0].dtype == BFLOAT16
        for one, other in zip(found, expected):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_array_equal(one, other)


def test_plans_are_found_again():
    x, scales, _ = operands()
    context = sa.Context("cpu")
    right = sa.attention(*x, TEXT, **scales, context=context)
    bf16 = [e.astype(BFLOAT16) for e in x]
    unscaled = sa.attention(*bf16, TEXT, context=context)  # of the same shapes, and another plan
    for _ in range(3):
        np.testing.assert_array_equal(sa.attention(*x, TEXT, **scales, context=context), right)
        np.testing.assert_array_equal(sa.attention(*x, TEXT, context=context), unscaled)
        np.testing.assert_array_equal(sa.attention(*bf16, TEXT, context=context), unscaled)
    assert context._look_up.cache_info().misses == 2


def test_what_is_wrong_is_named():
    x, scales, _ = operands()
    q, k, v = x
    wide = [e.astype(np.float32) for e in x]
    bf16 = [e.astype(BFLOAT16) for e in x]
    plan, of_floats = sa.plan(TEXT, *x), sa.plan(TEXT, *wide)
    sizes = {"heads_q": 2, "seq_q": 8, "head_dim": 8, "dtype": FLOAT8}
    out, lse = sa.attention(*x, TEXT, return_lse=True)
    right = sa.attention(*x, TEXT, **scales)

    wide_out = out.astype(np.float32)

    def attend(q=q, k=k, v=v, **changed):
        return sa.attention(q, k, v, TEXT, **{**scales, **changed})

    def differentiate(out=out, dout=out, **changed):
        return sa.attention_backward(*x, out, lse, dout, TEXT, **{**scales, **changed})

    unscaled = dict.fromkeys(scales)
    calls = [
        (sa.DTypeError, "k", "bfloat16; accepted: float8_e4m3fn", lambda: attend(k=bf16[1])),
        (sa.DTypeError, "v", "float32; accepted: float8_e4m3fn", lambda: attend(v=wide[2])),
        (sa.DTypeError, "k", "float8_e4m3fn; accepted: bfloat16", lambda: attend(bf16[0], **unscaled)),
        (sa.DTypeError, "v", "float8_e4m3fn; accepted: float32", lambda: attend(*wide[:2], **unscaled)),
        (sa.DTypeError, "k", "float8_e5m2.*accepted: ", lambda: attend(k=k.astype(ml_dtypes.float8_e5m2))),
        (sa.DTypeError, "q", "float8_e5m2.*accepted: ", lambda: attend(q.astype(ml_dtypes.float8_e5m2))),
        (sa.DTypeError, "q_scales", "float32", lambda: attend(q_scales=scales["q_scales"].astype(np.float64))),
        (sa.DTypeError, "k_scales", "float32", lambda: attend(k_scales=scales["k_scales"].astype(BFLOAT16))),
        (sa.DTypeError, "v_scales", "float32", lambda: attend(v_scales=v[..., 0])),
        (sa.DTypeError, "q_scales", "accepted: an array", lambda: attend(q_scales="text")),
        (sa.ShapeError, "q_scales", "2, 70, 4", lambda: attend(q_scales=scales["k_scales"])),
        (sa.ShapeError, "k_scales", "2, 70, 2", lambda: attend(k_scales=scales["k_scales"][:, 1:])),
        (sa.ShapeError, "v_scales", "2, 70, 2", lambda: attend(v_scales=scales["v_scales"][..., None])),
        (sa.ShapeError, "q_scales", "2, 70, 4", lambda: attend(q_scales=np.float32(1))),
        (sa.ShapeError, "k", "24", lambda: attend(k=k[..., 1:])),
        (sa.ArgumentError, "q_scales", "not of float8", lambda: attend(*wide)),
        (sa.ArgumentError, "k_scales", "of float8", lambda: attend(*wide, q_scales=None)),
        (sa.ArgumentError, "v_scales", "of float8", lambda: of_floats.forward(*wide, v_scales=scales["v_scales"])),
        (sa.ShapeError, "q_scales", "2, 70, 4", lambda: plan.forward(*x, q_scales=scales["q_scales"].swapaxes(1, 2))),
        (sa.DTypeError, "q", "accepted: float8_e4m3fn", lambda: plan.forward(*bf16)),
        (sa.DTypeError, "problem.cache_dtype", "accepted: ", lambda: sa.plan(TEXT, bf16[0], k, v)),
        (sa.DTypeError, "dout", "accepted: bfloat16", lambda: differentiate(dout=wide_out)),
        (sa.DTypeError, "out", "accepted: bfloat16", lambda: differentiate(out=wide_out)),
        (sa.DTypeError, "k_scales", "float32", lambda: differentiate(k_scales=scales["k_scales"].astype(np.float64))),
        (sa.ShapeError, "q_scales", "2, 70, 4", lambda: differentiate(q_scales=scales["k_scales"])),
        (sa.ArgumentError, "plan", "backward", lambda: plan.backward(*x, out, lse, out)),
        (sa.UnsupportedError, "problem.dtype", "cache_dtype of float8", lambda: sa.plan(TEXT, *x, starts=True)),
        (sa.UnsupportedError, "problem.dtype", "STARTS", lambda: sa.Plan("full", **sizes, starts=True)),
        (sa.DTypeError, "q", "float8_e4m3fn", lambda: attend(q.view(np.uint8))),
    ]
    for number, (kind, argument, words, call) in enumerate(calls):
        with pytest.raises(kind, match=words) as caught:
            call()
        assert caught.value.argument == argument, (number, caught.value)
    np.testing.assert_array_equal(attend(), right)


def test_libraries_that_know_only_dlpack_have_no_float8():
    """NumPy itself exports neither float8 nor bfloat16."""
    x, scales, _ = operands()
    wide = [Array(e.astype(np.float32)) for e in x]
    for name, s in scales.items():
        with pytest.raises(sa.UnsupportedError, match=f"argument {name}.*sparseattn.dlpack") as caught:
            sa.attention(*wide, TEXT, **{name: s})
        assert caught.value.argument == name
    with pytest.raises(sa.DTypeError) as caught:
        sa.attention(*map(Array, x), TEXT)
    assert caught.value.argument == "q"


def test_explain_knows_float8():
    said = in_process("explain", "causal", "--dtype", "float8_e4m3fn").stdout
    assert "from float8_e4m3fn" in said
