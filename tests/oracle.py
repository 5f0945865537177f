# SPDX-License-Identifier: MIT
"""What every pattern and attention itself mean, a second time: NumPy, plain, slow, sharing no line with the library.

A pattern is a predicate over positions, sees(p, k, scene), evaluated on whole arrays at once. Its text is parsed into a
tree of such predicates; to_mask cuts it to a rectangle. attention_forward and attention_backward are dense softmax
attention in float64 under such a mask.
"""
import dataclasses
import re

import numpy as np


# ---- where a question is asked ----

@dataclasses.dataclass(frozen=True)
class Extent:
    seq_q: int
    seq_k: int
    batch: int = 1
    heads: int = 1
    q_offset: int | None = None  # None: queries align to the end of the keys

    @property
    def offset(self):
        return self.seq_k - self.seq_q if self.q_offset is None else self.q_offset


@dataclasses.dataclass(frozen=True)
class Scene:
    """One (batch entry, query head) of an extent."""
    extent: Extent
    batch: int
    head: int


def to_mask(pattern, extent):
    """bool [batch, heads, seq_q, seq_k]; pattern is a text or what parse returned."""
    sees = parse(pattern) if isinstance(pattern, str) else pattern
    p = np.arange(extent.seq_q, dtype=np.int64)[:, None] + extent.offset
    k = np.arange(extent.seq_k, dtype=np.int64)[None, :]
    out = np.zeros((extent.batch, extent.heads, extent.seq_q, extent.seq_k), bool)
    for b in range(extent.batch):
        for h in range(extent.heads):
            out[b, h] = sees(p, k, Scene(extent, b, h))
    return out


def coverage(plane, height, width):
    """float64 [height, width]: the kept share of each cell of one plane of a mask."""
    rows = [y * plane.shape[0] // height for y in range(height + 1)]
    cols = [x * plane.shape[1] // width for x in range(width + 1)]
    return np.array([[plane[rows[y]:rows[y + 1], cols[x]:cols[x + 1]].mean() for x in range(width)]
                     for y in range(height)])


# ---- leaves: NumPy's // and % floor, as the definitions do ----

def full():
    return lambda p, k, scene: (p == p) & (k == k)


def causal():
    return lambda p, k, scene: k <= p


def window(left, right):
    def sees(p, k, scene):
        low = (k >= p - left) if left >= 0 else (k == k)
        high = (k <= p + right) if right >= 0 else (k == k)
        return low & high
    return sees


def sink(tokens):
    return lambda p, k, scene: (k < tokens) & (p == p)


def block_diagonal(block):
    return lambda p, k, scene: (p >= 0) & (k // block == p // block)


def documents(*cu):
    def document(x):  # index of the [cu[t], cu[t+1]) around x, or -1
        t = np.searchsorted(np.array(cu), x, side="right") - 1
        return np.where(t < len(cu) - 1, t, -1)

    def sees(p, k, scene):
        return (document(p) >= 0) & (document(p) == document(k))
    return sees


def dilated(left, right, dilation):
    near = window(left, right)
    return lambda p, k, scene: near(p, k, scene) & ((k - p) % dilation == 0)


def strided(stride):
    return lambda p, k, scene: (k - p) % stride == 0


def landmark(block, landmarks):
    return lambda p, k, scene: (k % block >= block - landmarks) & (p == p)


def fixed(block, landmarks):
    return union(block_diagonal(block), landmark(block, landmarks))


def logsparse():
    def sees(p, k, scene):
        distance = p - k
        power = (distance > 0) & (distance & (distance - 1) == 0)
        return (distance == 0) | power
    return sees


def residue(modulus, offset):
    return lambda p, k, scene: (k % modulus == offset) & (p % modulus == offset)


def global_keys(*positions):
    return lambda p, k, scene: np.isin(k, positions) & (p == p)


def global_tokens(*positions):
    return lambda p, k, scene: np.isin(k, positions) | np.isin(p, positions)


def tree(*parents):
    nodes = len(parents)
    family = np.zeros((nodes, nodes), bool)  # family[a, b]: b is a or an ancestor of a
    for node in range(nodes):
        ancestor = node
        while ancestor != -1:
            family[node, ancestor] = True
            ancestor = parents[ancestor]

    def sees(p, k, scene):
        first = scene.extent.seq_k - nodes
        a, b = np.broadcast_arrays(p - first, k - first)
        inside = (a >= 0) & (a < nodes) & (b >= 0) & (b < nodes)
        related = family[np.where(inside, a, 0), np.where(inside, b, 0)]
        return (k < first) | (inside & related)
    return sees


WORD = (1 << 64) - 1


def splitmix64(state):
    """The generator of Steele, Lea and Flood, https://doi.org/10.1145/2714064.2660195."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & WORD
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        yield z ^ (z >> 31)


def bigbird(block, window_blocks, global_blocks, random_blocks, seed):
    def fixed_part(i, j):
        return (2 * abs(i - j) < window_blocks) | (j < global_blocks) | (i < global_blocks)

    def random_part(i, blocks):  # R(i)
        unseen = {j for j in range(blocks) if not fixed_part(i, j)}
        draws = splitmix64((seed + i * 0x9E3779B97F4A7C15) & WORD)
        drawn = set()
        while unseen and len(drawn) < random_blocks:
            j = next(draws) % blocks
            if j in unseen:
                unseen.remove(j)
                drawn.add(j)
        return drawn

    def sees(p, k, scene):
        blocks = -(-scene.extent.seq_k // block)
        i, j = np.broadcast_arrays(p // block, k // block)
        out = fixed_part(i, j)
        for row in np.unique(i[i >= 0]):
            out = out | ((i == row) & np.isin(j, list(random_part(int(row), blocks))))
        return out & (i >= 0)
    return sees


def linked_keys(i, ids, symbols, sinks, window, links, ngram_keys, before, after, look_back, stop_ratio):
    """The keys that token i of an xref links, in the order of its definition; symbols: (open, completed) of each."""
    far = i - window
    linked = []

    def span(first, last):
        for k in range(max(first, sinks), min(last, far) + 1):
            if k not in linked and len(linked) < links:
                linked.append(k)

    def around(places):
        for m in places:
            span(m - before, m + after)

    def places(symbol):  # the latest first
        return [m for m in range(far, -1, -1) if symbols[m][0] == symbol]

    for n in (4, 3, 2):
        tail = ids[i - n + 1:i + 1] if i + 1 >= n else None
        same = [m for m in range(far - 1, n - 2, -1) if ids[m - n + 1:m + 1] == tail]
        for m in same[:3]:
            span(m, m + ngram_keys - 1)
    if symbols[i][0] != -1:
        found = places(symbols[i][0])
        around(found[:2] + found[-1:])
    for c in range(i, max(i - look_back, -1), -1):
        symbol = symbols[c][1]
        times = sum(symbols[m][0] == symbol for m in range(i + 1))
        if symbol != -1 and (not stop_ratio or times <= max(i // stop_ratio, 4)):
            found = places(symbol)
            around(found[:1] + found[-1:])
    return linked


def xref(ids, symbols, sinks=32, window=64, budget=224, links=None, ngram_keys=7, before=3, after=10, look_back=32,
         stop_ratio=48):
    links = max(0, min(budget // 2, budget - sinks - window)) if links is None else links
    pairs = list(zip(symbols[::2], symbols[1::2])) if symbols else [(-1, -1)] * len(ids)
    plane = np.zeros((len(ids), len(ids)), bool)
    for i, row in enumerate(plane):
        row[:min(sinks, i + 1)] = True
        row[linked_keys(i, ids, pairs, sinks, window, links, ngram_keys, before, after, look_back, stop_ratio)] = True
        row[max(i - window + 1, 0):i + 1] = True
        for k in range(i - window, -1, -1):  # the window grows while the budget lasts
            if row.sum() + (not row[k]) > budget:
                break
            row[k] = True

    def sees(p, k, scene):
        if scene.extent.seq_k > len(ids):
            raise ValueError(f"an xref of {len(ids)} tokens on {scene.extent}")
        i, j = np.broadcast_arrays(p, k)
        inside = (i >= 0) & (i < len(ids)) & (j >= 0) & (j < len(ids))
        return inside & plane[np.where(inside, i, 0), np.where(inside, j, 0)]
    return sees


# ---- index patterns: rows are rows of the extent, not positions ----

def table(kept):
    """kept(batch, head) -> bool [seq_q, seq_k]. Rows and keys beyond it, which transposes ask for, hold nothing."""
    def sees(p, k, scene):
        plane = kept(scene.batch, scene.head)
        if plane.shape != (scene.extent.seq_q, scene.extent.seq_k):
            raise ValueError(f"an index pattern of {plane.shape} on {scene.extent}")
        i, j = np.broadcast_arrays(p - scene.extent.offset, k)
        inside = (i >= 0) & (i < plane.shape[0]) & (j >= 0) & (j < plane.shape[1])
        return inside & plane[np.where(inside, i, 0), np.where(inside, j, 0)]
    return sees


def block_table(row_ptr, col_idx, columns):
    """bool [rows, columns]: row r has the columns col_idx[row_ptr[r]:row_ptr[r + 1]]."""
    plane = np.zeros((len(row_ptr) - 1, columns), bool)
    for row in range(len(plane)):
        plane[row, col_idx[row_ptr[row]:row_ptr[row + 1]]] = True
    return plane


def csr(row_ptr, col_idx, seq_k):
    plane = block_table(row_ptr, col_idx, seq_k)
    return table(lambda batch, head: plane)


def bsr(row_ptr, col_idx, block_q, block_k, seq_q, seq_k):
    blocks = block_table(row_ptr, col_idx, -(-seq_k // block_k))
    plane = blocks.repeat(block_q, 0).repeat(block_k, 1)[:seq_q, :seq_k]
    return table(lambda batch, head: plane)


def mask(values, *sizes):
    planes = np.reshape(values, (1,) * (4 - len(sizes)) + sizes) != 0
    return table(lambda batch, head: planes[batch if len(planes) > 1 else 0, head if len(planes[0]) > 1 else 0])


def predicate(keep, heads, seq_q, seq_k):
    return mask([keep(head, q, k) for head in range(heads) for q in range(seq_q) for k in range(seq_k)],
                heads, seq_q, seq_k)


# ---- composition ----

def union(*parts):
    return lambda p, k, scene: np.logical_or.reduce(np.broadcast_arrays(*[part(p, k, scene) for part in parts]))


def intersection(*parts):
    return lambda p, k, scene: np.logical_and.reduce(np.broadcast_arrays(*[part(p, k, scene) for part in parts]))


def difference(a, b):
    return lambda p, k, scene: a(p, k, scene) & ~b(p, k, scene)


def transpose(part):
    return lambda p, k, scene: part(k, p, scene)


def per_head(parts, part_of_head):
    return lambda p, k, scene: parts[part_of_head[scene.head]](p, k, scene)


def per_batch(parts, part_of_batch):
    return lambda p, k, scene: parts[part_of_batch[scene.batch]](p, k, scene)


def grid(sizes, tile, parts):
    tiles = [size // of_tile for size, of_tile in zip(sizes, tile)]

    def places(x):
        digits = np.unravel_index(np.clip(x, 0, np.prod(sizes) - 1), (*tiles, *tile))
        return [t * of_tile + own for t, of_tile, own in zip(digits[:len(sizes)], tile, digits[len(sizes):])]

    def sees(p, k, scene):
        out = (p >= 0) & (p < np.prod(sizes)) & (k >= 0) & (k < np.prod(sizes))
        for size, part, of_p, of_k in zip(sizes, parts, places(p), places(k)):
            along = Extent(size, size, scene.extent.batch, scene.extent.heads)
            out = out & part(of_p, of_k, Scene(along, scene.batch, scene.head))
        return out
    return sees


def per_document(cu_q, cu_k, part):
    def sees(p, k, scene):
        i = p - scene.extent.offset
        out = np.zeros(np.broadcast_shapes(i.shape, k.shape), bool)
        for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
            if q0 < q1 and k0 < k1:
                own = Extent(q1 - q0, k1 - k0, scene.extent.batch, scene.extent.heads)  # aligned to its end
                inside = (q0 <= i) & (i < q1) & (k0 <= k) & (k < k1)
                out |= inside & part(i - q0 + own.offset, k - k0, Scene(own, scene.batch, scene.head))
        return out
    return sees


def rows(bounds, seq_q, part):
    found = np.concatenate([np.arange(*pair) for pair in zip(bounds[::2], bounds[1::2])])  # the part's row of each row

    def sees(p, k, scene):
        if scene.extent.seq_q != len(found):
            raise ValueError(f"rows of {len(found)} on {scene.extent}")
        own = Extent(seq_q, scene.extent.seq_k, scene.extent.batch, scene.extent.heads)  # aligned to its end
        i = p - scene.extent.offset
        inside = (i >= 0) & (i < len(found))  # transposes ask for others, which see nothing
        position = found[np.where(inside, i, 0)] + own.offset
        return inside & part(position, k, Scene(own, scene.batch, scene.head))
    return sees


def columns(bounds, seq_k, part):
    found = np.concatenate([np.arange(*pair) for pair in zip(bounds[::2], bounds[1::2])])  # the part's key of each key

    def sees(p, k, scene):
        if scene.extent.seq_k != len(found):
            raise ValueError(f"columns of {len(found)} on {scene.extent}")
        own = dataclasses.replace(scene.extent, seq_k=seq_k, q_offset=scene.extent.offset + seq_k - len(found))
        inside = (k >= 0) & (k < len(found))  # transposes ask for others, which nobody sees
        key = found[np.where(inside, k, 0)]
        return inside & part(p - scene.extent.offset + own.offset, key, Scene(own, scene.batch, scene.head))
    return sees


# ---- lists given at run time ----

def listed(indices, counts, heads_q, seq_q, seq_k, block_q=1, block_k=1):
    """int [batch, heads_q, seq_q, seq_k]: how often the lists [batch, rows, heads_kv, most] name each key. counts
    [batch, rows, heads_kv] or None: entries that count."""
    batch, rows, heads_kv, most = indices.shape
    times = np.zeros((batch, heads_kv, rows, -(-seq_k // block_k)), np.int64)
    for b, row, head, i in np.ndindex(indices.shape):
        block = indices[b, row, head, i]
        if (counts is None or i < counts[b, row, head]) and 0 <= block < times.shape[3]:
            times[b, head, row, block] += 1
    times = np.repeat(np.repeat(times, block_q, 2), block_k, 3)[:, :, :seq_q, :seq_k]
    return np.repeat(times, heads_q // heads_kv, 1)


# ---- text ----

NUMERIC = {f.__name__: f for f in (full, causal, window, sink, block_diagonal, documents, dilated, strided, landmark,
                                   fixed, logsparse, residue, global_keys, global_tokens, tree, bigbird)}
LISTS = {"csr": (csr, 2), "bsr": (bsr, 2), "mask": (mask, 1), "xref": (xref, 2)}  # lists before the numbers


class Reader:
    """expression := term ('|' term)*;  term := atom (('&' | '-') atom)*;  atom := '(' expression ')' | name [arguments]

    transpose takes an expression, per_head and per_batch a list of choices and then expressions, grid one list or two and
    then expressions, per_document two lists
    and an expression, rows and columns a list, a number and an expression, csr, bsr, mask and xref lists and then numbers, all
    others numbers.
    """

    def __init__(self, text):
        self.tokens = re.findall(r"[a-z_]+|-?\d+|[^\s]", text) + ["end"]

    def take(self, *wanted):
        if wanted and self.tokens[0] not in wanted:
            raise ValueError(f"expected {' or '.join(wanted)} before {' '.join(self.tokens[:4])}")
        return self.tokens.pop(0)

    def expression(self):
        parts = [self.term()]
        while self.tokens[0] == "|":
            self.take("|")
            parts.append(self.term())
        return union(*parts) if len(parts) > 1 else parts[0]

    def term(self):
        sees = self.atom()
        while self.tokens[0] in ("&", "-"):
            combine = intersection if self.take() == "&" else difference
            sees = combine(sees, self.atom())
        return sees

    def atom(self):
        name = self.take()
        if name == "(":
            return self.closing(self.expression())
        if name == "transpose":
            self.take("(")
            return transpose(self.closing(self.expression()))
        if name in ("per_head", "per_batch"):
            return self.selection(per_head if name == "per_head" else per_batch)
        if name == "grid":
            return self.grid()
        if name == "per_document":
            return per_document(*self.lists(2), self.closing(self.expression()))
        if name == "rows":
            return rows(*self.lists(1), *self.numbers(None, ","), self.closing(self.expression()))
        if name == "columns":
            return columns(*self.lists(1), *self.numbers(None, ","), self.closing(self.expression()))
        if name in LISTS:
            make, count = LISTS[name]
            return make(*self.lists(count), *self.numbers(None, ")"))
        if name not in NUMERIC:
            raise ValueError(f"no pattern {name}")
        return NUMERIC[name](*self.numbers("(", ")")) if self.tokens[0] == "(" else NUMERIC[name]()

    def selection(self, choose):
        self.take("(")
        chosen = self.numbers("[", "]")
        parts = []
        while self.take(",", ")") == ",":
            parts.append(self.expression())
        return choose(parts, chosen)

    def grid(self):
        self.take("(")
        sizes = tile = self.numbers("[", "]")
        parts = []
        while self.take(",", ")") == ",":
            if self.tokens[0] == "[":
                tile = self.numbers("[", "]")
            else:
                parts.append(self.expression())
        return grid(sizes, tile, parts)

    def lists(self, count):
        """What follows a name up to its next argument: "([1,2],[3],"."""
        self.take("(")
        found = []
        for _ in range(count):
            found.append(self.numbers("[", "]"))
            if self.tokens[0] != ")":
                self.take(",")
        return found

    def numbers(self, opening, closing):
        if opening:
            self.take(opening)
        values = []
        while self.tokens[0] != closing:
            values.append(int(self.take()))
            if self.tokens[0] != closing:
                self.take(",")
        self.take(closing)
        return values

    def closing(self, value):
        self.take(")")
        return value


def parse(text):
    reader = Reader(text)
    sees = reader.expression()
    reader.take("end")
    return sees


# ---- attention ----

def attention_forward(q, k, v, mask, scale, softcap=None, sink=None):
    """q [batch, heads_q, seq_q, d], k [batch, heads_kv, seq_k, d], v [..., d_v] -> out, lse; float64. mask is bool, or
    how often each key is seen; sink [heads_q] is one more score of each row, without a value."""
    s, v = scores(q, k, mask, scale, softcap), grouped(v, q)
    z = np.full((1, q.shape[1], 1, 1), -np.inf) if sink is None else np.float64(sink)[None, :, None, None]
    m = np.maximum(s.max(-1, keepdims=True), z)
    m = np.where(np.isfinite(m), m, 0.0)                          # a row that sees no key has no maximum
    e = np.exp(s - m) * mask
    total = e.sum(-1, keepdims=True) + np.exp(z - m)
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(total))[..., 0]                         # log 0 = -inf: the row is empty
    return p @ v, lse


def attention_backward(q, k, v, mask, scale, dout, dlse=None, softcap=None, sink=None):
    """dq, dk, dv, and dsink where there is a sink, of sum(out * dout) + sum(lse * dlse); float64."""
    out, lse = attention_forward(q, k, v, mask, scale, softcap, sink)
    s = scores(q, k, mask, scale, softcap)
    p = np.exp(s - np.where(np.isfinite(lse), lse, 0.0)[..., None]) * mask  # exp(-inf) = 0 where masked
    dp = dout @ grouped(v, q).swapaxes(-1, -2)
    delta = (out * dout).sum(-1) - (0.0 if dlse is None else dlse)
    ds = p * (dp - delta[..., None])
    if softcap:
        ds = ds * (1 - (np.where(mask, s, 0.0) / softcap) ** 2)   # c tanh(x / c) has the slope 1 - tanh(x / c)^2
    dq = scale * ds @ grouped(k, q)
    dk = per_group_sum(scale * ds.swapaxes(-1, -2) @ q.astype(np.float64), k)
    dv = per_group_sum(p.swapaxes(-1, -2) @ dout.astype(np.float64), v)
    if sink is None:
        return dq, dk, dv
    share = np.exp(np.float64(sink)[:, None] - np.where(np.isfinite(lse), lse, 0.0))
    return dq, dk, dv, -(share * delta).sum((0, 2))


def scores(q, k, mask, scale, softcap=None):
    s = scale * (q.astype(np.float64) @ grouped(k, q).swapaxes(-1, -2))
    s = softcap * np.tanh(s / softcap) if softcap else s
    return np.where(mask, s, -np.inf)


def grouped(x, q):
    """Repeats each of heads_kv for the query heads that share it."""
    return np.repeat(x.astype(np.float64), q.shape[1] // x.shape[1], axis=1)


def per_group_sum(x, like):
    batch, heads_kv = like.shape[:2]
    return x.reshape(batch, heads_kv, -1, *x.shape[2:]).sum(2)
