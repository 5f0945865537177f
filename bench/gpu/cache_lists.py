#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Lists that come with calls on a cache: decoding with selected keys, which lie in pages.

    python3 bench/gpu/cache_lists.py --library build/libsparseattn.so [--case GLOB] [--out bench/results]

Of a case: sequences of so many tokens, each in pages of 64 in random order; the last `queries` of each ask for a list of
tokens of their own, or of blocks of 64 tokens, drawn from all before them. Cases of `float8` have keys and values of a
byte with a scale for each token and head; what they are compared with has bfloat16. Times as in bench.py. `rows_us` is a
plan without a cache, of lists of single keys that name rows of the pool: what finding them costs is the difference.
`naive_us` is gather-then-matmul in torch, whose rows and scores go through memory. `gigabytes_a_second` is what the
listed keys and values come to, `tflops` 2 heads queries list (head_dim + head_dim_v). A JSON line for each case goes to
<out>/<gpu>_cache_lists.jsonl.
"""
import typing

import torch
from abi import DTYPES, Library, ffi, sized
from float8 import to_float8
from measure import empty_us, peer_us, time_us
from options import make_library_parser
from report import digits, first_line, write_cases

CAPACITY, PAGE_SIZE = 131072, 64


class Case(typing.NamedTuple):
    name: str
    batch: int
    length: int
    most: int  # entries of a list
    queries: int = 1
    block: int = 1  # tokens of an entry
    heads: int = 128
    heads_kv: int = 1
    head_dim: int = 576
    head_dim_v: int = 512
    float8: bool = False

    @property
    def value_in_key(self):
        return self.head_dim != self.head_dim_v


CASES = [
    Case("dsa_decode_1", 1, 131072, 2048),
    Case("dsa_decode_16", 16, 65536, 2048),
    Case("dsa_decode_128", 128, 32768, 2048),
    Case("dsa_draft_32", 32, 32768, 2048, queries=4),
    Case("dsa_chunk_2k", 1, 65536, 2048, queries=2048),
    Case("nsa_decode_64", 64, 32768, 16, block=64, heads=64, heads_kv=4, head_dim=128, head_dim_v=128),
]
CASES += [case._replace(name=case.name + "_float8", float8=True) for case in CASES]


class Tensors:
    """Pools that are full up to the length, lists of tokens of each sequence, and the rows that these are."""

    def __init__(self, case):
        def draw(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        of_entry = case.length // PAGE_SIZE
        self.q = draw(case.batch, case.queries, case.heads, case.head_dim)
        columns = {"k": case.head_dim} if case.value_in_key else {"k": case.head_dim, "v": case.head_dim_v}
        pool = case.batch * of_entry, PAGE_SIZE, case.heads_kv
        self.keys = {name: draw(*pool, size) for name, size in columns.items()}  # and values
        self.out = torch.empty(*self.q.shape[:3], case.head_dim_v, device="cuda", dtype=torch.bfloat16)
        self.pools = dict(self.keys)
        if case.float8:
            for name, x in self.keys.items():
                self.pools[name], self.pools[name + "_scales"], self.keys[name] = to_float8(x)
        pages = torch.randperm(case.batch * of_entry, device="cuda").view(case.batch, of_entry)
        self.page_table = torch.full((case.batch, CAPACITY // PAGE_SIZE), -1, device="cuda", dtype=torch.int32)
        self.page_table[:, :of_entry] = pages
        self.starts = torch.full((case.batch,), case.length - case.queries, device="cuda", dtype=torch.int32)
        seen = (self.starts[0] + 1 + torch.arange(case.queries, device="cuda")) // case.block  # blocks before each query
        shape = (case.batch, case.queries, case.heads_kv, case.most)
        self.lists = (torch.rand(shape, device="cuda") * seen[:, None, None]).int()
        tokens = (self.lists[..., None] * case.block + torch.arange(case.block, device="cuda")).flatten(-2).long()
        entries = torch.arange(case.batch, device="cuda")[:, None, None, None]
        self.rows = (pages[entries, tokens // PAGE_SIZE] * PAGE_SIZE + tokens % PAGE_SIZE).int()

    def operands(self):
        return dict(q=self.q, out=self.out, **self.pools)

    def as_rows(self):
        """As one sequence whose keys are all rows of the pool, in bfloat16."""
        whole = dict(q=self.q, out=self.out, **self.keys)
        flat = {name: x.reshape(1, -1, *x.shape[2:]) for name, x in whole.items()}
        return flat | dict(indices=self.rows.reshape(1, -1, *self.rows.shape[2:]))


def make_plan(library, case, on_cache):
    lib, lists = library.lib, case.most * case.block
    flags = (lib.SPATTN_PLAN_VALUE_IN_KEY if case.value_in_key else 0) | (lib.SPATTN_PLAN_STARTS if on_cache else 0)
    text = f"causal & runtime_blocks(1,{case.block},{case.most})" if on_cache else f"runtime_tokens({lists})"
    rows = case.batch * case.queries
    sizes = dict(batch=case.batch, seq_q=case.queries, seq_k=CAPACITY, page_size=PAGE_SIZE) if on_cache else \
        dict(batch=1, seq_q=rows, seq_k=case.batch * case.length)
    if on_cache and case.float8:
        sizes["cache_dtype"] = DTYPES[torch.float8_e4m3fn]
    problem = sized("spattn_problem", flags=flags, heads_q=case.heads, heads_kv=case.heads_kv, head_dim=case.head_dim,
                    head_dim_v=case.head_dim_v, dtype=DTYPES[torch.bfloat16], axes=lib.SPATTN_BSHD, **sizes)
    return library.make("spattn_plan", lib.spattn_plan_create, library.context, library.pattern(text), problem, ffi.NULL)


def attend(case, t, of, dtype):
    """[queries, heads, head_dim_v] of these of all queries, by the rows that their lists are."""
    group = case.heads // case.heads_kv
    q = t.q.flatten(0, 1)[of].to(dtype).unflatten(1, (case.heads_kv, group))
    rows = t.rows.flatten(0, 1)[of].long()
    heads = torch.arange(case.heads_kv, device="cuda")[None, :, None]
    keys = {name: x.flatten(0, 1)[rows, heads].to(dtype) for name, x in t.keys.items()}
    k, v = keys["k"], keys.get("v", keys["k"][..., :case.head_dim_v])
    return ((q @ k.mT * case.head_dim**-0.5).softmax(-1) @ v).flatten(1, 2)


def max_error(case, t):
    out, worst = t.out.flatten(0, 1), 0.0
    for query in range(0, len(out), max(1, len(out) // 4)):
        of = slice(query, query + 1)
        worst = max(worst, (attend(case, t, of, torch.float64) - out[of]).abs().max().item())
    return worst


def naive(case, t):
    """In chunks of queries whose copied rows fit the memory."""
    for begin in range(0, case.batch * case.queries, 256):
        attend(case, t, slice(begin, begin + 256), torch.bfloat16)


def run_case(library, case):
    torch.cuda.empty_cache()
    torch.manual_seed(1)
    t = Tensors(case)
    plan = make_plan(library, case, True)
    call = library.forward(plan, **t.operands(), starts=t.starts, page_table=t.page_table, indices=t.lists)
    call()
    error, us = max_error(case, t), time_us(call)
    rows_us = time_us(library.forward(make_plan(library, case, False), **t.as_rows()))
    try:
        naive_us = {"naive_us": digits(peer_us(lambda: naive(case, t)))}
    except Exception as e:
        naive_us = {"naive_us": None, "naive": f"failed: {first_line(e)}"}
    pairs = case.batch * case.queries * case.most * case.block
    columns = case.head_dim + (0 if case.value_in_key else case.head_dim_v)
    row_bytes = columns + 4 * len(t.keys) if case.float8 else 2 * columns
    return {"case": case.name, "kernel": library.kernel(plan, "forward"),
            "shape": [case.batch, case.queries, case.heads, case.heads_kv, case.length, case.head_dim, case.head_dim_v],
            "list": [case.most, case.block], "capacity": CAPACITY, "page_size": PAGE_SIZE, "float8": case.float8,
            "us": digits(us), "rows_us": digits(rows_us), **naive_us,
            "gigabytes_a_second": round(pairs * case.heads_kv * row_bytes * 1e-3 / us),
            "tflops": digits(2e-6 * pairs * case.heads * (case.head_dim + case.head_dim_v) / us),
            "max_err": error, "empty_us": digits(empty_us())}


def describe(line):
    return (f"{line['case']:16} {line['us']:8} us  rows {line['rows_us']}  naive {line['naive_us']}  "
            f"{line['gigabytes_a_second']} GB/s  {line['tflops']} TFLOP/s  err {line['max_err']:.1e}  "
            f"{line['kernel']}")


def main():
    parser = make_library_parser(__doc__)
    parser.add_argument("--case", default="*")
    options = parser.parse_args()
    library = Library(options.library)
    write_cases(options, "_cache_lists", CASES, lambda case: run_case(library, case), describe)


if __name__ == "__main__":
    main()
