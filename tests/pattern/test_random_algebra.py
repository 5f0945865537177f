# SPDX-License-Identifier: MIT
"""Random expressions on random small extents: the library's mask, rows, counts and picture against the oracle's."""
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


def expression(r, extent, depth):
    """A text whose every part makes sense on the extent."""
    choice = r.random()
    if depth == 0 or choice < 0.2:
        return tree(r, extent) if extent.seq_q <= extent.seq_k and r.random() < 0.1 else r.choice(LEAVES)(r)
    part = lambda: expression(r, extent, depth - 1)
    if choice < 0.80:
        return f"({part()} {r.choice('||&&-')} {part()})"
    if choice < 0.90:
        return f"transpose({part()})"
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
    printed = library.text(library.c.spattn_pattern_print, pattern)
    again = library.parse(printed)
    assert library.c.spattn_pattern_equal(pattern, again) == 1
    assert library.text(library.c.spattn_pattern_print, again) == printed


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
