#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Rates over lists of blocks that come with each call, as attention has them that chooses blocks by its data (NSA,
MoBA).

    python3 bench/gpu/block_lists.py --library build/libsparseattn.so [--case GLOB] [--pass forward|backward]
                                     [--no-flex] [--out bench/results]

Of a case: each block of queries lists its own last block of keys and others before it at random, as many as `most` or
as there are; where it is not causal, any. All heads list the same. Inputs N(0,1); times and rates as in bench.py, on
the pairs that are kept, and a JSON line for each case and pass goes to <out>/<gpu>_block_lists.jsonl.

Beside each case, in the same run: `static_us`, a plan of ours that knows the same blocks, so that what lists of a call
cost stands apart from what blocks cost; `dense_us`, the fastest of cuDNN, flash and our own kernel with every key seen;
and `flex_us`, compiled FlexAttention, with `flex_mask_us` for its block mask, which such a model makes in each call.
"""
import fnmatch
import json
import typing

import cases
import torch
import torch_peers
from abi import Library
from dense import Dense
from measure import gemm_tflops, peer_us, sustained_us, time_us
from options import PASSES, make_library_parser
from report import digits, first_line, origin, results_file
from torch.nn.attention.flex_attention import create_block_mask
from truth import Tensors, agree, max_error


class Shape(typing.NamedTuple):
    name: str
    heads: int
    seq: int
    block_q: int
    block_k: int
    most: int  # blocks of a list
    is_causal: bool = True
    heads_kv: int = 0  # 0: heads
    head_dim: int = 128
    deterministic: bool = False
    passes: tuple = PASSES


SHAPES = [
    Shape("blocks128_16k", 16, 16384, 128, 128, 16, is_causal=False),
    Shape("causal_blocks128_16k", 16, 16384, 128, 128, 16),
    Shape("causal_blocks128_128k", 4, 131072, 128, 128, 64),
    Shape("causal_blocks128_16k_gqa8", 64, 16384, 128, 128, 16, heads_kv=8),
    Shape("causal_blocks128_16k_d64", 16, 16384, 128, 128, 16, head_dim=64),
    Shape("causal_blocks64_16k", 16, 16384, 64, 64, 32),
    # A list a query: of groups of heads, as NSA has them, and of each head, as MoBA does.
    Shape("causal_blocks64_16k_gqa16", 64, 16384, 1, 64, 16, heads_kv=4),
    Shape("causal_blocks64_64k_gqa16", 64, 65536, 1, 64, 16, heads_kv=4),
    Shape("moba128_16k", 16, 16384, 1, 128, 8),
    Shape("moba128_64k", 16, 65536, 1, 128, 8),
    Shape("moba512_64k", 16, 65536, 1, 512, 8),
]
SHAPES += [shape._replace(name=shape.name + cases.DETERMINISTIC, deterministic=True) for shape in SHAPES[1:2]]


def draw_table(shape):
    """[lists, most] blocks, -1 where a list is shorter."""
    lists, blocks = -(-shape.seq // shape.block_q), -(-shape.seq // shape.block_k)
    last = (torch.arange(1, lists + 1, device="cuda") * shape.block_q - 1).clamp(max=shape.seq - 1) // shape.block_k
    weight = torch.rand(lists, blocks, device="cuda")
    if shape.is_causal:
        weight.masked_fill_(torch.arange(blocks, device="cuda") > last[:, None], -1)
    weight.scatter_(1, last[:, None], 2)
    weight, chosen = weight.topk(min(shape.most, blocks))
    return chosen.masked_fill(weight < 0, -1).int()


def case_of(shape, table):
    """A case of the benches, whose `kept` looks up the lists."""
    lists, blocks = len(table), -(-shape.seq // shape.block_k)
    sees = torch.zeros(lists, blocks + 1, dtype=torch.bool, device="cuda")
    sees.scatter_(1, table.long() % (blocks + 1), True)  # an entry that is absent stands in the last column

    def kept(q, k, sees):
        return sees[q // shape.block_q, k // shape.block_k] & ((k <= q) | (not shape.is_causal))
    pattern = f"runtime_blocks({shape.block_q},{shape.block_k},{shape.most})" + " & causal" * shape.is_causal
    return cases.Case(shape.name, pattern, shape.heads, shape.seq, kept, head_dim=shape.head_dim,
                      heads_kv=shape.heads_kv, tables=lambda: [sees[:, :blocks]], deterministic=shape.deterministic)


class ListedTensors(Tensors):
    """With the lists as one more operand of each pass."""

    def __init__(self, case, table):
        super().__init__(case)
        self.indices = table[None, :, None].expand(case.batch, -1, case.heads_kv, -1)

    def operands(self, what, is_packed=False):
        return super().operands(what, is_packed) | {"indices": self.indices}


def static_us(library, shape, case, table, what):
    """The same blocks by a plan that knows them. Of lists a query its masks would be as many as blocks."""
    if shape.block_q == 1:
        return None
    rows = [sorted(block for block in row if block >= 0) for row in table.tolist()]
    row_ptr = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
    text = (f"bsr([{cases.numbers(row_ptr.tolist())}],[{cases.numbers(sum(rows, []))}],{shape.block_q},{shape.block_k},"
            f"{shape.seq},{shape.seq})" + " & causal" * shape.is_causal)
    known = case.but("static", pattern=text)
    return digits(time_us(library.calls(known, Tensors(known), [what])[0][what]))


def flex_us(case, t, what):
    """FlexAttention, which has to make what the library made, and its block mask."""
    kept = case.keeps("cuda")
    flex = torch_peers.of_pass(what, torch_peers.make_flex(kept, case.seq, case.seq_k), t)
    agree(flex(), {name: getattr(t, name) for name in t.results[what]})
    make = torch.compile(create_block_mask, dynamic=False)
    mask = lambda: make(lambda b, h, i, j: kept(i, j), None, None, case.seq, case.seq_k, device="cuda")  # noqa: E731
    return {"flex_us": digits(peer_us(flex)), "flex_mask_us": digits(peer_us(mask))}


def run_shape(library, dense, shape, options, write):
    torch.cuda.empty_cache()
    torch.compiler.reset()
    torch.manual_seed(1)
    table = draw_table(shape)
    case = case_of(shape, table)
    t = ListedTensors(case, table)
    passes = [what for what in options.passes if what in shape.passes]
    calls, plan, _ = library.calls(case, t, passes)
    pairs = kept_pairs(case) * case.batch * case.heads
    for what in passes:
        us = time_us(calls[what])
        best, name, _ = dense.best(case.but("dense", pattern="causal" if shape.is_causal else "full"), what)
        line = {"case": shape.name, "pass": what, "kernel": library.kernel(plan, what), "pattern": case.pattern,
                "shape": case.shape(), "pairs": pairs, "us": round(us, 1),
                "tflops": round(case.flops(what, pairs) / us * 1e-6, 1),
                "tflops_sustained": round(case.flops(what, pairs) / sustained_us(calls[what]) * 1e-6, 1),
                "max_err": max_error(case, t, case.keeps("cuda"), what), "gemm": round(gemm_tflops(), 1),
                "static_us": static_us(library, shape, case, table, what), "dense": name, "dense_us": digits(best)}
        if not options.no_flex:
            try:
                line |= flex_us(case, t, what)
            except Exception as e:  # a peer that cannot is a fact to record
                line |= {"flex_us": None, "flex": f"failed: {first_line(e)}"}
        write(line)


def kept_pairs(case):
    keeps, keys = case.keeps("cuda"), torch.arange(case.seq_k, device="cuda")
    rows = torch.arange(case.seq, device="cuda").split(1024)
    return sum(int(keeps(q[:, None], keys[None]).sum()) for q in rows)


def describe(line):
    peers = (("static", "static_us"), (line["dense"], "dense_us"), ("FlexAttention", "flex_us"),
             ("its mask", "flex_mask_us"))
    beside = "".join(f"  {name} {line[key]:.0f} us" for name, key in peers if line.get(key))
    return (f"{line['case']:26} {line['pass']:8} {line['us']:9.1f} us {line['tflops']:6.1f} TFLOP/s "
            f"({line['tflops_sustained']} sustained)  gemm {line['gemm']}  err {line['max_err']:.1e}{beside}  "
            f"{line['kernel']}")


def main():
    parser = make_library_parser(__doc__)
    parser.add_argument("--case", default="*")
    parser.add_argument("--no-flex", action="store_true")
    options = parser.parse_args()
    library, common = Library(options.library), origin(options.toolkit)
    dense = Dense(library)
    with results_file(options.out, "_block_lists").open("w") as stream:
        def write(line):
            stream.write(json.dumps({**line, **common}) + "\n")
            stream.flush()
            print(describe(line), flush=True)
        for shape in SHAPES:
            if fnmatch.fnmatch(shape.name, options.case):
                run_shape(library, dense, shape, options, write)


if __name__ == "__main__":
    main()
