# SPDX-License-Identifier: MIT
"""Random expressions on random small extents: the library's mask, rows, counts and picture against the oracle's."""
import itertools
import math
import random

import numpy as np
import pytest
from oracle import Extent, coverage, to_mask

LEAVES = [
    lambda r: "full",
    lambda r: "causal",
    lambda r: f"window({r.randint(-1, 9)},{r.randint(-1, 9)})",
    lambda r: f"sink({r.randint(0, 9)})",
    lambda r: f"block_diagonal({r.randint(1, 9)})",
    lambda r: f"documents({listed(sorted(r.choices(range(40), k=r.randint(1, 6))))})",
    lambda r: f"dilated({r.randint(-1, 20)},{r.randint(-1, 20)},{r.randint(1, 6)})",
    lambda r: f"strided({r.randint(1, 7)})",
    lambda r: "landmark({0},{1})".format(*pair(r)),
    lambda r: "fixed({0},{1})".format(*pair(r)),
    lambda r: "logsparse",
    lambda r: f"residue({(m := r.randint(1, 6))},{r.randrange(m)})",
    lambda r: f"global_keys({listed(r.choices(range(50), k=r.randint(1, 5)))})",
    lambda r: f"global_tokens({listed(r.choices(range(50), k=r.randint(1, 5)))})",
    lambda r: f"bigbird({r.randint(1, 9)},{r.choice([0, 1, 3, 5])},{r.randint(0, 2)},{r.randint(0, 3)},"
              f"{r.getrandbits(64)})",
]




def csr(r, extent):
    row_ptr, col_idx = sparse_rows(r, extent.seq_q, extent.seq_k)
    return f"csr([{row_ptr}],[{col_idx}],{extent.seq_k})"


def bsr(r, extent):
    block_q, block_k = r.randint(1, 20), r.randint(1, 20)
    row_ptr, col_idx = sparse_rows(r, -(-extent.seq_q // block_q), -(-extent.seq_k // block_k))
    return f"bsr([{row_ptr}],[{col_idx}],{block_q},{block_k},{extent.seq_q},{extent.seq_k})"


def mask(r, extent):
    sizes = r.choice([[], [r.choice([1, extent.heads])], [r.choice([1, extent.batch]), r.choice([1, extent.heads])]])
    sizes += [extent.seq_q, extent.seq_k]
    share = r.choice([0.05, 0.5, 1.0])
    return f"mask([{listed(int(r.random() < share) for _ in range(math.prod(sizes)))}],{listed(sizes)})"


def sparse_rows(r, rows, columns):
    """row_ptr and col_idx as texts: rows empty, full, or of a few columns."""
    found = [sorted(r.sample(range(columns), r.choice([0, 1, r.randint(0, columns), columns]))) for _ in range(rows)]
    return listed(itertools.accumulate(map(len, found), initial=0)), listed(itertools.chain(*found))


def listed(numbers):
    return ",".join(map(str, numbers))


def pair(r):
    block = r.randint(1, 9)
    return block, r.randint(0, block)


def tree(r, extent):
    nodes = r.randint(extent.seq_q, extent.seq_k)
    names = r.sample(range(nodes), nodes)  # parents may come after their children
    parents = {names[n]: -1 if n == 0 or r.random() < 0.2 else names[r.randrange(n)] for n in range(nodes)}
    return f"tree({listed(parents[n] for n in range(nodes))})"


def xref(r, extent):
    tokens = extent.seq_k + r.randint(0, 3)
    ids = listed(r.choices(range(r.randint(1, 9)), k=tokens))
    symbols = listed(r.choices([-1, -1, 0, 1, 2], k=2 * tokens)) if r.random() < 0.8 else ""
    sinks, window, links = r.randint(0, 4), r.randint(1, 9), r.randint(0, 15)
    numbers = [sinks, window, sinks + window + links + r.randint(0, 9), links, r.randint(0, 4), r.randint(0, 3),
               r.randint(0, 4), r.randint(0, 9), r.randint(0, 3)]
    return f"xref([{ids}],[{symbols}],{listed(numbers[:r.choice([3, 9, 9])])})"


def per_document(r, extent, depth):
    """Documents of equal sizes, whose pattern may be lists, or of any sizes, whose pattern must fit them all."""
    documents = r.randint(1, 5)
    if r.random() < 0.5:
        own = Extent(-(-extent.seq_q // documents), -(-extent.seq_k // documents), extent.batch, extent.heads)
        count = 1 + min(extent.seq_q // own.seq_q, extent.seq_k // own.seq_k)
        cu_q, cu_k = range(0, count * own.seq_q, own.seq_q), range(0, count * own.seq_k, own.seq_k)
    else:
        own = Extent(0, 0, extent.batch, extent.heads)
        cu_q, cu_k = (sorted(r.choices(range(n + 1), k=documents + 1)) for n in (extent.seq_q, extent.seq_k))
    return f"per_document([{listed(cu_q)}], [{listed(cu_k)}], {expression(r, own, depth)})"


def ranges(r, count):
    """Ranges of a longer or shorter extent, in any order, whose tokens may be there more than once; and its tokens."""
    tokens, bounds = r.randint(1, 2 * count), []
    while count:
        length = r.randint(1, min(count, tokens))
        begin = r.randint(0, tokens - length)
        bounds += [begin, begin + length]
        count -= length
    return listed(bounds), tokens


def rows(r, extent, depth):
    bounds, seq_q = ranges(r, extent.seq_q)
    own = Extent(seq_q, extent.seq_k, extent.batch, extent.heads)
    return f"rows([{bounds}], {seq_q}, {expression(r, own, depth)})"


def columns(r, extent, depth):
    bounds, seq_k = ranges(r, extent.seq_k)
    own = Extent(extent.seq_q, seq_k, extent.batch, extent.heads, extent.offset + seq_k - extent.seq_k)
    return f"columns([{bounds}], {seq_k}, {expression(r, own, depth)})"


def leaf(r, extent):
    """Without sizes, a leaf that means something on every extent."""
    if extent.seq_q and r.random() < 0.3:
        return r.choice([csr, bsr, mask])(r, extent)
    if extent.seq_q and extent.seq_q <= extent.seq_k and r.random() < 0.1:
        return tree(r, extent)
    if extent.seq_k and r.random() < 0.1:
        return xref(r, extent)
    return r.choice(LEAVES)(r)


def expression(r, extent, depth):
    """A text whose every part makes sense on the extent."""
    choice = r.random()
    if depth == 0 or choice < 0.2:
        return leaf(r, extent)
    part = lambda: expression(r, extent, depth - 1)
    if choice < 0.70:
        return f"({part()} {r.choice('||&&-')} {part()})"
    if choice < 0.80:
        return f"transpose({part()})"
    if choice < 0.90 and extent.seq_q:
        return r.choice([per_document, rows, columns])(r, extent, depth - 1)
    name, count = r.choice([("per_head", extent.heads), ("per_batch", extent.batch)])
    return f"{name}([{listed(r.randrange(2) for _ in range(count))}],{part()},{part()})"


def random_extent(r):
    offset = r.choice([None, None, 0, r.randint(-30, 60)])
    return Extent(r.randint(1, 40), r.randint(1, 40), r.choice([1, 1, 2]), r.choice([1, 1, 3]), offset)


def cases(seed, count):
    r = random.Random(seed)
    for _ in range(count):
        extent = random_extent(r)
        yield r, expression(r, extent, r.randint(0, 3)), extent


def check_rows(library, pattern, extent, mask, r):
    head = r.randrange(extent.heads)
    row_ptr, columns = library.to_csr(pattern, extent, head, r.choice([np.int32, np.int64]))
    plane = mask[0, head]
    assert (row_ptr == np.concatenate([[0], plane.sum(1).cumsum()])).all()
    assert (columns == plane.nonzero()[1]).all()
    for _ in range(4):
        at = tuple(r.randrange(n) for n in mask.shape)
        assert library.keeps(pattern, extent, *at) == mask[at]


def check_stats(library, pattern, extent, mask, r):
    block_q, block_k = r.choice([(1, 1), (4, 8), (16, 16), (7, 3), (64, 64)])
    stats = library.stats(pattern, extent, block_q, block_k)
    rows = mask.sum(-1)
    assert (stats.pairs, stats.rows_empty) == (mask.sum(), (rows == 0).sum())
    assert (stats.row_min, stats.row_max) == (rows.min(), rows.max())
    assert stats.density == pytest.approx(mask.mean())
    kept = block_sums(mask, block_q, block_k)
    assert stats.blocks_empty == (kept == 0).sum()
    assert stats.blocks_full + stats.blocks_partial == (kept > 0).sum()
    assert stats.blocks_full == (kept == block_q * block_k).sum()
    assert stats.visited == (kept > 0).sum() * block_q * block_k  # whole blocks, as kernels compute them


def block_sums(mask, block_q, block_k):
    """Pairs of each block of [batch, heads, seq_q, seq_k]."""
    rows = np.add.reduceat(mask.astype(int), range(0, mask.shape[2], block_q), 2)
    return np.add.reduceat(rows, range(0, mask.shape[3], block_k), 3)


def check_image(library, pattern, extent, mask, r):
    head, height, width = r.randrange(extent.heads), r.randint(1, extent.seq_q), r.randint(1, extent.seq_k)
    image = library.to_image(pattern, extent, head, height, width)
    np.testing.assert_allclose(image, coverage(mask[0, head], height, width), atol=1e-6)


def check_text(library, pattern):
    """Bytes bring every pattern back, its text those without long lists."""
    printed = library.text(library.c.spattn_pattern_print, pattern)
    saved = library.save(pattern)
    again = [library.load(saved)] + ([] if "#" in printed else [library.parse(printed)])
    for other in again:
        assert library.c.spattn_pattern_equal(pattern, other) == 1
        assert library.text(library.c.spattn_pattern_print, other) == printed
    assert library.save(again[0]) == saved


@pytest.mark.parametrize("seed", range(10))
def test_random_expressions(library, seed):
    """To repeat one: pytest tests/pattern/test_random_algebra.py -k 'expressions[SEED]'"""
    for r, text, extent in cases(seed, 300):
        pattern, mask = library.parse(text), to_mask(text, extent)
        try:
            assert (library.to_mask(pattern, extent) == mask).all()
            check_rows(library, pattern, extent, mask, r)
            check_stats(library, pattern, extent, mask, r)
            check_image(library, pattern, extent, mask, r)
            check_text(library, pattern)
        except Exception as failure:
            raise AssertionError(f"{text} on {extent}: {failure}") from failure
