#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Calls on a cache in which each sequence has its own number of queries: prompts beside tokens that are decoded.

    python3 bench/gpu/ragged.py --library build/libsparseattn.so [--case GLOB] [--out bench/results]

One plan for a capacity of 128K tokens serves all queries of a case; pages of 128 tokens stand in random order; 64 heads
of 128 on 8, or as many as DeepSeek's latent attention has, of 576 on one, values the first 512 columns of keys. Times
as in bench.py. `even_us`, where each sequence has one query, is the same call of as many sequences that have as many
tokens in all, and each the same number. `apart_us` is what calls take that have the same number of queries for each of their
sequences, one call after the other, as many as there are numbers (`calls_apart`); `fa4_us`, FA4 on the same rows and
pages, causal, where its wheel is. Results are compared with those of the calls apart (`max_err`). A JSON line for each
case goes to <out>/<gpu>_ragged.jsonl.
"""
import itertools
import typing

import torch
from abi import DTYPES, Library, ffi, sized
from cache import CAPACITY, LATENT, STREAMING
from measure import empty_us, peer_us, time_us
from options import make_library_parser
from report import digits, first_line, write_cases

PAGE_SIZE = 128


class Case(typing.NamedTuple):
    name: str
    queries: list  # of each sequence
    lengths: list  # tokens of each, these queries' included
    pattern: str = "causal"
    heads: int = 64
    heads_kv: int = 8
    head_dim: int = 128

    @property
    def is_latent(self):
        return self.head_dim > LATENT

    def evened(self):
        mean = sum(self.lengths) // len(self.lengths)
        return self._replace(lengths=[mean] * len(self.lengths))


def latent(name, queries, lengths, heads=128):
    return Case(name, queries, lengths, heads=heads, heads_kv=1, head_dim=576)


CASES = [
    Case("decode_64_of_512_to_16k", [1] * 64, [512 + 16384 * n // 64 for n in range(64)]),
    Case("chunk1k_beside_31_decoded_8k", [1024] + [1] * 31, [8192] * 32),
    Case("chunk1k_beside_31_streaming_32k", [1024] + [1] * 31, [32768] * 32, STREAMING),
    Case("prompts_100_to_2000", list(range(100, 2001, 100)), list(range(100, 2001, 100))),
    Case("drafts_1_to_8_of_32_8k", [1 + n % 8 for n in range(32)], [8192] * 32),
    Case("decode_128k_beside_127_of_2k", [1] * 128, [131072] + [2048] * 127),
    latent("latent_decode_64_of_512_to_16k", [1] * 64, [512 + 16384 * n // 64 for n in range(64)]),
    latent("latent_decode_128k_beside_127_of_2k", [1] * 128, [131072] + [2048] * 127),
    latent("latent_decode_32k_beside_31_of_8k", [1] * 32, [32768] + [8192] * 31, heads=16),
    latent("latent_chunk256_beside_31_decoded_8k", [256] + [1] * 31, [8192] * 32),
]


class Tensors:
    """Rows of all sequences' queries, and pages of each that are full up to its length."""

    def __init__(self, case):
        def draw(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        def integers(values):
            return torch.tensor(values, device="cuda", dtype=torch.int32)
        rows, of_each = sum(case.queries), [-(-length // PAGE_SIZE) for length in case.lengths]
        self.q = draw(rows, case.heads, case.head_dim)
        self.keys = {name: draw(sum(of_each), PAGE_SIZE, case.heads_kv, case.head_dim)
                     for name in ("k" if case.is_latent else "kv")}
        self.out = torch.empty_like(self.q[..., :LATENT])
        self.table = torch.full((len(of_each), CAPACITY // PAGE_SIZE), -1, device="cuda", dtype=torch.int32)
        for entry, pages in enumerate(torch.randperm(sum(of_each), device="cuda").split(of_each)):
            self.table[entry, :len(pages)] = pages
        self.starts = integers([length - count for length, count in zip(case.lengths, case.queries)])
        self.lengths = integers(case.lengths)
        self.begins = list(itertools.accumulate(case.queries, initial=0))
        self.offsets = integers(self.begins)


def make_call(library, case, t, sequences, seq_q, is_ragged):
    """A call of those sequences' queries, and its plan: of rows of all, or of so many of each."""
    rows = [row for n in sequences for row in range(t.begins[n], t.begins[n + 1])]
    pattern = library.pattern(f"causal & ({case.pattern})")
    lib = library.lib
    flags = lib.SPATTN_PLAN_STARTS | (lib.SPATTN_PLAN_VALUE_IN_KEY if case.is_latent else 0)
    problem = sized("spattn_problem", flags=flags,
                    batch=len(sequences), heads_q=case.heads, heads_kv=case.heads_kv, seq_q=seq_q, seq_k=CAPACITY,
                    head_dim=case.head_dim, head_dim_v=min(case.head_dim, LATENT), dtype=DTYPES[torch.bfloat16],
                    axes=lib.SPATTN_THD if is_ragged else lib.SPATTN_BSHD, page_size=PAGE_SIZE)
    plan = library.make("spattn_plan", library.lib.spattn_plan_create, library.context, pattern, problem, ffi.NULL)
    operands = {**t.keys, "starts": t.starts[sequences].contiguous(), "page_table": t.table[sequences].contiguous()}
    if is_ragged:
        return library.forward(plan, q=t.q, out=t.out, query_offsets=t.offsets, **operands), plan, t.out, rows
    q = t.q[rows].view(len(sequences), seq_q, case.heads, case.head_dim)
    out = torch.empty_like(q[..., :LATENT])
    return library.forward(plan, q=q, out=out, **operands), plan, out, rows


def fa4_us(case, t):
    from flash_attn.cute.interface import _flash_attn_fwd
    if case.is_latent:
        raise RuntimeError("it has no heads of 576")
    if case.pattern != "causal":
        raise RuntimeError("it has no such pattern")
    pages = -(-max(case.lengths) // PAGE_SIZE)
    options = {"cu_seqlens_q": t.offsets, "seqused_k": t.lengths, "max_seqlen_q": max(case.queries),
               "page_table": t.table[:, :pages].clamp(min=0).contiguous(), "causal": True}
    call = lambda: _flash_attn_fwd(t.q, t.keys["k"], t.keys["v"], **options)  # noqa: E731
    error = (call()[0].float() - t.out.float()).abs().max().item()
    if error > 0.02:
        raise RuntimeError(f"it is {error:.3f} off")
    return peer_us(call)


def even_us(library, case):
    if max(case.queries) > 1 or case == case.evened():
        return None
    case = case.evened()
    call, *_ = make_call(library, case, Tensors(case), list(range(len(case.queries))), len(case.queries), True)
    return digits(time_us(call))


def run_case(library, case):
    torch.cuda.empty_cache()
    torch.manual_seed(1)
    t = Tensors(case)
    everybody = list(range(len(case.queries)))
    call, plan, _, _ = make_call(library, case, t, everybody, sum(case.queries), True)
    call()
    alike = {count: [n for n in everybody if case.queries[n] == count] for count in sorted(set(case.queries))}
    apart, error = [], 0.0
    for count, sequences in alike.items():
        one, _, out, rows = make_call(library, case, t, sequences, count, False)
        one()
        error = max(error, (out.flatten(0, 1).float() - t.out[rows].float()).abs().max().item())
        apart.append(one)
    line = {"fa4_us": None}
    try:
        line["fa4_us"] = digits(fa4_us(case, t))
    except Exception as e:
        line["fa4"] = f"failed: {first_line(e)}"
    return {"case": case.name, "pattern": case.pattern, "kernel": library.kernel(plan, "forward"),
            "shape": [len(everybody), sum(case.queries), case.heads, case.heads_kv, max(case.lengths), case.head_dim],
            "capacity": CAPACITY, "page_size": PAGE_SIZE, "us": digits(time_us(call)),
            "even_us": even_us(library, case), "apart_us": digits(time_us(lambda: [one() for one in apart])), "calls_apart": len(apart), **line,
            "max_err": error, "empty_us": digits(empty_us())}


def describe(line):
    return (f"{line['case']:37} {line['us']:8} us  even {line['even_us']}"
            f"  apart {line['apart_us']} ({line['calls_apart']})"
            f"  fa4 {line['fa4_us']}  err {line['max_err']:.1e}  {line['kernel']}")


def main():
    parser = make_library_parser(__doc__)
    parser.add_argument("--case", default="*")
    options = parser.parse_args()
    library = Library(options.library)
    write_cases(options, "_ragged", CASES, lambda case: run_case(library, case), describe)


if __name__ == "__main__":
    main()
