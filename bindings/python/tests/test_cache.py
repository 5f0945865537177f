# SPDX-License-Identifier: MIT
"""Plans on a cache: each query of a call is a row of the whole sequence's attention."""

import copy
import pickle

import numpy as np
import oracle
import pytest
from conftest import draw_parents, seen_by_nodes

import sparseattn as sa

STREAMING = "causal & (sink(2) | window(9,0))"
PATTERNS = [STREAMING, "full", "dilated(20,0,3) | block_diagonal(8)"]
BATCH, SEQ_K, HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM_V = 3, 48, 4, 2, 16, 8
STARTS = np.array([17, -2, 45])  # the first queries of the second entry, and the last of the third, are outside


def operands(seq_q=5, dtype=np.float32, seed=1):
    """q, and the k and v of a cache that is full: bshd."""
    rng = np.random.default_rng(seed)
    shapes = [(seq_q, HEADS_Q, HEAD_DIM), (SEQ_K, HEADS_KV, HEAD_DIM), (SEQ_K, HEADS_KV, HEAD_DIM_V)]
    return [rng.standard_normal((BATCH, *shape)).astype(dtype) for shape in shapes]


def rows(q, k, v, pattern, starts, **options):
    """out and lse, query by query."""
    out = np.zeros((*q.shape[:3], HEAD_DIM_V), q.dtype)
    lse = np.full((BATCH, HEADS_Q, q.shape[1]), -np.inf, np.float32)
    for b, start in enumerate(starts.tolist()):
        for i in range(q.shape[1]):
            if 0 <= start + i < SEQ_K:
                own = (x[b : b + 1] for x in (q[:, i : i + 1], k, v))
                seen = sa.parse(pattern) & sa.causal()
                found = sa.attention(*own, seen, q_offset=start + i, return_lse=True, **options)
                out[b, i], lse[b, :, i] = found[0][0, 0], found[1][0, :, 0]
    return out, lse


def in_pages(k, v, page_size, seed=0):
    """Pools of pages of k and v, in any order, among pages that are nobody's; and their table."""
    count = SEQ_K // page_size
    order = np.random.default_rng(seed).permutation(BATCH * count + 2)[: BATCH * count]
    pools = [np.full((BATCH * count + 2, page_size, *x.shape[2:]), np.nan, x.dtype) for x in (k, v)]
    for pool, x in zip(pools, (k, v)):
        pool[order] = x.reshape(BATCH * count, page_size, *x.shape[2:])
    return *pools, order.reshape(BATCH, count)


def forget(k, v, starts, seq_q):
    """NaN where no query of a call may look."""
    for b, start in enumerate(starts):
        k[b, max(0, start + seq_q) :] = v[b, max(0, start + seq_q) :] = np.nan


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("axes", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", [None, 1, 6, 16])
def test_queries_are_rows_of_the_sequence(pattern, axes, page_size):
    q, k, v = operands()
    right, right_lse = rows(q, k, v, pattern, STARTS)
    forget(k, v, STARTS, 5)
    table = None
    if page_size:
        k, v, table = in_pages(k, v, page_size)
    if axes == "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    plan = sa.plan(pattern, q, k, v, axes=axes, starts=True, page_table=table)
    assert plan.stats().pairs == BATCH * HEADS_Q * (sa.parse(pattern) & sa.causal()).stats(SEQ_K).pairs
    for dtype in (np.int64, np.int32):
        more = {"starts": STARTS.astype(dtype), "page_table": table if table is None else table.astype(dtype)}
        out, lse, largest = plan.forward(q, k, v, **more, return_lse=True, return_max_logits=True)
        out = out.swapaxes(1, 2) if axes == "bhsd" else out
        np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=1e-5)
        assert (largest <= lse).all() and np.array_equal(np.isinf(largest), np.isinf(right_lse))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_entries_have_as_many_queries_as_a_call_says(pattern):
    q, k, v = operands()
    right, right_lse = rows(q, k, v, pattern, STARTS)
    k_pool, v_pool, table = in_pages(k, v, 6)
    for counts, before, behind in [([5, 0, 2], 0, 0), ([1, 1, 1], 2, 0), ([0, 4, 5], 1, 3)]:
        offsets = before + np.cumsum([0, *counts])
        mine = [(b, i) for b, count in enumerate(counts) for i in range(count)]
        packed = np.full((before + sum(counts) + behind, *q.shape[2:]), np.nan, q.dtype)
        for row, (b, i) in enumerate(mine):
            packed[before + row] = q[b, i]
        plan = sa.plan(pattern, packed, k_pool, v_pool, axes="thd", starts=True, page_table=table)
        more = {"starts": STARTS, "page_table": table, "query_offsets": offsets}
        out, lse = plan.forward(packed, k_pool, v_pool, **more, return_lse=True)
        is_nobodys = np.ones(len(packed), bool)
        for row, (b, i) in enumerate(mine):
            np.testing.assert_allclose(out[before + row], right[b, i], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(lse[:, before + row], right_lse[b, :, i], rtol=1e-5, atol=1e-5)
            is_nobodys[before + row] = False
        assert (out[is_nobodys] == 0).all() and (lse[:, is_nobodys] == -np.inf).all()
        with pytest.raises(sa.ShapeError) as raised:
            plan.forward(packed, k_pool, v_pool, starts=STARTS, page_table=table, query_offsets=offsets[1:])
        assert raised.value.argument == "query_offsets"


def test_layers_share_a_step():
    step, plan = sa.Step(), None
    for seed in (1, 2, 3):
        q, k, v = operands(3, seed=seed)
        k_pool, v_pool, table = in_pages(k, v, 6)
        plan = plan or sa.plan(STREAMING, q, k_pool, v_pool, starts=True, page_table=table)
        out = plan.forward(q, k_pool, v_pool, starts=STARTS, page_table=table, step=step)
        right, _ = rows(q, k, v, STREAMING, STARTS)
        np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)
        other = plan.forward(q[::-1], k_pool, v_pool, starts=STARTS[::-1], page_table=table[::-1])  # in other scratch
        assert np.isfinite(other).all()
    with pytest.raises(sa.DTypeError, match="argument step is int; accepted: a sparseattn.Step"):
        plan.forward(q, k_pool, v_pool, starts=STARTS, page_table=table, step=1)


@pytest.mark.parametrize("argument", ["starts", "page_table", "parents", "query_offsets"])
def test_a_step_refuses_other_numbers_until_it_is_reset(argument):
    """Arrays that are changed in place as much as others; a call that fails has told it nothing."""
    q, k, v = operands(3)
    k_pool, v_pool, table = in_pages(k, v, 6)
    packed = argument == "query_offsets"
    given = {"starts": STARTS.copy(), "page_table": table, "parents": np.array([[-1, 0, 0]] * BATCH)}
    given |= {"query_offsets": np.array([0, 3, 6, 9]), "parents": np.array([-1, 0, 0] * BATCH)} if packed else {}
    q = q.reshape(-1, *q.shape[2:]) if packed else q
    options = {"axes": "thd"} if packed else {}
    plan = sa.plan(STREAMING, q, k_pool, v_pool, starts=True, parents=True, page_table=table, **options)
    step = sa.Step()
    with pytest.raises(sa.ShapeError):
        plan.forward(q, k_pool, v_pool, **given | {"starts": STARTS[::-1]}, step=step, out=np.empty(3, np.float32))
    right = plan.forward(q, k_pool, v_pool, **given)
    for numbers in (given, {name: x.astype(np.int32) for name, x in given.items()}):  # equal ones, not the same
        assert np.array_equal(plan.forward(q, k_pool, v_pool, **numbers, step=step), right)
    given[argument][1 if packed else 0] -= 1
    with pytest.raises(sa.ArgumentError, match=rf"argument {argument} has other numbers .* step.reset\(\)") as raised:
        plan.forward(q, k_pool, v_pool, **given, step=step)
    assert raised.value.argument == argument
    step.reset()
    found = plan.forward(q, k_pool, v_pool, **given, step=step)
    assert np.array_equal(found, plan.forward(q, k_pool, v_pool, **given)) and not np.array_equal(found, right)
    with pytest.raises(sa.ArgumentError) as raised:
        plan.forward(q, k_pool, v_pool, **given | {argument: None}, step=step)
    assert raised.value.argument == argument


def test_a_copy_of_a_step_has_seen_no_call():
    q, k, v = operands(3)
    plan, step = sa.plan(STREAMING, q, k, v, starts=True), sa.Step()
    plan.forward(q, k, v, starts=STARTS, step=step)
    for other in (copy.copy(step), copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        found = plan.forward(q, k, v, starts=STARTS + 1, step=other)
        assert np.array_equal(found, plan.forward(q, k, v, starts=STARTS + 1))


@pytest.mark.parametrize("dtype, bound", [(np.float64, 1e-12), (np.float16, 5e-3)])
def test_one_plan_serves_a_sequence_as_it_grows(dtype, bound):
    q, k, v = operands(1, dtype)
    sink_logits = np.array([0.5, -1, 2, -np.inf], np.float32)
    options = {"softcap": 2.0, "scale": 0.3}
    pools, table = (np.full_like(x, np.nan) for x in in_pages(k, v, 8)[:2]), in_pages(k, v, 8)[2]
    k_pool, v_pool = pools
    plan = sa.Plan(
        STREAMING,
        batch=BATCH,
        heads_q=HEADS_Q,
        heads_kv=HEADS_KV,
        seq_q=1,
        seq_k=SEQ_K,
        head_dim=HEAD_DIM,
        head_dim_v=HEAD_DIM_V,
        dtype=dtype,
        sink_logits=True,
        starts=True,
        page_size=8,
        **options,
    )
    starts, known = np.zeros(BATCH, np.int32), np.full_like(table, 1 << 40)  # nobody needs what is not known yet
    for token in range(SEQ_K):
        known[:, token // 8] = table[:, token // 8]
        k_pool[table[:, token // 8], token % 8], v_pool[table[:, token // 8], token % 8] = k[:, token], v[:, token]
        starts[:] = token
        out = plan.forward(q, k_pool, v_pool, starts=starts, page_table=known, sink_logits=sink_logits)
        right, _ = rows(q, k, v, STREAMING, starts, sink_logits=sink_logits, **options)
        np.testing.assert_allclose(out, right, rtol=bound, atol=bound)


def test_pages_of_several_entries_and_a_table_with_strides():
    q, k, v = operands()
    k[:], v[:] = k[:1], v[:1]  # a text that all entries begin with
    k_pool, v_pool, table = in_pages(k, v, 6)
    wide = np.full((BATCH, 2 * table.shape[1]), -1, np.int32)
    shared = wide[:, ::2]
    shared[:] = table[:1]
    starts = np.array([10, 20, 30])
    found = sa.plan(STREAMING, q, k_pool, v_pool, starts=True, page_table=shared)
    out = found.forward(q, k_pool, v_pool, starts=starts, page_table=shared)
    np.testing.assert_allclose(out, rows(q, k, v, STREAMING, starts)[0], rtol=1e-5, atol=1e-5)


def test_values_in_keys():
    q, k, _ = operands()
    k_pool, _, table = in_pages(k, k, 6)
    plan = sa.plan(STREAMING, q, k_pool, None, head_dim_v=HEAD_DIM_V, starts=True, page_table=table)
    right, _ = rows(q, k, k[..., :HEAD_DIM_V], STREAMING, STARTS)
    np.testing.assert_allclose(plan.forward(q, k_pool, starts=STARTS, page_table=table), right, rtol=1e-5, atol=1e-5)


def test_a_plan_takes_other_arrays_and_none():
    """Structs of a call are kept for the next one: nothing of them may stay behind."""
    q, k, v = operands()
    plan = sa.plan(STREAMING, q, k, v, starts=True)
    first = plan.forward(q, k, v, starts=STARTS)
    kept = np.empty_like(first)
    assert plan.forward(q, k, v, starts=STARTS.astype(np.int32), out=kept) is kept
    assert np.array_equal(first, kept)
    with pytest.raises(sa.ArgumentError) as raised:
        plan.forward(q, k, v)
    assert raised.value.argument == "starts"
    assert np.array_equal(first, plan.forward(q, k, v, starts=STARTS.tolist()))


def test_what_is_wrong_is_named():
    q, k, v = operands()
    k_pool, v_pool, table = in_pages(k, v, 6)
    plan = sa.plan(STREAMING, q, k, v, starts=True)
    paged = sa.plan(STREAMING, q, k_pool, v_pool, starts=True, page_table=table)
    calls = [
        (sa.ShapeError, "starts", lambda: plan.forward(q, k, v, starts=STARTS[:2])),
        (sa.DTypeError, "starts", lambda: plan.forward(q, k, v, starts=STARTS.astype(np.float32))),
        (sa.ArgumentError, "page_table", lambda: plan.forward(q, k, v, starts=STARTS, page_table=table)),
        (sa.ArgumentError, "starts", lambda: sa.plan(STREAMING, q, k, v).forward(q, k, v, starts=STARTS)),
        (sa.ArgumentError, "page_table", lambda: paged.forward(q, k_pool, v_pool, starts=STARTS)),
        (sa.ShapeError, "page_table", lambda: paged.forward(q, k_pool, v_pool, starts=STARTS, page_table=table[:, 1:])),
        (sa.ShapeError, "k", lambda: paged.forward(q, k, v, starts=STARTS, page_table=table)),
        (sa.ShapeError, "v", lambda: paged.forward(q, k_pool, v_pool[1:], starts=STARTS, page_table=table)),
        (sa.ShapeError, "page_table", lambda: sa.plan(STREAMING, q, k_pool, v_pool, starts=True, page_table=table[0])),
        (sa.ArgumentError, "problem.page_size", lambda: sa.plan(STREAMING, q, k_pool, v_pool, page_table=table)),
        (sa.UnsupportedError, "problem.flags", lambda: sa.plan(STREAMING, q, k, v, starts=True, backward=True)),
        (sa.UnsupportedError, "pattern", lambda: sa.plan(sa.runtime_tokens(3) & sa.sink(2), q, k, v, starts=True)),
    ]
    for kind, argument, call in calls:
        with pytest.raises(kind) as raised:
            call()
        assert raised.value.argument == argument, raised.value


@pytest.mark.parametrize("axes", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("page_size", [None, 1, 6, 16])
def test_appended_tokens_are_read(axes, page_size):
    """Chunk by chunk, on pages that were never written: rows of the whole sequence."""
    q, k, v = operands(SEQ_K)
    right, _ = rows(q, k, v, "full", np.zeros(BATCH, np.int64))
    if axes == "thd" and page_size is None:
        return
    pool_k, pool_v, table = np.full_like(k, np.nan), np.full_like(v, np.nan), None
    if page_size:
        pool_k, pool_v, table = in_pages(pool_k, pool_v, page_size)
    swap = (lambda x: x.swapaxes(1, 2)) if axes == "bhsd" else (lambda x: x)
    of_cache = np.ascontiguousarray(swap(pool_k)), np.ascontiguousarray(swap(pool_v))
    for begin, end in [(0, 20), (20, 21), (21, 40), (40, SEQ_K)]:
        chunk = [swap(x[:, begin:end]) for x in (q, k, v)]
        more = {"starts": np.full(BATCH, begin), "page_table": table}
        if axes == "thd":
            chunk = [np.concatenate(x) for x in chunk]
            more["query_offsets"] = np.arange(BATCH + 1) * (end - begin)
        sa.cache_append(*chunk[1:], *of_cache, **more, axes=axes)
        plan = sa.plan("full", chunk[0], *of_cache, axes=axes, starts=True, page_table=table)
        out = plan.forward(chunk[0], *of_cache, **more)
        out = out.reshape(BATCH, end - begin, HEADS_Q, HEAD_DIM_V) if axes == "thd" else swap(out)
        np.testing.assert_allclose(out, right[:, begin:end], rtol=1e-5, atol=1e-5)


def test_tokens_without_a_place_are_not_written():
    _, k, v = operands()
    cache_k, cache_v = np.zeros_like(k), np.zeros_like(v)
    rows_k, rows_v = k[:, :5], v[:, :5]
    sa.cache_append(rows_k, rows_v, cache_k, cache_v, starts=STARTS.tolist(), counts=[2, 5, 4])
    for b, (start, count) in enumerate(zip(STARTS.tolist(), [2, 5, 4])):
        for rows_x, cache in ((rows_k, cache_k), (rows_v, cache_v)):
            expected = np.zeros_like(cache[b])
            for i in range(5 - count, 5):
                if 0 <= start + i < SEQ_K:
                    expected[start + i] = rows_x[b, i]
            np.testing.assert_array_equal(cache[b], expected)
    pool = np.zeros((4, 6, HEADS_KV, HEAD_DIM), np.float32)
    table = [[3, 9], [-1, 2], [0, 1]]
    sa.cache_append(k[:, :12], None, pool, None, starts=np.zeros(BATCH, np.int32), page_table=table)
    expected = np.stack([k[2, :6], k[2, 6:12], k[1, 6:12], k[0, :6]])
    np.testing.assert_array_equal(pool, expected)


def test_what_is_wrong_with_an_append_is_named():
    _, k, v = operands()
    cache_k, cache_v = np.zeros_like(k), np.zeros_like(v)
    table = np.zeros((BATCH, 8), np.int32)

    def append(k_new=k[:, :5], v_new=v[:, :5], k=cache_k, v=cache_v, starts=STARTS, **options):
        sa.cache_append(k_new, v_new, k, v, starts=starts, **options)

    append()
    read_only = np.zeros_like(k)
    read_only.flags.writeable = False
    for error, argument, options in [
        (sa.ShapeError, "k_new", {"k_new": k[0, :5]}),
        (sa.ShapeError, "k_new", {"k_new": k[:, :5, :, :3]}),
        (sa.ShapeError, "v_new", {"v_new": v[:, :4]}),
        (sa.DTypeError, "k_new", {"k_new": k[:, :5].astype(np.float64)}),
        (sa.DTypeError, "k", {"k": cache_k.tolist()}),
        (sa.ArgumentError, "k", {"k": read_only}),
        (sa.ShapeError, "k", {"k": cache_k[:2]}),
        (sa.ArgumentError, "v_new", {"v_new": None}),
        (sa.ArgumentError, "v_new", {"v": None}),
        (sa.ArgumentError, "k", {"v_new": k[:, :5], "v": cache_k}),
        (sa.ShapeError, "starts", {"starts": [1, 2]}),
        (sa.DTypeError, "starts", {"starts": [1.0, 2.0, 3.0]}),
        (sa.ShapeError, "counts", {"counts": [1, 2]}),
        (sa.ShapeError, "page_table", {"page_table": table[0]}),
        (sa.ArgumentError, "query_offsets", {"query_offsets": [0, 1, 2, 3]}),
        (sa.ArgumentError, "problem.axes", {"axes": "sbhd"}),
    ]:
        before = cache_k.copy()
        with pytest.raises(error) as raised:
            append(**options)
        assert raised.value.argument == argument, options.keys()
        np.testing.assert_array_equal(cache_k, before)


# ---- trees of drafts ----

NODES = 13
TREE_PATTERNS = [*PATTERNS, "window(3,0)"]  # the last ends before some ancestors


def rows_of_nodes(q, k, v, pattern, starts, parents):
    """out and lse of nodes of trees, in double precision: bshd."""
    seen = seen_by_nodes(pattern, k.shape[1], starts, parents, q.shape[2])
    k, v = (np.nan_to_num(x.astype(np.float64)) for x in (k, v))
    rows = (x.swapaxes(1, 2) for x in (q.astype(np.float64), k, v))
    out, lse = oracle.attention_forward(*rows, seen, q.shape[3] ** -0.5)
    return out.swapaxes(1, 2), lse


@pytest.mark.parametrize("pattern", TREE_PATTERNS)
@pytest.mark.parametrize("axes", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", [None, 1, 6, 16])
def test_nodes_of_trees_see_their_ancestors(pattern, axes, page_size):
    q, k, v = operands(NODES)
    random = np.random.default_rng(3)
    forget(k, v, STARTS, NODES)
    of_cache, table = (k, v), None
    if page_size:
        *of_cache, table = in_pages(k, v, page_size)
    swap = (lambda x: x.swapaxes(1, 2)) if axes == "bhsd" else (lambda x: x)
    given = [swap(x) for x in (q, *of_cache)]
    plan = sa.plan(pattern, *given, axes=axes, starts=True, parents=True, page_table=table)
    for reach in (1, 2, NODES):
        parents = draw_parents(random, BATCH, NODES, reach)
        right, right_lse = rows_of_nodes(q, k, v, pattern, STARTS, parents)
        spread = np.full((BATCH, 2 * NODES), 99)
        spread[:, ::2] = parents
        for each in (parents, parents.astype(np.int32), spread[:, ::2], parents.tolist()):
            more = {"starts": STARTS, "page_table": table, "parents": each}
            out, lse, largest = plan.forward(*given, **more, return_lse=True, return_max_logits=True)
            np.testing.assert_allclose(swap(out), right, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=1e-5)
            assert (largest <= lse).all() and np.array_equal(np.isinf(largest), np.isinf(right_lse))


@pytest.mark.parametrize("dtype, bound", [(np.float64, 1e-6), (np.float16, 5e-3), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("reference", [False, True])
def test_trees_of_many_nodes(dtype, bound, reference):
    """Own keys of an entry lie in several blocks, which they share with those of the text before."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    random = np.random.default_rng(4)
    nodes, seq_k, starts = 150, 420, np.array([201, 0, 333])
    shapes = [(nodes, HEADS_Q, HEAD_DIM), (seq_k, HEADS_KV, HEAD_DIM), (seq_k, HEADS_KV, HEAD_DIM_V)]
    q, k, v = (random.standard_normal((BATCH, *shape)).astype(dtype) for shape in shapes)
    for pattern in ("full", "sink(2) | window(90,0)"):
        plan = sa.plan(pattern, q, k, v, starts=True, parents=True, reference=reference)
        for reach in (1, 4, nodes):
            parents = draw_parents(random, BATCH, nodes, reach)
            right, right_lse = rows_of_nodes(q, k, v, pattern, starts, parents)
            out, lse = plan.forward(q, k, v, starts=starts, parents=parents, return_lse=True)
            np.testing.assert_allclose(out.astype(np.float64), right, rtol=bound, atol=bound)
            np.testing.assert_allclose(lse, right_lse, rtol=bound, atol=bound)


@pytest.mark.parametrize("pattern", TREE_PATTERNS)
def test_entries_have_trees_of_as_many_nodes_as_a_call_says(pattern):
    q, k, v = operands(NODES)
    parents = draw_parents(np.random.default_rng(5), BATCH, NODES)
    right, right_lse = rows_of_nodes(q, k, v, pattern, STARTS, parents)
    k_pool, v_pool, table = in_pages(k, v, 6)
    for counts, before, behind in [([NODES, 0, 2], 0, 0), ([1, NODES, 1], 2, 0), ([0, 4, 5], 1, 3)]:
        offsets = before + np.cumsum([0, *counts])
        packed, of_rows = np.full((before + sum(counts) + behind, *q.shape[2:]), np.nan, q.dtype), []
        packed_parents = np.full(len(packed), 7)
        for b, count in enumerate(counts):
            packed[offsets[b] : offsets[b + 1]] = q[b, :count]
            packed_parents[offsets[b] : offsets[b + 1]] = parents[b, :count]
            of_rows += [(b, i) for i in range(count)]
        plan = sa.plan(pattern, packed, k_pool, v_pool, axes="thd", starts=True, parents=True, page_table=table)
        more = {"starts": STARTS, "page_table": table, "query_offsets": offsets, "parents": packed_parents}
        out, lse = plan.forward(packed, k_pool, v_pool, **more, return_lse=True)
        mine = slice(before, before + sum(counts))
        for row, (b, i) in enumerate(of_rows):
            np.testing.assert_allclose(out[mine][row], right[b, i], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(lse[:, mine][:, row], right_lse[b, :, i], rtol=1e-5, atol=1e-5)
        assert (np.delete(out, mine, 0) == 0).all() and (np.delete(lse, mine, 1) == -np.inf).all()
        for wrong in (packed_parents[None], packed_parents[1:]):
            with pytest.raises(sa.ShapeError) as raised:
                plan.forward(packed, k_pool, v_pool, **more | {"parents": wrong})
            assert raised.value.argument == "parents"


@pytest.mark.parametrize("pattern", TREE_PATTERNS)
def test_a_chain_is_a_causal_call(pattern):
    q, k, v = operands(NODES)
    options = {"starts": True, "softcap": 2.0, "sink_logits": True}
    more = {"starts": STARTS, "sink_logits": np.array([0.5, -1, 2, -np.inf], np.float32)}
    right = sa.plan(pattern, q, k, v, **options).forward(q, k, v, **more)
    chains = np.tile(np.arange(-1, NODES - 1), (BATCH, 1))
    found = sa.plan(pattern, q, k, v, **options, parents=True).forward(q, k, v, **more, parents=chains)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_keys_beside_a_path_may_hold_anything():
    q, k, v = operands(NODES)
    parents = np.tile(np.arange(NODES) - 2, (BATCH, 1))  # two chains, one of even and one of odd numbers
    plan = sa.plan("full", q, k, v, starts=True, parents=True)
    first = plan.forward(q, k, v, starts=[20] * BATCH, parents=parents)
    k[:, 21:33:2], v[:, 21:33:2] = np.nan, np.inf
    second = plan.forward(q, k, v, starts=[20] * BATCH, parents=parents)
    assert np.array_equal(first[:, ::2], second[:, ::2]) and np.isnan(second[:, 1::2]).all()


def test_values_in_keys_of_trees():
    q, k, _ = operands(NODES)
    parents = draw_parents(np.random.default_rng(6), BATCH, NODES)
    k_pool, _, table = in_pages(k, k, 6)
    options = {"head_dim_v": HEAD_DIM_V, "starts": True, "parents": True, "page_table": table}
    plan = sa.plan(STREAMING, q, k_pool, None, **options)
    right, _ = rows_of_nodes(q, k, k[..., :HEAD_DIM_V], STREAMING, STARTS, parents)
    out = plan.forward(q, k_pool, starts=STARTS, page_table=table, parents=parents)
    np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)


def test_what_is_wrong_with_parents_is_named():
    q, k, v = operands(NODES)
    parents = draw_parents(np.random.default_rng(7), BATCH, NODES)
    plan, without = (sa.plan(STREAMING, q, k, v, starts=True, parents=given) for given in (True, False))
    more = {"starts": STARTS, "parents": parents}
    right = plan.forward(q, k, v, **more)
    lists = {"starts": True, "parents": True}
    calls = [
        (sa.ArgumentError, "parents", lambda: plan.forward(q, k, v, starts=STARTS)),
        (sa.ArgumentError, "parents", lambda: without.forward(q, k, v, **more)),
        (sa.ArgumentError, "parents", lambda: sa.plan("full", q, k, v).forward(q, k, v, parents=parents)),
        (sa.ArgumentError, "starts", lambda: plan.forward(q, k, v, parents=parents)),
        (sa.ShapeError, "parents", lambda: plan.forward(q, k, v, **more | {"parents": parents[:, 1:]})),
        (sa.ShapeError, "parents", lambda: plan.forward(q, k, v, **more | {"parents": parents[1:]})),
        (sa.ShapeError, "parents", lambda: plan.forward(q, k, v, **more | {"parents": parents[0]})),
        (sa.DTypeError, "parents", lambda: plan.forward(q, k, v, **more | {"parents": parents.astype(np.float32)})),
        (sa.DTypeError, "parents", lambda: plan.forward(q, k, v, **more | {"parents": parents.astype(np.uint8)})),
        (sa.DTypeError, "parents", lambda: plan.forward(q, k, v, **more | {"parents": "tree"})),
        (sa.UnsupportedError, "problem.flags", lambda: sa.plan(STREAMING, q, k, v, parents=True)),
        (sa.UnsupportedError, "problem.flags", lambda: sa.plan(STREAMING, q, k, v, **lists, backward=True)),
        (sa.UnsupportedError, "problem.flags", lambda: sa.plan(sa.runtime_tokens(3), q, k, v, **lists)),
    ]
    for number, (kind, argument, call) in enumerate(calls):
        with pytest.raises(kind) as raised:
            call()
        assert raised.value.argument == argument, (number, raised.value)
    assert np.array_equal(plan.forward(q, k, v, **more), right)


# ---- float8 ----

FLOAT8 = "float8_e4m3fn"


def float8_caches(k, v):
    """Caches like k and v, and scales of their rows, that were never written."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    caches = [np.full(x.shape, np.nan, ml_dtypes.float8_e4m3fn) for x in (k, v)]
    return *caches, {f"{name}_scales": np.full(x.shape[:3], np.nan, np.float32) for name, x in (("k", k), ("v", v))}


def rows_of(x, scales):
    """What a cache stands for."""
    return x.astype(np.float64) * scales[..., None]


def causal_rows(q, k, v):
    """Of queries that are the first of each entry, in double precision: bshd."""
    k, v = (np.repeat(x, HEADS_Q // HEADS_KV, 2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k) / np.sqrt(HEAD_DIM)
    scores = np.where(np.arange(k.shape[1]) <= np.arange(q.shape[1])[:, None], scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", shares / shares.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("dtype, bound", [(np.float32, 1e-5), (np.float16, 5e-3), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("axes", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", [None, 6])
def test_float8_caches_with_scales_of_each_row(dtype, bound, axes, page_size):
    """Chunk by chunk; what was not written yet is NaN, and so is its scale."""
    pytest.importorskip("ml_dtypes")
    q, k, v = operands(SEQ_K)
    sizes = 10.0 ** np.arange(-3, 1).repeat(SEQ_K // 4)[:, None, None]
    q, k, v = (x.astype(dtype) for x in (q, k * sizes, v * sizes))
    swap = (lambda x: x.swapaxes(1, 2)) if axes == "bhsd" else (lambda x: x)
    of_cache, table = (k, v), None
    if page_size:
        *of_cache, table = in_pages(k, v, page_size)
    cache_k, cache_v, scales = float8_caches(*of_cache)
    cache, scales = [swap(cache_k), swap(cache_v)], {name: swap(x) for name, x in scales.items()}
    out = np.zeros((BATCH, SEQ_K, HEADS_Q, HEAD_DIM_V))
    for begin, end in [(0, 20), (20, 21), (21, SEQ_K)]:
        chunk = [swap(x[:, begin:end]) for x in (q, k, v)]
        more = {"starts": np.full(BATCH, begin), "page_table": table, **scales}
        sa.cache_append(*chunk[1:], *cache, **more, choose_scales=True, axes=axes)
        plan = sa.plan("full", chunk[0], *cache, axes=axes, starts=True, page_table=table)
        out[:, begin:end] = swap(plan.forward(chunk[0], *cache, **more))
    seen = [rows_of(x, swap(s)) for x, s in zip((cache_k, cache_v), scales.values())]
    if page_size:
        seen = [x[table].reshape(BATCH, SEQ_K, *x.shape[2:]) for x in seen]
    for x, given in zip(seen, (k, v)):
        largest = np.abs(given.astype(np.float64)).max(-1, keepdims=True)
        assert (np.abs(x - given) <= np.abs(given) / 16 + largest / 448 / 512).all()
    right = causal_rows(q, *seen)
    assert (np.abs(out - right) <= bound * (1 + np.abs(right))).all()


def test_float8_caches_with_scales_of_the_caller():
    """One for each kv head, or none; what is beyond 448 times those becomes that."""
    q, k, v = operands(SEQ_K)
    of_heads = np.array([1 / 64, 1 / 256], np.float32)
    for given in (of_heads, None):
        cache_k, cache_v, scales = float8_caches(k, v)
        scales = dict.fromkeys(scales) if given is None else dict.fromkeys(scales, np.broadcast_to(given, k.shape[:3]))
        cache, starts = (cache_k, cache_v), [0] * BATCH
        sa.cache_append(k, v, *cache, starts=starts, **scales)
        largest = 448 * (1 if given is None else given[:, None])
        seen = [x.astype(np.float64) * (1 if given is None else given[:, None]) for x in cache]
        for x, rows in zip(seen, (k, v)):
            rows = np.clip(rows, -largest, largest)
            assert (np.abs(x - rows) <= np.abs(rows) / 16 + largest / 448 / 512).all()
        plan = sa.Plan(
            "full",
            batch=BATCH,
            heads_q=HEADS_Q,
            heads_kv=HEADS_KV,
            seq_q=SEQ_K,
            head_dim=HEAD_DIM,
            head_dim_v=HEAD_DIM_V,
            starts=True,
            cache_dtype=FLOAT8,
        )
        out = plan.forward(q, *cache, starts=starts, **scales)
        np.testing.assert_allclose(out, causal_rows(q, *seen), rtol=1e-5, atol=1e-5)


def test_float8_values_in_keys():
    q, k, _ = operands(SEQ_K)
    cache, _, scales = float8_caches(k, k)
    more = {"starts": [0] * BATCH, "k_scales": scales["k_scales"]}
    sa.cache_append(k, None, cache, None, **more, choose_scales=True)
    plan = sa.plan("full", q, cache, None, head_dim_v=HEAD_DIM_V, starts=True)
    seen = rows_of(cache, more["k_scales"])
    out = plan.forward(q, cache, **more)
    np.testing.assert_allclose(out, causal_rows(q, seen, seen[..., :HEAD_DIM_V]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [None, 6])
def test_float8_caches_of_trees(page_size):
    q, k, v = operands(NODES)
    of_cache, table = (k, v), None
    if page_size:
        *of_cache, table = in_pages(k, v, page_size)
    cache_k, cache_v, scales = float8_caches(*of_cache)
    more = {"page_table": table, **scales}
    sa.cache_append(k, v, cache_k, cache_v, starts=[0] * BATCH, **more, choose_scales=True)
    seen = [rows_of(x, s) for x, s in zip((cache_k, cache_v), scales.values())]
    if page_size:
        seen = [x[table].reshape(BATCH, SEQ_K, *x.shape[2:]) for x in seen]
    for pattern in TREE_PATTERNS:
        parents = draw_parents(np.random.default_rng(8), BATCH, NODES)
        plan = sa.plan(pattern, q, cache_k, cache_v, starts=True, parents=True, page_table=table)
        out = plan.forward(q, cache_k, cache_v, starts=STARTS, parents=parents, **more)
        right, _ = rows_of_nodes(q, *seen, pattern, STARTS, parents)
        np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)


def test_what_is_wrong_with_float8_is_named():
    q, k, v = operands()
    cache_k, cache_v, scales = float8_caches(k, v)
    sizes = {"batch": BATCH, "heads_q": HEADS_Q, "heads_kv": HEADS_KV, "seq_q": 5, "seq_k": SEQ_K}
    sizes |= {"head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM_V}
    of_floats = sa.plan(STREAMING, q, k, v, starts=True)
    plan = sa.plan(STREAMING, q, cache_k, cache_v, starts=True)
    more = {"starts": STARTS, **scales}
    read_only = np.broadcast_to(np.float32(1), k.shape[:3])

    def append(k=cache_k, v=cache_v, choose_scales=True, **changed):
        rows = (x[:, :5].astype(np.float32) for x in operands()[1:])
        sa.cache_append(*rows, k, v, **more | changed, choose_scales=choose_scales)

    plan.forward(q, cache_k, cache_v, **more)
    append()
    calls = [
        (sa.DTypeError, "problem.cache_dtype", lambda: sa.Plan("full", **sizes, cache_dtype=FLOAT8)),
        (sa.DTypeError, "problem.cache_dtype", lambda: sa.plan("full", q, cache_k, cache_v)),
        (sa.DTypeError, "problem.cache_dtype", lambda: sa.Plan("full", **sizes, starts=True, cache_dtype="float16")),
        (sa.DTypeError, "problem.cache_dtype", lambda: sa.Plan("full", **sizes, starts=True, cache_dtype="float8")),
        (sa.UnsupportedError, "problem.dtype", lambda: sa.Plan("full", **sizes, starts=True, dtype=FLOAT8)),
        (sa.DTypeError, "k", lambda: plan.forward(q, k, cache_v, **more)),
        (sa.DTypeError, "v", lambda: plan.forward(q, cache_k, v, **more)),
        (sa.ShapeError, "k_scales", lambda: plan.forward(q, cache_k, cache_v, **more | {"k_scales": q[0, 0]})),
        (sa.DTypeError, "v_scales", lambda: plan.forward(q, cache_k, cache_v, **more | {"v_scales": k[..., 0] > 0})),
        (sa.ArgumentError, "k_scales", lambda: of_floats.forward(q, k, v, **more)),
        (sa.ArgumentError, "v_scales", lambda: of_floats.forward(q, k, v, **more | {"k_scales": None})),
        (sa.ArgumentError, "k_scales", lambda: sa.plan("full", q, q, q).forward(q, q, q, k_scales=read_only)),
        (sa.ArgumentError, "args.flags", lambda: append(k.copy(), v.copy())),
        (sa.ArgumentError, "k_scales", lambda: append(k.copy(), v.copy(), choose_scales=False)),
        (sa.ArgumentError, "k_scales", lambda: append(k_scales=None)),
        (sa.ArgumentError, "v_scales", lambda: append(v_scales=None)),
        (sa.ArgumentError, "k_scales", lambda: append(k_scales=read_only)),
        (sa.ShapeError, "v_scales", lambda: append(v_scales=scales["v_scales"][:, 1:])),
        (sa.DTypeError, "k_scales", lambda: append(k_scales=scales["k_scales"].astype(np.float64))),
    ]
    for number, (kind, argument, call) in enumerate(calls):
        with pytest.raises(kind) as raised:
            call()
        assert raised.value.argument == argument, (number, raised.value)
