# SPDX-License-Identifier: MIT
"""What the GPU bench runs, as data: a new case is a line here. Names are those of the CPU's table, ../cases.inc, where
it has the same pattern."""
import dataclasses
import functools
import math
import pathlib
import typing

import torch

MASKS = pathlib.Path(__file__).resolve().parent / "masks"
PASSES = ("forward", "backward")
FORWARD = ("forward",)  # what nobody trains with


@dataclasses.dataclass
class Case:
    name: str
    pattern: str  # the library's text
    heads: int
    seq: int  # queries
    kept: typing.Callable  # (positions of queries, keys, *tables) -> bool
    goals: dict = dataclasses.field(default_factory=dict)  # TFLOP/s of each pass
    recorded: dict = dataclasses.field(default_factory=dict)  # the best peer elsewhere: pass -> (name, TFLOP/s)
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    heads_kv: int = 0  # 0: heads
    seq_k: int = 0  # 0: seq
    batch: int = 1
    tables: typing.Callable = tuple  # makes what `kept` looks up
    block: int = 0  # where `kept` looks up a table of blocks: their size
    documents: tuple = ()  # the boundaries, where documents of as many queries as keys are packed
    is_packed: bool = False  # tensors are [tokens, heads, head_dim]
    deterministic: bool = False  # backward alone: the forward always is
    passes: tuple = PASSES
    goal_us: float | None = None  # of the forward
    goal_dense: float | None = None  # speed-up over the best dense kernel

    def __post_init__(self):
        self.head_dim_v = self.head_dim_v or self.head_dim
        self.heads_kv = self.heads_kv or self.heads
        self.seq_k = self.seq_k or self.seq

    def keeps(self, device):
        """(query rows, keys) -> bool, on tensors of the device. Queries align to the end of the keys."""
        tables, offset = [table.to(device) for table in self.tables()], self.seq_k - self.seq
        return lambda q, k: self.kept(q + offset, k, *tables)

    def is_dense(self):
        return self.pattern in ("full", "causal")

    def shape(self):
        return [self.batch, self.heads, self.heads_kv, self.seq, self.head_dim]

    def flops(self, what, pairs):
        """Of so many kept pairs: a product of head_dim and one of head_dim_v forward, backward also their gradients."""
        k, v = self.head_dim, self.head_dim_v
        return 2 * pairs * (k + v if what == "forward" else 3 * k + 2 * v)

    def but(self, name, **changes):
        return dataclasses.replace(self, name=name, **changes)


# ---- patterns of several cases ----

WINDOW, STREAMING = "causal & window(1023,0)", "causal & (sink(64) | window(1023,0))"


def full(q, k):
    return (q >= 0) & (k >= 0)


def causal(q, k):
    return k <= q


def window(q, k, before):
    return (k <= q) & (k >= q - before)


def window1k(q, k):
    return window(q, k, 1023)


def streaming(q, k):
    return (k <= q) & ((k < 64) | (k >= q - 1023))


def dilated(q, k):
    return window(q, k, 1008) & ((q - k) % 16 == 0)


def numbers(values):
    return ",".join(map(str, values))


# ---- tables of blocks ----

def blocks(size, make_table):
    """What a case needs whose keys a table of blocks says, [query block, key block]."""
    return dict(kept=lambda q, k, table: table[q // size, k // size], tables=lambda: [make_table()], block=size)


def load_mask(name):
    """[query block, key block], bool."""
    lines = [line for line in (MASKS / f"{name}.pbm").read_text().split("\n") if not line.startswith("#")]
    width, height = map(int, lines[1].split())
    bits = "".join("".join(lines[2:]).split())
    return torch.tensor([bit == "1" for bit in bits]).view(height, width)


def mask_case(name, seq, *goals, **more):
    """A case of the 128-blocks in masks/<name>.pbm."""
    mask = load_mask(name)
    row_ptr = [0, *mask.sum(1).cumsum(0).tolist()]
    text = f"bsr([{numbers(row_ptr)}],[{numbers(mask.nonzero()[:, 1].tolist())}],128,128,{seq},{seq})"
    kept = blocks(128, lambda: mask)
    return Case(name, text, 16, seq, kept.pop("kept"), *goals, **kept, **more)


@functools.cache
def bigbird_table(size, wide, first, chosen, seed, seq_k, row=0):
    """Which blocks bigbird(size,wide,first,chosen,seed) sees, from block `row` of queries on."""
    word, gamma, count = (1 << 64) - 1, 0x9E3779B97F4A7C15, -(-seq_k // size)
    i, j = torch.arange(count)[:, None], torch.arange(count)
    table = (2 * (i - j).abs() < wide) | (j < first) | (i < first)
    for here in range(row, count):
        sees, state, drawn = table[here].tolist(), (seed + here * gamma) & word, 0
        while drawn < chosen and not all(sees):
            state = (state + gamma) & word  # splitmix64, https://prng.di.unimi.it/splitmix64.c
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
            block = (z ^ (z >> 31)) % count
            drawn += not sees[block]
            sees[block] = True
        table[here] = torch.tensor(sees)
    return table


def bigbird(size, wide, first, chosen, seq, seq_k=0):
    """What a case of bigbird(size,wide,first,chosen,1) needs."""
    seq_k = seq_k or seq
    return dict(pattern=f"bigbird({size},{wide},{first},{chosen},1)", seq=seq, seq_k=seq_k,
                **blocks(size, lambda: bigbird_table(size, wide, first, chosen, 1, seq_k, (seq_k - seq) // size)))


# ---- documents one after the other ----

def mixed(count):
    """The boundaries of documents of 10 to 4000 tokens, the long ones among the short."""
    boundaries = [0]
    for i in range(count):
        boundaries.append(boundaries[-1] + 10 + (i * 37 % count) * 3990 // (count - 1))
    return tuple(boundaries)


def in_document(q, k, document, at, document_of_key):
    return (document[q] == document_of_key[k]) & (k <= at[q])


def document_tables(cu_q, cu_k):
    """By position of a query: its document, and the key it stands at; and the document of each key."""
    def documents(cu):
        return torch.bucketize(torch.arange(cu[-1]), torch.tensor(cu[1:]), right=True)
    document, of_key, before = documents(cu_q), documents(cu_k), cu_k[-1] - cu_q[-1]
    at = torch.arange(cu_q[-1]) + (torch.tensor(cu_k[1:]) - torch.tensor(cu_q[1:]))[document]
    return [*(torch.nn.functional.pad(x, (before, 0), value=-1) for x in (document, at)), of_key]


def documents(count):
    """What a case of `count` packed documents needs, each of which is causal."""
    cu = mixed(count)
    return dict(pattern=f"causal & documents({numbers(cu)})", seq=cu[-1], kept=in_document,
                tables=lambda: document_tables(cu, cu), documents=cu)


def per_document(count, tail=1):
    """The same as a batch of several lengths; with a tail of n, the last 1 of n tokens of each document ask."""
    cu_k, cu_q = mixed(count), [0]
    for begin, end in zip(cu_k, cu_k[1:]):
        cu_q.append(cu_q[-1] + -(-(end - begin) // tail))
    return dict(pattern=f"per_document([{numbers(cu_q)}],[{numbers(cu_k)}],causal)", seq=cu_q[-1], seq_k=cu_k[-1],
                kept=in_document, tables=lambda: document_tables(cu_q, cu_k), is_packed=True,
                documents=cu_k if tail == 1 else ())


# ---- trees ----

def tree(nodes, cached=0):
    """What a case of a tree needs that branches four ways, in breadth-first order, behind cached keys it all sees."""
    parents = [-1, *((node - 1) // 4 for node in range(1, nodes))]

    def related():  # [node, itself or an ancestor]
        table = torch.eye(nodes, dtype=torch.bool)
        for node in range(1, nodes):
            table[node] |= table[parents[node]]
        return table

    return dict(pattern=f"tree({numbers(parents)})", seq=nodes, seq_k=cached + nodes, tables=lambda: [related()],
                kept=lambda q, k, table: (k < cached) | table[q - cached, (k - cached).clamp(min=0)])


def near_on_grid(sizes, tile, reach):
    """Windows of `reach` places to each side of every axis; tokens lie tile after tile."""
    def places(token):
        of_tile, inside = token // math.prod(tile), token % math.prod(tile)
        found = []
        for size, part in zip(sizes[::-1], tile[::-1]):
            found.append(of_tile % (size // part) * part + inside % part)
            of_tile, inside = of_tile // (size // part), inside // part
        return found[::-1]

    def kept(q, k):
        near = [(a - b).abs() <= most for a, b, most in zip(places(q), places(k), reach)]
        return functools.reduce(torch.logical_and, near)

    windows = ", ".join(f"window({most},{most})" for most in reach)
    return dict(pattern=f"grid([{numbers(sizes)}], [{numbers(tile)}], {windows})", seq=math.prod(sizes), kept=kept)


GLOBAL = range(0, 65536, 1024)
CASES = [
    Case("full_16k", "full", 16, 16384, full, {"forward": 790, "backward": 650},
         {"forward": ("FA4", 720), "backward": ("FA4", 620)}),
    Case("causal_16k", "causal", 16, 16384, causal, {"forward": 770, "backward": 630},
         {"forward": ("FA4", 651), "backward": ("FA4", 600)}),
    Case("window1k_16k", WINDOW, 16, 16384, window1k, {"forward": 620, "backward": 480},
         {"forward": ("FA4", 498), "backward": ("FA4", 442)}),
    Case("window4k_128k", "causal & window(4095,0)", 4, 131072, lambda q, k: window(q, k, 4095),
         {"forward": 750, "backward": 600}, {"forward": ("FA4", 617), "backward": ("cuDNN flex", 558)}, goal_dense=10),
    Case("streaming_16k", STREAMING, 16, 16384, streaming, {"forward": 600, "backward": 460},
         {"forward": ("cuDNN flex", 463), "backward": ("cuDNN flex", 273)}),
    Case("streaming_128k", STREAMING, 4, 131072, streaming, {"forward": 640, "backward": 480},
         {"forward": ("cuDNN flex", 507), "backward": ("cuDNN flex", 129)}, goal_dense=10),
    Case("block_diagonal512_16k", "block_diagonal(512)", 16, 16384, lambda q, k: q // 512 == k // 512,
         {"forward": 600, "backward": 450}, {"forward": ("FA4", 450), "backward": ("FA4", 359)}),
    mask_case("bsr128_50_4k", 4096, {"forward": 660, "backward": 540},
              {"forward": ("FA4", 572), "backward": ("cuDNN flex", 482)}, goal_dense=1.5),
    mask_case("bsr128_25_8k", 8192, {"forward": 700, "backward": 570},
              {"forward": ("cuDNN flex", 610), "backward": ("BSA", 496)}, goal_dense=2.5),
    mask_case("bsr128_10_16k", 16384, {"forward": 720, "backward": 580},
              {"forward": ("FLASH flex", 624), "backward": ("BSA", 520)}, goal_dense=5),
    mask_case("bsr128_05_32k", 32768, {"forward": 730, "backward": 590},
              {"forward": ("FA4", 603), "backward": ("BSA", 539)}),
    # Tokens in other orders than their own: residue classes, hot tokens, pieces.
    Case("dilated_16k", "causal & dilated(1008,0,16)", 16, 16384, dilated, {"forward": 110, "backward": 95},
         {"forward": ("FA4", 75), "backward": ("FA4", 67)}),
    Case("dilated_128k", "causal & dilated(1008,0,16)", 4, 131072, dilated, goal_dense=10),
    Case("longnet_128k", "causal & block_diagonal(8192) & residue(4,1)", 4, 131072,
         lambda q, k: (k <= q) & (q // 8192 == k // 8192) & (q % 4 == 1) & (k % 4 == 1), goal_dense=10),
    Case("strided_16k", "causal & strided(128)", 16, 16384, lambda q, k: (k <= q) & ((q - k) % 128 == 0)),
    Case("sparse_transformer_16k", "causal & (window(128,0) | strided(128))", 16, 16384,
         lambda q, k: (k <= q) & ((k >= q - 128) | ((q - k) % 128 == 0)), {"forward": 350}),
    Case("logsparse_16k", "logsparse", 16, 16384, lambda q, k: (k <= q) & (((q - k) & (q - k - 1)) == 0)),
    Case("window1k_128k", WINDOW, 4, 131072, window1k, goal_dense=10),
    Case("global_tokens_64k", f"window(256,256) | global_tokens({numbers(GLOBAL)})", 4, 65536,
         lambda q, k: ((q - k).abs() <= 256) | (q % 1024 == 0) | (k % 1024 == 0), {"forward": 550}),
    Case("landmark_64k", "causal & (window(256,0) | landmark(64,1))", 4, 65536,
         lambda q, k: (k <= q) & ((k >= q - 256) | (k % 64 == 63))),
    Case("bigbird_128k", heads=4, **bigbird(64, 3, 2, 3, 131072), goal_dense=5),
    # An image, and video: windows on each axis, of tiles that are blocks.
    Case("neighborhood_16k", heads=16, **near_on_grid((128, 128), (8, 8), (6, 6))),
    Case("neighborhood_rows_16k", heads=16, **near_on_grid((128, 128), (128, 128), (6, 6))),
    Case("neighborhood_video_115k", heads=4, **near_on_grid((30, 48, 80), (6, 8, 8), (9, 12, 12))),
    # Documents of 10 to 4000 tokens: as a pattern, as a batch of several lengths, and with queries in the last quarter
    # of each alone.
    Case("documents_16k", heads=16, **documents(8)),
    Case("documents_200k", heads=4, **documents(100)),
    Case("per_document_16k", heads=16, **per_document(8)),
    Case("per_document_200k", heads=4, **per_document(100)),
    Case("per_document_tail_16k", heads=16, **per_document(8, tail=4), passes=FORWARD),
    # Eight query heads on each key head.
    Case("causal_4k_gqa8", "causal", 64, 4096, causal, heads_kv=8),
    Case("window1k_16k_gqa8", WINDOW, 64, 16384, window1k, heads_kv=8),
    Case("streaming_16k_gqa8", STREAMING, 64, 16384, streaming, heads_kv=8),
    # Few queries on many keys.
    Case("decode_1m", "full", 1, 1, full, seq_k=1 << 20, passes=FORWARD),
    Case("decode_128k_gqa8", "full", 64, 1, full, heads_kv=8, seq_k=131072, passes=FORWARD),
    Case("decode16_128k_gqa8", "causal", 64, 16, causal, heads_kv=8, seq_k=131072, passes=FORWARD),
    *(Case(f"decode_{n}k_gqa8", "full", 64, 1, full, heads_kv=8, seq_k=1024 * n, passes=FORWARD) for n in (2, 8, 32)),
    Case("decode_8k_batch32_gqa8", "full", 64, 1, full, heads_kv=8, seq_k=8192, batch=32, passes=FORWARD),
    Case("decode_128k_streaming_gqa8", STREAMING, 64, 1, streaming, heads_kv=8, seq_k=131072, passes=FORWARD),
    Case("decode_16k_blocks_gqa8", heads=64, heads_kv=8, **bigbird(64, 1, 0, 25, 1, 16384), passes=FORWARD),
    Case("decode_128k_blocks_gqa8", heads=64, heads_kv=8, **bigbird(64, 1, 0, 204, 1, 131072), passes=FORWARD),
    # Trees of document headings, and of speculative decoding behind a cache: where does the tree beat dense?
    *(Case(f"tree_{n}", heads=8, head_dim=64, **tree(n)) for n in (26, 64, 128, 256, 512, 1024)),
    *(Case(f"tree_{n}_8k_gqa8", heads=64, heads_kv=8, **tree(n, 8192), passes=FORWARD) for n in (26, 64, 256, 1024)),
    # Small problems, where what a launch costs decides.
    Case("tiny_block_diagonal", "block_diagonal(16)", 1, 4096, lambda q, k: q // 16 == k // 16, head_dim=64,
         recorded={"forward": ("Triton flex, 28.7 us", 0.585)}, goal_us=6),
    Case("tiny_streaming", "causal & (sink(16) | window(63,0))", 6, 4096,
         lambda q, k: (k <= q) & ((k < 16) | (k >= q - 63)), head_dim=64,
         recorded={"forward": ("Triton flex, 27.3 us", 18.3)}, goal_us=8),
    # Elements and head sizes beside bf16 and 128.
    *(Case(f"{name}_{label}", text, 16, 16384, kept, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)
      for name, text, kept in (("full_16k", "full", full), ("window1k_16k", WINDOW, window1k))
      for label, dtype, head_dim, head_dim_v in (("f16", torch.float16, 128, 128), ("d64", torch.bfloat16, 64, 64),
                                                 ("d64_f16", torch.float16, 64, 64), ("d96", torch.bfloat16, 96, 96),
                                                 ("d192_128", torch.bfloat16, 192, 128),
                                                 ("d256", torch.bfloat16, 256, 256))),
    # Gemma 4's layers that see all keys: head_dim 512.
    *(Case(f"{name}_d512", text, 8, 16384, kept, heads_kv=4, head_dim=512, head_dim_v=512)
      for name, text, kept in (("full_16k", "full", full), ("causal_16k", "causal", causal),
                               ("window1k_16k", WINDOW, window1k))),
    Case("decode_32k_d512", "full", 8, 1, full, heads_kv=4, seq_k=32768, head_dim=512, head_dim_v=512, batch=8,
         passes=FORWARD),
    *(Case(f"{name}_{label}", text, 16, seq, kept, dtype=torch.float32, head_dim=head_dim, head_dim_v=head_dim)
      for name, text, seq, kept in (("full_4k", "full", 4096, full), ("window1k_16k", WINDOW, 16384, window1k))
      for label, head_dim in (("f32", 128), ("d64_f32", 64), ("d256_f32", 256))),
]
DETERMINISTIC = "_deterministic"
CASES += [case.but(case.name + DETERMINISTIC, goals={"backward": 0.85 * case.goals["backward"]}, deterministic=True,
                   passes=("backward",)) for case in CASES if "backward" in case.goals]


# ---- the same patterns over lengths ----

def sweep():
    """Cases of 4K to 128K tokens. Those that CASES has are taken from there."""
    known = {case.name: case for case in CASES}
    families = (("full", "full", full), ("causal", "causal", causal), ("window1k", WINDOW, window1k),
                ("streaming", STREAMING, streaming))
    for seq in (4096 << i for i in range(6)):
        heads, label = 16 if seq <= 32768 else 4, f"{seq >> 10}k"
        for name, text, kept in families:
            yield known.get(f"{name}_{label}", Case(f"{name}_{label}", text, heads, seq, kept))
        chosen = round(seq / 128 / 10) - 1  # and the diagonal: 10 % of the blocks
        name = f"bsr128_10_{label}"
        yield known.get(name, Case(name, heads=heads, **bigbird(128, 1, 0, chosen, seq)))
