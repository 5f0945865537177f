# SPDX-License-Identifier: MIT
"""Caches that are filled chunk by chunk and token by token, against attention of the whole sequences."""

import copy
import io
import pickle
import re

import numpy as np
import oracle
import pytest
from conftest import draw_parents, seen_by_nodes

import sparseattn as sa

torch = pytest.importorskip("torch")
import sparseattn.torch as sat  # noqa: E402

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
STREAMING = "causal & (sink(2) | window(9,0))"
BATCH, SEQ, HEADS_KV = 3, 45, 2
CHUNKS = [7, 16, 12, *[1] * 10]
# page_size, pages: as many as are needed in all, or fewer than all entries have room for
PAGES = [(8, None), (8, 18), (1, None), (128, None)]


def operands(dtype=torch.float32, device="cpu", seq=SEQ):
    made = torch.Generator().manual_seed(5)
    shapes = [(BATCH, seq, 4, 24), (BATCH, seq, HEADS_KV, 24), (BATCH, seq, HEADS_KV, 16)]
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(device, dtype) for shape in shapes]


def make_cache(k, v, capacity=64, **options):
    """Nothing is written yet, and what is not may hold anything."""
    cache = sat.KVCache(len(k), capacity, *k.shape[2:], v.shape[3], dtype=k.dtype, device=k.device, **options)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    return cache


def fill(cache, q, k, v, pattern, chunks=CHUNKS, **options):
    """out and lse of the whole sequence, chunk by chunk."""
    found, begin = [], 0
    for n in chunks:
        chunk = slice(begin, begin + n)
        cache.append(k[:, chunk], v[:, chunk])
        found.append(sat.decode(q[:, chunk], cache, pattern, return_lse=True, **options))
        begin += n
    return torch.cat([out for out, _ in found], 1), torch.cat([lse for _, lse in found], 2)


@pytest.mark.parametrize("page_size, pages", PAGES)
@pytest.mark.parametrize("pattern", [STREAMING, "full", "dilated(20,0,3) | sink(1)"])
def test_chunks_and_tokens_are_one_causal_pass(page_size, pages, pattern):
    q, k, v = operands()
    cache = make_cache(k, v, page_size=page_size, pages=pages)
    right = sat.attention(q, k, v, sa.parse(pattern) & sa.causal(), return_lse=True)
    for one, other in zip(fill(cache, q, k, v, pattern), right):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    assert cache.lengths.tolist() == [SEQ] * BATCH and cache.lengths.dtype == torch.int32


def test_a_cache_says_what_it_is():
    cache = sat.KVCache(2, 20, 3, 16, page_size=8, pages=5)
    assert repr(cache) == "<KVCache of 2 entries of up to 24 tokens, 3 heads of 16, 5 pages of 8, torch.float32 on cpu>"


def test_autocast_casts_to_the_caches_dtype():
    q, sinks = torch.randn(1, 8, 2, 16), torch.randn(2, dtype=torch.bfloat16)
    casts, own = (sat.KVCache(1, 16, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        casts.append(q, q)
        out = sat.decode(q, casts, "causal", sink_logits=sinks)
    x = q.bfloat16()
    own.append(x, x)
    assert torch.equal(out, sat.decode(x, own, "causal", sink_logits=sinks.float()))
    for call in (lambda: own.append(q, q), lambda: sat.decode(q, own, "causal")):
        with pytest.raises(sa.DTypeError):
            call()


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
def test_options(dtype, bound):
    q, k, v = operands(dtype)
    options = {"sink_logits": torch.tensor([0.5, -2, 1, 3]), "softcap": 1.5, "scale": 0.4}
    right = sat.attention(q, k, v, STREAMING, return_lse=True, **options)
    cache = make_cache(k, v, page_size=4)
    for one, other in zip(fill(cache, q, k, v, STREAMING, **options), right):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)
    last = q[:, -3:].transpose(1, 2)
    for reference in (False, True):
        out = sat.decode(last, cache, STREAMING, axes="bhsd", reference=reference, **options)
        torch.testing.assert_close(out.transpose(1, 2), right[0][:, -3:], rtol=bound, atol=bound)


def test_entries_of_several_lengths():
    """Texts padded in front: rows of one entry are those of its text alone, and padding is not kept."""
    q, k, v = operands()
    lengths, at = [30, 0, 11], [0, 0, 0]
    cache = make_cache(k, v, page_size=8, pages=12)
    small = lambda x: np.array(x, np.uint8), lambda x: torch.tensor(x, dtype=torch.uint8)
    for kind in (list, np.array, *small, torch.tensor):
        counts = [min(n, 8) for n in lengths]
        chunks = [torch.full((BATCH, 8, *x.shape[2:]), torch.nan) for x in (q, k, v)]
        for b, n in enumerate(counts):
            for chunk, x in zip(chunks, (q, k, v)):
                chunk[b, 8 - n :] = x[b, at[b] : at[b] + n]
        cache.append(chunks[1], chunks[2], kind(counts))
        out = sat.decode(chunks[0], cache, STREAMING)
        for b, n in enumerate(counts):
            right = sat.attention(*(x[b : b + 1, : at[b] + n] for x in (q, k, v)), STREAMING)
            torch.testing.assert_close(out[b, 8 - n :], right[0, at[b] :], rtol=2e-5, atol=2e-5)
        at = [a + n for a, n in zip(at, counts)]
        lengths = [n - m for n, m in zip(lengths, counts)]
        assert cache.lengths.tolist() == at
    assert at == [30, 0, 11]


def ragged(x, at, counts, rows=None):
    """Those tokens of each entry, one after the other, and NaN behind them up to so many rows."""
    parts = [x[b, a : a + n] for b, (a, n) in enumerate(zip(at, counts))]
    missing = 0 if rows is None else rows - sum(counts)
    return torch.cat([*parts, x.new_full((missing, *x.shape[2:]), torch.nan)])


@pytest.mark.parametrize("page_size, pages", PAGES)
@pytest.mark.parametrize("pattern", [STREAMING, "full", "per_batch([1,0,1], causal & window(5,0), full)"])
def test_prompts_beside_decoded_tokens(page_size, pages, pattern):
    """Each call has other numbers of tokens of each entry; rows behind all of them see nothing."""
    q, k, v = operands()
    right, right_lse = sat.attention(q, k, v, sa.parse(pattern) & sa.causal(), return_lse=True)
    cache = make_cache(k, v, page_size=page_size, pages=pages)
    at = [0] * BATCH
    steps = [[20, 0, 1], [1, 30, 1], [1, 1, 17], [0, 0, 0], [1, 1, 1], [0, 13, 0]]
    for step, (kind, counts) in enumerate(zip([list, np.array, torch.tensor] * 2, steps)):
        rows = 40 if step % 2 else None
        cache.append(ragged(k, at, counts, rows), ragged(v, at, counts, rows), kind(counts))
        out, lse = sat.decode(ragged(q, at, counts, rows), cache, pattern, kind(counts), return_lse=True)
        torch.testing.assert_close(out[: sum(counts)], ragged(right, at, counts), rtol=2e-5, atol=2e-5)
        of_rows = ragged(right_lse.transpose(1, 2), at, counts).T
        torch.testing.assert_close(lse[:, : sum(counts)], of_rows, rtol=2e-5, atol=2e-5)
        assert (out[sum(counts) :] == 0).all() and (lse[:, sum(counts) :] == -torch.inf).all()
        at = [a + n for a, n in zip(at, counts)]
        assert cache.lengths.tolist() == at


def test_ragged_calls_that_are_refused():
    q, k, v = operands()
    cache = make_cache(k, v, page_size=8)
    rows_k, rows_v = ragged(k, [0] * 3, [2, 0, 3]), ragged(v, [0] * 3, [2, 0, 3])
    rows_q = ragged(q, [0] * 3, [2, 0, 3])
    for error, argument, call in [
        (sa.ArgumentError, "counts", lambda: cache.append(rows_k, rows_v)),
        (sa.ArgumentError, "counts", lambda: cache.append(rows_k, rows_v, 1)),
        (sa.ArgumentError, "counts", lambda: cache.append(rows_k, rows_v, [2, 1, 3])),
        (sa.ShapeError, "counts", lambda: cache.append(rows_k, rows_v, [2, 3])),
        (sa.ShapeError, "v", lambda: cache.append(rows_k, rows_v[1:], [2, 0, 3])),
        (sa.ShapeError, "k", lambda: cache.append(rows_k[:, :1], rows_v, [2, 0, 3])),
        (sa.ArgumentError, "counts", lambda: sat.decode(rows_q, cache, STREAMING)),
        (sa.ArgumentError, "counts", lambda: sat.decode(rows_q, cache, STREAMING, [2, 1, 3])),
        (sa.ArgumentError, "counts", lambda: sat.decode(q[:, :1], cache, STREAMING, [1, 1, 1])),
    ]:
        with pytest.raises(error) as raised:
            call()
        assert raised.value.argument == argument
        assert cache.lengths.tolist() == [0, 0, 0]


def test_entries_come_and_go():
    """Pages go from one sequence to the next, and entries that others share memory with stay as they are."""
    q, k, v = operands()
    right = sat.attention(q, k, v, STREAMING)
    cache = make_cache(k, v, page_size=4, pages=24)
    kept = cache[0]
    kept.append(k[:1, :20], v[:1, :20])
    for turn in range(7):
        entry = cache[1 + turn % 2]
        out, _ = fill(entry, q[1:2], k[1:2], v[1:2], STREAMING, [30, 9, 1, 1])
        torch.testing.assert_close(out, right[1:2, :41], rtol=2e-5, atol=2e-5)
        cache.free(1 + turn % 2)
        assert cache.lengths.tolist() == [20, 0, 0]
    torch.testing.assert_close(sat.decode(q[:1, 15:20], kept, STREAMING), right[:1, 15:20], rtol=2e-5, atol=2e-5)
    cache[1:].append(k[1:, :10], v[1:, :10])
    torch.testing.assert_close(sat.decode(q[1:, 5:10], cache[1:], STREAMING), right[1:, 5:10], rtol=2e-5, atol=2e-5)
    assert cache.lengths.tolist() == [20, 10, 10] and [part.batch for part in cache] == [1, 1, 1]
    cache.reset()
    assert cache.lengths.tolist() == [0, 0, 0] and sorted(cache._free) == list(range(24))
    out = sat.decode(q, cache, STREAMING)
    assert (out == 0).all()  # nothing is there to see


@pytest.mark.parametrize("pages", [None, 16])
def test_drafts_are_forgotten(pages):
    q, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=pages)
    cache.append(k[:, :10], v[:, :10])
    cache.append(k[:, 20:29], v[:, 20:29])
    cache.truncate(torch.tensor([10, 12, 3]))
    assert cache.lengths.tolist() == [10, 12, 3]
    cache.truncate(10)
    assert cache.lengths.tolist() == [10, 10, 3]
    cache[:2].append(k[:2, 10:21], v[:2, 10:21])
    right = sat.attention(q[:2, :21], k[:2, :21], v[:2, :21], STREAMING)
    torch.testing.assert_close(sat.decode(q[:2, 8:21], cache[:2], STREAMING), right[:, 8:], rtol=2e-5, atol=2e-5)


def test_what_does_not_fit_changes_nothing():
    q, k, v = operands()
    cache = make_cache(k, v, capacity=31, page_size=8, pages=7)
    assert cache.capacity == 32 and cache.pages == 7
    cache.append(k[:, :16], v[:, :16])
    before = [x.clone() for x in (cache.k, cache.v, cache.page_table, cache.lengths)]
    with pytest.raises(sa.ResourceError, match="3 more pages are needed, and 1 of 7 are free") as raised:
        cache.append(k[:, 16:17], v[:, 16:17])
    assert raised.value.argument == "pages"
    with pytest.raises(sa.ArgumentError, match="entry 1 would have 33 tokens; accepted: up to its capacity, 32"):
        cache.append(k[:, :17], v[:, :17], [0, 17, 0])
    for one, other in zip(before, (cache.k, cache.v, cache.page_table, cache.lengths)):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    cache.free(2)
    cache[:2].append(k[:2, 16:17], v[:2, 16:17])
    right = sat.attention(*(x[:2, :17] for x in (q, k, v)), STREAMING)
    torch.testing.assert_close(sat.decode(q[:2, 16:17], cache[:2], STREAMING), right[:, 16:], rtol=2e-5, atol=2e-5)


def capture(patch):
    """From here on, calls do what each replay of a graph does."""
    patch.setattr("sparseattn.torch._cache.is_capturing", lambda device: True)


def test_tokens_without_a_place_disturb_nobody(monkeypatch):
    """A graph appends whatever the host has reserved: such tokens are not written."""
    _, k, v = operands()
    cache = make_cache(k, v, capacity=16, page_size=8, pages=4)
    cache.append(k[:, :8], v[:, :8])
    before = cache.k.clone()
    capture(monkeypatch)
    cache.append(k[:, 8:20], v[:, 8:20])
    torch.testing.assert_close(cache.k, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_pools_of_others_are_filled(device):
    """A cache that is not a KVCache, whose keys and values lie in one tensor."""
    q, k, v = operands(device=device)
    v = v.repeat(1, 1, 1, 2)[..., :24]
    pool = torch.full((20, 2, 8, HEADS_KV, 24), torch.nan, device=device)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:18].view(BATCH, 6).to(device)
    right = sat.attention(q, k, v, STREAMING)
    for begin, end in [(0, 30), (30, 31), (31, SEQ)]:
        more = {"starts": torch.full((BATCH,), begin, device=device), "page_table": table}
        sa.cache_append(k[:, begin:end], v[:, begin:end], pool[:, 0], pool[:, 1], **more)
        plan = sat.plan(STREAMING, q[:, begin:end], pool[:, 0], pool[:, 1], starts=True, page_table=table)
        out = plan.forward(q[:, begin:end], pool[:, 0], pool[:, 1], **more)
        torch.testing.assert_close(out, right[:, begin:end], rtol=2e-5, atol=2e-5)
    for error, argument, options in [
        (sa.DTypeError, "k_new", {"k_new": k.cpu().numpy()}),
        (sa.DTypeError, "k", {"k": None}),
        (sa.ShapeError, "k_new", {"k_new": k[0]}),
        (sa.DTypeError, "starts", {"starts": more["starts"].float()}),
        (sa.ArgumentError, "v", {"v": pool[:, 1].clone().requires_grad_()}),
        (sa.ArgumentError, "query_offsets", {"query_offsets": more["starts"]}),
    ]:
        given = {"k_new": k[:, :2], "v_new": v[:, :2], "k": pool[:, 0], "v": pool[:, 1], **more} | options
        with pytest.raises(error) as raised:
            sat.cache_append(given.pop("k_new"), given.pop("v_new"), given.pop("k"), given.pop("v"), **given)
        assert raised.value.argument == argument


@pytest.mark.parametrize("pages", [None, 18])
def test_the_host_takes_no_part_in_a_capture(monkeypatch, pages):
    q, k, v = operands()
    cache = make_cache(k, v, page_size=8, pages=pages)
    right = sat.attention(q, k, v, STREAMING)
    cache.append(k[:, :10], v[:, :10])
    counts = torch.zeros(BATCH, dtype=torch.int32)
    lengths = [10] * BATCH
    for turn in range(45):
        own = [int((turn + b) % 3 > 0 and n < SEQ) for b, n in enumerate(lengths)]
        cache.reserve(own)
        counts.copy_(torch.tensor(own))
        q1, k1, v1 = (torch.stack([x[b, min(n, SEQ - 1)] for b, n in enumerate(lengths)])[:, None] for x in (q, k, v))
        with monkeypatch.context() as patch:
            capture(patch)
            cache.append(k1, v1, counts)
            out = sat.decode(q1, cache, STREAMING)
            rows = torch.cat([q1[b] for b, new in enumerate(own) if new] + [q1[0]])  # the last is nobody's
            of_rows = sat.decode(rows, cache, STREAMING, counts)
            with pytest.raises(sa.ArgumentError, match="accepted in a capture: an int32 or int64 tensor"):
                sat.decode(rows, cache, STREAMING, own)
            by_host = (lambda: cache.reserve(1), lambda: cache.truncate(0), lambda: cache.forget(0, 0), cache.reset)
            for call in (*by_host, lambda: cache.free(0)):
                with pytest.raises(sa.CudaError, match="while a graph is captured"):
                    call()
            with pytest.raises(sa.ArgumentError, match="accepted in a capture: None, or an int32 or int64 tensor"):
                cache.append(k1, v1, own)
        assert len(of_rows) == sum(own) + 1 and (of_rows[-1] == 0).all()
        for b, new in enumerate(own):
            if new:
                torch.testing.assert_close(out[b, 0], right[b, lengths[b]], rtol=2e-5, atol=2e-5)
                torch.testing.assert_close(of_rows[sum(own[:b])], out[b, 0], rtol=2e-5, atol=2e-5)
            lengths[b] += new
        assert cache.lengths.tolist() == lengths
    assert min(lengths) > 35


def seen_in(x, scales, table, seq=SEQ):
    """The tokens that pages of float8 stand for, in double precision: bshd."""
    return (x.double() * scales.double()[..., None])[table].flatten(1, 2)[:, :seq]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("page_size, pages", PAGES)
def test_float8_caches(device, dtype, bound, page_size, pages):
    """What queries see is what the cache stands for, which is next to what was appended."""
    q, k, v = operands(dtype, device)
    k[:, ::3] *= 0.01
    options = {"page_size": page_size, "pages": pages, "dtype": dtype, "device": device}
    cache = sat.KVCache(BATCH, 64, HEADS_KV, 24, 16, cache_dtype=torch.float8_e4m3fn, **options)
    assert cache.k.dtype == cache.v.dtype == torch.float8_e4m3fn and cache.k_scales.dtype == torch.float32
    for x in (cache.k, cache.v):
        x.view(torch.uint8).fill_(0x7F)  # NaN
    for x in (cache.k_scales, cache.v_scales):
        x.fill_(torch.nan)
    out, lse = fill(cache, q, k, v, STREAMING)
    seen = [seen_in(*x, cache.page_table) for x in ((cache.k, cache.k_scales), (cache.v, cache.v_scales))]
    for x, given in zip(seen, (k.double(), v.double())):
        assert ((x - given).abs() <= given.abs() / 16 + given.abs().amax(-1, keepdim=True) / 448 / 512).all()
    right = sat.attention(q.double().cpu(), *(x.cpu() for x in seen), STREAMING, return_lse=True)
    for one, other in zip((out, lse), right):
        torch.testing.assert_close(one.cpu().double(), other.double(), rtol=bound, atol=bound)
    last = sat.decode(q[:, -3:].transpose(1, 2), cache, STREAMING, axes="bhsd").transpose(1, 2)
    torch.testing.assert_close(last.cpu().double(), right[0][:, -3:], rtol=bound, atol=bound)
    last = sat.decode(torch.cat([q[0, -1:], q[2, -3:]]), cache, STREAMING, [1, 0, 3])
    rows = torch.cat([right[0][0, -1:], right[0][2, -3:]])
    torch.testing.assert_close(last.cpu().double(), rows, rtol=bound, atol=bound)
    with pytest.raises(sa.DTypeError, match=f"k is torch.float64; accepted: {dtype}, as the cache"):
        cache.append(k.double(), v)
    with pytest.raises(sa.DTypeError, match=f"q is torch.float64; accepted: {dtype}, as the cache"):
        sat.decode(q.double(), cache, STREAMING)


def test_float8_values_in_keys():
    q, k, _ = operands()
    cache = sat.KVCache(BATCH, 64, HEADS_KV, 24, 16, value_in_key=True, page_size=8, cache_dtype=torch.float8_e4m3fn)
    assert cache.v is None and cache.v_scales is None
    for x in (k[:, :40], k[:, 40:]):
        cache.append(x, None)
    seen = seen_in(cache.k, cache.k_scales, cache.page_table)
    right = sat.attention(q.double(), seen, None, STREAMING, head_dim_v=16).float()
    torch.testing.assert_close(sat.decode(q[:, 35:], cache, STREAMING), right[:, 35:], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("head_dim, head_dim_v", [(48, 32), (24, 16)])  # rows of 16 bytes, and others
def test_lists_on_float8_caches(device, dtype, bound, head_dim, head_dim_v):
    """Values in keys, as in DeepSeek's sparse attention: listed tokens are what the cache stands for."""
    torch.manual_seed(4)
    q, k = (torch.randn(BATCH, SEQ, heads, head_dim, device=device).to(dtype) for heads in (8, 1))
    k[:, ::5] *= 0.02
    sizes = {"value_in_key": True, "page_size": 16, "dtype": dtype, "cache_dtype": torch.float8_e4m3fn}
    cache = sat.KVCache(BATCH, 64, 1, head_dim, head_dim_v, device=device, **sizes)
    cache.k.view(torch.uint8).fill_(0x7F)  # NaN, which nobody lists
    cache.append(k, None)
    lists = torch.randint(-2, SEQ + 3, (BATCH, SEQ, 1, 9), device=device)  # some absent, some behind their query
    counts = torch.randint(0, 10, (BATCH, SEQ, 1), device=device)
    seen = seen_in(cache.k, cache.k_scales, cache.page_table).cpu()
    options = {"indices": lists, "index_counts": counts}
    right = sat.attention(q.double().cpu(), seen, None, "causal & runtime_tokens(9)", head_dim_v=head_dim_v,
                          **{name: x.cpu() for name, x in options.items()})
    for begin in (0, SEQ - 1):  # a prompt, and its last token
        of = {name: x[:, begin:] for name, x in options.items()}
        out = sat.decode(q[:, begin:], cache, "causal & runtime_tokens(9)", **of)
        torch.testing.assert_close(out.cpu().double(), right[:, begin:], rtol=bound, atol=bound)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_float8_pools_of_others(device):
    """With scales of the caller, one for each kv head, and none."""
    q, k, v = operands(device=device)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:18].view(BATCH, 6).to(device)
    more = {"starts": torch.zeros(BATCH, dtype=torch.int32, device=device), "page_table": table}
    ones = torch.ones(20, 8, HEADS_KV, device=device)
    for scales in (torch.tensor([1 / 64, 1 / 32], device=device).expand_as(ones), None):
        pools = [torch.zeros(20, 8, HEADS_KV, n, device=device).to(torch.float8_e4m3fn) for n in (24, 16)]
        more |= {"k_scales": scales, "v_scales": scales}
        sa.cache_append(k, v, *pools, **more)
        seen = [seen_in(x, ones if scales is None else scales, table) for x in pools]
        assert ((seen[0] - k).abs() <= k.abs() / 16 + 1 / 512).all()
        out = sat.plan(STREAMING, q, *pools, starts=True, page_table=table).forward(q, *pools, **more)
        right = sat.attention(q.double().cpu(), *(x.cpu() for x in seen), STREAMING)
        torch.testing.assert_close(out.cpu().double(), right, rtol=2e-5, atol=2e-5)
    chosen = {name: torch.zeros_like(ones) for name in ("k_scales", "v_scales")}
    sa.cache_append(k, v, *pools, **more | chosen, choose_scales=True)
    torch.testing.assert_close(chosen["v_scales"][table].flatten(1, 2)[:, :SEQ] * 448, v.abs().amax(-1))
    floats = [x.float() for x in pools]
    of_floats = sat.plan(STREAMING, q, *floats, starts=True, page_table=table)
    for error, argument, call in [
        (sa.ArgumentError, "k_scales", lambda: of_floats.forward(q, *floats, **more | chosen)),
        (sa.ArgumentError, "args.flags", lambda: sat.cache_append(k, v, *floats, **more | chosen, choose_scales=True)),
        (sa.ArgumentError, "k_scales", lambda: sat.cache_append(k, v, *pools, **more, choose_scales=True)),
        (sa.DTypeError, "problem.cache_dtype", lambda: sat.plan(STREAMING, q, *pools)),
        (sa.UnsupportedError, "problem.dtype", lambda: sat.plan(STREAMING, pools[0], *pools, starts=True)),
    ]:
        with pytest.raises(error) as raised:
            call()
        assert raised.value.argument == argument, raised.value
    scales = chosen["k_scales"].requires_grad_()
    with pytest.raises(sa.ArgumentError, match="k_scales requires a gradient, which a cache does not keep"):
        sat.cache_append(k, v, *pools, **more | {"k_scales": scales})


def test_values_in_keys():
    q, k, _ = operands()
    cache = sat.KVCache(BATCH, 64, HEADS_KV, 24, 16, value_in_key=True, page_size=8)
    assert cache.v is None
    right = sat.attention(q, k, None, STREAMING, head_dim_v=16)
    cache.append(k[:, :40], None)
    cache.append(k[:, 40:], None)
    torch.testing.assert_close(sat.decode(q[:, 35:], cache, STREAMING), right[:, 35:], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("block", [1, 4])
def test_lists_name_tokens_of_the_sequence(device, block):
    """Latent attention with an indexer, token by token and behind a prompt: what stands behind a query is not seen."""
    q, k, _ = operands(torch.float32, device)
    k = k[:, :, :1]
    made = torch.Generator().manual_seed(8)
    lists = torch.randint(-2, SEQ // block + 2, (BATCH, SEQ, 1, 7), generator=made)
    tokens = (lists[..., None] * block + torch.arange(block)).where(lists[..., None] >= 0, -1).flatten(-2)
    tokens = tokens.where((tokens <= torch.arange(SEQ)[:, None, None]) & (tokens >= 0), -1).to(device)
    lists = lists.to(device)
    right = sat.attention(q, k, None, sa.runtime_tokens(7 * block), head_dim_v=16, indices=tokens)
    pattern = f"causal & runtime_blocks(1,{block},7)" if block > 1 else "causal & runtime_tokens(7)"
    cache = sat.KVCache(BATCH, 64, 1, 24, 16, value_in_key=True, page_size=8, pages=20, device=device)
    for begin, end in [(0, 30), (30, 31), (31, 32), (32, SEQ)]:
        cache.append(k[:, begin:end], None)
        out = sat.decode(q[:, begin:end], cache, pattern, indices=lists[:, begin:end])
        torch.testing.assert_close(out, right[:, begin:end], rtol=2e-5, atol=2e-5)
    rows = torch.cat([q[0, -1:], q[2, -3:]]), torch.cat([lists[0, -1:], lists[2, -3:]])
    out = sat.decode(rows[0], cache, pattern, [1, 0, 3], indices=rows[1], index_counts=torch.full((4, 1), 7).to(device))
    torch.testing.assert_close(out, torch.cat([right[0, -1:], right[2, -3:]]), rtol=2e-5, atol=2e-5)


# ---- tokens that no query to come sees ----


def spoil_free_pages(cache):
    """Whoever reads one that nobody has gets NaN."""
    for x in (cache.k, cache.v, cache.k_scales, cache.v_scales):
        if x is not None and x.dtype != torch.float8_e4m3fn:
            x[cache._free] = torch.nan
        elif x is not None:
            x.view(torch.uint8)[cache._free] = 0x7F


def pages_of(cache):
    """The numbers of all pages that entries have, as often as they have them."""
    return sorted(cache.page_table[cache.page_table >= 0].tolist())


def assert_no_leak(cache):
    """Each page is free, or as many entries have it as the host counts."""
    held = np.bincount(pages_of(cache), minlength=cache.pages)
    assert sorted(cache._free) == np.flatnonzero(held == 0).tolist()
    assert cache._others.tolist() == np.maximum(held - 1, 0).tolist()
    assert torch.equal(cache.page_table.cpu(), torch.from_numpy(cache._held))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("value_in_key", [False, True])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("page_size", [1, 3, 8, 64])
def test_few_pages_serve_texts_of_any_length(device, cache_dtype, value_in_key, dtype, bound, page_size):
    """What no query sees is forgotten now and then, and queries get what they get where nothing is."""
    q, k, v = operands(dtype, device, 320)
    v = None if value_in_key else v
    pages = BATCH * (2 // page_size + 24 // page_size + 3)  # sinks, a window, and what comes until the next time
    options = {"value_in_key": value_in_key, "page_size": page_size, "dtype": dtype, "cache_dtype": cache_dtype}
    cache, plain = (sat.KVCache(BATCH, 320, HEADS_KV, 24, 16, device=device, pages=n, **options) for n in (pages, None))
    assert pages < plain.pages
    spoil_free_pages(cache)
    random, at = np.random.default_rng(7), [0] * BATCH
    kinds = [list, np.array, torch.tensor, lambda ends: torch.tensor(ends, dtype=torch.int32, device=device)]
    for turn in range(150):
        own = [min(n, 320 - a) for n, a in zip(random.integers(0, 5, BATCH).tolist(), at)]
        rows_q, *rows = (x if x is None else ragged(x, at, own) for x in (q, k, v))
        for each in (cache, plain):
            each.append(*rows, own)
        found, right = (sat.decode(rows_q, each, STREAMING, own) for each in (cache, plain))
        torch.testing.assert_close(found, right, rtol=bound, atol=bound)
        at = [a + n for a, n in zip(at, own)]
        if turn % 3 == 0:
            cache.forget(2 if turn % 2 else [2] * BATCH, kinds[turn % 4]([max(0, a - 9) for a in at]))
            spoil_free_pages(cache)
        assert sorted(pages_of(cache) + cache._free) == list(range(pages))
        assert cache.lengths.tolist() == plain.lengths.tolist() == at
    assert min(at) > 250
    for each in (cache, plain):
        each.truncate([a - 2 for a in at])
    found, right = (sat.decode(q[:, :1], each, "causal & (sink(2) | window(6,0))") for each in (cache, plain))
    torch.testing.assert_close(found, right, rtol=bound, atol=bound)
    cache.reset()
    assert pages_of(cache) == [] and sorted(cache._free) == list(range(pages))


def test_forgotten_pages_are_for_all_entries():
    q, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=14)
    right = sat.attention(q, k, v, STREAMING)
    cache[0].append(k[:1, :41], v[:1, :41])
    with pytest.raises(sa.ResourceError, match="12 more pages are needed, and 3 of 14 are free"):
        cache[1:].append(k[1:, :21], v[1:, :21])
    cache[1:].forget(0, 41)
    assert len(cache._free) == 3
    cache[:2].forget(2, [32, 32])
    assert len(cache._free) == 10 and cache.page_table[0, :12].clamp(max=0).tolist() == [0, *[-1] * 7, 0, 0, 0, -1]
    for entry in (1, 2):
        out, _ = fill(cache[entry], *(x[entry : entry + 1] for x in (q, k, v)), STREAMING, [9, 4, 4, 4])
        torch.testing.assert_close(out, right[entry : entry + 1, :21], rtol=2e-5, atol=2e-5)
        cache[entry : entry + 1].forget(torch.tensor([2]), 12)
    cache[:1].append(k[:1, 41:], v[:1, 41:])
    torch.testing.assert_close(sat.decode(q[:1, 41:], cache[0], STREAMING), right[:1, 41:], rtol=2e-5, atol=2e-5)
    cache[1:].append(k[1:, 21:22], v[1:, 21:22])
    torch.testing.assert_close(sat.decode(q[1:, 21:22], cache[1:], STREAMING), right[1:, 21:22], rtol=2e-5, atol=2e-5)
    assert cache.lengths.tolist() == [45, 22, 22]
    for entry in range(BATCH):
        cache.free(entry)
    assert sorted(cache._free) == list(range(14)) and (cache.page_table == -1).all()


@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_what_is_left_of_forgetful_entries_stays(page_size):
    """Tokens are numbers, None where they were forgotten, and all that an entry may do is done at random."""
    capacity, pages = 60, 80 // page_size
    cache = sat.KVCache(BATCH, capacity, 1, 1, value_in_key=True, page_size=page_size, pages=pages)
    random, names = np.random.default_rng(page_size), iter(range(1, 1 << 20))
    tokens, seen = [[] for _ in range(BATCH)], set()

    def append(b):
        new = [next(names) for _ in range(random.integers(0, 9))]
        try:
            cache[b].append(torch.tensor(new, dtype=torch.float32).view(1, -1, 1, 1), None)
        except (sa.ResourceError, sa.ArgumentError) as error:
            return error.argument
        tokens[b] += new
        return "append"

    def forget(b):
        first, end = random.integers(0, capacity, 2).tolist()
        cache[b].forget(first, end)
        for page in range(len(tokens[b]) // page_size):
            own = slice(page * page_size, (page + 1) * page_size)
            if first <= own.start and own.stop <= end:
                tokens[b][own] = [None] * page_size
        return "forget"

    def truncate(b):
        n = int(random.integers(0, capacity))
        is_amid = 0 < n < len(tokens[b]) and tokens[b][n - 1] is None and tokens[b][n] is None
        try:
            cache[b].truncate(n)
        except sa.ArgumentError as error:
            assert is_amid and error.argument == "lengths", error
            begin, end = map(int, re.search("up to ([0-9]+), or ([0-9]+) and more", str(error)).groups())
            assert begin < n < end and tokens[b][begin:end] == [None] * (end - begin)
            assert None not in tokens[b][max(0, begin - 1) : begin] + tokens[b][end : end + 1]
            return "amid"
        assert not is_amid
        del tokens[b][n:]
        return "truncate"

    def keep(b):
        drafts = int(random.integers(0, 12))
        nodes = np.flatnonzero(random.random(drafts) < 0.5)
        last = tokens[b][len(tokens[b]) - drafts :] if drafts else []
        is_wrong = drafts > len(tokens[b]) or None in last
        try:
            cache[b].keep(torch.from_numpy(nodes)[None], drafts)
        except sa.ResourceError as error:
            assert not is_wrong
            return error.argument
        except sa.ArgumentError as error:
            assert is_wrong and error.argument == "tokens", error
            return "tokens"
        assert not is_wrong
        tokens[b][len(tokens[b]) - drafts :] = [last[node] for node in nodes]
        return "keep"

    def share(b):
        into, n = int(random.integers(BATCH)), int(random.integers(0, 30))
        if random.random() < 0.5:
            cache.free(into)
            tokens[into] = []
        own = tokens[b]
        is_amid = 0 < n < len(own) and own[n - 1] is None and own[n] is None
        right = "into" if tokens[into] else "tokens" if n > len(own) or is_amid else "share"
        try:
            cache.share(b, into, n)
        except sa.ArgumentError as error:
            assert error.argument == right, error
            return right
        assert right == "share"
        tokens[into] = own[:n]
        return right

    def reorder(b):
        parents = random.integers(0, BATCH, BATCH).tolist()
        cache.reorder(parents)
        tokens[:] = [list(tokens[parent]) for parent in parents]
        return "reorder"

    for _ in range(2000):
        chosen = [*[append] * 6, forget, truncate, keep, keep, share, reorder][random.integers(12)]
        seen.add(chosen(int(random.integers(BATCH))))
        assert_no_leak(cache)
        assert cache.lengths.tolist() == [len(own) for own in tokens]
        for row, own in zip(cache.page_table.tolist(), tokens):
            for at, token in enumerate(own):
                assert token is None or cache.k[row[at // page_size], at % page_size] == token
            firsts = own[::page_size]  # all tokens of a page are forgotten together
            assert [page >= 0 for page in row] == [t is not None for t in firsts] + [False] * (len(row) - len(firsts))
    done = {"append", "forget", "truncate", "keep", "share", "reorder"}
    assert seen == done | {"amid", "tokens", "capacity", "pages", "into"}


def test_forgetting_that_is_refused_or_nothing():
    _, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=40)
    cache.append(k[:, :30], v[:, :30])
    for error, argument, call in [
        (sa.ArgumentError, "first", lambda: cache.forget(-1, 8)),
        (sa.ArgumentError, "end", lambda: cache.forget(0, cache.lengths - 31)),
        (sa.ShapeError, "first", lambda: cache.forget([0, 0], 8)),
        (sa.ShapeError, "end", lambda: cache[1].forget(0, [8, 8])),
        (sa.DTypeError, "first", lambda: cache.forget(None, 8)),
        (sa.DTypeError, "end", lambda: cache.forget(0, 8.0)),
    ]:
        with pytest.raises(error) as raised:
            call()
        assert raised.value.argument == argument, raised.value
    before = cache.page_table.clone()
    for first, end in [(8, 8), (20, 4), (5, 11), (28, 99), (0, 3), (1 << 40, 1 << 41)]:
        cache.forget(first, end)
        assert torch.equal(cache.page_table, before) and len(cache._free) == 16
    cache.forget(7, 1 << 40)  # pages that are not full stay
    assert (cache.page_table[:, :8] >= 0).tolist() == [[True, True, *[False] * 5, True]] * BATCH
    message = "lengths is 27 for entry 1, which forgot its tokens 8 up to 28; accepted: up to 8, or 28 and more"
    with pytest.raises(sa.ArgumentError, match=message):
        cache.truncate([28, 27, 0])
    with pytest.raises(sa.ArgumentError, match="tokens is 3 for entry 0; accepted: up to 2"):
        cache.keep(torch.zeros(BATCH, 1, dtype=torch.int64), 3)
    assert cache.lengths.tolist() == cache._tokens.tolist() == [30] * BATCH
    cache.truncate([28, 8, 0])
    assert cache.lengths.tolist() == [28, 8, 0] and len(cache._free) == 36

    own = make_cache(k, v, page_size=4)
    own.append(k, v)
    own.forget(0, SEQ)
    own.truncate(SEQ - 3)
    assert pages_of(own) == list(range(own.pages)) and own.lengths.tolist() == [SEQ - 3] * BATCH


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_are_forgotten_between_replays(monkeypatch, page_size):
    """Where replays append fewer tokens than were reserved, the host hears of it before."""
    q, k, v = operands()
    cache = make_cache(k, v, page_size=page_size, pages=BATCH * (16 // page_size + 2))
    right = sat.attention(q, k, v, STREAMING)
    counts, lengths = torch.zeros(BATCH, dtype=torch.int32), [0] * BATCH
    while min(lengths) < SEQ:
        own = [int(np.clip(SEQ - n, 0, 1 + (n + b) % 2)) for b, n in enumerate(lengths)]
        counts.copy_(torch.tensor(own))
        rows_q, *rows = (ragged(x, lengths, own, 2 * BATCH) for x in (q, k, v))
        cache.reserve([min(2, SEQ - n) for n in lengths])
        with monkeypatch.context() as patch:
            capture(patch)
            cache.append(*rows, counts)
            out = sat.decode(rows_q, cache, STREAMING, counts)
            with pytest.raises(sa.CudaError, match="forget is called while a graph is captured"):
                cache.forget(2, 3)
        torch.testing.assert_close(out[: sum(own)], ragged(right, lengths, own), rtol=2e-5, atol=2e-5)
        lengths = [n + new for n, new in zip(lengths, own)]
        cache.truncate(cache.lengths)
        cache.forget(2, (cache.lengths - 9).clamp(0))
        spoil_free_pages(cache)
    assert cache.lengths.tolist() == cache._tokens.tolist() == [SEQ] * BATCH


# ---- pages of several entries ----


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("value_in_key", [False, True])
@pytest.mark.parametrize("page_size, pages", [(1, 60), (4, 20), (16, 8)])
def test_entries_share_pages(device, cache_dtype, value_in_key, page_size, pages):
    """Whatever entries do at random, their last tokens see what dense attention sees of texts of their own."""
    entries, most = 5, 50
    made = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(4000, heads, n, generator=made).to(device) for heads, n in ((4, 24), (2, 24), (2, 16)))
    v = None if value_in_key else v
    options = {"value_in_key": value_in_key, "cache_dtype": cache_dtype, "device": device}
    cache = sat.KVCache(entries, most, 2, 24, 16, page_size=page_size, pages=pages, **options)
    plain = sat.KVCache(1, len(k), 2, 24, 16, page_size=len(k), **options)  # of all tokens that there will be
    plain.append(*(x if x is None else x[None] for x in (k, v)))
    pools = [(plain.k, plain.k_scales), (plain.k[..., :16], plain.k_scales) if v is None else (plain.v, plain.v_scales)]
    right_k, right_v = (x.double().cpu()[0] * (1 if by is None else by.cpu()[0][..., None]) for x, by in pools)
    random, texts, new, refused = np.random.default_rng(page_size), [[] for _ in range(entries)], 0, 0
    for turn in range(300):
        spoil_free_pages(cache)
        b, before = int(random.integers(entries)), (cache.page_table.clone(), cache.lengths.clone())
        action = random.choice(["append", "append", "share", "reorder", "truncate", "keep", "free", "forget"])
        after = [list(text) for text in texts]
        try:
            if action == "append":
                counts = [min(n, most - len(text)) for n, text in zip(random.integers(0, 6, entries).tolist(), texts)]
                tokens = range(new, new + sum(counts))
                for text, count in zip(after, counts):
                    text += range(new, new + count)
                    new += count
                cache.append(*(x if x is None else x[tokens] for x in (k, v)), counts)
            elif action == "share":
                into, n = (b + 1) % entries, None
                if turn % 2 and None not in texts[b]:
                    n = int(random.integers(len(texts[b]) + 1))
                cache.free(into)
                cache.share(b, into, n)
                after[into] = texts[b][:n]
            elif action == "reorder":
                parents = random.integers(0, entries, entries)
                cache.reorder(torch.from_numpy(parents).to(device) if turn % 2 else parents.tolist())
                after = [list(texts[parent]) for parent in parents]
            elif action == "truncate" and None not in texts[b]:
                n = int(random.integers(len(texts[b]) + 1))
                cache[b].truncate(n)
                after[b] = texts[b][:n]
            elif action == "keep" and None not in texts[b]:
                drafts = int(random.integers(min(9, len(texts[b]) + 1)))
                nodes, first = np.flatnonzero(random.random(drafts) < 0.6), len(texts[b]) - drafts
                after[b] = texts[b][:first] + [texts[b][first + node] for node in nodes]
                cache[b].keep(torch.from_numpy(nodes)[None].to(device), drafts)
            elif action == "free":
                cache.free(b)
                after[b] = []
            elif action == "forget":
                cache[b].forget(2, max(0, len(texts[b]) - 9))
                for page in range(-(-2 // page_size), max(0, len(texts[b]) - 9) // page_size):
                    after[b][page * page_size : (page + 1) * page_size] = [None] * page_size
        except sa.ResourceError as error:
            assert error.argument == "pages" and action in ("append", "keep")
            assert all(torch.equal(*x) for x in zip(before, (cache.page_table, cache.lengths)))
            after, refused = texts, refused + 1
        texts = after
        assert_no_leak(cache)
        assert cache.lengths.tolist() == cache._tokens.tolist() == [len(text) for text in texts]
        out = sat.decode(q[turn].expand(entries, 1, 4, 24), cache, STREAMING)
        for b, text in enumerate(texts):
            visible = text[:2] + text[2:][-10:]
            if visible and None not in visible:  # a text that was made shorter may see what it forgot
                keys, values = (x[visible].repeat_interleave(2, 1) for x in (right_k, right_v))
                weights = (torch.einsum("hd,khd->hk", q[turn].double().cpu(), keys) / 24**0.5).softmax(1)
                right = torch.einsum("hk,khd->hd", weights, values)
                torch.testing.assert_close(out[b, 0].cpu().double(), right, rtol=2e-5, atol=2e-5)
    assert refused
    cache.reset()
    assert_no_leak(cache)
    assert len(cache._free) == pages


def test_a_prompt_costs_its_pages_once():
    """Who goes on takes a copy of the page that the prompt ends amid, but for the last of those that have it."""
    q, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=6)
    cache[0].append(k[:1, :14], v[:1, :14])
    cache.share(0, 1)
    cache[1:].share(source=0, into=1, tokens=np.int64(13))
    assert cache.lengths.tolist() == [14, 14, 13] and len(cache._free) == 2
    before = [x.clone() for x in (cache.k, cache.page_table, cache.lengths)]
    for counts, needed in (([3, 1, 1], 3), ([1, 0, 9], 4), ([0, 12, 0], 4)):
        with pytest.raises(sa.ResourceError, match=f"{needed} more pages are needed, and 2 of 6 are free") as raised:
            cache.append(k[0, : sum(counts)], v[0, : sum(counts)], counts)
        assert raised.value.argument == "pages"
        for one, other in zip(before, (cache.k, cache.page_table, cache.lengths)):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert_no_leak(cache)
    at, counts = [14, 14, 13], [2, 2, 3]
    texts = [[*range(a), *range(20 + b, 20 + b + n)] for b, (a, n) in enumerate(zip(at, counts))]
    cache.append(*(torch.cat([x[0, text[a:]] for a, text in zip(at, texts)]) for x in (k, v)), counts)
    assert cache.lengths.tolist() == [16] * BATCH and not cache._free
    out = sat.decode(q[:1, :1].expand(BATCH, -1, -1, -1), cache, "full")
    right = [sat.attention(q[:1, :1], k[:1, text], v[:1, text], "full") for text in texts]
    torch.testing.assert_close(out, torch.cat(right), rtol=2e-5, atol=2e-5)
    for entry, free in ((0, 1), (2, 2), (1, 6)):
        cache.free(entry)
        assert len(cache._free) == free
    assert_no_leak(cache)


def test_an_entry_keeps_drafts_in_pages_of_others():
    """They lie in the pages of two, and move in copies of these."""
    _, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=6)
    cache[0].append(k[:1, :14], v[:1, :14])
    cache.share(0, 1)
    before = as_it_lies(cache, 0)
    with pytest.raises(sa.ResourceError, match="3 more pages are needed, and 2 of 6 are free"):
        cache[:2].keep(torch.tensor([[0] * 9, [*range(1, 10)]]), [0, 12], [0, 9])
    assert cache.lengths.tolist() == [14, 14, 0] and len(cache._free) == 2
    cache[:2].keep(torch.tensor([[0] * 3, [1, 4, 9]]), [0, 10], [0, 3])
    assert cache.lengths.tolist() == [14, 7, 0] and len(cache._free) == 1
    assert all(torch.equal(*x) for x in zip(before, as_it_lies(cache, 0)))
    for found, x in zip(as_it_lies(cache, 1), (k, v)):
        assert torch.equal(found, x[0, [0, 1, 2, 3, 5, 8, 13]].contiguous().view(torch.uint8))
    assert_no_leak(cache)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_a_beam_search_on_layers(device):
    """Calls of a step find the same pages in all layers, and what they see is what texts of their own see."""
    layers, step = layers_of(71, device, page_size=4, pages=40), sat.Step()
    random, texts = np.random.default_rng(3), [[(0, n) for n in range(10)]] * BATCH
    for _, k, v, cache in layers:
        cache[0].append(k[:1, :10], v[:1, :10])
        cache.reorder([0] * BATCH)
    for n in range(10, SEQ):
        step.reset()
        texts = [[*text, (b, n)] for b, text in enumerate(texts)]
        for q, k, v, cache in layers:
            cache.append(k[:, n : n + 1], v[:, n : n + 1])
            out = sat.decode(q[:, n : n + 1], cache, STREAMING, step=step)
            rows, tokens = (torch.tensor([[token[i] for token in text] for text in texts]) for i in range(2))
            right = sat.attention(q[:, : n + 1], k[rows, tokens], v[rows, tokens], STREAMING)[:, n:]
            torch.testing.assert_close(out, right, rtol=2e-5, atol=2e-5)
        parents = random.integers(0, BATCH, BATCH).tolist()
        texts = [texts[parent] for parent in parents]
        for *_, cache in layers:
            cache.reorder(parents)
    for *_, cache in layers:
        assert_no_leak(cache)
        assert len(cache._free) >= 40 - 12 - 2 * BATCH  # and what the others of the last step had is given back
        cache.reset()
        assert sorted(cache._free) == list(range(40))


def test_replays_write_to_no_page_of_others(monkeypatch):
    """The host copies pages when it reserves tokens, and counts those that came. The table stays where it lies."""
    q, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=30)
    where = cache.page_table.data_ptr()
    cache[0].append(k[:1, :6], v[:1, :6])
    texts = [[(0, n) for n in range(6)]] * BATCH
    cache.share(0, 1)
    cache.share(0, 2)
    for turn, n in enumerate(range(6, 30)):
        cache.reserve(2)  # of which one comes
        with monkeypatch.context() as patch:
            capture(patch)
            cache.append(k[:, n : n + 1], v[:, n : n + 1])
            out = sat.decode(q[:, n : n + 1], cache, STREAMING)
            for call in (lambda: cache.share(0, 1), lambda: cache.reorder([0, 0, 0])):
                with pytest.raises(sa.CudaError, match="is called while a graph is captured"):
                    call()
        texts = [[*text, (b, n)] for b, text in enumerate(texts)]
        rows, tokens = (torch.tensor([[token[i] for token in text] for text in texts]) for i in range(2))
        right = sat.attention(q[:, : n + 1], k[rows, tokens], v[rows, tokens], STREAMING)[:, n:]
        torch.testing.assert_close(out, right, rtol=2e-5, atol=2e-5)
        if turn % 3 == 0:
            parents = [(turn + b) // 2 % BATCH for b in range(BATCH)]
            cache.reorder(parents)
            texts = [texts[parent] for parent in parents]
            assert cache._tokens.tolist() == [n + 1] * BATCH and not cache._reserved.any()
        elif turn % 3 == 1:
            cache.free(2)
            cache.share(turn % 2, 2)
            texts[2] = texts[turn % 2]
            assert cache._tokens[2] == n + 1 and cache._reserved[2] == 0
    assert cache.lengths.tolist() == [30] * BATCH and cache.page_table.data_ptr() == where
    cache.truncate(cache.lengths)
    assert_no_leak(cache)


@pytest.mark.parametrize("came", [0, 2])
def test_replays_behind_drafts_that_were_not_kept_write_to_no_page_of_others(monkeypatch, came):
    """Where fewer tokens came than were reserved the host does not know where the next one goes."""
    _, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=30)
    one = cache[0]
    one.append(k[:1, :16], v[:1, :16])
    cache.share(0, 1)
    of_other = as_it_lies(cache, 1)

    def replay(n):
        with monkeypatch.context() as patch:
            capture(patch)
            one.append(k[:1, 20 : 20 + n], v[:1, 20 : 20 + n])

    one.reserve(4)
    replay(came)
    one.keep(torch.zeros(1, 0, dtype=torch.int64), came + 3)
    replay(1)
    assert cache.lengths.tolist() == [14, 16, 0]
    assert all(torch.equal(*x) for x in zip(of_other, as_it_lies(cache, 1)))
    for found, x in zip(as_it_lies(cache, 0), (k, v)):
        assert torch.equal(found, x[0, [*range(13), 20]].contiguous().view(torch.uint8))
    cache.truncate(cache.lengths)
    assert_no_leak(cache)


def failing(call, good, error, done):
    """The call, which works so many times and then raises; each time adds to `done`."""

    def counted(*arguments):
        done.append(1)
        if len(done) > good:
            raise error
        return call(*arguments)

    return counted


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_copies_of_pages_that_fail_leave_them_to_all(monkeypatch, error):
    _, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=12)
    cache[0].append(k[:1, :15], v[:1, :15])
    cache.share(0, 1)
    before, free = cache.page_table.clone(), list(cache._free)
    for good in range(6):  # a page behind each entry's own, and the four numbers of copies
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(sat.KVCache, "_to_device", failing(sat.KVCache._to_device, good, error, []))
            cache[:2].append(k[:2, 20:24], v[:2, 20:24])
        assert torch.equal(cache.page_table, before) and cache._free == free
        assert cache.lengths.tolist() == cache._tokens.tolist() == [15, 15, 0]
        assert_no_leak(cache)
    cache[:2].append(k[:2, 20:24], v[:2, 20:24])
    assert cache.lengths.tolist() == [19, 19, 0]
    assert_no_leak(cache)


def test_sharing_that_is_refused_or_nothing():
    _, k, v = operands()
    own = make_cache(k, v, page_size=4)
    cache = make_cache(k, v, page_size=4, pages=40)
    cache[:2].append(k[:2, :30], v[:2, :30])
    cache[1].forget(7, 22)
    before = [x.clone() for x in (cache.page_table, cache.lengths)]
    for error, argument, call in [
        (sa.ArgumentError, "pages", lambda: own.share(0, 1)),
        (sa.ArgumentError, "pages", lambda: own.reorder([0, 1, 2])),
        (sa.ArgumentError, "source", lambda: cache.share(3, 2)),
        (sa.ArgumentError, "source", lambda: cache[:1].share(1, 0)),
        (sa.ArgumentError, "into", lambda: cache.share(0, -1)),
        (sa.ArgumentError, "into", lambda: cache.share(0, 1)),
        (sa.ArgumentError, "into", lambda: cache.share(0, 0)),
        (sa.ArgumentError, "tokens", lambda: cache.share(0, 2, 31)),
        (sa.ArgumentError, "tokens", lambda: cache.share(0, 2, -1)),
        (sa.ArgumentError, "tokens", lambda: cache.share(1, 2, 9)),
        (sa.DTypeError, "source", lambda: cache.share("0", 2)),
        (sa.DTypeError, "into", lambda: cache.share(0, None)),
        (sa.DTypeError, "tokens", lambda: cache.share(0, 2, 4.0)),
        (sa.ArgumentError, "parents", lambda: cache.reorder([0, 1, 3])),
        (sa.ArgumentError, "parents", lambda: cache.reorder(torch.tensor([-1, 0, 0]))),
        (sa.ShapeError, "parents", lambda: cache.reorder([0, 1])),
        (sa.ShapeError, "parents", lambda: cache.reorder(0)),
        (sa.DTypeError, "parents", lambda: cache.reorder([0.0, 1.0, 2.0])),
    ]:
        with pytest.raises(error) as raised:
            call()
        assert raised.value.argument == argument, raised.value
        assert all(torch.equal(*x) for x in zip(before, (cache.page_table, cache.lengths)))
    cache.reorder(np.arange(3, dtype=np.uint8))
    cache.share(2, 2)
    cache.share(0, 2, 0)
    assert all(torch.equal(*x) for x in zip(before, (cache.page_table, cache.lengths)))
    cache.share(1, 2, 8)  # up to what was forgotten
    cache[2].append(k[:1, 8:9], v[:1, 8:9])
    assert cache.lengths.tolist() == [30, 30, 9]
    assert_no_leak(cache)
    cache.reorder([0, 2, 1])
    with pytest.raises(sa.ArgumentError, match="lengths is 9 for entry 2, which forgot its tokens 8 up to 20"):
        cache.truncate(9)
    cache.truncate([9, 9, 8])
    assert_no_leak(cache)
    nobody = sat.KVCache(0, 0, 2, 8, pages=0)
    nobody.reorder([])


# ---- trees of drafts ----

NODES = 13
TREE_PATTERNS = [STREAMING, "full", "window(3,0) | dilated(20,0,3)"]


def rows_of_nodes(q, k, v, pattern, starts, parents):
    """out and lse of nodes of trees, which begin at these tokens of k and v, in double precision: bshd."""
    seen = seen_by_nodes(pattern, k.shape[1], starts, np.asarray(parents.cpu()), q.shape[2])
    rows = (x.double().cpu().numpy().swapaxes(1, 2) for x in (q, k, v))
    out, lse = oracle.attention_forward(*rows, seen, q.shape[3] ** -0.5)
    return torch.from_numpy(out.swapaxes(1, 2)), torch.from_numpy(lse)


def assert_rows(found, right, bound):
    for one, other in zip(found, right):
        torch.testing.assert_close(one.cpu().double(), other.double(), rtol=bound, atol=bound)


def forest(reach=8, seed=1, device="cpu"):
    return torch.from_numpy(draw_parents(np.random.default_rng(seed), BATCH, NODES, reach)).to(device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("page_size, pages", PAGES)
@pytest.mark.parametrize("pattern", TREE_PATTERNS)
def test_trees_of_drafts(device, dtype, bound, page_size, pages, pattern):
    q, k, v = operands(dtype, device, 30)
    cache = make_cache(k, v, page_size=page_size, pages=pages)
    cache.append(k[:, :17], v[:, :17], [17, 0, 5])
    lengths, behind = [17, 0, 5], [slice(0, 17), slice(17, 17), slice(12, 17)]
    cache.append(k[:, 17:], v[:, 17:])
    texts = [torch.zeros(BATCH, 30, *x.shape[2:], dtype=dtype) for x in (k, v)]  # entry by entry as they lie
    for text, x in zip(texts, (k, v)):
        for b, own in enumerate(behind):
            text[b, : lengths[b] + NODES] = torch.cat([x[b, own], x[b, 17:]]).cpu()
    for parents in (forest(1), forest(2, 2).int(), forest(NODES, 3)):
        right = rows_of_nodes(q[:, 17:], *texts, pattern, lengths, parents)
        spread = torch.full((BATCH, 2 * NODES), 99, device=device, dtype=parents.dtype)
        spread[:, ::2] = parents
        for each in (parents.to(device), spread[:, ::2]):
            found = sat.decode(q[:, 17:], cache, pattern, parents=each, return_lse=True)
            assert_rows(found, right, bound)
        swapped = q[:, 17:].transpose(1, 2)
        found = sat.decode(swapped, cache, pattern, parents=parents.to(device), axes="bhsd", reference=device == "cpu")
        assert_rows([found.transpose(1, 2)], right, bound)
    chains = torch.arange(-1, NODES - 1, device=device).expand(BATCH, NODES)
    found = sat.decode(q[:, 17:], cache, pattern, parents=chains)
    assert_rows([found], [sat.decode(q[:, 17:], cache, pattern).cpu()], bound)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("page_size, pages", PAGES)
@pytest.mark.parametrize("pattern", TREE_PATTERNS)
def test_trees_of_several_sizes(device, page_size, pages, pattern):
    """A tree, a token that is decoded, which is a tree, too, and an entry that has nothing to ask."""
    q, k, v = operands(device=device, seq=30)
    cache = make_cache(k, v, page_size=page_size, pages=pages)
    cache.append(k[:, :17], v[:, :17])
    own, parents = [NODES, 1, 0], forest(4, 4)
    cache.append(ragged(k, [17] * BATCH, own, 20), ragged(v, [17] * BATCH, own, 20), own)
    right, right_lse = rows_of_nodes(q[:, 17:], k, v, pattern, [17] * BATCH, parents)
    of_rows = torch.cat([parents[0], parents[1, :1], torch.full((6,), 3)]).to(device)
    for counts in (own, torch.tensor(own, device=device)):
        rows = ragged(q, [17] * BATCH, own, 20)
        out, lse = sat.decode(rows, cache, pattern, counts, parents=of_rows, return_lse=True)
        right_rows = ragged(right, [0] * BATCH, own), ragged(right_lse.transpose(1, 2), [0] * BATCH, own).T
        assert_rows((out[:14], lse[:, :14]), right_rows, 2e-5)
        assert (out[14:] == 0).all() and (lse[:, 14:] == -torch.inf).all()


def as_it_lies(cache, b):
    """An entry's tokens: rows of k, of v, and of their scales, as bytes."""
    pools = [x for x in (cache.k, cache.v, cache.k_scales, cache.v_scales) if x is not None]
    n = int(cache.lengths[b])
    held = cache.page_table[b, : -(-n // cache.page_size)].long()
    return [x[held].flatten(0, 1)[:n].contiguous().view(torch.uint8) for x in pools]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("value_in_key", [False, True])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("page_size, pages", [(8, None), (8, 18), (1, None), (3, 60)])
def test_drafts_that_are_accepted_stay(device, cache_dtype, value_in_key, dtype, bound, page_size, pages):
    """Round by round: then the cache holds, bit for bit, what it would without the drafts that were wrong."""
    q, k, v = operands(dtype, device)
    k[:, ::3] *= 0.01
    v = None if value_in_key else v
    options = {"page_size": page_size, "pages": pages, "dtype": dtype, "device": device, "cache_dtype": cache_dtype}
    sizes = (BATCH, 64, HEADS_KV, 24, 16)
    cache, plain = (sat.KVCache(*sizes, value_in_key=value_in_key, **options) for _ in range(2))
    for x in (cache.k, cache.v, cache.k_scales, cache.v_scales, plain.k_scales, plain.v_scales):
        if x is not None:
            x.copy_(torch.full_like(x, torch.nan, dtype=torch.float32))
    random, pattern = np.random.default_rng(2), "causal & (sink(2) | window(60,0))"
    at = [0] * BATCH

    def rows(x, b, path, noise):
        """Nodes of entry b: those on the path are the tokens to come, others anything."""
        made = torch.randn(NODES, *x.shape[2:], generator=noise, dtype=torch.float64).to(device, dtype)
        made[path] = x[b, at[b] : at[b] + len(path)]
        return made

    for turn in range(6):
        kept = random.integers(0, 7, BATCH).tolist() if turn != 3 else [4] * BATCH
        paths = [torch.from_numpy(np.sort(random.choice(NODES, n, replace=False))) for n in kept]
        nodes, parents = torch.full((BATCH, 7), -9, dtype=[torch.int32, torch.int64][turn % 2]), forest(3, turn)
        for b, path in enumerate(paths):
            parents[b, path] = torch.cat([path.new_tensor([-1]), path])[: len(path)]
            nodes[b, : len(path)] = path
        noise = torch.Generator().manual_seed(turn)
        drafts = [x if x is None else torch.stack([rows(x, b, path, noise) for b, path in enumerate(paths)])
                  for x in (q, k, v)]
        cache.append(*drafts[1:])
        out = sat.decode(drafts[0], cache, pattern, parents=parents.to(device))
        nodes, counts = (nodes, kept) if turn != 3 else (nodes[:, :4], None)
        cache.keep(nodes.to(device), NODES if turn % 3 else [NODES] * BATCH, counts)
        plain.append(*(x if x is None else ragged(x, at, kept) for x in (k, v)), kept)
        right = sat.decode(ragged(q, at, kept), plain, pattern, kept)
        found = torch.cat([out[b, path] for b, path in enumerate(paths)])
        torch.testing.assert_close(found, right, rtol=bound, atol=bound)
        at = [a + n for a, n in zip(at, kept)]
        assert cache.lengths.tolist() == cache._tokens.tolist() == at
        for b in range(BATCH):
            assert all(torch.equal(*x) for x in zip(as_it_lies(cache, b), as_it_lies(plain, b)))
        if pages:
            needed = [-(-a // page_size) for a in at]
            assert [(entry >= 0).sum() for entry in cache._held] == needed and len(cache._free) == pages - sum(needed)
            assert [(entry >= 0).sum() for entry in cache.page_table] == needed
    assert min(at) > 8
    more = [x if x is None else x[:, -2:] for x in (k, v)]
    for each in (cache, plain):
        each.append(*more)
    found, right = (sat.decode(q[:, -2:], each, STREAMING) for each in (cache, plain))
    torch.testing.assert_close(found, right, rtol=bound, atol=bound)


def test_entries_keep_of_as_many_drafts_as_they_have():
    """Ragged drafts; entries that others share memory with stay as they are."""
    q, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=30)
    cache.append(k[:, :10], v[:, :10])
    before = as_it_lies(cache, 1)
    drafts = [6, 0, 9]
    cache.append(ragged(k, [10] * BATCH, drafts), ragged(v, [10] * BATCH, drafts), drafts)
    for tokens in (torch.tensor([7, 0, 9]), [6, 11, 9]):
        cache[:1].keep(torch.tensor([[0, 1]]), 0, [0])
        with pytest.raises(sa.ArgumentError) as raised:
            cache[1:].keep(torch.zeros(2, 3, dtype=torch.int32), tokens[1:], [4, 0])
        assert raised.value.argument in ("tokens", "counts")
    cache.keep(torch.tensor([[2, 5, 99], [-7, 1 << 40, 3], [0, 4, 8]]), torch.tensor(drafts), torch.tensor([2, 0, 3]))
    assert cache.lengths.tolist() == [12, 10, 13]
    assert all(torch.equal(*x) for x in zip(before, as_it_lies(cache, 1)))
    for b, tokens in ((0, [12, 15]), (2, [10, 14, 18])):
        of_k, of_v = as_it_lies(cache, b)
        for found, x in ((of_k, k), (of_v, v)):
            assert torch.equal(found, torch.cat([x[b, :10], x[b, tokens]]).contiguous().view(torch.uint8))
    cache.keep(torch.zeros(BATCH, 0, dtype=torch.int64), [12, 10, 13])
    assert cache.lengths.tolist() == [0] * BATCH and sorted(cache._free) == list(range(30))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_may_say_how_many_drafts_there_are_and_how_many_stay(dtype):
    """A prompt of which an entry keeps as many nodes as it has tokens: the tensor that is read is the one to write."""
    _, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=40)
    cache.append(k[:, :9], v[:, :9], [9, 4, 0])
    before = [as_it_lies(cache, b) for b in range(BATCH)]
    nodes = torch.arange(9, dtype=dtype).expand(BATCH, 9)
    for tokens, counts in ((cache.lengths, cache.lengths), ([9, 4, 0], cache.lengths), (cache.lengths, [9, 4, 0])):
        cache.keep(nodes, tokens, counts)
        assert cache.lengths.tolist() == cache._tokens.tolist() == [9, 4, 0]
        assert all(torch.equal(*x) for b in range(BATCH) for x in zip(before[b], as_it_lies(cache, b)))


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_keeping_that_fails_leaves_all_drafts(monkeypatch, cache_dtype):
    """As where there is no memory for the second of the tensors that it reads."""
    _, k, v = operands()
    cache = sat.KVCache(BATCH, 64, HEADS_KV, 24, 16, page_size=4, pages=40, cache_dtype=cache_dtype)
    cache.append(k[:, :10], v[:, :10])
    before = [as_it_lies(cache, b) for b in range(BATCH)]
    read, done = sat._cache._rows_of, []

    def fail(*arguments):
        done.append(1)
        if len(done) == 2:
            raise MemoryError
        return read(*arguments)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(sat._cache, "_rows_of", fail)
        cache.keep(torch.tensor([[1, 3]] * BATCH), 6)
    assert cache.lengths.tolist() == cache._tokens.tolist() == [10] * BATCH
    assert all(torch.equal(*x) for b in range(BATCH) for x in zip(before[b], as_it_lies(cache, b)))
    cache.keep(torch.tensor([[1, 3]] * BATCH), 6)
    assert cache.lengths.tolist() == [6] * BATCH


@pytest.mark.parametrize("pages", [None, 40])
def test_drafts_that_were_reserved_and_never_came_are_not_kept(monkeypatch, pages):
    q, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=pages)
    cache.append(k[:, :10], v[:, :10])
    nodes = torch.tensor([[1]] * BATCH)
    cache.reserve([6, 0, 6])
    for part in (cache, cache[2:]):
        with pytest.raises(sa.ArgumentError, match="argument tokens is 13 for entry 0; accepted: up to 10") as raised:
            part.keep(nodes[-part.batch :], 13)
        assert raised.value.argument == "tokens" and cache.lengths.tolist() == [10] * BATCH
    for n in (3, 2):  # some of them come with a replay
        with monkeypatch.context() as patch:
            capture(patch)
            cache.append(k[:, 10 : 10 + n], v[:, 10 : 10 + n], torch.tensor([n, 0, n], dtype=torch.int32))
    cache.keep(nodes, [5, 0, 14], [1, 0, 1])  # of two entries all drafts that came, and of one older tokens
    assert cache.lengths.tolist() == [11, 10, 2]
    for b, tokens in ((0, [*range(10), 11]), (2, [0, 2])):
        for found, x in zip(as_it_lies(cache, b), (k, v)):
            assert torch.equal(found, x[b, tokens].contiguous().view(torch.uint8))
    with pytest.raises(sa.ArgumentError, match="argument tokens is 12 for entry 0; accepted: up to 11"):
        cache.keep(nodes, [12, 0, 0], [1, 0, 0])
    cache.append(k[:, 20:22], v[:, 20:22])
    cache.truncate([11, 12, 3])
    with pytest.raises(sa.ArgumentError, match="argument tokens is 4 for entry 2; accepted: up to 3"):
        cache.keep(nodes, [0, 0, 4], [0, 0, 0])
    with monkeypatch.context() as patch:  # where nobody can say no, there is no entry of fewer than no tokens
        capture(patch)
        cache.keep(nodes, 12, torch.tensor([0, 1, 0], dtype=torch.int32))
    assert cache.lengths.tolist() == [0, 1, 0]


def test_drafts_of_replays_are_kept_behind_what_was_forgotten(monkeypatch):
    """Where the host has to know that replays brought more tokens than it has seen come."""
    _, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=40)
    cache.append(k[:, :10], v[:, :10])
    for begin in (10, 20):
        cache.reserve(10)
        with monkeypatch.context() as patch:
            capture(patch)
            cache.append(k[:, begin : begin + 10], v[:, begin : begin + 10])
    cache.forget(2, 24)
    cache.keep(torch.tensor([[1, 2]] * BATCH), 3)
    assert cache.lengths.tolist() == cache._tokens.tolist() == [29] * BATCH
    assert torch.equal(cache.k[cache.page_table[:, 7].long(), 0], k[:, 29])
    with pytest.raises(sa.ArgumentError, match="argument tokens is 6 for entry 0; accepted: up to 5"):
        cache.keep(torch.tensor([[1, 2]] * BATCH), 6)


@pytest.mark.parametrize("pages", [None, 30])
def test_the_host_takes_no_part_where_drafts_are_kept(monkeypatch, pages):
    q, k, v = operands()
    cache, plain = (make_cache(k, v, page_size=4, pages=pages) for _ in range(2))
    for each in (cache, plain):
        each.append(k[:, :5], v[:, :5])
    nodes, counts = torch.tensor([[0, 3], [1, 2], [2, 3]]), torch.tensor([2, 1, 0])
    tokens, parents = torch.tensor([4] * BATCH, dtype=torch.int32), torch.tensor([[-1, 0, 1, 0]] * BATCH)
    for turn, given in enumerate([4, tokens, 4]):
        cache.reserve(4)
        with monkeypatch.context() as patch:
            capture(patch)
            at = cache.lengths.tolist()
            cache.append(k[:, 5:9], v[:, 5:9])
            out = sat.decode(q[:, 5:9], cache, STREAMING, parents=parents)
            cache.keep(nodes, given, counts)
            for wrong in ([4] * BATCH, -1, torch.tensor([4])):
                with pytest.raises(sa.ArgumentError) as raised:
                    cache.keep(nodes, wrong, counts)
                assert raised.value.argument == "tokens"
            with pytest.raises(sa.ArgumentError, match="accepted in a capture: None, or an int32 or int64 tensor"):
                cache.keep(nodes, 4, [2, 1, 0])
        for b, (path, count) in enumerate(zip(nodes.tolist(), counts.tolist())):
            tokens_kept = [5 + node for node in path[:count]]
            plain[b].append(k[b : b + 1, tokens_kept], v[b : b + 1, tokens_kept])
            assert all(torch.equal(*x) for x in zip(as_it_lies(cache, b), as_it_lies(plain, b)))
        assert cache.lengths.tolist() == [at[0] + 2, at[1] + 1, at[2]] and out.isfinite().all()
        assert cache._tokens.tolist() == [a + 4 for a in at]
        cache.truncate(cache.lengths)
        assert cache._tokens.tolist() == cache.lengths.tolist()
        if pages:
            assert len(cache._free) == pages - sum(-(-n // 4) for n in cache.lengths.tolist())


def test_what_is_wrong_with_trees_is_named():
    q, k, v = operands(seq=20)
    cache = make_cache(k, v)
    cache.append(k, v)
    parents, nodes = forest(), torch.zeros(BATCH, 4, dtype=torch.int64)
    rows = q[:, -NODES:]
    calls = [
        (sa.ShapeError, "parents", lambda: sat.decode(rows, cache, STREAMING, parents=parents[:, 1:])),
        (sa.ShapeError, "parents", lambda: sat.decode(rows, cache, STREAMING, parents=parents[0])),
        (sa.ShapeError, "parents", lambda: sat.decode(rows[0], cache, STREAMING, [NODES, 0, 0], parents=parents)),
        (sa.DTypeError, "parents", lambda: sat.decode(rows, cache, STREAMING, parents=parents.float())),
        (sa.DTypeError, "parents", lambda: sat.decode(rows, cache, STREAMING, parents=parents.short())),
        (sa.DTypeError, "parents", lambda: sat.decode(rows, cache, STREAMING, parents=parents.tolist())),
        (sa.ArgumentError, "parents", lambda: sat.decode(rows, cache, STREAMING, parents=parents.to("meta"))),
        (sa.UnsupportedError, "problem.flags", lambda: sat.decode(rows, cache, sa.runtime_tokens(3), parents=parents)),
        (sa.DTypeError, "nodes", lambda: cache.keep([[0, 1]] * BATCH, 4)),
        (sa.DTypeError, "nodes", lambda: cache.keep(nodes.float(), 4)),
        (sa.ShapeError, "nodes", lambda: cache.keep(nodes[0], 4)),
        (sa.ShapeError, "nodes", lambda: cache.keep(nodes[1:], 4)),
        (sa.ArgumentError, "nodes", lambda: cache.keep(nodes.to("meta"), 4)),
        (sa.ArgumentError, "tokens", lambda: cache.keep(nodes, 21)),
        (sa.ArgumentError, "tokens", lambda: cache.keep(nodes, -1)),
        (sa.ShapeError, "tokens", lambda: cache.keep(nodes, [4, 4])),
        (sa.DTypeError, "tokens", lambda: cache.keep(nodes, 4.5)),
        (sa.ArgumentError, "counts", lambda: cache.keep(nodes, 3)),
        (sa.ArgumentError, "counts", lambda: cache.keep(nodes, 4, [1, 5, 1])),
        (sa.ArgumentError, "counts", lambda: cache.keep(nodes, [4, 4, 2], [1, 1, 3])),
        (sa.ShapeError, "counts", lambda: cache.keep(nodes, 4, [1, 1])),
    ]
    before = [x.clone() for x in (cache.k, cache.v)]
    for number, (kind, argument, call) in enumerate(calls):
        with pytest.raises(kind) as raised:
            call()
        assert raised.value.argument == argument, (number, raised.value)
    assert cache.lengths.tolist() == cache._tokens.tolist() == [20] * BATCH
    for one, other in zip(before, (cache.k, cache.v)):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def layers_of(seed, device="cpu", dtype=torch.float32, **options):
    """Queries and keys of two layers, and their caches, which have none of these yet."""
    layers = []
    for n in range(2):
        made = torch.Generator().manual_seed(seed + n)
        shapes = [(BATCH, SEQ, 4, 24), (BATCH, SEQ, HEADS_KV, 24), (BATCH, SEQ, HEADS_KV, 16)]
        x = [torch.randn(shape, generator=made).to(device, torch.float32) for shape in shapes]
        layers.append((*x, make_cache(*x[1:], **options)))
    return layers


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("page_size, pages", PAGES)
def test_layers_share_a_step(device, page_size, pages, monkeypatch):
    layers, begin = layers_of(11, device, page_size=page_size, pages=pages), 0
    made = []
    of_cache = sat._cache._places_of
    monkeypatch.setattr(sat._cache, "_places_of", lambda *call: made.append(call) or of_cache(*call))
    for n in CHUNKS:
        step, chunk = sat.Step(), slice(begin, begin + n)
        for q, k, v, cache in layers:
            cache.append(k[:, chunk], v[:, chunk])
            for pattern in (STREAMING, "full"):
                found = sat.decode(q[:, chunk], cache, pattern, step=step, return_lse=True)
                for one, other in zip(found, sat.decode(q[:, chunk], cache, pattern, return_lse=True)):
                    assert torch.equal(one, other)
        begin += n
    assert len(made) == len(CHUNKS) * 2 * 3  # of a pattern: for the step once, and for each layer without it


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_layers_share_a_step_of_ragged_queries_and_of_trees(device):
    layers = layers_of(17, device, page_size=4, pages=40)
    for counts in ([9, 0, 3], [1, 1, 1], [2, 5, 1]):
        steps, rows = (sat.Step(), sat.Step()), sum(counts) + 1
        parents = (torch.arange(rows, device=device) // 2 - 1).int()
        for q, k, v, cache in layers:
            at = cache.lengths.tolist()
            q, k, v = (ragged(x, at, counts, rows) for x in (q, k, v))
            cache.append(k, v, counts)
            for step, given in zip(steps, ({}, {"parents": parents})):
                found = sat.decode(q, cache, STREAMING, counts, step=step, **given)
                assert torch.equal(found, sat.decode(q, cache, STREAMING, counts, **given))


@needs_cuda
def test_layers_share_a_step_in_a_graph():
    layers = layers_of(23, "cuda", page_size=8, pages=18)
    fixed = [[torch.zeros_like(x[:, :1]) for x in layer[:3]] for layer in layers]
    sat.decode(fixed[0][0], layers[0][3], STREAMING)  # which makes the plan
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        step = sat.Step()
        for (q1, k1, v1), (*_, cache) in zip(fixed, layers):
            cache.append(k1, v1)
            found.append(sat.decode(q1, cache, STREAMING, step=step))
        del step  # whose memory the graph keeps
    right = [sat.attention(q, k, v, STREAMING) for q, k, v, _ in layers]
    for n in range(SEQ):
        for layer, of_layer in zip(layers, fixed):
            layer[3].reserve(1)
            for one, x in zip(of_layer, layer):
                one.copy_(x[:, n : n + 1])
        graph.replay()
        for out, whole in zip(found, right):
            torch.testing.assert_close(out, whole[:, n : n + 1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("pages", [None, 18])
def test_entries_of_one_cache_share_no_step(pages):
    (q, k, v, cache), _ = layers_of(31, page_size=8, pages=pages)
    cache.append(k[:, :9], v[:, :9])
    step = sat.Step()
    for entry in range(BATCH):
        right = sat.decode(q[entry : entry + 1, 8:9], cache[entry], STREAMING)
        if entry == 0:
            assert torch.equal(right, sat.decode(q[:1, 8:9], cache[0], STREAMING, step=step))
            continue
        with pytest.raises(sa.ArgumentError, match="other lengths, or other pages"):
            sat.decode(q[entry : entry + 1, 8:9], cache[entry], STREAMING, step=step)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_a_step_serves_one_step_of_the_model_after_the_other(device):
    """The same tensors, changed in place; where nobody has told it so, it is refused."""
    layers, step = layers_of(53, device, page_size=8), sat.Step()
    parents = torch.full((BATCH, 2), -1, device=device)
    for begin in (0, 2, 4):
        chunk = slice(begin, begin + 2)
        parents[:, 1] = begin - 2
        for layer, (q, k, v, cache) in enumerate(layers):
            cache.append(k[:, chunk], v[:, chunk])
            options = {"parents": parents}
            if begin and not layer:
                with pytest.raises(sa.ArgumentError, match=r"parents was written to .* step.reset\(\)") as raised:
                    sat.decode(q[:, chunk], cache, STREAMING, step=step, **options)
                assert raised.value.argument == "parents"
                options["parents"] = parents.clone()
                with pytest.raises(sa.ArgumentError, match="argument parents is another tensor"):
                    sat.decode(q[:, chunk], cache, STREAMING, step=step, **options)
                step.reset()
            found = sat.decode(q[:, chunk], cache, STREAMING, step=step, parents=parents)
            assert torch.equal(found, sat.decode(q[:, chunk], cache, STREAMING, parents=parents))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_plans_of_tensors_share_a_step(device, inference):
    (q, k, v, _), (*_, k2, v2, _) = layers_of(59, device)
    with torch.inference_mode(inference):
        starts, step = torch.tensor([7, 0, 30], device=device), sat.Step()
        plan = sat.plan(STREAMING, q[:, :2], k, v, starts=True)
        for again in range(2):
            for keys, values in ((k, v), (k2, v2)):
                found = plan.forward(q[:, :2], keys, values, starts=starts[:], step=step)
                assert torch.equal(found, plan.forward(q[:, :2], keys, values, starts=starts))
            with pytest.raises(sa.ArgumentError, match="argument starts (is another|has other)") as raised:
                plan.forward(q[:, :2], k, v, starts=starts + 1, step=step)
            assert raised.value.argument == "starts"
            starts += 3
            if device == "cpu" or not inference:  # there torch does not count what is written
                with pytest.raises(sa.ArgumentError, match="argument starts (was written|has other)"):
                    plan.forward(q[:, :2], k, v, starts=starts, step=step)
            step.reset()


def test_numbers_that_the_host_does_not_read_are_told_apart():
    x = torch.arange(6)
    noted = sat._tensors.note_of(x)
    assert not sat._tensors.change_of(x.view(6), noted)
    for other in (x.clone(), x[:5], x[::2], x.view(2, 3), x.view(torch.float64)):
        assert "another tensor" in sat._tensors.change_of(other, noted)
        assert not sat._tensors.change_of(other, noted, is_unknown_same=True)
    x[2:3] = 5
    for unknown_same in (False, True):
        assert "was written to" in sat._tensors.change_of(x, noted, unknown_same)


def test_a_call_that_fails_leaves_nothing_in_a_step():
    (q, k, v, cache), _ = layers_of(41, page_size=8)
    cache.append(k[:, :9], v[:, :9])
    step, rows = sat.Step(), ragged(q, [0, 0, 0], [3, 1, 2])
    with pytest.raises(sa.ShapeError):
        sat.decode(rows, cache, STREAMING, [1, 3, 2], step=step, out=torch.empty(3))
    found = sat.decode(rows, cache, STREAMING, [3, 1, 2], step=step)
    assert torch.equal(found, sat.decode(rows, cache, STREAMING, [3, 1, 2]))


@pytest.mark.parametrize("pages", [None, 40])
def test_layers_keep_their_drafts_after_each_call(pages):
    """Caches of other numbers of pages, whose first one has other pages when the second one's call comes."""
    step, parents = sat.Step(), (torch.arange(8) - 1).expand(BATCH, 8)
    for n in range(2):
        q, k, v, _ = layers_of(43 + n)[0]
        cache = make_cache(k, v, page_size=4, pages=pages and pages + n)
        cache.append(k[:, :40], v[:, :40])
        right = sat.decode(q[:, 32:40], cache, STREAMING, parents=parents)
        assert torch.equal(right, sat.decode(q[:, 32:40], cache, STREAMING, parents=parents, step=step))
        cache.keep(torch.zeros((BATCH, 1), dtype=torch.int32), 8)


@pytest.mark.parametrize("pages", [None, 12])
def test_an_append_that_is_refused_takes_nothing(pages):
    (_, k, v, cache), _ = layers_of(47, page_size=8, pages=pages)
    cache.append(k[:, :9], v[:, :9])
    for _ in range(3):
        with pytest.raises(sa.ArgumentError, match="overlaps"):
            cache[1].append(cache.k[:1], cache.v[:1])
        assert cache.lengths.tolist() == cache._tokens.tolist() == [9] * BATCH
        assert len(cache._free) == (0 if pages is None else 6)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_append_that_fails_leaves_a_cache_as_it_was(monkeypatch, error):
    """Wherever it is by then; pages are free in the order of before."""
    (q, k, v, cache), _ = layers_of(61, page_size=4, pages=36)
    cache.append(k[:, :9], v[:, :9])
    right, free = sat.decode(q[:, 7:9], cache, STREAMING), list(cache._free)
    calls = {"append": lambda: cache.append(k[:, 9:29], v[:, 9:29], [9, 7, 20]), "reserve": lambda: cache.reserve(4)}
    for name, function, good in [
        *[("append", "_to_device", good) for good in range(4)],  # the pages of three entries, and counts
        ("append", "_put", 0),
        *[("reserve", "_to_device", good) for good in range(3)],
    ]:
        done = []
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(sat.KVCache, function, failing(getattr(sat.KVCache, function), good, error, done))
            calls[name]()
        assert len(done) == good + 1 and cache._free == free
        assert sorted(pages_of(cache) + free) == list(range(36))
        assert cache.lengths.tolist() == cache._tokens.tolist() == [9] * BATCH
        assert torch.equal(sat.decode(q[:, 7:9], cache, STREAMING), right)
    calls["append"]()
    assert cache.lengths.tolist() == [18, 16, 29]


def test_an_append_that_is_interrupted_when_its_tokens_have_come_keeps_them(monkeypatch):
    (q, k, v, cache), _ = layers_of(61, page_size=4, pages=36)
    write = cache._write

    def interrupted(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.append(k[:, :9], v[:, :9])
    assert cache.lengths.tolist() == cache._tokens.tolist() == [9] * BATCH
    right = sat.attention(*(x[:, :9] for x in (q, k, v)), STREAMING)
    torch.testing.assert_close(sat.decode(q[:, :9], cache, STREAMING), right, rtol=2e-5, atol=2e-5)


def test_a_step_keeps_a_few_workspaces():
    """Plans of a context that keeps none are made anew in each call."""
    (q, k, v, cache), _ = layers_of(37, page_size=8)
    cache.append(k[:, :9], v[:, :9])
    step, context = sat.Step(), sa.Context("cpu", plan_cache=-1)
    right = sat.decode(q[:, 8:9], cache, STREAMING)
    for _ in range(100):
        assert torch.equal(right, sat.decode(q[:, 8:9], cache, STREAMING, step=step, context=context))
    assert len(step._kept) < 40


@pytest.mark.parametrize("pages", [None, 18])
def test_what_is_wrong_with_a_step_is_named(pages):
    (q, k, v, cache), (*_, other) = layers_of(29, page_size=8, pages=pages)
    step = sat.Step()
    cache.append(k[:, :9], v[:, :9])
    sat.decode(q[:, 8:9], cache, STREAMING, step=step)
    other.append(k[:, :8], v[:, :8])
    with pytest.raises(sa.ArgumentError, match="argument step was begun with a cache that has other lengths") as raised:
        sat.decode(q[:, 8:9], other, STREAMING, step=step)
    assert raised.value.argument == "step"
    with pytest.raises(sa.DTypeError, match="argument step is dict; accepted: a sparseattn.Step"):
        sat.decode(q[:, 8:9], cache, STREAMING, step={})
    rows = ragged(q, [0, 0, 0], [3, 1, 2])
    sat.decode(rows, cache, STREAMING, [3, 1, 2], step=step)
    sat.decode(rows, cache, STREAMING, torch.tensor([3, 1, 2]), step=step)
    for counts in ([1, 3, 2], [99, 1, 2], None):
        with pytest.raises(sa.ArgumentError, match="argument counts"):
            sat.decode(rows, cache, STREAMING, counts, step=step)
    parents = torch.full((BATCH, 1), -1)
    sat.decode(q[:, 8:9], cache, STREAMING, parents=parents, step=step)
    with pytest.raises(sa.ArgumentError, match="argument parents is another tensor"):
        sat.decode(q[:, 8:9], cache, STREAMING, parents=parents.clone(), step=step)
    with pytest.raises(sa.ArgumentError, match="argument step is given to a plan without starts; accepted: None"):
        sat.plan("full", q, k, v).forward(q, k, v, step=step)


def test_plans_of_trees_are_their_own():
    q, k, v = operands()
    context = sa.Context("cpu")
    cache = make_cache(k, v)
    cache.append(k, v)
    for _ in range(2):
        sat.decode(q[:, -NODES:], cache, STREAMING, context=context)
        sat.decode(q[:, -NODES:], cache, STREAMING, context=context, parents=forest())
    assert context._look_up.cache_info().misses == 2


def test_out_is_written_where_it_lies():
    q, k, v = operands()
    cache = make_cache(k, v)
    cache.append(k, v)
    right = sat.decode(q[:, -2:], cache, STREAMING)
    lies = torch.zeros(2, BATCH, 2, 4, 16)
    assert sat.decode(q[:, -2:], cache, STREAMING, out=lies[1]).data_ptr() == lies[1].data_ptr()
    spread = torch.zeros(BATCH, 4, 2, 32)[..., :16].transpose(1, 2)
    out, _ = sat.decode(q[:, -2:], cache, STREAMING, out=spread, return_lse=True)
    again = sat.decode(q[:, -2:], cache, STREAMING)
    for one in (lies[1], spread, out, again):
        assert torch.equal(one, right)
    assert (lies[0] == 0).all() and (spread.as_strided((BATCH, 4, 2, 32), (256, 64, 32, 1))[..., 16:] == 0).all()
    with pytest.raises(sa.ShapeError) as raised:
        sat.decode(q[:, -2:], cache, STREAMING, out=torch.zeros(BATCH, 2, 4, 15))
    assert raised.value.argument == "out"


def test_one_plan_serves_a_sequence_as_it_grows():
    q, k, v = operands()
    context = sa.Context("cpu")
    cache = make_cache(k, v)
    fill(cache, q, k, v, STREAMING, [1] * SEQ, context=context)
    fill(make_cache(k, v, pages=5), q, k, v, STREAMING, [1] * SEQ, context=context)
    assert context._look_up.cache_info().misses == 1


def test_nothing_has_a_gradient():
    q, k, v = operands()
    cache = make_cache(k, v)
    for name, call in {
        "k": lambda x: cache.append(x, v),
        "v": lambda x: cache.append(k, x),
        "q": lambda x: sat.decode(x, cache, STREAMING),
        "sink_logits": lambda x: sat.decode(q, cache, STREAMING, sink_logits=x),
        "scale": lambda x: sat.decode(q, cache, STREAMING, scale=x),
        "softcap": lambda x: sat.decode(q, cache, STREAMING, softcap=x),
    }.items():
        given = {"k": k, "v": v, "q": q, "sink_logits": torch.zeros(4)}
        x = given.get(name, torch.tensor(0.3)).clone().requires_grad_()
        with pytest.raises(sa.ArgumentError, match="requires a gradient, which a (cache|call) does not keep") as raised:
            call(x)
        assert raised.value.argument == name
        with torch.no_grad():
            call(x)
    assert not any(x.requires_grad for x in (cache.k, cache.v, cache.lengths))
    with torch.inference_mode():
        another = make_cache(k, v)
        another.append(k, v)
    another.reset()
    another.append(k, v)
    assert torch.equal(sat.decode(q, another, STREAMING), sat.attention(q, k, v, STREAMING))


def test_what_is_wrong_is_named():
    q, k, v = operands()
    cache = make_cache(k, v)
    calls = [
        (sa.ShapeError, "k", lambda: cache.append(k[:1], v)),
        (sa.ShapeError, "k", lambda: cache.append(k.transpose(1, 2), v)),
        (sa.DTypeError, "k", lambda: cache.append(k.half(), v)),
        (sa.ArgumentError, "k", lambda: cache.append(k.to("meta"), v)),
        (sa.DTypeError, "v", lambda: cache.append(k, None)),
        (sa.ShapeError, "v", lambda: cache.append(k, v[:, 1:])),
        (sa.ShapeError, "v", lambda: cache.append(k, k)),
        (sa.ShapeError, "counts", lambda: cache.append(k, v, [1, 2])),
        (sa.ArgumentError, "counts", lambda: cache.append(k, v, [1, 2, SEQ + 1])),
        (sa.ArgumentError, "counts", lambda: cache.append(k, v, [1, -2, 3])),
        (sa.DTypeError, "counts", lambda: cache.append(k, v, [1, 2, 3.5])),
        (sa.DTypeError, "counts", lambda: cache.append(k, v, [[1], [2, 3], 1])),
        (sa.DTypeError, "counts", lambda: cache.append(k[0], v[0], [[1], [2, 3], 1])),
        (sa.ArgumentError, "counts", lambda: cache.append(k, v, torch.zeros(BATCH, dtype=torch.int32, device="meta"))),
        (sa.ArgumentError, "tokens", lambda: cache.reserve(-1)),
        (sa.DTypeError, "tokens", lambda: cache.reserve(None)),
        (sa.DTypeError, "tokens", lambda: cache.reserve([[1], [2, 3]])),
        (sa.DTypeError, "tokens", lambda: cache.reserve(10**30)),
        (sa.ArgumentError, "capacity", lambda: cache.reserve((1 << 63) - 1)),
        (sa.ArgumentError, "capacity", lambda: cache.reserve(np.uint64((1 << 63) + 5))),
        (sa.ArgumentError, "capacity", lambda: cache.reserve(129)),
        (sa.DTypeError, "k", lambda: cache.append(k.to(torch.int8), v)),
        (sa.DTypeError, "q", lambda: sat.decode(q.to(torch.int8), cache, STREAMING)),
        (sa.ShapeError, "q", lambda: sat.decode(q[:1], cache, STREAMING)),
        (sa.ShapeError, "q", lambda: sat.decode(q[0, 0], cache, STREAMING)),
        (sa.ShapeError, "q", lambda: sat.decode(q[..., :23], cache, STREAMING)),
        (sa.DTypeError, "q", lambda: sat.decode(q.half(), cache, STREAMING)),
        (sa.DTypeError, "q", lambda: sat.decode(q.numpy(), cache, STREAMING)),
        (sa.DTypeError, "cache", lambda: sat.decode(q, k, STREAMING)),
        (sa.ShapeError, "q", lambda: sat.decode(q, cache, STREAMING, axes="thd")),
        (sa.ShapeError, "q", lambda: sat.decode(q[:, :, :3], cache, STREAMING)),
        (sa.ShapeError, "q", lambda: sat.decode(q[:, :, :0], cache, STREAMING)),
        (sa.UnsupportedError, "pattern", lambda: sat.decode(q, cache, sa.runtime_tokens(3) & sa.sink(2))),
        (sa.ArgumentError, "indices", lambda: sat.decode(q, cache, sa.runtime_tokens(3))),
        (sa.ArgumentError, "indices", lambda: sat.decode(q, cache, STREAMING, indices=q)),
        (sa.ArgumentError, "entries", lambda: cache[::2]),
    ]
    for number, (kind, argument, call) in enumerate(calls):
        with pytest.raises(kind) as raised:
            call()
        assert raised.value.argument == argument, (number, raised.value)
        if kind is sa.DTypeError and argument in ("k", "q") and "torch." in str(raised.value):
            assert "; accepted: torch.float32, as the cache" in str(raised.value)
    cache.truncate((1 << 63) - 1)
    cache.forget(0, (1 << 63) - 1)
    assert cache.lengths.tolist() == cache._tokens.tolist() == [0] * BATCH
    with pytest.raises(IndexError):
        cache[BATCH]


@pytest.mark.parametrize(
    "change, kind, argument, given, accepted",
    [
        (dict(batch=-1), sa.ArgumentError, "batch", "-1", "0 to 1048576"),
        (dict(batch=(1 << 20) + 1), sa.ArgumentError, "batch", "1048577", "0 to 1048576"),
        (dict(batch=1.5), sa.DTypeError, "batch", "1.5", "an integer"),
        (dict(batch="2"), sa.DTypeError, "batch", "'2'", "an integer"),
        (dict(capacity=-8), sa.ArgumentError, "capacity", "-8", "0 to 2147483520"),
        (dict(capacity=1 << 31, pages=1), sa.ArgumentError, "capacity", "2147483648", "0 to 2147483520"),
        (dict(capacity=(1 << 31) - 1, pages=1), sa.ArgumentError, "capacity", "2147483647", "0 to 2147483520"),
        (dict(capacity=1 << 70), sa.ArgumentError, "capacity", str(1 << 70), "integers of 64 bits"),
        (dict(capacity=None), sa.DTypeError, "capacity", "None", "an integer"),
        (dict(heads_kv=0), sa.ArgumentError, "heads_kv", "0", "1 to 65536"),
        (dict(heads_kv=65537), sa.ArgumentError, "heads_kv", "65537", "1 to 65536"),
        (dict(head_dim=0), sa.ArgumentError, "head_dim", "0", "1 to 1024"),
        (dict(head_dim=2000), sa.ArgumentError, "head_dim", "2000", "1 to 1024"),
        (dict(head_dim_v=-1), sa.ArgumentError, "head_dim_v", "-1", "1 to 1024"),
        (dict(head_dim_v=1025), sa.ArgumentError, "head_dim_v", "1025", "1 to 1024"),
        (dict(head_dim_v=9, value_in_key=True), sa.ArgumentError, "head_dim_v", "9", "1 to 8"),
        (dict(page_size=0), sa.ArgumentError, "page_size", "0", "1 to 65536"),
        (dict(page_size=65537), sa.ArgumentError, "page_size", "65537", "1 to 65536"),
        (dict(pages=-1), sa.ArgumentError, "pages", "-1", "0 to 16777215"),
        (dict(pages=1 << 24), sa.ArgumentError, "pages", "16777216", "0 to 16777215"),
        (dict(batch=1 << 20, capacity=1 << 12), sa.ArgumentError, "pages", "None", "0 to 16777215"),
        (dict(dtype=torch.int32), sa.DTypeError, "dtype", "torch.int32", "torch.float32, .*torch.float64$"),
        (dict(dtype=torch.float8_e4m3fn), sa.DTypeError, "dtype", "torch.float8_e4m3fn", ".*torch.float64$"),
        (dict(dtype="float32"), sa.DTypeError, "dtype", "float32", "torch.float32"),
        (dict(cache_dtype=torch.float16), sa.DTypeError, "cache_dtype", "torch.float16", "None, torch.float32"),
        (dict(device="meta"), sa.ArgumentError, "device", "'meta'", "cpu, cuda"),
        (dict(device="nowhere"), sa.ArgumentError, "device", "'nowhere'", "cpu, cuda"),
        (dict(device=None), sa.ArgumentError, "device", "None", "cpu, cuda"),
    ],
)
def test_caches_that_cannot_be_are_refused_at_once(change, kind, argument, given, accepted):
    good = {"batch": 1, "capacity": 8, "heads_kv": 1, "head_dim": 8}
    with pytest.raises(kind, match=f"argument {argument} is {given}[;,].*accepted: {accepted}") as raised:
        sat.KVCache(**good | change)
    assert raised.value.argument == argument


def test_a_cache_lies_where_it_says():
    """Whatever device factories of tensors choose around it, as where a model is made without memory."""
    with torch.device("meta"):
        assert sat.KVCache(2, 30, 1, 8, page_size=8).page_table.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_sizes_are_integers_of_any_kind():
    """At the largest numbers, too, and what a bool counts for."""
    cache = sat.KVCache(np.int64(1), torch.tensor(2**31 - 1 - 65535), True, np.uint8(4), page_size=65536, pages=1)
    assert cache.capacity == 2**31 - 65536 and cache.k.shape == (1, 65536, 1, 4)
    wide = sat.KVCache(1, 8, 2, 1024, page_size=8)
    wide.append(torch.ones(1, 3, 2, 1024), torch.ones(1, 3, 2, 1024))
    assert (sat.decode(torch.ones(1, 3, 4, 1024), wide, "causal") == 1).all()


def pickled(held):
    return pickle.loads(pickle.dumps(held))


def saved(held):
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def saved_and_loaded(cache):
    return (saved if cache.k.dtype == torch.float8_e4m3fn else pickled)(cache)  # pickle alone does not load float8


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("pages", [None, 30])
@pytest.mark.parametrize("make_copy", [copy.deepcopy, saved_and_loaded])
def test_copies_go_on_by_themselves(make_copy, pages, cache_dtype):
    """As a beam search's do: neither sees what the other one appends. Those of an entry are of that entry alone."""
    q, k, v = operands()
    cache = sat.KVCache(BATCH, 64, HEADS_KV, 24, 16, page_size=4, pages=pages, cache_dtype=cache_dtype)
    cache.append(k[:, :10], v[:, :10])
    right = sat.decode(q[:, 8:10], cache, STREAMING)
    for entries in (slice(0, BATCH), slice(1, 2)):
        part = cache[entries]
        other = make_copy(part)
        assert torch.equal(sat.decode(q[entries, 8:10], other, STREAMING), right[entries])
        other.append(k[entries, 30:36], v[entries, 30:36])
        part.append(k[entries, 10:11], v[entries, 10:11])
        assert other.lengths.tolist() == [16] * other.batch and part.lengths.tolist() == [11] * part.batch
        for each, tokens in ((part, [*range(11)]), (other, [*range(10), *range(30, 36)])):
            plain = sat.KVCache(each.batch, 64, HEADS_KV, 24, 16, cache_dtype=cache_dtype)
            plain.append(k[entries][:, tokens], v[entries][:, tokens])
            found, expected = (sat.decode(q[entries, 11:12], x, STREAMING) for x in (each, plain))
            torch.testing.assert_close(found, expected)
        other.reset()
        part.truncate(10)
        assert torch.equal(sat.decode(q[:, 8:10], cache, STREAMING), right)


@pytest.mark.parametrize("pages", [None, 40])
@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("order", [1, -1])
def test_copies_of_a_cache_and_its_parts_are_one_cache(order, make_copy, pages):
    """As of a server that holds them: what one of them appends is there in the others, in pages of its own."""
    q, k, v = operands()
    right = sat.attention(q, k, v, STREAMING)
    cache = make_cache(k, v, page_size=4, pages=pages)
    cache.append(k[:, :10], v[:, :10])
    held, at = [cache, cache[0], cache[1:], cache[1:][1]], [10] * BATCH
    for _ in range(2):
        held = make_copy(held[::order])[::order]
        for part, entries, n in zip(held, ([0, 1, 2], [0], [1, 2], [2]), (3, 9, 2, 3)):
            begins = [at[entry] for entry in entries]
            part.append(*(ragged(x[entries], begins, [n] * part.batch) for x in (k, v)), [n] * part.batch)
            at = [a + n * (entry in entries) for entry, a in enumerate(at)]
        for part, entries in zip(held, ([0, 1, 2], [0], [1, 2], [2])):
            last, ones = [at[entry] - 1 for entry in entries], [1] * part.batch
            found = sat.decode(ragged(q[entries], last, ones), part, STREAMING, ones)
            torch.testing.assert_close(found, ragged(right[entries], last, ones), rtol=2e-5, atol=2e-5)
        assert held[0].lengths.tolist() == held[0]._tokens.tolist() == at
        assert sorted(pages_of(held[0]) + held[0]._free) == list(range(held[0].pages))
    assert cache.lengths.tolist() == [10] * BATCH


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled, saved])
def test_copies_share_pages_as_their_caches_do(make_copy):
    _, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=12)
    cache[0].append(k[:1, :14], v[:1, :14])
    cache.share(0, 1)
    other, part = make_copy([cache, cache[1]])
    part.append(k[1:2, 14:18], v[1:2, 14:18])
    assert len(cache._free) == 8 and cache.lengths.tolist() == [14, 14, 0]
    assert len(other._free) == 6 and other.lengths.tolist() == [14, 18, 0]
    for entry, n in ((0, 14), (1, 14)):
        assert all(torch.equal(one, two[:n]) for one, two in zip(as_it_lies(cache, entry), as_it_lies(other, entry)))
    for each in (cache, other):
        assert_no_leak(each)
        each.reset()
        assert sorted(each._free) == list(range(12))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_copies_are_of_use_inside_of_inference_mode_and_outside(make_copy, cache_dtype):
    q, k, v = operands()
    cache = sat.KVCache(BATCH, 64, HEADS_KV, 24, 16, page_size=4, pages=40, cache_dtype=cache_dtype)
    cache.append(k[:, :10], v[:, :10])
    with torch.inference_mode():
        inside = make_copy(cache)
    outside = make_copy(inside)
    for each in (cache, inside, outside):
        each.append(k[:, 10:11], v[:, 10:11])
        with torch.inference_mode():
            each[0].append(k[:1, 11:12], v[:1, 11:12])
        each.truncate(11)
        each.append(k[:, 11:], v[:, 11:])
        assert torch.equal(sat.decode(q, each, STREAMING), sat.decode(q, cache, STREAMING))


def test_a_shallow_copy_is_the_same_memory():
    _, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=30)
    other = copy.copy(cache)
    other.append(k[:, :10], v[:, :10])
    cache.append(k[:, 10:11], v[:, 10:11])
    for each in (cache, other):
        assert each.lengths.tolist() == each._tokens.tolist() == [11] * BATCH and len(each._free) == 21


def test_compiled_code_goes_on_around_it():
    q, k, v = operands()
    cache = make_cache(k, v, page_size=4, pages=18)

    @torch.compile(backend="eager")
    def step(q, k, v):
        cache.append(2 * k, v)
        out = sat.decode(q + 0, cache, STREAMING)
        cache.forget(2, (cache.lengths - 9).clamp(0))
        cache.reorder([0, 1, 2])
        return out + 1

    found = [step(*(x[:, n : n + 3] for x in (q, k, v))) for n in range(0, SEQ, 3)]
    right = sat.attention(q, 2 * k, v, STREAMING) + 1
    torch.testing.assert_close(torch.cat(found, 1), right, rtol=2e-5, atol=2e-5)


def test_nothing_at_all():
    cache = sat.KVCache(0, 0, 2, 8)
    cache.append(torch.zeros(0, 3, 2, 8), torch.zeros(0, 3, 2, 8))
    assert sat.decode(torch.zeros(0, 3, 4, 8), cache, "full").shape == (0, 3, 4, 8)
    cache.keep(torch.zeros(0, 3, dtype=torch.int64), 3)
    cache = sat.KVCache(2, 16, 2, 8)
    cache.append(torch.zeros(2, 0, 2, 8), torch.zeros(2, 0, 2, 8))
    none = torch.zeros(2, 0, dtype=torch.int64)
    assert sat.decode(torch.zeros(2, 0, 4, 8), cache, "full", parents=none).shape == (2, 0, 4, 8)
    cache.keep(none, 0)
    sat.KVCache(2, 0, 2, 8).keep(torch.zeros(2, 3, dtype=torch.int64), 0, [0, 0])


# ---- on GPUs ----


@needs_cuda
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("page_size, pages", [*PAGES, (64, 5)])
def test_cuda_devices(dtype, bound, page_size, pages):
    q, k, v = operands(dtype, "cuda")
    right = sat.attention(q.cpu(), k.cpu(), v.cpu(), STREAMING, return_lse=True)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = fill(make_cache(k, v, page_size=page_size, pages=pages), q, k, v, STREAMING)
        torch.cuda.current_stream().wait_stream(stream)  # whose results are read on this one
        for one, other in zip(found, right):
            assert one.is_cuda
            torch.testing.assert_close(one.cpu(), other, rtol=bound, atol=bound)
    with pytest.raises(sa.ArgumentError, match="q lies on cpu; accepted: cuda:0, where the cache lies"):
        sat.decode(q.cpu(), make_cache(k, v), STREAMING)


@needs_cuda
def test_the_host_waits_for_nothing():
    q, k, v = operands(torch.bfloat16, "cuda")
    cache = make_cache(k, v, page_size=4, pages=15)

    def step(n):
        cache.append(k[:, n : n + 1], v[:, n : n + 1])
        out = sat.decode(q[:, n : n + 1], cache, STREAMING)
        cache.forget(2, max(0, n - 8))
        return out

    step(0)  # which makes the plan
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [step(n) for n in range(1, SEQ)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    right = sat.attention(q, k, v, STREAMING)[:, 1:]
    torch.testing.assert_close(torch.cat(found, 1), right, rtol=4e-2, atol=4e-2)


@needs_cuda
@pytest.mark.parametrize("pages", [None, 18])
@pytest.mark.parametrize("with_counts", [False, True])
def test_graphs(pages, with_counts):
    q, k, v = operands(torch.float32, "cuda")
    cache = make_cache(k, v, page_size=8, pages=pages)
    q1, k1, v1 = (torch.zeros_like(x[:, :1]) for x in (q, k, v))
    counts = torch.ones(BATCH, dtype=torch.int32, device="cuda") if with_counts else None
    sat.decode(q1, cache, STREAMING)  # which makes the plan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(k1, v1, counts)
        out = sat.decode(q1, cache, STREAMING)
        with pytest.raises(sa.CudaError, match="while a graph is captured"):
            cache.reserve(1)
    right = sat.attention(q, k, v, STREAMING)
    cache.append(k[:, :10], v[:, :10])
    lengths = [10] * BATCH
    for turn in range(40):
        own = [int(not with_counts or (turn + b) % 3 > 0) for b in range(BATCH)]
        for fixed, x in ((q1, q), (k1, k), (v1, v)):
            for b, n in enumerate(lengths):
                fixed[b] = x[b, min(n, SEQ - 1)]
        if with_counts:
            counts.copy_(torch.tensor(own))
        if any(n + new > SEQ for n, new in zip(lengths, own)):
            break
        cache.reserve(own)
        graph.replay()
        for b, new in enumerate(own):
            if new:
                torch.testing.assert_close(out[b, 0], right[b, lengths[b]], rtol=2e-5, atol=2e-5)
            lengths[b] += new
        assert cache.lengths.tolist() == lengths
    assert min(lengths) > 30


@needs_cuda
def test_a_graph_of_texts_of_any_length():
    """Pages go from where they are forgotten to the tokens of later replays."""
    q, k, v = operands(torch.float32, "cuda", 200)
    cache = make_cache(k, v, capacity=200, page_size=8, pages=BATCH * 4)
    fixed = [torch.zeros_like(x[:, :1]) for x in (q, k, v)]
    sat.decode(fixed[0], cache, STREAMING)  # which makes the plan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(*fixed[1:])
        out = sat.decode(fixed[0], cache, STREAMING)
        with pytest.raises(sa.CudaError, match="forget is called while a graph is captured"):
            cache.forget(2, 3)
    right = sat.attention(q, k, v, STREAMING)
    for n in range(200):
        for one, x in zip(fixed, (q, k, v)):
            one.copy_(x[:, n : n + 1])
        cache.reserve(1)
        graph.replay()
        torch.testing.assert_close(out, right[:, n : n + 1], rtol=2e-5, atol=2e-5)
        cache.forget(2, max(0, n - 8))
        spoil_free_pages(cache)


@needs_cuda
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_a_graph_of_prompts_beside_decoded_tokens(dtype, bound):
    """Each replay has other numbers of tokens of each entry."""
    q, k, v = operands(dtype, "cuda")
    right = sat.attention(q, k, v, STREAMING)
    cache = make_cache(k, v, page_size=8, pages=18)
    rows = [torch.zeros(20, *x.shape[2:], dtype=dtype, device="cuda") for x in (q, k, v)]
    counts = torch.zeros(BATCH, dtype=torch.int32, device="cuda")
    sat.decode(rows[0], cache, STREAMING, counts)  # which makes the plan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(*rows[1:], counts)
        out = sat.decode(rows[0], cache, STREAMING, counts)
    at = [0] * BATCH
    for own in [[10, 0, 1], [1, 17, 1], [1, 1, 18], [0, 0, 0], [1, 1, 1], [0, 13, 7], [1, 1, 0], [20, 0, 0]]:
        for fixed, x in zip(rows, (q, k, v)):
            fixed.copy_(ragged(x, at, own, 20))
        counts.copy_(torch.tensor(own))
        cache.reserve(own)
        graph.replay()
        torch.testing.assert_close(out[: sum(own)], ragged(right, at, own), rtol=bound, atol=bound)
        assert (out[sum(own) :] == 0).all()
        at = [a + n for a, n in zip(at, own)]
        assert cache.lengths.tolist() == at


@needs_cuda
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("pages", [None, 40])
def test_a_graph_of_trees(cache_dtype, pages):
    """Each replay has another tree of drafts, of which it keeps others."""
    q, k, v = operands(torch.bfloat16, "cuda")
    options = {"page_size": 8, "pages": pages, "dtype": torch.bfloat16, "device": "cuda", "cache_dtype": cache_dtype}
    cache, plain = (sat.KVCache(BATCH, 64, HEADS_KV, 24, 16, **options) for _ in range(2))
    rows = [torch.zeros(BATCH, NODES, *x.shape[2:], dtype=x.dtype, device="cuda") for x in (q, k, v)]
    parents, nodes = forest(device="cuda"), torch.zeros(BATCH, 4, dtype=torch.int64, device="cuda")
    counts = torch.zeros(BATCH, dtype=torch.int32, device="cuda")
    sat.decode(rows[0], cache, "full", parents=parents)  # which makes the plan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(*rows[1:])
        out = sat.decode(rows[0], cache, "full", parents=parents)
        cache.keep(nodes, NODES, counts)
    random = np.random.default_rng(3)
    for turn in range(10):
        for fixed, x in zip(rows, (q, k, v)):
            fixed.copy_(x[:, 2 * turn : 2 * turn + NODES])
        parents.copy_(forest(4, turn))
        own = random.integers(0, 5, BATCH)
        paths = [np.sort(random.choice(NODES, 4, replace=False)) for _ in range(BATCH)]
        nodes.copy_(torch.from_numpy(np.stack(paths)))
        counts.copy_(torch.from_numpy(own))
        plain.append(*rows[1:])
        right = sat.decode(rows[0], plain, "full", parents=parents)
        plain.keep(nodes, NODES, counts)
        cache.reserve(NODES)
        graph.replay()
        torch.testing.assert_close(out, right, rtol=4e-2, atol=4e-2)
        cache.truncate(cache.lengths)
        assert cache._tokens.tolist() == plain._tokens.tolist() == cache.lengths.tolist()
        for b in range(BATCH):
            assert all(torch.equal(*x) for x in zip(as_it_lies(cache, b), as_it_lies(plain, b)))
    assert (cache.lengths > 10).all()
