# SPDX-License-Identifier: MIT
"""A sequence on several ranks, which take turns in one process: the results and gradients of one."""

import os
import subprocess
import sys

import numpy as np
import pytest

import sparseattn as sa

SEQ, HEADS, DIM = 600, 2, 16
SPLITS = [(3, "contiguous"), (2, "zigzag"), (2, [[(500, 600), (0, 90)], [(90, 500)]])]


def carry(all_ranks, sent, received, is_back=False):
    """What the transport does: from `sent` of each rank to `received` of the others, or back."""
    for one in all_ranks:
        for other in all_ranks:
            out, come = one.peer(other.rank), other.peer(one.rank)
            there = sent[one.rank][out.back_sent if is_back else out.sent]
            here = received[other.rank][come.back_received if is_back else come.received]
            assert there.size == here.size and (one.rank != other.rank or there.size == 0)
            if is_back:
                there[:] = here
            else:
                here[:] = there


def put_own(one, seen, own, axis):
    """A rank's own rows to their places among the keys of its plan."""
    at = lambda begin, tokens: (*[slice(None)] * axis, slice(begin, begin + tokens))
    row = 0
    for place, (begin, end) in zip(one.places, one.ranges):
        for x, to in zip(own, seen):
            if x is not None:
                to[at(place, end - begin)] = x[at(row, end - begin)]
        row += end - begin


def run(pattern, split, axes="bshd", value_in_key=False, **options):
    """out, dq, dk and dv of all ranks and, of the same tokens, those of one."""
    rng = np.random.default_rng(7)
    dtype = options.get("dtype", np.float32)
    make = lambda: rng.standard_normal((1, SEQ, HEADS, DIM)).astype(dtype)
    q, k, v, dout = make(), make(), make(), make()
    if axes == "bhsd":
        q, k, v, dout = (x.transpose(0, 2, 1, 3) for x in (q, k, v, dout))
    if axes == "thd":
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
    v = None if value_in_key else v
    axis = {"bshd": 1, "bhsd": 2, "thd": 0}[axes]
    sizes = {"heads_q": HEADS, "head_dim": DIM, "axes": axes, "value_in_key": value_in_key, "backward": True, **options}
    one = sa.Plan(pattern, seq_q=SEQ, **sizes)
    out, lse = one.forward(q, k, v, return_lse=True)
    want = out, *one.backward(q, k, v, out, lse, dout)[:3]
    ranks, how = split
    every = [sa.Sharding(pattern, ranks, rank, split=how, seq=SEQ, **sizes) for rank in range(ranks)]
    mine = lambda x, one: None if x is None else one.local(x, axis)
    sent = [one.pack(mine(k, one), mine(v, one)) for one in every]
    received = [one.empty_received() for one in every]
    carry(every, sent, received)
    got, gradients = [], []
    for one in every:
        keys, values = one.unpack(received[one.rank], mine(k, one), mine(v, one))
        own, own_lse = one.plan.forward(mine(q, one), keys, values, return_lse=True)
        seen = one.empty_seen()
        put_own(one, seen, (mine(k, one), mine(v, one)), axis)
        one.unpack_received(received[one.rank], *seen)
        assert np.array_equal(one.plan.forward(mine(q, one), *seen), own), "keys in place"
        dq, seen_dk, seen_dv = one.plan.backward(mine(q, one), keys, values, own, own_lse, mine(dout, one))
        got.append([own, dq])
        gradients.append((seen_dk, seen_dv))
    received = [one.pack_gradients(*gradients[one.rank]) for one in every]
    sent = [one.empty_sent() for one in every]
    carry(every, sent, received, is_back=True)
    for one in every:
        sums = one.add_gradients(sent[one.rank], *gradients[one.rank])
        one.add_gradients_in_place(sent[one.rank], *gradients[one.rank])
        for apart, seen in zip(sums, gradients[one.rank]):
            assert apart is None or np.array_equal(apart, one.own_of(seen, axis)), "sums in place"
        got[one.rank] += sums
    return [(x, mine(y, one)) for one in every for x, y in zip(got[one.rank], want)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "pattern",
    ["causal & (sink(3) | window(70,0))", "block_diagonal(100)", "causal", sa.csr([0, *range(1, SEQ + 1)], [0] * SEQ, SEQ)],
)
def test_ranks_attend_as_one(pattern, split):
    for got, want in run(pattern, split):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def to_axes(x, axes):
    """Elements, or scales, of a batch of one: from bshd to these."""
    if x is None or axes == "bshd":
        return x
    return x[0] if axes == "thd" else x.swapaxes(1, 2)


def draw_float8(rng, scaled):
    """Elements of float8 and scales, float32 or None, in bshd."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    elements = rng.standard_normal((1, SEQ, HEADS, DIM)).astype(ml_dtypes.float8_e4m3fn)
    if scaled == "heads":
        return elements, np.broadcast_to(rng.uniform(0.5, 2, HEADS).astype(np.float32), (1, SEQ, HEADS))
    return elements, rng.uniform(0.3, 2, (1, SEQ, HEADS)).astype(np.float32) if scaled == "rows" else None


def run_float8(pattern, split, scaled, axes="bshd", value_in_key=False):
    """As run, of float8. Scales of rows are sent; one of a head is the same everywhere, and is not."""
    rng, names = np.random.default_rng(9), ("q_scales", "k_scales", "v_scales")
    drawn = [draw_float8(rng, scaled) for _ in names]
    (q, k, v), scales = ([to_axes(x, axes) for x in of_all] for of_all in zip(*drawn))
    if value_in_key:
        v, scales[2] = None, None
    axis = {"bshd": 1, "bhsd": 2, "thd": 0}[axes]
    dtype = q.dtype
    dout = to_axes(rng.standard_normal((1, SEQ, HEADS, DIM)).astype("bfloat16"), axes)
    sizes = {"heads_q": HEADS, "head_dim": DIM, "axes": axes, "value_in_key": value_in_key, "backward": True}
    one = sa.Plan(pattern, seq_q=SEQ, dtype=dtype, **sizes)
    given = dict(zip(names, scales))
    out, lse = one.forward(q, k, v, return_lse=True, **given)
    want = out, *one.backward(q, k, v, out, lse, dout, **given)[:3]
    ranks, how = split
    sizes |= {"seq": SEQ, "dtype": dtype, "scales": scaled == "rows"}
    every = [sa.Sharding(pattern, ranks, rank, split=how, **sizes) for rank in range(ranks)]
    mine = lambda x, one: None if x is None else one.local(x, axis)
    sent_scales = scales[1:] if scaled == "rows" else [None, None]
    held = lambda one: [mine(x, one) for x in (k, v, *sent_scales)]
    sent, received = [one.pack(*held(one)) for one in every], [one.empty_received() for one in every]
    carry(every, sent, received)
    got, gradients = [], []
    for one in every:
        seen = one.unpack(received[one.rank], *held(one))
        in_place = one.empty_seen()
        put_own(one, in_place, held(one), axis)
        one.unpack_received(received[one.rank], *in_place)
        keys, values, *seen_scales = seen
        if scaled == "heads":
            seen_scales = [None if x is None else np.repeat(x.take([0], axis), one.keys, axis) for x in scales[1:]]
        given = dict(zip(names, (mine(scales[0], one), *(seen_scales or (None, None)))))
        own, own_lse = one.plan.forward(mine(q, one), keys, values, return_lse=True, **given)
        if scaled == "rows":
            again = given | dict(zip(names[1:], in_place[2:]))
            assert np.array_equal(one.plan.forward(mine(q, one), *in_place[:2], **again), own), "keys in place"
        dq, *of_seen = one.plan.backward(mine(q, one), keys, values, own, own_lse, mine(dout, one), **given)[:3]
        got.append([own, dq])
        gradients.append(of_seen)
    received = [one.pack_gradients(*gradients[one.rank]) for one in every]
    sent = [one.empty_sent() for one in every]
    carry(every, sent, received, is_back=True)
    for one in every:
        got[one.rank] += one.add_gradients(sent[one.rank], *gradients[one.rank])
    return [(x, mine(y, one)) for one in every for x, y in zip(got[one.rank], want)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("scaled", ["rows", "heads", "never"])
def test_ranks_bring_float8(split, scaled):
    runs = [("causal & (sink(3) | window(70,0))", "bshd", False), ("block_diagonal(100)", "bhsd", False)]
    for pattern, axes, value_in_key in [*runs, ("causal", "thd", False), ("full", "bshd", True)]:
        for got, want in run_float8(pattern, split, scaled, axes, value_in_key):
            assert (got is None) == (want is None)
            if got is not None:
                assert got.dtype == want.dtype == np.dtype("bfloat16")
                got, want = got.astype(np.float32), want.astype(np.float32)
                np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * np.abs(want).max())


def test_float8_halves_what_is_sent():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    sizes = {"seq": 1024, "heads_q": HEADS, "head_dim": DIM, "backward": True}
    wide, rows, bare = (
        sa.Sharding("causal", 2, 0, **sizes, dtype=dtype, scales=scales).peer(1)
        for dtype, scales in [("bfloat16", False), (ml_dtypes.float8_e4m3fn, True), (ml_dtypes.float8_e4m3fn, False)]
    )
    length = lambda part: part.stop - part.start
    assert 2 * length(bare.sent) == length(wide.sent) == 512 * HEADS * 2 * DIM * 2
    assert length(rows.sent) == length(bare.sent) + 512 * HEADS * 2 * 4
    assert length(wide.back_sent) == length(rows.back_sent) == length(bare.back_sent) == length(wide.sent)


@pytest.mark.parametrize("axes", ["bhsd", "thd"])
def test_axes_and_options(axes):
    for options in ({"value_in_key": True, "softcap": 3.0}, {"dtype": np.float64, "scale": 0.4, "deterministic": True}):
        for got, want in run("causal & window(150,0)", SPLITS[1], axes, **options):
            assert (got is None) == (want is None)
            if got is not None:
                np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_what_goes_where():
    sizes = {"seq": 1024, "heads_q": HEADS, "head_dim": DIM}
    last = sa.Sharding("causal & window(100,0)", 4, 3, **sizes)
    assert last.ranges == [(768, 1024)] and last.tokens == 256 and last.ranges_of(1) == [(256, 512)]
    assert [last.peer(rank).tokens_received for rank in range(4)] == [0, 0, 128, 0]
    assert last.empty_received().size == 128 * HEADS * 2 * DIM * 4 and last.empty_sent().size == 0
    assert last.peer(2).received == slice(0, last.empty_received().size)
    assert "window(100,0)" in last.plan.explain()
    assert last.seen == [(640, 1024)] and last.keys == 384 and last.empty_seen()[0].shape == (1, 384, HEADS, DIM)
    sinks = sa.Sharding("causal & (sink(4) | window(100,0))", 4, 3, **sizes)
    assert sinks.seen == [(0, 128), (640, 1024)] and sinks.keys == 512
    assert sa.Sharding("runtime_tokens(4) & causal & window(100,0)", 4, 3, **sizes).seen == [(0, 1024)]
    zigzag = sa.Sharding("causal", 2, 0, split="zigzag", **sizes)
    assert zigzag.ranges == [(0, 256), (768, 1024)] and "rows([0,256,768,1024]" in zigzag.plan.explain()


def test_ranges_live_until_they_are_read():
    program = f"""
import sparseattn as sa
for _ in range(3):
    made = sa.Sharding("causal", 2, 0, seq=600, heads_q=1, head_dim=8, split={SPLITS[2][1]})
    assert made.ranges == {SPLITS[2][1][0]}
"""
    # glibc fills what is freed with other bytes, elsewhere this is one more call.
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "MALLOC_PERTURB_": "165"}, check=True)


def test_errors_of_float8():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    sizes = {"seq": 64, "heads_q": HEADS, "head_dim": DIM, "dtype": ml_dtypes.float8_e4m3fn, "backward": True}
    bare, rows = sa.Sharding("full", 2, 0, **sizes), sa.Sharding("full", 2, 0, **sizes, scales=True)
    k, scales = np.zeros((1, 32, HEADS, DIM), ml_dtypes.float8_e4m3fn), np.ones((1, 32, HEADS), np.float32)
    sent, wide, received = rows.pack(k, k, scales, scales), k.astype(np.float32), rows.empty_received()
    seen, of_v = rows.empty_seen(), "seen_v_scales"
    for call, kind, argument in [
        (lambda: sa.Sharding("full", 2, 0, **sizes | {"dtype": "f4"}, scales=True), "ArgumentError", "options.flags"),
        (lambda: bare.pack(k, k, scales, scales), "ArgumentError", "k_scales"),
        (lambda: bare.pack(wide, k), "DTypeError", "k"),
        (lambda: rows.pack(k, k), "ArgumentError", "k_scales"),
        (lambda: rows.pack(k, k, scales), "ArgumentError", "v_scales"),
        (lambda: rows.pack(k, k, scales[:, 1:], scales), "ShapeError", "k_scales"),
        (lambda: rows.pack(k, k, scales, scales.astype(np.float64)), "DTypeError", "v_scales"),
        (lambda: rows.unpack(sent[1:], k, k, scales, scales), "SparseAttentionError", "buffer_bytes"),
        (lambda: rows.unpack_received(received, *seen[:2]), "ArgumentError", "seen_k_scales"),
        (lambda: rows.unpack_received(received, wide, seen[1], *seen[2:]), "DTypeError", "seen_k"),
        (lambda: rows.unpack_received(received, *seen[:3], np.zeros((1, 64, HEADS), "S8")), "DTypeError", of_v),
        (lambda: rows.pack_gradients(*seen[:2]), "DTypeError", "seen_k"),
    ]:
        with pytest.raises(getattr(sa, kind), match="accepted: ") as caught:
            call()
        assert caught.value.argument == argument, (argument, str(caught.value))


def test_axes_of_tokens_may_count_from_the_last():
    x = np.random.default_rng(4).standard_normal((2, 64, HEADS, DIM))
    sharding = sa.Sharding("causal", 2, 1, seq=64, heads_q=HEADS, head_dim=DIM, split="zigzag")
    assert sharding.ranges == [(16, 32), (32, 48)]
    np.testing.assert_array_equal(sharding.local(x), x[:, 16:48])
    np.testing.assert_array_equal(sharding.local(x, -3), x[:, 16:48])
    np.testing.assert_array_equal(sharding.local(x.swapaxes(1, 2), 2), x.swapaxes(1, 2)[:, :, 16:48])
    seen = x[:, : sharding.keys]
    np.testing.assert_array_equal(sharding.own_of(seen, -3), sharding.own_of(seen))
    for array, axis in [(x, 4), (x, -5), (x[:, :40], 1)]:
        with pytest.raises(IndexError):
            sharding.local(array, axis)


def test_errors():
    sizes = {"seq": 64, "heads_q": HEADS, "head_dim": DIM}
    make = lambda ranks=2, rank=0, **more: sa.Sharding("full", ranks, rank, **{**sizes, **more})
    sharding = make()
    k, sent = np.zeros((1, 32, HEADS, DIM), np.float32), sharding.empty_sent()
    for call, kind, argument in [
        (lambda: make(0), sa.ArgumentError, "options.ranks"),
        (lambda: make(2, 2), sa.ArgumentError, "options.rank"),
        (lambda: make(2, "one"), sa.DTypeError, "options.rank"),
        (lambda: make(65), sa.ArgumentError, "problem.seq_q"),
        (lambda: make(split="ring"), sa.ArgumentError, "split"),
        (lambda: make(split=[(0, 32), (32, 64)]), sa.DTypeError, "split"),
        (lambda: make(split=[[(0, 32, 1)], [(32, 64)]]), sa.DTypeError, "split"),
        (lambda: make(split=None), sa.DTypeError, "split"),
        (lambda: make(split=[[(0, 64)]]), sa.ArgumentError, "split"),
        (lambda: make(split=[[(0, 64)], []]), sa.ArgumentError, "options.ranges"),
        (lambda: make(split=[[], []]), sa.ArgumentError, "options.ranges"),
        (lambda: make(split=[[(0, 30)], [(31, 64)]]), sa.ArgumentError, "options.ranges"),
        (lambda: make(starts=True), sa.UnsupportedError, "problem.flags"),
        (lambda: make(dtype="floats"), sa.DTypeError, "problem.dtype"),
        (lambda: sharding.peer(2), sa.ArgumentError, "rank"),
        (lambda: sharding.ranges_of(-1), sa.ArgumentError, "rank"),
        (lambda: sharding.pack(k), sa.SparseAttentionError, "v"),
        (lambda: sharding.pack(k[:, 1:], k), sa.ShapeError, "k"),
        (lambda: sharding.pack(k.astype(np.float64), k), sa.DTypeError, "k"),
        (lambda: sharding.unpack(sent[1:], k, k), sa.SparseAttentionError, "buffer_bytes"),
        (lambda: sharding.unpack(k, k, k), sa.ShapeError, "buffer"),
        (lambda: sharding.unpack(bytes(sent), k, k), sa.ShapeError, "buffer"),
        (lambda: sharding.add_gradients(sent, k, k), sa.ShapeError, "seen_k"),
    ]:
        with pytest.raises(kind, match="accepted: |is None") as caught:
            call()
        assert caught.value.argument == argument, (argument, str(caught.value))
