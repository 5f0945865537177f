#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Where gathered rows, listed tiles and blocks cross: csr patterns of 16K tokens from 0.05 to 10 % kept.

    python3 bench/gpu/crossings.py --library build/libsparseattn.so [--pass forward|backward] [--no-flex]
                                   [--mask GLOB] [--out bench/results]

8 heads of 64 columns, bf16, one mask for all of them. Its tokens are `scattered` at random, or `clustered`: of the
blocks of 64 x 64 the square root of the share, and as much of the tokens in these. Each query sees itself, too. Each of
our families is pinned by SPATTN_FORCE_KERNEL on the same mask: keys gathered by a warp a query row, or by a tile of the
heads that share a list (here one, so that most of its tile is idle), and rows of blocks. Of the latter a plan takes
plain blocks or listed tiles, whichever it expects to be faster, and says which: that is the line's `family`. `plan` is
what it takes when nothing is pinned. Beside them, in the same run: torch.sparse in float32, FlexAttention (at 0.2 %
alone, for its compilation takes long) and the fastest dense attention, which sees every key.

A JSON line for each goes to <out>/<gpu>_csr.jsonl. Inputs N(0,1); `us` is the median of 9 calls with a cold L2,
`tflops` the rate on kept pairs, `max_err` the largest difference from double precision on sampled rows. Rows that
gather have `l2_share`: what they fetch, pairs (head_dim + head_dim_v) 2 bytes forward and twice that backward, by query
and by key, as a share of 8.7 TB/s, which is what L2 gave random rows of 256 bytes, and everything else, on an H200. In
the table at the end `x` is the plan's speed-up over the best of torch.sparse, FlexAttention and our plain blocks.
"""
import contextlib
import fnmatch
import json
import os
import re

import torch
import torch_peers
from abi import Library
from cases import Case, full
from dense import Dense
from measure import peer_us
from options import make_library_parser
from report import digits, first_line, origin, results_file
from truth import Tensors, agree, max_error

SEQ, HEADS, HEAD_DIM = 16384, 8, 64
DENSITIES = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)  # percent
FLEX_DENSITY = 0.2
CLUSTER = 64  # tokens, of queries and of keys
L2_LIMIT = 8.7  # TB/s
FETCHES = {"forward": 1, "backward": 2}  # of two rows for each pair
ROWS = {
    "forward": ("any_gather_forward_bf16", "sm90_gather_forward_bf16_d64_v64_64x64",
                "sm90_block_forward_bf16_d64_v64_128x64", "sm80_block_forward_bf16_d64_v64_64x64",
                "sm90_block_forward_bf16_d64_v64_128x128", "sm90_block_forward_bf16_d64_v64_64x64",
                "sm90_block_forward_bf16_d64_v64_192x128"),
    "backward": ("any_gather_backward_bf16", "sm90_gather_backward_bf16_d64_v64_64x64",
                 "sm90_block_backward_apart_bf16_d64_v64_128x128", "sm80_block_backward_bf16_d64_v64_64x64",
                 "sm90_block_backward_bf16_d64_v64_128x128"),
}
FAMILIES = ("gathered rows", "shared lists", "listed tiles", "blocks")
PEERS = ("torch.sparse", "FlexAttention", "dense")


def family_of(kernel):
    if "_gather_" in kernel:
        return "gathered rows" if kernel.startswith("any_") else "shared lists"
    return "listed tiles" if kernel.endswith("listed tiles") else "blocks"


# ---- masks: [queries, keys], bool ----

def scattered(share):
    return torch.rand(SEQ, SEQ, device="cuda") < share


def clustered(share):
    blocks = torch.rand(SEQ // CLUSTER, SEQ // CLUSTER, device="cuda") < share**0.5
    return scattered(share**0.5) & blocks.repeat_interleave(CLUSTER, 0).repeat_interleave(CLUSTER, 1)


MASKS = {"scattered": scattered, "clustered": clustered}


def csr_of(table):
    """row_ptr and col_idx, on the host."""
    row_ptr = torch.nn.functional.pad(table.sum(1).cumsum(0), (1, 0))
    return row_ptr.cpu(), table.nonzero()[:, 1].contiguous().cpu()


# ---- what is measured ----

@contextlib.contextmanager
def pinned(row):
    """SPATTN_FORCE_KERNEL for plans that are made inside; None pins nothing."""
    if row:
        os.environ["SPATTN_FORCE_KERNEL"] = row
    try:
        yield
    finally:
        os.environ.pop("SPATTN_FORCE_KERNEL", None)


def chosen(library, plan, what):
    """The row of a pass with the order of its tokens, and the microseconds that the plan expects."""
    marked = [line for line in library.explain(plan).splitlines() if line.startswith("  * ")]  # one of each pass
    kernel, expected = marked[0 if what == "forward" else -1][4:].split(": ")
    return kernel, float(expected.split()[0])


def refusal(error, row):
    """What the plan says of a row that it cannot take, else what the error says."""
    match = re.search(f"{row}: ([^;]*)", str(error))
    return match[1] if match else first_line(error)


def measure_row(library, case, t, what, pattern, row):
    """What a line says of a row, or of the plan's own choice where it is None."""
    for name in ["out", *t.results[what]]:
        getattr(t, name).fill_(torch.nan)  # the row before must not answer for this one
    with pinned(row):
        calls, plan, pairs = library.calls(case, t, [what], pattern)
    us = peer_us(calls[what])
    kernel, expected = chosen(library, plan, what)
    line = {"family": family_of(kernel) if row else "plan", "kernel": kernel, "pairs": int(pairs), "us": digits(us),
            "expected_us": expected, "tflops": digits(case.flops(what, pairs) / us * 1e-6),
            "max_err": max_error(case, t, case.keeps("cuda"), what)}
    if "_gather_" in kernel:
        fetched = FETCHES[what] * pairs * (case.head_dim + case.head_dim_v) * 2  # bytes
        line["l2_share"] = digits(fetched / us * 1e-6 / L2_LIMIT, 3)
    return line


def peers_here(case, t, what, csr, use_flex):
    """Name, and what makes the call, of each peer that has the pass."""
    if what == "forward":
        yield "torch.sparse", lambda: torch_peers.sparse(csr, t)
    if use_flex:
        yield "FlexAttention", lambda: torch_peers.of_pass(
            what, torch_peers.make_flex(case.keeps("cuda"), case.seq, case.seq_k), t)


def measure_peer(make_call, results):
    call = make_call()
    agree(call(), results)
    return {"us": digits(peer_us(call))}


def run_mask(library, case, t, what, csr, use_flex):
    """Yields what each line says."""
    pattern = library.csr_pattern(*csr, case.seq_k)
    for row in (*ROWS[what], None):  # the plan's own choice last: it leaves what peers are compared with
        try:
            yield measure_row(library, case, t, what, pattern, row)
        except Exception as e:  # a row that cannot is a fact to record
            yield {"family": family_of(row) if row else "plan", "kernel": row, "failed": refusal(e, row)}
    results = {name: getattr(t, name) for name in t.results[what]}
    for name, make_call in peers_here(case, t, what, csr, use_flex):
        try:
            yield {"family": name, **measure_peer(make_call, results)}
        except Exception as e:  # and so is a peer
            yield {"family": name, "failed": first_line(e)}
        torch.cuda.empty_cache()


# ---- what is said of it ----

def describe(line):
    """A line for the terminal."""
    said = f"failed: {line['failed']}" if "failed" in line else f"{line['us']:9.1f} us"
    more = [f"{label} {line[name]:.4g}" for label, name in (("TFLOP/s", "tflops"), ("expected", "expected_us"),
                                                            ("of L2's limit", "l2_share"), ("err", "max_err"))
            if name in line]
    return f"{line['mask']:10} {line['density']:5} % {line['pass']:8} {line['family']:13} " + "  ".join(
        [said, *more, line.get("kernel") or line.get("dense") or ""])


def fastest(lines, names):
    """The microseconds of each of these families that ran: of its rows the fastest one's."""
    times = {}
    for line in lines:
        if line["family"] in names and "us" in line:
            times[line["family"]] = min(line["us"], times.get(line["family"], line["us"]))
    return times


def table(lines):
    """The families beside each other, by density, and which of ours is the fastest."""
    columns = (*FAMILIES, "plan", *PEERS)
    out = []
    for mask, what in dict.fromkeys((line["mask"], line["pass"]) for line in lines):
        heads = ["     %", *(f"{name:>13}" for name in columns), "     x  fastest"]
        out += ["", f"{mask}, {what}, us", "  ".join(heads)]
        for density in dict.fromkeys(line["density"] for line in lines):
            here = [line for line in lines if (line["mask"], line["pass"], line["density"]) == (mask, what, density)]
            times, ours = fastest(here, columns), fastest(here, FAMILIES)
            others = fastest(here, ("torch.sparse", "FlexAttention", "blocks")).values()
            gain = f"{min(others) / times['plan']:6.3g}" if others and "plan" in times else " " * 6
            cells = [f"{times[name]:13.1f}" if name in times else f"{'-':>13}" for name in columns]
            out.append("  ".join([f"{density:6}", *cells, gain, min(ours, key=ours.get) if ours else "-"]))
    return "\n".join(out)


def run(options):
    library, common = Library(options.library), origin(options.toolkit)
    shapes = Case("csr", "full", HEADS, SEQ, full, head_dim=HEAD_DIM)
    dense, t, lines = Dense(library), Tensors(shapes), []
    with results_file(options.out, "_csr").open("w") as stream:
        def write(mask, density, what, line):
            lines.append({"mask": mask, "density": density, "pass": what, **line, "shape": shapes.shape()})
            stream.write(json.dumps({**lines[-1], **common}) + "\n")
            stream.flush()
            print(describe(lines[-1]), flush=True)
        for mask in fnmatch.filter(MASKS, options.mask):
            for density in DENSITIES:
                torch.manual_seed(1)
                torch.compiler.reset()
                kept = MASKS[mask](density / 100)
                kept.fill_diagonal_(True)
                case = shapes.but(f"csr_{mask}", kept=lambda q, k, table: table[q, k], tables=lambda kept=kept: [kept])
                csr = csr_of(kept)
                for what in options.passes:
                    use_flex = density == FLEX_DENSITY and not options.no_flex
                    for line in run_mask(library, case, t, what, csr, use_flex):
                        write(mask, density, what, line)
                    us, name, _ = dense.best(shapes, what)
                    write(mask, density, what, {"family": "dense", "dense": name, "us": digits(us)})
    print(table(lines))


def main():
    parser = make_library_parser(__doc__)
    parser.add_argument("--mask", default="*", help=f"of {', '.join(MASKS)}")
    parser.add_argument("--no-flex", action="store_true")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
